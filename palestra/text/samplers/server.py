"""HTTP sampler server (`palestra serve-sampler`): one base, adapters from folders, vLLM's API on palestra's engine.

HTTP runs on the main thread, the engine on another. Concurrent requests share batches, even with different adapters.
Samples are equal to those of a sampler in the training process (engine/sampling/sampler.py).
"""

from __future__ import annotations

import asyncio
import hmac
import os
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

from palestra.core.http.limits import MIB, AdmissionMiddleware, AsgiApp, HttpLimits, bearer_token, cancel_on_disconnect
from palestra.core.http.listen import open_listener, url_host
from palestra.core.http.loop_thread import LoopThread
from palestra.core.http.origin_middleware import OriginPolicy, is_loopback
from palestra.core.http.server import FORCED_EXIT_DELAY_S, HttpServer, build_server, stop_within
from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_cache import budget_bytes
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request, max_positions
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import ScoreRequest, score_prompts
from palestra.engine.training.peft_format import load_adapter
from palestra.text.samplers import wire

MAX_TOKEN_JSON_BYTES = 12  # largest size of a token id in JSON, in bytes
MAX_ADAPTERS = 1024
LOAD_ERRORS = (ValueError, OSError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError)  # bad files
DRAIN_TIMEOUT_S = 30  # seconds that open requests have to end when the server stops

B = TypeVar("B", bound=wire.RequestBody)
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class SamplerServerOptions:
    """Options of `palestra serve-sampler`.

    `key_env`: environment variable with the API key that clients must send. `kv_cache_gib`: memory of the KV cache in
    GiB (None: half of the free memory). `with_parent`: stop the server when its standard input closes. `hosts`:
    additional host names accepted on loopback.
    """

    base: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 8001
    key_env: str = wire.KEY_VARIABLE
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    max_num_seqs: int = 512
    kv_cache_gib: float | None = None
    with_parent: bool = False
    hosts: tuple[str, ...] = ()


@dataclass
class SamplerState:
    """State shared by the routes: public name of the base, its sampler (runs on `engine_thread`), and the loaded
    adapters by name."""

    base: str
    sampler: Sampler
    engine_thread: LoopThread
    key: str | None = None
    adapters: dict[str, Snapshot] = field(default_factory=dict)
    started_at: int = field(default_factory=lambda: int(time.time()))

    def adapter(self, model: str) -> Snapshot | None:
        """Returns the adapter named `model`, or None for the base. Raises HTTPException (404) for an unknown name."""
        if model != self.base and model not in self.adapters:
            _refuse(404, f"The model `{model}` does not exist: there are {', '.join([self.base, *self.adapters])}.")
        return self.adapters.get(model)


def serve(options: SamplerServerOptions, print_line: PrintLine = print) -> None:
    """Serves until SIGTERM or SIGINT, then lets open requests end (up to `DRAIN_TIMEOUT_S`) and returns.

    Raises ValueError if the base cannot be loaded or the port is taken.
    """
    with open_listener(options.host, options.port) as listener:
        engine = Engine.load(options.base, device=options.device, dtype=options.dtype, threads=options.threads)
        engine_side = LoopThread("engine")
        key = os.environ.get(options.key_env) or None
        sampler = Sampler(engine, max_num_seqs=options.max_num_seqs, cache_bytes=budget_bytes(options.kv_cache_gib))
        state = SamplerState(options.base, sampler, engine_side, key)
        app = make_guarded_app(state, OriginPolicy.for_host(options.host, hosts=options.hosts, pages=False))
        server = build_server(
            app, drain=DRAIN_TIMEOUT_S, keep_alive=600
        )  # clients keep connections open during training steps
        if options.with_parent:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        print_line(_where(options, listener.getsockname()[1], key))
        asyncio.run(server.serve(sockets=[listener]))
        engine_side.close()


def make_guarded_app(state: SamplerState, origins: OriginPolicy) -> AsgiApp:
    """Returns the app with key check, origin check and a body limit: the base's longest prompt plus 1 MiB."""
    limits = HttpLimits(max_body_bytes=MIB + MAX_TOKEN_JSON_BYTES * (max_positions(state.sampler.engine) or 2**20))

    def admit(path: str, headers: Mapping[str, str]) -> str | None:
        if (
            path == "/health"
            or not state.key
            or hmac.compare_digest(bearer_token(headers).encode(), state.key.encode())
        ):
            return None
        return "this sampler needs a key, and the key sent is wrong: send Authorization: Bearer KEY"

    return AdmissionMiddleware(make_app(state), origins, limits, auth_check=admit, error_body=wire.error_body)


def make_app(state: SamplerState) -> Starlette:
    """Returns the Starlette app with the routes of the vLLM API, without access checks."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", list_models),
            Route("/v1/completions", create_completions, methods=["POST"]),
            Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refusal_response},
    )
    app.state.sampler_state = state
    return app


async def health(call: Call) -> Response:
    """GET /health: answers an empty 200."""
    return Response()


async def list_models(call: Call) -> Response:
    """GET /v1/models: lists the base, then the adapters with the base as their parent."""
    state = _sampler_state(call)
    head = {"object": "model", "created": state.started_at, "owned_by": wire.PALESTRA_OWNER}
    cards = [{"id": state.base, **head, "root": state.base, "parent": None}]
    cards += [{"id": name, **head, "root": name, "parent": state.base} for name in state.adapters]
    return JSONResponse({"object": "list", "data": cards})


async def load_lora_adapter(call: Call) -> Response:
    """POST /v1/load_lora_adapter: loads an adapter folder. 400 if the name is in use or the folder is invalid."""
    state = _sampler_state(call)
    asked = await _read(call, wire.LoadAdapterBody)
    name = asked.lora_name
    engine = state.sampler.engine
    if name in state.adapters or name == state.base:
        _refuse(400, f"The lora adapter '{name}' has already been loaded: adapters do not change under their name.")
    if len(state.adapters) >= MAX_ADAPTERS:
        _refuse(400, f"{MAX_ADAPTERS} adapters are loaded, the maximum of this sampler: unload one")
    try:
        adapter = await asyncio.to_thread(load_adapter, Path(asked.lora_path), engine)
    except LOAD_ERRORS as error:
        _refuse(400, f"cannot load the adapter '{name}': {error}")
    state.adapters.setdefault(name, adapter.snapshot(name, engine.dtype))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(call: Call) -> Response:
    """POST /v1/unload_lora_adapter: unloads an adapter. Running requests keep it until they end. 404 if unknown."""
    state = _sampler_state(call)
    asked = await _read(call, wire.UnloadAdapterBody)
    if asked.lora_name not in state.adapters:
        _refuse(404, f"The lora adapter '{asked.lora_name}' cannot be found.")
    del state.adapters[asked.lora_name]
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def create_completions(call: Call) -> Response:
    """POST /v1/completions: samples `n` completions. Cancels them if the client disconnects."""
    state = _sampler_state(call)
    asked = await _read(call, wire.CompletionBody)
    adapter = state.adapter(asked.model)
    try:
        request = Request(
            np.array(asked.prompt, np.int32),
            asked.n,
            asked.sampling,
            adapter,
            asked.seed % 2**64,
            asked.keep,
            choices=tuple(map(tuple, asked.choices)),
        )
        answers = await cancel_on_disconnect(call.receive, state.engine_thread.run_async(state.sampler.sample(request)))
        scored: dict[str, Any] = {}
        if asked.prompt_logprobs is not None:
            scores = await cancel_on_disconnect(call.receive, state.engine_thread.run_async(_score(state, request)))
            scored = {"prompt_logprobs": scores}
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
            "choices": [_choice(i, answer, asked, state) | scored for i, answer in enumerate(answers)],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
    )


async def _score(state: SamplerState, request: Request) -> list[dict[str, Any] | None]:
    """Returns the JSON of the log-probability of each prompt token, at temperature 1; null for the first, which has
    none."""
    engine = state.sampler.engine
    ids = request.prompt_ids
    (score,) = score_prompts(engine, [ScoreRequest(ids, request.adapter)])
    texts = engine.tokenizer.convert_ids_to_tokens(ids[1:].tolist())
    rows = zip(ids[1:].tolist(), score.logprobs.tolist(), texts, strict=True)
    return [None, *({str(token): {"logprob": logp, "decoded_token": text}} for token, logp, text in rows)]


def _choice(index: int, answer: Completion, asked: wire.CompletionBody, state: SamplerState) -> dict[str, Any]:
    """Returns the JSON of one completion. Its text excludes the stop string."""
    tokenizer = state.sampler.engine.tokenizer
    ids = answer.token_ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for stop in asked.stop:
        text = text.split(stop, 1)[0]
    logprobs = {"tokens": tokenizer.convert_ids_to_tokens(ids), "token_logprobs": answer.logprobs.tolist()}
    return {
        "index": index,
        "text": text,
        "finish_reason": answer.stop_reason,
        "stop_reason": None,
        "logprobs": None if asked.logprobs is None else logprobs,
        "token_ids": ids if asked.return_token_ids else None,
    } | ({"sampling_mask": answer.sampling_mask.rows()} if answer.sampling_mask else {})


def _sampler_state(call: Call) -> SamplerState:
    state: SamplerState = call.app.state.sampler_state
    return state


async def _read(call: Call, model: type[B]) -> B:
    body = await call.body()
    try:
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:5]
        _refuse(400, "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong))


def _refuse(status: int, message: str) -> NoReturn:
    raise HTTPException(status, message)


async def _refusal_response(call: Call, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(wire.error_body(error.status_code, error.detail), error.status_code)


def _end_with_parent(server: HttpServer) -> None:
    """Stops the server when its standard input closes: the parent process has closed it, or has ended."""
    while sys.stdin.buffer.read(4096):
        pass
    stop_within(DRAIN_TIMEOUT_S + FORCED_EXIT_DELAY_S, server.stop)


def _where(options: SamplerServerOptions, port: int, key: str | None) -> str:
    inside = key or is_loopback(options.host)
    warning = "" if inside else f"  (without a key in {options.key_env}, anyone who reaches this machine may use it)"
    return f"{wire.READY_PREFIX}http://{url_host(options.host)}:{port}{warning}"
