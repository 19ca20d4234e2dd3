"""Functions of all peers' scripts: reading the spec, measuring steps per second, printing the result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class Spec:
    """What to measure. `what` is train, sample (policies act, without learning) or random (the env with random
    actions). A batch is `games` times `horizon` joint steps; PPO makes `epochs` passes over it in `minibatches`."""

    what: str
    env: str = "simple_spread"
    games: int = 240
    horizon: int = 25
    epochs: int = 2
    minibatches: int = 4
    hidden: tuple[int, ...] = (64, 64)
    workers: int = 2
    seconds: float = 10.0

    @property
    def batch(self) -> int:
        """Joint steps of a batch."""
        return self.games * self.horizon


SEATS = 3
CYCLES = 25  # joint steps of a game


def read_spec() -> Spec:
    """The spec in the script's first argument, as JSON."""
    tree = json.loads(sys.argv[1])
    return Spec(**tree | {"hidden": tuple(tree.get("hidden", (64, 64)))})


def measure(advance: Callable[[], int], seconds: float, warmup: int = 1) -> dict[str, float]:
    """Joint steps per second of `advance`, which returns the number of steps it made; the first `warmup` calls are not
    counted. `cpu_seconds` are those of this process alone."""
    for _ in range(warmup):
        advance()
    made, calls, start, cpu = 0, 0, time.perf_counter(), time.process_time()
    while calls < 2 or time.perf_counter() - start < seconds:
        made += advance()
        calls += 1
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"env_steps_per_s": made / spent, "env_steps": made, "seconds": spent, "cpu_seconds": cpu}


def print_result(figures: dict[str, float], packages: tuple[str, ...], notes: str) -> None:
    """Prints the figures as JSON in the script's last line, with the versions of `packages` and notes on the setup."""
    print(json.dumps({**figures, "versions": {name: version(name) for name in packages}, "notes": notes}), flush=True)
