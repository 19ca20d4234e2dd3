"""The service under the load of many clients: 64 adapters of eight API keys, sampled and trained concurrently.

Each key has eight adapters, and each adapter has a client that trains it: gradients of a batch, an optimizer step, an
export of the new weights to a sampler. All other clients sample from the newest weights of one of their key's adapters;
the first key has more of these clients than the others. A client waits for its answer, then for an exponentially
distributed time, and sends the next request.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from service import server
from service_load import worker_of
from soak_parts.memory import MemoryWatch, SoakResult

from palestra.service.server.api_keys import add_key
from palestra.text.tinker.connection import RequestRefused, ServiceConnection

KEYS = 8
HEAVY_SHARE = 1 / 3  # share of the sampling clients that use the first key
THINK_S = 1.0  # mean seconds between an answer and the client's next request
PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS, TRAINED = 32, 4, 8, 4
WARM_UP = 0.1  # first part of the time, whose requests do not count
VERBS = ("sample", "forward_backward", "optim_step", "save_weights_for_sampler")


@dataclass
class Log:
    """Seconds of answered requests sent after the time `start`, by key and verb; and errors of failed requests."""

    start: float
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: list[str] = field(default_factory=list)

    async def timed(self, key: int, verb: str, request: Awaitable[Any]) -> dict[str, Any] | None:
        """Returns the answer, or None if the request failed."""
        asked = time.monotonic()
        try:
            reply = await request
        except (RequestRefused, ConnectionError) as error:
            self.failed.append(f"{verb}: {error}")
            return None
        if asked >= self.start:
            self.seconds[key, verb].append(time.monotonic() - asked)
        return {} if verb in ("sample", "forward_backward") else dict(reply.json())

    def of_verb(self, verb: str) -> list[float]:
        """Returns the seconds of all requests of a verb, over all keys."""
        return [s for (_, name), own in self.seconds.items() if name == verb for s in own]


class Adapter:
    """An adapter in training on the server, and the sampler with its newest weights."""

    def __init__(self, connection: ServiceConnection, key: int, log: Log, seed: int) -> None:
        self.connection, self.key, self.log, self.rng = connection, key, log, random.Random(seed)
        self.model = self.sampler = ""
        self.seq = self.sampled = 0

    async def create(self) -> None:
        lora = {"rank": 8, "seed": self.rng.getrandbits(32)}
        number = self.connection.next_number("model")
        fields: dict[str, Any] = {
            "session_id": self.connection.id,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": lora,
        }
        self.model = (await self.connection.call("create_model", **fields)).json()["model_id"]
        await self.publish()

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any] | None:
        self.seq += 1
        request = self.connection.call(verb, model_id=self.model, seq_id=self.seq, **fields)
        return await self.log.timed(self.key, verb, request)

    async def publish(self) -> None:
        """Exports the current weights to a new sampler, which the next samples use."""
        number = self.connection.next_number("sampler")
        if said := await self.ask("save_weights_for_sampler", sampling_session_seq_id=number):
            self.sampler, self.sampled = str(said["sampling_session_id"]), 0

    async def train(self) -> None:
        """Trains on a batch of random tokens and exports the weights."""
        data = [self._datum() for _ in range(TRAINED)]
        await self.ask("forward_backward", forward_backward_input={"data": data, "loss_fn": "cross_entropy"})
        await self.ask("optim_step", adam_params={"learning_rate": 1e-5})
        await self.publish()

    async def sample(self, rng: random.Random) -> None:
        self.sampled += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens(rng, PROMPT_TOKENS)}]}
        params = {"max_tokens": ANSWER_TOKENS, "stop": [], "seed": rng.getrandbits(32)}
        fields: dict[str, Any] = {
            "prompt": prompt,
            "num_samples": ANSWERS,
            "sampling_params": params,
            "seq_id": self.sampled,
        }
        request = self.connection.call("asample", sampling_session_id=self.sampler, **fields)
        await self.log.timed(self.key, "sample", request)

    def _datum(self) -> dict[str, Any]:
        ids = tokens(self.rng, PROMPT_TOKENS + ANSWER_TOKENS)
        weights = [0.0] * (PROMPT_TOKENS - 1) + [1.0] * ANSWER_TOKENS
        inputs = {
            "target_tokens": {"data": ids[1:], "dtype": "int64"},
            "weights": {"data": weights, "dtype": "float32"},
        }
        return {"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": inputs}


def tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(20, 90) for _ in range(number)]


async def again_and_again(work: Any, rng: random.Random, until: float) -> None:
    """Calls `work` until the time `until`, with a random wait before each call."""
    while time.monotonic() < until:
        await asyncio.sleep(rng.expovariate(1 / THINK_S))
        await work()


async def clients_of_key(adapters: list[Adapter], samplers: int, key: int, until: float) -> None:
    """Runs a training client for each of the key's adapters, and `samplers` sampling clients."""
    work = [again_and_again(adapter.train, adapter.rng, until) for adapter in adapters]
    for number in range(samplers):
        rng, adapter = random.Random(1000 * key + number), adapters[number % len(adapters)]
        work.append(again_and_again(lambda a=adapter, r=rng: a.sample(r), rng, until))
    await asyncio.gather(*work)


async def created(adapters: Iterable[Adapter]) -> None:
    await asyncio.gather(*(adapter.create() for adapter in adapters))


def soak(minutes: float, quick: bool) -> SoakResult:
    """Loads a server of its own for `minutes`."""
    clients, adapters = (60, 16) if quick else (200, 64)
    shares = [HEAVY_SHARE] + [(1 - HEAVY_SHARE) / (KEYS - 1)] * (KEYS - 1)
    samplers = [max(1, round(share * (clients - adapters))) for share in shares]
    with tempfile.TemporaryDirectory() as folder:
        keys = [add_key(Path(folder) / "keys", f"key{i}") for i in range(KEYS)]
        with server(Path(folder) / "data", "--auth", str(Path(folder) / "keys")) as (url, pid):
            connections = [ServiceConnection(url, key) for key in keys]
            log = Log(start=float("inf"))
            own = [
                [Adapter(connection, key, log, 100 * key + i) for i in range(adapters // KEYS)]
                for key, connection in enumerate(connections)
            ]
            for connection, some in zip(connections, own, strict=True):
                connection.run(created(some))
            begun = time.monotonic()
            log.start, until = begun + WARM_UP * 60 * minutes, begun + 60 * minutes
            with MemoryWatch(lambda: {"front end": [pid], "engine": [worker_of(pid)]}) as memory:
                threads = [
                    threading.Thread(target=connection.run, args=[clients_of_key(some, samplers[key], key, until)])
                    for key, (connection, some) in enumerate(zip(connections, own, strict=True))
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            steps = sum(adapter.seq for some in own for adapter in some)
            disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()) / 1e6
            for connection in connections:
                connection.close()
    return result(log, memory, 60 * minutes * (1 - WARM_UP), {"service_calls": steps, "service_disk_mb": disk})


def result(log: Log, memory: MemoryWatch, seconds: float, more: dict[str, float]) -> SoakResult:
    """The result: figures, and a table row for each verb and for the samples of each key."""
    rows, worst = [], 0.0
    for verb in VERBS:
        own = log.of_verb(verb)
        p50, p99 = np.percentile(own, (50, 99))
        worst = max(worst, p99 / p50)
        rows.append((verb, f"{len(own) / seconds:.1f}", f"{p50:.3f}", f"{p99:.3f}", f"{p99 / p50:.1f}"))
    medians = []
    for key in range(KEYS):
        own = log.seconds[key, "sample"]
        p50, p99 = np.percentile(own, (50, 99))
        medians.append(p50)
        rows.append((f"sample, key {key}", f"{len(own) / seconds:.1f}", f"{p50:.3f}", f"{p99:.3f}", f"{p99 / p50:.1f}"))
    for error in log.failed[:3]:
        rows.append((error[:60], "", "", "", ""))
    figures = {
        "service_p99_vs_p50": worst,
        "service_failed": len(log.failed),
        "service_samples_per_s": len(log.of_verb("sample")) / seconds,
        "service_light_keys_spread": max(medians[1:]) / min(medians[1:]),
        "service_heavy_vs_light": medians[0] / float(np.median(medians[1:])),
        **more,
    }
    return SoakResult(figures, ("service", "a second", "p50 s", "p99 s", "ratio"), rows, memory.curves)
