"""Measures costs and gains of running parts of a run in other processes and on other machines.

    python results/scaling/run.py                    about 15 minutes
    python results/scaling/run.py --quick            one part, shorter: a smoke test
    python results/scaling/run.py --parts envs loop  some parts
    python results/scaling/run.py --report           also publishes the figures, and writes docs/results-scaling.md

Four parts: envs on servers, samplers in processes of their own (parts/samplers.py), training shared by ranks
(parts/sharding.py), the whole loop on workers and on Ray (parts/loop.py). The docstrings of the last three
describe their figures; each also runs alone.

Envs: games of tic-tac-toe as text. Their steps take some microseconds, so that communication dominates. Episodes run
concurrently, each a coroutine that steps as soon as the last answer came: in this process, on 1 and on 4 servers
(processes of this machine, over TCP), and by single calls in place of the stream that clients use. Client and servers
share the machine's cores, so CPU seconds are reported as well as wall time. Figures:

    env_added_ms        median milliseconds of a step of a single episode on 1 server, less those in process
    env_steps_per_s     steps per second of 64 episodes on 4 servers
    env_cpu_us          CPU microseconds of such a step, client and servers together
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from palestra.core.types import Step
from palestra.envs.base import Env
from palestra.envs.remote import SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.remote_env import env_factory
from palestra.envs.remote.serialization import encode_mapping, encode_value, read_step

sys.path.append(str(Path(__file__).parents[2]))
from bench.serving_envs import servers
from bench.soak_parts.memory import cpu_seconds, process_tree
from results.ledger import finish
from results.scaling.report import PAGE, page

GAME = "text_tic_tac_toe"
EPISODES, SERVERS = (1, 8, 64), (1, 4)
TARGETS = {"env_added_ms": 1.0, "env_steps_per_s": 10_000, "env_cpu_us": None, "fsdp_memory_ratio": 0.35}
console = Console(width=110)


class Speed(NamedTuple):
    """The speed of one setup: steps per second, median and 99th percentile of a step's milliseconds, CPU microseconds
    of a step in this process (`here`) and in servers (`there`)."""

    rate: float
    p50: float
    p99: float
    here: float
    there: float

    def row(self) -> list[str]:
        return [f"{self.rate:,.0f}", f"{self.p50:.3f}", f"{self.p99:.3f}", f"{self.here:.0f}", f"{self.there:.0f}"]


HEADINGS = ("steps/s", "p50 ms", "p99 ms", "CPU µs here", "CPU µs there")


def cpu(processes: Sequence[subprocess.Popen[str]]) -> float:
    """CPU seconds of these processes and their descendants so far (on Linux; 0 on other systems)."""
    return sum(cpu_seconds(pid) for process in processes for pid in process_tree(process.pid))


async def episode(make: Callable[[], Any], seed: int, until: float, took: list[float]) -> None:
    """Plays games with random actions, one after another, until that time; appends the seconds of each step to
    `took`."""
    rng = random.Random(seed)
    while time.perf_counter() < until:
        env = make()
        step: Step = await settled(env.reset(seed))
        while not step.done:
            ((seat, legal),) = (step.legal_actions or {}).items()
            start = time.perf_counter()
            step = await settled(env.step({seat: rng.choice(legal)}))
            took.append(time.perf_counter() - start)
        await settled(env.close())
        await asyncio.sleep(0)  # in process, nothing else gives control to other episodes


async def settled(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


async def measure(
    make: Callable[[], Any], episodes: int, seconds: float, there: Sequence[subprocess.Popen[str]]
) -> Speed:
    """The speed of that many concurrent episodes, after a warm-up of half a second."""
    await asyncio.gather(*(episode(make, i, time.perf_counter() + 0.5, []) for i in range(episodes)))  # warms up
    took: list[float] = []
    start, own, theirs = time.perf_counter(), time.process_time(), cpu(there)
    await asyncio.gather(*(episode(make, i, start + seconds, took) for i in range(episodes)))
    wall, own, theirs = time.perf_counter() - start, time.process_time() - own, cpu(there) - theirs
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    return Speed(len(took) / wall, p50, p99, own / len(took) * 1e6, theirs / len(took) * 1e6)


class Calling(Env):
    """The same env on a server, reached by single calls."""

    def __init__(self, call: Callable[..., Awaitable[pb.Reply]], numbers: Iterator[int]) -> None:
        self.call, self.session = call, next(numbers)

    async def reset(self, seed: int) -> Step:
        asked = pb.Open(kind=pb.Kind(type=GAME), seed=encode_value(seed))
        reply = await self.call(pb.Request(id=1, session=self.session, open=asked), timeout=10)
        return read_step(reply.opened.steps[0])

    async def step(self, actions: dict[str, Any]) -> Step:
        reply = await self.call(pb.Request(id=1, session=self.session, step=encode_mapping(actions)), timeout=10)
        return read_step(reply.step)

    async def close(self) -> None:
        await self.call(pb.Request(id=1, session=self.session, close=pb.Close()), timeout=10)


async def by_calls(episodes: int, seconds: float, there: Sequence[Any]) -> Speed:
    async with grpc.aio.insecure_channel(there[0].address) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/Ask", pb.Request.SerializeToString, pb.Reply.FromString)
        numbers = iter(range(1, 10**9))
        return await measure(lambda: Calling(ask, numbers), episodes, seconds, there)


def envs(quick: bool) -> tuple[Table, dict[str, float]]:
    """The table and figures of env steps in this process and on servers."""
    seconds = 1.5 if quick else 8.0
    table = Table("", "episodes", *HEADINGS, title="steps of a small game", title_justify="left")
    found: dict[tuple[str, int], Speed] = {}

    def note(way: str, episodes: int, speed: Speed) -> None:
        found[way, episodes] = speed
        table.add_row(way, str(episodes), *speed.row())

    for n in EPISODES:
        note("in process", n, asyncio.run(measure(env_factory({"type": GAME}), n, seconds, [])))
    for number in SERVERS:
        way = f"{number} server{'s' * (number > 1)}"
        with servers(number, GAME) as there:
            make = env_factory({"type": GAME, "at": [process.address for process in there]})  # type: ignore[attr-defined]
            for n in EPISODES:
                note(way, n, asyncio.run(measure(make, n, seconds, there)))
            if number == 1:
                for n in EPISODES:
                    note("1 server, by calls", n, asyncio.run(by_calls(n, seconds, there)))
    best = found["4 servers", 64]
    figures = {
        "env_added_ms": found["1 server", 1].p50 - found["in process", 1].p50,
        "env_steps_per_s": best.rate,
        "env_cpu_us": best.here + best.there,
    }
    return table, figures


def elsewhere(name: str, title: str) -> Callable[[bool], tuple[Table, dict[str, float]]]:
    """A part with a file of its own: a function that returns its figures and a table of two columns."""

    def part(quick: bool) -> tuple[Table, dict[str, float]]:
        figures: dict[str, float] = import_module(f"results.scaling.parts.{name}").measure(quick)
        table = Table("", "figure", title=title, title_justify="left")
        for key, figure in figures.items():
            table.add_row(key, f"{figure:,.3f}" if abs(figure) < 100 else f"{figure:,.0f}")
        return table, figures

    return part


PARTS = {
    "envs": envs,
    "samplers": elsewhere("samplers", "samplers in processes of their own"),
    "sharding": elsewhere("sharding", "training shared by ranks"),
    "loop": elsewhere("loop", "the whole loop on workers and on Ray"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), help="parts to run (default: all; with --quick envs)"
    )
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    parser.add_argument("--report", action="store_true", help=f"publish the figures, and write {PAGE}")
    options = parser.parse_args()
    if options.report and (options.quick or options.parts):
        parser.error("--report: the page has all parts, at full length")
    figures: dict[str, float] = {}
    tables = []
    for name in options.parts or (["envs"] if options.quick else PARTS):
        table, own = PARTS[name](options.quick)
        console.print(table)
        tables.append(table)
        figures |= own
    if options.report:
        PAGE.write_text(page(tables))
    finish("scale", figures, TARGETS, page="scaling", is_stored=not options.quick, is_published=options.report)


if __name__ == "__main__":
    main()
