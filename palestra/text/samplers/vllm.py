"""Client for vLLM-compatible sampler servers: token ids over HTTP, one adapter name per version.

    sampler = VllmSampler([SamplerServer("http://localhost:8001")], AdapterStore(None, "tiny"), RequestTimeouts())
    answers = await sampler.sample(Request(prompt_ids, 8, sampling, snapshot, seed))

The API is vLLM's (wire.py), which `palestra serve-sampler` also implements. A request goes to the server with
the fewest requests in flight. If that server is unreachable, or lost its adapters in a restart, the request is retried
there or on another server. An adapter is unloaded when its snapshot is garbage-collected in this process.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from palestra.core.http.loop_thread import LoopThread
from palestra.core.http.retry import RETRY_STATUSES, RetryPolicy
from palestra.core.types import SamplingMask
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request
from palestra.parallel.worker_stats import worker_stats
from palestra.text.policies.base import request_error
from palestra.text.policies.lm import SamplerProtocol
from palestra.text.samplers import wire
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.processes import SamplerProcesses

if TYPE_CHECKING:
    import aiohttp

ReplyT = TypeVar("ReplyT", bound=wire.ReplyPart)

COMPLETIONS_PATH = "/v1/completions"
PAUSES = RetryPolicy(0.1, 5.0)  # for which a server gets no requests after failures in a row
CONNECT_TIMEOUT_S = 10.0  # seconds for which a server that should be running may be unreachable
MAX_REPLY_BYTES = 2**29  # of one reply
MAX_CONNECTIONS = 512  # concurrent HTTP connections; further requests wait, which bounds open files


class ServerUnavailable(ConnectionError):
    """Raised when a server did not answer but may answer later."""


class AdapterLost(Exception):
    """Raised when a server does not know an adapter that was loaded there, because it was restarted."""


@dataclass(frozen=True)
class RequestTimeouts:
    """Timeouts in seconds: `request_timeout_s` for one request, `retry_timeout_s` for retries while no server is
    reachable."""

    request_timeout_s: float = 1800.0
    retry_timeout_s: float = 120.0


@dataclass(eq=False)
class SamplerServer:
    """A sampler server and its state.

    `model`: its name of the base (None: the first it lists). `restart`: restarts a server that seems dead and returns
    its current URL; None for servers that this run does not manage. `is_palestra`: it is a palestra server.
    `num_in_flight`: requests in flight. `failures`: failures in a row. `paused_until`: `time.monotonic` time before
    which it gets no requests. `adapter_loads`: load tasks of its adapters by name.
    """

    url: str
    model: str | None = None
    restart: Callable[[], str] | None = None
    is_palestra: bool = False
    num_in_flight: int = 0
    failures: int = 0
    paused_until: float = 0.0
    adapter_loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def record_failure(self) -> None:
        """Records a failure: pauses requests to this server, with exponential backoff."""
        self.failures += 1
        self.paused_until = time.monotonic() + PAUSES.wait_s(self.failures)


class VllmSampler(SamplerProtocol):
    """A sampler (`SamplerProtocol`) on one or several servers of the same base.

    HTTP runs on its own thread: callers may be coroutines of any event loop, and requests progress while they compute.
    """

    def __init__(
        self,
        servers: Sequence[SamplerServer],
        adapter_store: AdapterStore,
        timeouts: RequestTimeouts,
        key: str | None = None,
        processes: SamplerProcesses | None = None,
    ) -> None:
        self.servers = list(servers)
        self.adapter_store = adapter_store
        self.timeouts = timeouts
        self.processes = processes  # keeps the server processes alive; they stop with this object
        self.loop_thread = LoopThread("vLLM client")
        # An adapter of zeros, sent with requests for the bare base, except to palestra servers.
        # Works around a vLLM bug (seen on 0.32 for CPUs; pull requests 48421 and 49656): in a batch
        # with an adapter's rows, rows without an adapter got the adapter of their neighbours.
        self.zero_adapter: Snapshot | None = None
        self.vocabulary: int | None = None  # tokens of the base, once it is known
        self.failure: Exception | None = None
        self._puts: dict[str, asyncio.Task[Path]] = {}
        self._watched: set[str] = set()  # adapters that are unloaded with their snapshots
        self._http = self.loop_thread.run(_open_session(timeouts, key))
        self.loop_thread.on_close = self._http.close
        self.close = weakref.finalize(self, _close, self.loop_thread, adapter_store)

    def connect(self) -> None:
        """Connects to every server and reads its models. Raises ValueError if one is unreachable or lacks the base."""
        for server in self.servers:
            self.loop_thread.run(self._meet(server))

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the `request.n` completions in order: token_ids [T] int32 and logprobs [T] float32 each.

        Raises ValueError if a server refuses the request or no server answers within the retry time.
        """
        return await self.loop_thread.run_async(self._sample(request))

    def sample_on_server(self, server: SamplerServer, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of one server for several concurrent requests, which share its batch.

        Raises ValueError if the server refuses a request or is unreachable.
        """

        async def generate_all() -> list[list[Completion]]:
            return await asyncio.gather(*(self._ask(server, request) for request in requests))

        return self.loop_thread.run(self._patiently(server, generate_all))

    def clear_cache(self) -> None:
        """Raises the error of a lasting server failure; frees nothing, since unused adapters are unloaded on their own.

        Episodes without a sampler have failed by then, and training on the remaining ones would bias the update.
        """
        if self.failure:
            raise self.failure

    # ---- on the HTTP thread

    async def _meet(self, server: SamplerServer) -> None:
        bases = await self._patiently(server, lambda: self._bases(server))
        names = [card.id for card in bases]
        server.model = server.model or names[0]
        if server.model not in names:
            raise ValueError(
                f'the sampler at {server.url} serves {", ".join(names)}, not "{server.model}": set sampler.model'
            )
        server.is_palestra = bases[0].owned_by == wire.PALESTRA_OWNER

    async def _bases(self, server: SamplerServer) -> list[wire.ModelCard]:
        """Returns the bases that a server lists, at least one."""
        listed = _read(server, wire.ModelList, await self._send(server, "GET", "/v1/models"))
        bases = [card for card in listed.data if not card.parent]
        if not bases:
            raise _unlike_vllm(server, "/v1/models lists no model")
        return bases

    async def _patiently(self, server: SamplerServer, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Returns the result of `work`, retried for up to 10 s while the server is unreachable.

        Raises ValueError after that.
        """
        timeout_s = min(CONNECT_TIMEOUT_S, self.timeouts.retry_timeout_s)
        policy = RetryPolicy(PAUSES.first_wait_s, PAUSES.first_wait_s, timeout_s=timeout_s)
        try:
            return await policy.run(work, ServerUnavailable)
        except ServerUnavailable as error:
            raise ValueError(f"{error}. Is it running? Start it first, or correct sampler.urls.") from error

    async def _sample(self, request: Request) -> list[Completion]:
        """Returns the completions of `request`, retrying on all servers until one answers or the retry time is over."""
        until: float | None = None
        while True:
            server = await self._free()
            start = time.monotonic()
            try:
                found = await self._ask(server, request)
            except ServerUnavailable as error:
                worker_stats.count("sampler", server.url, str(error), lost=1)
                until = until or time.monotonic() + self.timeouts.retry_timeout_s
                if time.monotonic() > until:
                    self.failure = ValueError(
                        f"no sampler answered for {self.timeouts.retry_timeout_s:.0f} seconds: {error}"
                    )
                    raise self.failure from error
                await self._see_to(server)
            else:
                server.failures = 0
                self.failure = None
                worker_stats.count("sampler", server.url, done=1, seconds=time.monotonic() - start)
                return found

    async def _free(self) -> SamplerServer:
        """Returns the available server with the fewest requests in flight; waits while all are paused."""
        while True:
            now = time.monotonic()
            if awake := [server for server in self.servers if server.paused_until <= now]:
                return min(awake, key=lambda server: server.num_in_flight)
            await asyncio.sleep(min(PAUSES.first_wait_s, *(server.paused_until - now for server in self.servers)))

    async def _see_to(self, server: SamplerServer) -> None:
        """Pauses a server after a failure, and restarts it if this run manages it."""
        if server.paused_until > time.monotonic():
            return  # another request is already handling this failure
        server.record_failure()
        if server.restart is None:
            return
        server.paused_until = float("inf")
        try:
            url = await asyncio.to_thread(server.restart)
        except ValueError as error:
            self.failure = error
            raise
        finally:
            server.paused_until = 0.0
        if url != server.url:
            server.url = url
            server.failures = 0
            server.adapter_loads.clear()

    async def _ask(self, server: SamplerServer, request: Request) -> list[Completion]:
        server.num_in_flight += 1
        try:
            for _ in range(2):
                try:
                    model = await self._model(server, request)
                    body = wire.build_completion_body(request, model, keep=request.keep_kv and server.is_palestra)
                    reply = await self._send(server, "POST", COMPLETIONS_PATH, body)
                    return _answers(server, reply, request, self.vocabulary)
                except AdapterLost:
                    server.adapter_loads.clear()
            raise ServerUnavailable(f"the sampler at {server.url} loses adapters as soon as they are loaded")
        finally:
            server.num_in_flight -= 1

    async def _model(self, server: SamplerServer, request: Request) -> str:
        """Loads the request's adapter on the server if needed and returns its model name there."""
        snapshot = request.adapter or (None if server.is_palestra else self.zero_adapter)
        if snapshot is None:
            assert server.model is not None
            return server.model
        name = self.adapter_store.adapter_name(snapshot)
        if name not in self._watched:
            self._watched.add(name)
            unload = partial(self._unload, name)  # called on any thread
            weakref.finalize(snapshot, self.loop_thread.run_detached, unload).atexit = False
        if name not in self._puts:
            self._puts[name] = asyncio.create_task(
                self.adapter_store.write_async(snapshot, self.timeouts.retry_timeout_s)
            )
            self._puts[name].add_done_callback(partial(self._drop_failed, name))
        path = await asyncio.shield(self._puts[name])
        if name not in server.adapter_loads:
            server.adapter_loads[name] = asyncio.create_task(self._load(server, name, path))
        try:
            await asyncio.shield(server.adapter_loads[name])
        except (ServerUnavailable, ValueError):
            server.adapter_loads.pop(name, None)
            raise
        return name

    def _drop_failed(self, name: str, put: asyncio.Task[Path]) -> None:
        if put.cancelled() or put.exception():
            self._puts.pop(name, None)  # the next request tries again

    async def _load(self, server: SamplerServer, name: str, path: Path) -> None:
        try:
            await self._send(server, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except AdapterLost:
            raise ValueError(
                f"the sampler at {server.url} has no /v1/load_lora_adapter, or cannot see {path}. Start vLLM with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora; on another machine, set sampler.folder to a "
                "folder that both see"
            ) from None
        except ValueError as error:
            if "already been loaded" not in str(error):  # by an attempt whose response was lost
                raise

    async def _unload(self, name: str) -> None:
        self._puts.pop(name, None)
        self._watched.discard(name)
        there = [server for server in self.servers if server.adapter_loads.pop(name, None)]
        gone = (self._send(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name}) for server in there)
        await asyncio.gather(*gone, return_exceptions=True)  # an unreachable server has lost it anyway
        await asyncio.to_thread(self.adapter_store.delete, name)

    async def _send(self, server: SamplerServer, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends an HTTP request and returns the JSON (or text) of the response.

        Raises ServerUnavailable if a retry may help, AdapterLost if an adapter is unknown (404), else ValueError with
        the server's message.
        """
        try:
            # a redirect would send prompts to a server that the config does not name
            call = self._http.request(method, server.url.rstrip("/") + path, json=body, allow_redirects=False)
            async with call as answer:
                status = answer.status
                content = await _read_body(answer)
        except TimeoutError as error:
            raise ValueError(
                f"no answer from the sampler at {server.url} within sampler.request_timeout: "
                f"{self.timeouts.request_timeout_s:.0f} seconds"
            ) from error
        except _aiohttp().ClientError as error:
            raise ServerUnavailable(
                f"no answer from the sampler at {server.url}: {error or type(error).__name__}"
            ) from error
        if status < 300:
            return _parse(content)
        message = f"the sampler at {server.url} answered {status}: {_message(content)}"
        if status in (401, 403):
            raise ValueError(f"{message}. Put its key into the environment variable that sampler.key_env names.")
        if status in RETRY_STATUSES and (
            status != 500 or path == COMPLETIONS_PATH
        ):  # vLLM returns 500 for invalid adapters
            raise ServerUnavailable(message)
        if status == 404 and body and ("lora_name" in body or body["model"] != server.model):
            raise AdapterLost(message)
        raise request_error(message)


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the body of a reply. Raises ValueError if it is longer than `MAX_REPLY_BYTES`."""
    content = bytearray()
    async for piece in answer.content.iter_any():
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            raise ValueError(f"the sampler at {answer.url.origin()} sent more than {MAX_REPLY_BYTES:,} bytes")
    return bytes(content)


async def _open_session(timeouts: RequestTimeouts, key: str | None) -> aiohttp.ClientSession:
    http = _aiohttp()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = http.TCPConnector(limit=MAX_CONNECTIONS)
    timeout = http.ClientTimeout(total=timeouts.request_timeout_s, sock_connect=10)
    compact = partial(json.dumps, separators=(",", ":"))
    session: aiohttp.ClientSession = http.ClientSession(
        headers=headers, connector=connector, timeout=timeout, json_serialize=compact
    )
    return session


@cache
def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError(f"remote samplers need aiohttp ({error}): pip install 'palestra[service]'") from error
    return aiohttp


def _close(aside: LoopThread, exchange: AdapterStore) -> None:
    aside.close()
    exchange.close()


def _read(server: SamplerServer, kind: type[ReplyT], reply: Any) -> ReplyT:
    """Returns the reply of a server as a `kind`. Raises ServerUnavailable if it is no JSON object, as from a proxy, and
    ValueError if it is not of that kind."""
    if not isinstance(reply, dict):
        raise ServerUnavailable(f"the sampler at {server.url} answered {str(reply)[:80]!r}, which is no JSON object")
    try:
        return kind.model_validate(reply)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise _unlike_vllm(server, f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def _unlike_vllm(server: SamplerServer, fault: str) -> ValueError:
    return ValueError(
        f"the answer of the sampler at {server.url} cannot be used: {fault}. It must answer as vLLM does since 0.10.2, "
        "with token_ids and the log-probability of each"
    )


def _answers(server: SamplerServer, reply: Any, request: Request, vocabulary: int | None) -> list[Completion]:
    """Returns the completions in a reply: token_ids [T] int32 and logprobs [T] float32.

    Raises ValueError if it does not hold as many as requested, or one that cannot be an answer to the request, and
    ServerUnavailable if the server aborted one.
    """
    choices = sorted(_read(server, wire.CompletionReply, reply).choices, key=lambda choice: choice.index)
    count = wire.num_completions(request)
    if [choice.index for choice in choices] != list(range(count)):
        raise _unlike_vllm(server, f"{len(choices)} choices for {count} answers, or two of one index")
    for choice in choices:
        _check_choice(server, choice, request, vocabulary)
    answers = [
        Completion(
            np.array(choice.token_ids, np.int32),
            np.array(choice.logprobs.token_logprobs, np.float32),
            "stop" if choice.finish_reason == "stop" else "length",
            sampling_mask=_sampling_mask(server, choice) if request.sampling.records_mask else None,
            routed_experts=_routed_experts(choice.routed_experts),
        )
        for choice in choices
    ]
    return answers * (request.n // count)


def _check_choice(
    server: SamplerServer, choice: wire.CompletionChoice, request: Request, vocabulary: int | None
) -> None:
    """Raises an error as `_answers` does."""
    if choice.finish_reason == "abort":
        raise ServerUnavailable(f"the sampler at {server.url} aborted an answer")
    length = len(choice.token_ids)
    if len(choice.logprobs.token_logprobs) != length:
        raise _unlike_vllm(server, f"{len(choice.logprobs.token_logprobs)} log-probabilities of {length} tokens")
    if length > request.sampling.max_tokens:
        raise _unlike_vllm(server, f"{length} tokens where max_tokens is {request.sampling.max_tokens}")
    if vocabulary is not None and max(choice.token_ids) >= vocabulary:
        raise _unlike_vllm(server, f"token {max(choice.token_ids)} of a base with {vocabulary} tokens")


def _sampling_mask(server: SamplerServer, choice: wire.CompletionChoice) -> SamplingMask:
    if choice.sampling_mask is None or len(choice.sampling_mask) != len(choice.token_ids):
        raise _unlike_vllm(server, "it has no sampling_mask for each token")
    return SamplingMask.join([np.array(ids, np.int32) for ids in choice.sampling_mask])


def _routed_experts(encoded: str | None) -> np.ndarray | None:
    """Returns the experts [P + T - 1, L, K] int32 of vLLM's --enable-return-routed-experts, which since 0.22 are a
    NumPy file in base64; None if the server returns none. Raises ValueError for the lists of 0.21."""
    if encoded is None:
        return None
    if not isinstance(encoded, str):
        raise ValueError("routed experts of vLLM 0.21 cannot be read: install vLLM 0.22 or newer")
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.int32)


def _parse(content: bytes) -> Any:
    """Returns the JSON in a body; its text if it holds none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")


def _message(content: bytes) -> str:
    """Returns the message of an error response, at most 500 characters."""
    try:
        reply = json.loads(content)
        reply = reply.get("error", reply)
        return str(reply.get("message") or reply.get("detail") or reply)[:500]
    except (ValueError, AttributeError):
        return content[:500].decode(errors="replace")
