"""HTTP sampler server (`palestra serve-sampler`): one base, adapters from folders, vLLM's API on palestra's engine.

HTTP runs on the main thread, the engine on another. Concurrent requests share batches, even with different adapters.
Samples are equal to those of a sampler in the training process (engine/sampler.py).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from palestra.engine.checkpoints import load_adapter
from palestra.engine.lora import Snapshot
from palestra.engine.models import Engine
from palestra.engine.requests import Request, Sampled, positions
from palestra.engine.sampler import Sampler
from palestra.remote import sampler_wire as wire
from palestra.remote.aside import Aside
from palestra.web.door import bracketed, listening
from palestra.web.gate import MIB, App, Gate, Limits, bearer, unless_gone
from palestra.web.origins import Origins, is_loopback
from palestra.web.server import stoppable

TOKEN = 12  # largest size of a token id in JSON, in bytes
MOST_ADAPTERS = 1024
UNREADABLE = (
    ValueError,
    OSError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)  # bad files
DRAIN = 30  # seconds that open requests have to end when the server stops

B = TypeVar("B", bound=wire.Call)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of `palestra serve-sampler`.

    `key_env`: environment variable with the API key that clients must send. `with_parent`: stop the server when its
    standard input closes. `hosts`: additional host names accepted on loopback.
    """

    base: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8001
    key_env: str = wire.KEY
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    max_rows: int = 512
    with_parent: bool = False
    hosts: tuple[str, ...] = ()


@dataclass
class Desk:
    """State shared by the routes: public name of the base, its sampler (runs on `engine_side`), and the loaded adapters
    by name."""

    base: str
    sampler: Sampler
    engine_side: Aside
    key: str | None = None
    adapters: dict[str, Snapshot] = field(default_factory=dict)
    started: int = field(default_factory=lambda: int(time.time()))

    def adapter(self, model: str) -> Snapshot | None:
        """Returns the adapter named `model`, or None for the base. Raises HTTPException (404) for an unknown name."""
        if model != self.base and model not in self.adapters:
            _refuse(404, f"The model `{model}` does not exist: there are {', '.join([self.base, *self.adapters])}.")
        return self.adapters.get(model)


def serve(options: Options, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT, then lets open requests end (up to DRAIN seconds) and returns.

    Raises ValueError if the base cannot be loaded or the port is taken.
    """
    with listening(options.host, options.port) as door:
        engine = Engine.load(options.base, device=options.device, dtype=options.dtype, threads=options.threads)
        engine_side, key = Aside("engine"), os.environ.get(options.key_env) or None
        desk = Desk(options.base, Sampler(engine, max_rows=options.max_rows), engine_side, key)
        app = guarded(desk, Origins.of(options.host, hosts=options.hosts, pages=False))
        server = stoppable(app, drain=DRAIN, keep_alive=600)  # clients keep connections open during training steps
        if options.with_parent:
            threading.Thread(target=_end_with_parent, daemon=True).start()
        say(_where(options, door.getsockname()[1], key))
        asyncio.run(server.serve(sockets=[door]))
        engine_side.close()


def guarded(desk: Desk, origins: Origins) -> App:
    """Returns the app with key check, origin check and a body limit: the base's longest prompt plus 1 MiB."""
    limits = Limits(body=MIB + TOKEN * (positions(desk.sampler.engine) or 2**20))

    def admit(path: str, headers: Mapping[str, str]) -> str | None:
        if path == "/health" or not desk.key or hmac.compare_digest(bearer(headers).encode(), desk.key.encode()):
            return None
        return "this sampler wants a key, and this is not the one: send Authorization: Bearer KEY"

    return Gate(make_app(desk), origins, limits, admit=admit, shape=wire.error)


def make_app(desk: Desk) -> Starlette:
    """Returns the Starlette app with the routes of the vLLM API, without access checks."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", list_models),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _said_no},
    )
    app.state.desk = desk
    return app


async def health(call: Call) -> Response:
    """GET /health: an empty 200."""
    return Response()


async def list_models(call: Call) -> Response:
    """GET /v1/models: the base, then the adapters with the base as their parent."""
    desk = _desk(call)
    head = {"object": "model", "created": desk.started, "owned_by": wire.OURS}
    cards = [{"id": desk.base, **head, "root": desk.base, "parent": None}]
    cards += [{"id": name, **head, "root": name, "parent": desk.base} for name in desk.adapters]
    return JSONResponse({"object": "list", "data": cards})


async def load(call: Call) -> Response:
    """POST /v1/load_lora_adapter: loads an adapter folder. 400 if the name is in use or the folder is invalid."""
    desk, asked = _desk(call), await _read(call, wire.Load)
    name, engine = asked.lora_name, desk.sampler.engine
    if name in desk.adapters or name == desk.base:
        _refuse(400, f"The lora adapter '{name}' has already been loaded: adapters do not change under their name.")
    if len(desk.adapters) >= MOST_ADAPTERS:
        _refuse(400, f"{MOST_ADAPTERS} adapters are loaded, as many as this sampler holds: unload one")
    try:
        adapter = await asyncio.to_thread(load_adapter, Path(asked.lora_path), engine)
    except UNREADABLE as error:
        _refuse(400, f"cannot load the adapter '{name}': {error}")
    desk.adapters.setdefault(name, adapter.snapshot(name, engine.dtype))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(call: Call) -> Response:
    """POST /v1/unload_lora_adapter: unloads an adapter. Running requests keep it until they end. 404 if unknown."""
    desk, asked = _desk(call), await _read(call, wire.Unload)
    if asked.lora_name not in desk.adapters:
        _refuse(404, f"The lora adapter '{asked.lora_name}' cannot be found.")
    del desk.adapters[asked.lora_name]
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def complete(call: Call) -> Response:
    """POST /v1/completions: samples `n` completions. Cancels them if the client disconnects."""
    desk, asked = _desk(call), await _read(call, wire.Completion)
    request = Request(
        np.array(asked.prompt, np.int32),
        asked.n,
        asked.sampling,
        desk.adapter(asked.model),
        asked.seed % 2**64,
        asked.keep,
    )
    try:
        answers = await unless_gone(call.receive, desk.engine_side.soon(desk.sampler.sample(request)))
    except ValueError as error:
        _refuse(400, str(error))
    except Exception as error:
        _refuse(500, f"{type(error).__name__}: {error}")
    sampled = sum(len(answer.token_ids) for answer in answers)
    usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": sampled}
    return JSONResponse(
        {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": [_choice(i, answer, asked, desk) for i, answer in enumerate(answers)],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
    )


def _choice(index: int, answer: Sampled, asked: wire.Completion, desk: Desk) -> dict[str, Any]:
    """JSON of one completion. Its text excludes the stop string."""
    tokenizer, ids = desk.sampler.engine.tokenizer, answer.token_ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for stop in asked.stop:
        text = text.split(stop, 1)[0]
    logprobs = {"tokens": tokenizer.convert_ids_to_tokens(ids), "token_logprobs": answer.logprobs.tolist()}
    return {
        "index": index,
        "text": text,
        "finish_reason": answer.stop,
        "stop_reason": None,
        "logprobs": None if asked.logprobs is None else logprobs,
        "token_ids": ids if asked.return_token_ids else None,
    }


def _desk(call: Call) -> Desk:
    desk: Desk = call.app.state.desk
    return desk


async def _read(call: Call, model: type[B]) -> B:
    body = await call.body()
    try:
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:5]
        _refuse(400, "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong))


def _refuse(status: int, message: str) -> NoReturn:
    raise HTTPException(status, message)


async def _said_no(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(wire.error(error.status_code, error.detail), error.status_code)


def _end_with_parent() -> None:
    """Sends SIGTERM to this process when its standard input closes, that is, when the parent process has ended."""
    while sys.stdin.buffer.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _where(options: Options, port: int, key: str | None) -> str:
    inside = key or is_loopback(options.host)
    warning = "" if inside else f"  (without a key in {options.key_env}, everybody who reaches this machine may use it)"
    return f"{wire.READY}http://{bracketed(options.host)}:{port}{warning}"
