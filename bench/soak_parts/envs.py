"""Many gRPC sessions of an env whose steps wait 20 ms, on a server of its own with two workers.

Each session is a coroutine of one client: it opens an env, steps as soon as the last answer arrived, closes the env
after 50 steps and opens the next.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from serving_envs import servers
from soak_parts.memory import Durations, MemoryWatch, SoakResult, process_tree

from palestra.envs.remote.address import counters
from palestra.envs.remote.remote_env import env_factory

KIND = "soak_parts.noise_env:NoiseEnv"
STEP_S, TURNS, WORKERS = 0.02, 50, 2
WARM_UP = 0.1  # first part of the time, whose steps do not count


class Sessions:
    """Sessions that play until a time; counts seconds of steps after `start`, finished episodes, and errors."""

    def __init__(self, address: str, start: float, until: float) -> None:
        self.make = env_factory({"type": KIND, "seconds": STEP_S, "turns": TURNS, "at": [address]})
        self.start, self.until = start, until
        self.took = Durations()
        self.episodes, self.failed = 0, list[str]()

    async def play(self, seed: int) -> None:
        while time.monotonic() < self.until:
            try:
                await self._episode(seed)
                self.episodes += 1
            except Exception as error:  # counted, since a soak looks for failed episodes
                self.failed.append(f"{type(error).__name__}: {error}")

    async def _episode(self, seed: int) -> None:
        env: Any = self.make()
        step = await env.reset(seed)
        while not step.done and time.monotonic() < self.until:
            asked = time.monotonic()
            step = await env.step({"agent0": "abc"})
            if asked >= self.start:
                self.took.add(time.monotonic() - asked)
        await env.close()


def soak(minutes: float, quick: bool) -> SoakResult:
    """Plays all sessions concurrently for `minutes`."""
    sessions = 500 if quick else 2000
    with servers(1, KIND, "--workers", str(WORKERS)) as (process,):
        begun = time.monotonic()
        play = Sessions(process.address, begun + WARM_UP * 60 * minutes, begun + 60 * minutes)  # type: ignore[attr-defined]

        def groups() -> dict[str, list[int]]:
            front, *workers = process_tree(process.pid)
            return {"env client": [os.getpid()], "env server": [front], "env workers": workers}

        async def all_sessions() -> None:
            await asyncio.gather(*(play.play(seed) for seed in range(sessions)))

        with MemoryWatch(groups) as memory:
            asyncio.run(all_sessions())
    p50, p99 = (1e3 * play.took.percentile(share) for share in (50, 99))
    rate = len(play.took) / (60 * minutes * (1 - WARM_UP))
    figures = {
        "envs_steps_per_s": rate,
        "envs_p50_ms": p50,
        "envs_p99_ms": p99,
        "envs_episodes": play.episodes,
        "envs_failed": len(play.failed),
        "envs_lost_sessions": counters["env_lost"],
    }
    rows = [(f"{sessions} sessions", f"{rate:,.0f}", f"{p50:.0f}", f"{p99:.0f}", str(play.episodes))]
    rows += [(error[:60], "", "", "", "") for error in play.failed[:3]]
    return SoakResult(figures, ("envs", "steps/s", "p50 ms", "p99 ms", "episodes"), rows, memory.curves)
