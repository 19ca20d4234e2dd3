"""Sampling on servers: token ids in and out over HTTP, adapters loaded under a new name per version.

    sampler = VllmSampler([Server("http://localhost:8001")], Exchange(None, "tiny"), Patience())
    answers = await sampler.sample(Request(prompt_ids, 8, sampling, snapshot, seed))

The dialect is vLLM's (sampler_wire.py); `palestra serve-sampler` speaks it too. A request goes to the server that has
the fewest under way. Where that one is gone, or lost its adapters in a restart, it is made again elsewhere, or there.
An adapter leaves the servers when nothing in this process can ask for it any more.
"""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.engine.lora import Snapshot
from palestra.engine.requests import Request, Sampled
from palestra.remote import sampler_wire as wire
from palestra.remote.aside import Aside
from palestra.remote.exchange import Exchange
from palestra.remote.sampler_processes import Processes
from palestra.roll import roll

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS = "/v1/completions"
AWAY = (408, 429, 500, 502, 503, 504)  # answers of a server that may know better in a while
PAUSES = (0.1, 5.0)  # seconds that a server is left alone after a failure: at first, and at most
CONNECTIONS = 512  # more requests wait here, and not for the lack of a file handle


class Away(ConnectionError):
    """The server gave no answer, and may give one later."""


class Lost(Exception):
    """The server does not know an adapter that was loaded there: it has been started again."""


@dataclass(frozen=True)
class Patience:
    """Seconds that an answer may take, and for which servers that are away are asked again."""

    answer: float = 1800.0
    away: float = 120.0


@dataclass(eq=False)
class Server:
    """A server at `url` with the base `model` (None: the first it lists). `revive` sees to one that seems gone and says
    where it is now; servers that somebody else runs have none."""

    url: str
    model: str | None = None
    revive: Callable[[], str] | None = None
    ours: bool = False
    under_way: int = 0
    failures: int = 0
    rests_until: float = 0.0
    loaded: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def failed(self) -> None:
        """Leaves it alone for a while, which grows with each failure in a row."""
        first, most = PAUSES
        self.failures += 1
        self.rests_until = time.monotonic() + min(most, first * 2 ** (self.failures - 1))


class VllmSampler:
    """`Samples` on one or several servers of the same base. HTTP is spoken on a thread of its own, so that callers may
    be coroutines of any loop, and requests go on while the caller computes."""

    def __init__(
        self,
        servers: Sequence[Server],
        exchange: Exchange,
        patience: Patience,
        key: str | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.servers, self.exchange, self.patience = list(servers), exchange, patience
        self.processes = processes  # of ours, which end with this object
        self.aside = Aside("sampling elsewhere")
        self.zero: Snapshot | None = None
        self.broken: Exception | None = None
        self._puts: dict[str, asyncio.Task[Path]] = {}
        self._http = self.aside.now(_opened(patience, key))
        self.aside.last = self._http.close
        self.close = weakref.finalize(self, _close, self.aside, exchange)

    def meet(self) -> None:
        """Asks every server who it is. Raises ValueError where one is not there, or serves no such base."""
        for server in self.servers:
            self.aside.now(self._meet(server))

    def under(self, zero: Snapshot) -> None:
        """From now on requests of the bare base go under `zero`, an adapter that adds nothing, on servers of another
        make: in one batch with an adapter's rows, rows without one got the adapter of their neighbours (seen on vLLM
        0.32 for CPUs; its pull requests 48421 and 49656)."""
        self.zero = zero

    async def sample(self, request: Request) -> list[Sampled]:
        """The answers to `request`, in sibling order. Raises ValueError where a server refuses it, or none is there."""
        return await self.aside.soon(self._sample(request))

    def sample_at(self, server: Server, requests: Sequence[Request]) -> list[list[Sampled]]:
        """The answers of one server to several requests, which share its batch. Raises ValueError where it is gone."""

        async def asked() -> list[list[Sampled]]:
            return await asyncio.gather(*(self._ask(server, request) for request in requests))

        return self.aside.now(self._patiently(server, asked))

    def forget(self) -> None:
        """Servers let go of adapters by themselves. Where none was to be had, the run ends here: episodes that found no
        sampler failed, and nothing should be learned from what is left."""
        if self.broken:
            raise self.broken

    # ---- on the other thread

    async def _meet(self, server: Server) -> None:
        cards = (await self._patiently(server, lambda: self._send(server, "GET", "/v1/models")))["data"]
        bases = [card for card in cards if not card.get("parent")]
        names = [str(card["id"]) for card in bases]
        server.model = server.model or names[0]
        if server.model not in names:
            raise ValueError(
                f'the sampler at {server.url} serves {", ".join(names)}, not "{server.model}": set sampler.model'
            )
        server.ours = bases[0].get("owned_by") == wire.OURS

    async def _patiently(self, server: Server, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `work` comes to, tried for as long as a server may be away at the start: a few seconds."""
        until = time.monotonic() + min(10.0, self.patience.away)
        while True:
            try:
                return await work()
            except Away as error:
                if time.monotonic() > until:
                    raise ValueError(f"{error}. Is it running? Start it first, or correct sampler.urls.") from error
            await asyncio.sleep(PAUSES[0])

    async def _sample(self, request: Request) -> list[Sampled]:
        """The answers of whichever server gives them first; those that fail are asked again later."""
        until: float | None = None
        while True:
            server, start = await self._free(), time.monotonic()
            try:
                found = await self._ask(server, request)
            except Away as error:
                roll.note("sampler", server.url, str(error), lost=1)
                until = until or time.monotonic() + self.patience.away
                if time.monotonic() > until:
                    self.broken = ValueError(f"no sampler answered for {self.patience.away:.0f} seconds: {error}")
                    raise self.broken from error
                await self._see_to(server)
            else:
                server.failures, self.broken = 0, None
                roll.note("sampler", server.url, done=1, seconds=time.monotonic() - start)
                return found

    async def _free(self) -> Server:
        """The server with the fewest requests under way of those that are not left alone; waits for one."""
        while True:
            now = time.monotonic()
            if awake := [server for server in self.servers if server.rests_until <= now]:
                return min(awake, key=lambda server: server.under_way)
            await asyncio.sleep(min(PAUSES[0], *(server.rests_until - now for server in self.servers)))

    async def _see_to(self, server: Server) -> None:
        """After a failure: lets the server rest, and revives one of our own. Others find it resting meanwhile."""
        if server.rests_until > time.monotonic():
            return  # another request has met the same failure
        server.failed()
        if server.revive is None:
            return
        server.rests_until = float("inf")
        try:
            url = await asyncio.to_thread(server.revive)
        except ValueError as error:
            self.broken = error
            raise
        finally:
            server.rests_until = 0.0
        if url != server.url:
            server.url, server.failures = url, 0
            server.loaded.clear()

    async def _ask(self, server: Server, request: Request) -> list[Sampled]:
        server.under_way += 1
        try:
            for _ in range(2):
                try:
                    model = await self._model(server, request)
                    body = wire.body(request, model, keep=request.keep and server.ours)
                    return _answers(server, await self._send(server, "POST", COMPLETIONS, body), request)
                except Lost:
                    server.loaded.clear()
            raise Away(f"the sampler at {server.url} loses adapters as soon as they are loaded")
        finally:
            server.under_way -= 1

    async def _model(self, server: Server, request: Request) -> str:
        """The name that the server knows the request's weights by, once they are there."""
        snapshot = request.adapter or (None if server.ours else self.zero)
        if snapshot is None:
            assert server.model is not None
            return server.model
        name = self.exchange.name(snapshot)
        if name not in self._puts:
            self._puts[name] = asyncio.create_task(asyncio.to_thread(self.exchange.put, snapshot))
            weakref.finalize(snapshot, self._let_go, name).atexit = False
        path = await asyncio.shield(self._puts[name])
        if name not in server.loaded:
            server.loaded[name] = asyncio.create_task(self._load(server, name, path))
        try:
            await asyncio.shield(server.loaded[name])
        except (Away, ValueError):
            server.loaded.pop(name, None)
            raise
        return name

    async def _load(self, server: Server, name: str, path: Path) -> None:
        try:
            await self._send(server, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except Lost:
            raise ValueError(
                f"the sampler at {server.url} has no /v1/load_lora_adapter, or cannot see {path}. Start vLLM with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora; on another machine, set sampler.folder to a "
                "folder that both see"
            ) from None
        except ValueError as error:
            if "already been loaded" not in str(error):  # by an attempt whose answer was lost
                raise

    def _let_go(self, name: str) -> None:
        """Nothing can ask for an adapter any more. Called on whichever thread dropped it last."""
        self.aside.later(partial(self._unload, name))

    async def _unload(self, name: str) -> None:
        self._puts.pop(name, None)
        there = [server for server in self.servers if server.loaded.pop(name, None)]
        gone = (self._send(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name}) for server in there)
        await asyncio.gather(*gone, return_exceptions=True)  # a server that is away has lost it anyhow
        await asyncio.to_thread(self.exchange.drop, name)

    async def _send(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON (or text) that a server answers. Raises Away, Lost (404), or ValueError with what it said."""
        try:
            async with self._http.request(method, server.url.rstrip("/") + path, json=body) as answer:
                status, content = answer.status, await answer.read()
        except TimeoutError as error:
            raise ValueError(
                f"no answer from the sampler at {server.url} within sampler.timeout: {self.patience.answer:.0f} seconds"
            ) from error
        except _aiohttp().ClientError as error:
            raise Away(f"no answer from the sampler at {server.url}: {error or type(error).__name__}") from error
        if status < 300:
            return json.loads(content) if content[:1] in (b"{", b"[") else content.decode()
        said = f"the sampler at {server.url} answered {status}: {_message(content)}"
        if status in (401, 403):
            raise ValueError(f"{said}. Put its key into the environment variable that sampler.key_env names.")
        if status in AWAY and (status != 500 or path == COMPLETIONS):  # vLLM says 500 to adapters that do not fit
            raise Away(said)
        if status == 404 and body and ("lora_name" in body or body["model"] != server.model):
            raise Lost(said)
        raise ValueError(said)


async def _opened(patience: Patience, key: str | None) -> aiohttp.ClientSession:
    http, headers = _aiohttp(), {"Authorization": f"Bearer {key}"} if key else {}
    connector, timeout = (
        http.TCPConnector(limit=CONNECTIONS),
        http.ClientTimeout(total=patience.answer, sock_connect=10),
    )
    session: aiohttp.ClientSession = http.ClientSession(
        headers=headers, connector=connector, timeout=timeout, json_serialize=_dumped
    )
    return session


@cache
def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError(f"samplers elsewhere need aiohttp ({error}): pip install 'palestra[service]'") from error
    return aiohttp


def _close(aside: Aside, exchange: Exchange) -> None:
    aside.close()
    exchange.close()


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _answers(server: Server, said: Any, request: Request) -> list[Sampled]:
    """The answers in what a server said. Raises ValueError where there are no token ids in it."""
    choices = sorted(said["choices"], key=lambda choice: choice["index"])
    count = wire.drawn(request)
    if len(choices) != count or any(choice.get("token_ids") is None for choice in choices):
        raise ValueError(
            f"the sampler at {server.url} says no token ids of {count} answers: it must know return_token_ids, as vLLM "
            "does since 0.10.2"
        )
    answers = [
        Sampled(
            np.array(choice["token_ids"], np.int32),
            np.array(choice["logprobs"]["token_logprobs"], np.float32),
            "stop" if choice["finish_reason"] == "stop" else "length",
        )
        for choice in choices
    ]
    return answers * (request.n // count)


def _message(content: bytes) -> str:
    """What an error's body says."""
    try:
        said = json.loads(content)
        said = said.get("error", said)
        return str(said.get("message") or said.get("detail") or said)[:500]
    except (ValueError, AttributeError):
        return content[:500].decode(errors="replace")
