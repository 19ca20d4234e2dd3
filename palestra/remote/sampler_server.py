"""A sampler as a process of its own: one base, adapters from folders, vLLM's calls on the engine of this house.

HTTP is answered on the main thread, the engine computes on another. Requests under way share batches, whatever adapters
they ask for. What is sampled is what a sampler in the training process would have sampled (engine/sampler.py).
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from palestra.engine.checkpoints import load_adapter
from palestra.engine.lora import Snapshot
from palestra.engine.models import Engine
from palestra.engine.requests import Request, Sampled
from palestra.engine.sampler import Sampler
from palestra.remote import sampler_wire as wire
from palestra.remote.aside import Aside
from palestra.web.door import bracketed, listening

DRAIN = 30  # seconds that requests have to end when the server is told to

B = TypeVar("B", bound=wire.Call)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What `palestra serve-sampler` was asked for. `key_env` names the variable that holds the key which clients must
    send; `with_parent` ends the server when its standard input ends."""

    base: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8001
    key_env: str = wire.KEY
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    max_rows: int = 512
    with_parent: bool = False


@dataclass
class Desk:
    """What the routes share: the base by its public name, its sampler, which works on `engine_side`, and the adapters
    by theirs."""

    base: str
    sampler: Sampler
    engine_side: Aside
    key: str | None = None
    adapters: dict[str, Snapshot] = field(default_factory=dict)
    started: int = field(default_factory=lambda: int(time.time()))

    def adapter(self, model: str) -> Snapshot | None:
        """The adapter that `model` names; None for the base. Raises HTTPException (404) for what is not here."""
        if model != self.base and model not in self.adapters:
            _refuse(404, f"The model `{model}` does not exist: there are {', '.join([self.base, *self.adapters])}.")
        return self.adapters.get(model)


def serve(options: Options, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT, then ends what is under way and returns. Raises ValueError where the base cannot
    be loaded or the port is taken."""
    with listening(options.host, options.port) as door:
        engine = Engine.load(options.base, device=options.device, dtype=options.dtype, threads=options.threads)
        engine_side, key = Aside("engine"), os.environ.get(options.key_env) or None
        desk = Desk(options.base, Sampler(engine, max_rows=options.max_rows), engine_side, key)
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(desk),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=600,  # clients keep connections over a training step
                timeout_graceful_shutdown=DRAIN,
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)  # before uvicorn listens, and when it is done
        if options.with_parent:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        say(_where(options, door.getsockname()[1], key))
        asyncio.run(server.serve(sockets=[door]))
        engine_side.close()


def make_app(desk: Desk) -> Starlette:
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
    return Response()


async def list_models(call: Call) -> Response:
    """The base, then the adapters, whose parent it is."""
    desk = _desk(call)
    head = {"object": "model", "created": desk.started, "owned_by": wire.OURS}
    cards = [{"id": desk.base, **head, "root": desk.base, "parent": None}]
    cards += [{"id": name, **head, "root": name, "parent": desk.base} for name in desk.adapters]
    return JSONResponse({"object": "list", "data": cards})


async def load(call: Call) -> Response:
    desk, asked = _desk(call), await _read(call, wire.Load)
    name, engine = asked.lora_name, desk.sampler.engine
    if name in desk.adapters or name == desk.base:
        _refuse(400, f"The lora adapter '{name}' has already been loaded: adapters do not change under their name.")
    try:
        adapter = await asyncio.to_thread(load_adapter, Path(asked.lora_path), engine)
    except (ValueError, OSError, LookupError) as error:
        _refuse(400, f"cannot load the adapter '{name}': {error}")
    desk.adapters[name] = adapter.snapshot(name, engine.dtype)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(call: Call) -> Response:
    """Requests under way keep their adapter to their end."""
    desk, asked = _desk(call), await _read(call, wire.Unload)
    if asked.lora_name not in desk.adapters:
        _refuse(404, f"The lora adapter '{asked.lora_name}' cannot be found.")
    del desk.adapters[asked.lora_name]
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def complete(call: Call) -> Response:
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
        answers = await _unless_gone(call, desk.engine_side.soon(desk.sampler.sample(request)))
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
    """One answer. Its text ends before the stop string that ended it."""
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


async def _unless_gone(call: Call, work: Awaitable[list[Sampled]]) -> list[Sampled]:
    """What `work` comes to; it is cancelled when the client hangs up."""
    wanted, gone = asyncio.ensure_future(work), asyncio.ensure_future(call.receive())
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            _refuse(499, "the client hung up")
        return wanted.result()
    finally:
        wanted.cancel()
        gone.cancel()


def _desk(call: Call) -> Desk:
    """Raises HTTPException (401) where the call lacks the key."""
    desk: Desk = call.app.state.desk
    sent = call.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    if desk.key and not hmac.compare_digest(sent.encode(), desk.key.encode()):
        _refuse(401, "this sampler wants a key, and this is not the one: send Authorization: Bearer KEY")
    return desk


async def _read(call: Call, model: type[B]) -> B:
    try:
        return model.model_validate_json(await call.body())
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        _refuse(400, "; ".join(wrong))


def _refuse(status: int, message: str) -> NoReturn:
    raise HTTPException(status, message)


async def _said_no(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(wire.error(error.status_code, error.detail), error.status_code)


def _end_with_parent(server: uvicorn.Server) -> None:
    """Ends the server when whoever started it is no more, however it died: its end of our standard input closes."""
    sys.stdin.buffer.read()
    server.should_exit = True


def _where(options: Options, port: int, key: str | None) -> str:
    inside = key or options.host in ("127.0.0.1", "localhost", "::1")
    warning = "" if inside else f"  (without a key in {options.key_env}, everybody who reaches this machine may use it)"
    return f"{wire.READY}http://{bracketed(options.host)}:{port}{warning}"
