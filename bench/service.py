"""Measures the training service: the cost of HTTP, the speed with many clients, latency under load, and memory.

    python bench/service.py            about 5 minutes
    python bench/service.py --quick    two rounds instead of eight, and less load: about a minute and a half

A round is one step of reinforcement learning by a client: sample 8 answers of 16 tokens to each of 64 prompts of 96
tokens, train on all of them, make an optimizer step, and export the weights to a sampler. Rounds run in this process,
by one client of a server, and by 4 and 16 clients that share the same work, each with an adapter of its own. Server and
clients share the machine's cores, so wall time counts. The ways alternate, and the best of each counts. Figures:

    clients16_vs_1           rounds per second of 16 clients that do a 16th each, over those of one client
    http_overhead            seconds of a round by one client over HTTP, over those in process, less one
    small_p99_beside_heavy   99th percentile of the seconds of an answer of 5 tokens, while another key has 64 requests
                             of 64 answers of 120 tokens in the queue, over the percentile without that load
    memory_after_burst       resident memory of the worker some seconds after a burst of large, many, and refused
                             requests, over the memory before
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from limit import random_prompts
from rich.console import Console
from rich.table import Table
from service_load import beside_heavy, memory_after_burst, worker_of

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import OptimConfig
from palestra.service.server.api_keys import add_key
from palestra.text.learners.lm import Weights, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.policies.lm import SamplerProtocol
from palestra.text.tinker.connection import ServiceConnection
from palestra.text.tinker.remote_sampler import RemoteSampler
from palestra.text.tinker.remote_weights import RemoteWeights

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish

PROMPT, NEW, K, GROUPS = 96, 16, 8, 64
CONFIG = LoraPolicyConfig(base="tiny", alpha=32.0)
TARGETS = {
    "clients16_vs_1": 0.85,
    "http_overhead": 0.15,
    "small_p99_beside_heavy": 4.0,
    "memory_after_burst": 1.1,
}
console = Console(width=110)


@dataclass
class Client:
    """A client with an adapter, in this process or on a server; `seconds` has the least time of each phase."""

    weights: Weights
    sampler: SamplerProtocol
    seconds: dict[str, float]

    async def round(self, prompts: Sequence[np.ndarray]) -> None:
        start = time.perf_counter()
        adapter = self.weights.snapshot("bench")
        sampling = SamplingConfig(max_tokens=NEW, stop_at_eos=False)
        asked = [self.sampler.sample(Request(p, K, sampling, adapter, seed=i)) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*asked)
        self._note("sampling", start)
        start = time.perf_counter()
        self.weights.forward_backward(list(credited(prompts, answers)), clipped_policy_loss)
        self.weights.optim_step(OptimConfig(lr=1e-5))
        self._note("training", start)

    def _note(self, phase: str, start: float) -> None:
        self.seconds[phase] = min(self.seconds.get(phase, float("inf")), time.perf_counter() - start)


def credited(prompts: Sequence[np.ndarray], answers: Sequence[list[Any]]) -> Iterator[Sample]:
    """Yields samples with advantages. The reward of an answer is its share of even tokens, so that rewards differ in
    every group."""
    for prompt, siblings in zip(prompts, answers, strict=True):
        rewards = np.array([np.mean(s.token_ids % 2 == 0) for s in siblings])
        for s, advantage in zip(siblings, rewards - rewards.mean(), strict=True):
            yield Sample(prompt, s.token_ids, s.logprobs, np.full(NEW, advantage, np.float32))


def in_process() -> Client:
    engine = Engine.load("tiny", device="cpu")
    return Client(build_weights(CONFIG, engine, seed=0), Sampler(engine), {})


def remote(url: str, seed: int) -> Client:
    connection = ServiceConnection(url)

    return Client(RemoteWeights(connection, CONFIG, seed=seed), RemoteSampler(connection, ""), {})


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Starts a server on a free port; yields its address and process id, and ends it on exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    palestra = str(Path(sys.executable).parent / "palestra")
    command = [palestra, "serve", "--data", str(folder), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz").close()
                break
            except OSError:
                time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def together(clients: Sequence[Client], prompts: Sequence[np.ndarray]) -> float:
    """Wall seconds in which the clients do one round concurrently, each an equal part of it."""

    def one(number: int) -> None:
        asyncio.run(clients[number].round(prompts[number :: len(clients)]))

    start = time.perf_counter()
    if len(clients) == 1:  # in the main thread, as a program does: memory is slower in other threads
        one(0)
    else:  # each in a thread of its own, since training waits for its answer
        with ThreadPoolExecutor(len(clients)) as threads:
            list(threads.map(one, range(len(clients))))
    return time.perf_counter() - start


def loaded(quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Percentiles of a small request's seconds with and without a heavy key, and the worker's memory around a burst."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {name: add_key(Path(folder) / "keys", name) for name in ("small", "heavy")}
        with server(Path(folder) / "data", "--auth", str(Path(folder) / "keys")) as (url, pid):
            waits = asyncio.run(beside_heavy(url, keys, *((10, 16) if quick else (200, 64))))
        with server(Path(folder) / "fresh", "--auth", str(Path(folder) / "keys")) as (url, pid):
            memory = asyncio.run(memory_after_burst(url, keys, worker_of(pid), (64, 15) if quick else (512, 120)))
    return waits, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    sys.setswitchinterval(5e-4)  # clients are threads here but processes in practice: they must not wait for each other
    quick = parser.parse_args().quick
    repeats = 2 if quick else 8
    prompts = [np.array(p, np.int32) for p in random_prompts(GROUPS, PROMPT, seed=0)]
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "data") as (url, _):
        ways = {"in process": [in_process()]}
        ways |= {f"{n} client{'s' * (n > 1)}": [remote(url, seed) for seed in range(n)] for n in (1, 4, 16)}
        best = dict.fromkeys(ways, float("inf"))
        for number in range(repeats + 1):
            for name, clients in ways.items():
                seconds = together(clients, prompts)
                best[name] = min(best[name], seconds) if number else best[name]  # the first round warms up
    table = Table(title=f"a round: {GROUPS} prompts of {PROMPT} tokens, {K} answers of {NEW}", title_justify="left")
    for heading in ("", "seconds", "sampled tokens/s", "trained tokens/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, clients in ways.items():
        spent = {phase: max(c.seconds[phase] for c in clients) for phase in ("sampling", "training")}
        rates = [f"{GROUPS * K * NEW / spent[phase]:,.0f}" for phase in spent]
        table.add_row(name, f"{best[name]:.2f}", *rates)
    console.print(table)
    waits, memory = loaded(quick)
    console.print(f"small requests' p99: {1000 * waits['alone']:.0f} ms alone, {1000 * waits['beside']:.0f} ms beside")
    console.print("the worker's MiB: " + ", ".join(f"{value:.0f} {when}" for when, value in memory.items()))
    figures = {
        "clients16_vs_1": best["1 client"] / best["16 clients"],
        "http_overhead": best["1 client"] / best["in process"] - 1,
        "small_p99_beside_heavy": waits["beside"] / waits["alone"],
        "memory_after_burst": memory["after"] / memory["before"],
    }
    finish("service", figures, TARGETS, is_stored=not quick)


if __name__ == "__main__":
    main()
