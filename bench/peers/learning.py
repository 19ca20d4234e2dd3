"""What the scripts that train one task in several packages share: the run's spec, and its curve."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

Point = tuple[int, float, float]  # env steps, CPU seconds, return


@dataclass(frozen=True)
class LearningSpec:
    """A run: `algorithm` ("mappo", "qmix", or "random": uniform actions, without learning) in a VMAS `scenario` made
    with `options`, which ends a game after `horizon` joint steps. A batch is `rollout_length` joint steps of each of
    `games` games. One network of `hidden` tanh units plays all agents; Adam has the rate `lr`, and clips gradients to
    `max_grad_norm`. An evaluation every `eval_every` joint steps plays `eval_games` games greedily.

    MAPPO makes `epochs` passes over a batch in `minibatches`. QMIX takes `gradient_steps` after a batch, each on
    `batch_size` joint steps of all before, and moves its target networks by `tau`; epsilon falls from `epsilon` to
    `epsilon_end` over the first `epsilon_share` of the run.
    """

    algorithm: str
    scenario: str
    options: dict[str, Any]
    horizon: int
    games: int
    rollout_length: int
    env_steps: int
    eval_every: int
    seed: int
    eval_games: int = 1000
    hidden: tuple[int, ...] = (64, 64)
    lr: float = 1e-3
    max_grad_norm: float = 5.0
    adam_eps: float = 1e-6
    gamma: float = 0.9
    gae_lambda: float = 0.9
    clip: float = 0.2
    epochs: int = 10
    minibatches: int = 4
    gradient_steps: int = 100
    batch_size: int = 256
    tau: float = 0.005
    mixer_units: int = 32
    epsilon: float = 1.0
    epsilon_end: float = 0.05
    epsilon_share: float = 0.5

    @property
    def batch(self) -> int:
        """Joint steps of a batch."""
        return self.games * self.rollout_length


def read_learning_spec() -> LearningSpec:
    """Returns the spec in the script's first argument, as JSON."""
    tree = json.loads(sys.argv[1])
    return LearningSpec(**tree | {"hidden": tuple(tree["hidden"])})


class CurveRecorder:
    """Records the return that `evaluate` measures, at env steps and CPU seconds of this process. Its clock starts with
    the first record, and stands still while it evaluates."""

    def __init__(self, spec: LearningSpec, evaluate: Callable[[], float]) -> None:
        self.spec = spec
        self.evaluate = evaluate
        self.points = list[Point]()
        self.cpu_s = 0.0
        self.since = time.process_time()

    def record(self, env_steps: int) -> None:
        """Adds a point if an evaluation is due."""
        if env_steps > 0:
            self.cpu_s += time.process_time() - self.since
        if env_steps % self.spec.eval_every == 0:
            self.points.append((env_steps, self.cpu_s, self.evaluate()))
        self.since = time.process_time()


def print_curve(points: Sequence[Point], packages: Sequence[str]) -> None:
    """Prints the curve as JSON in the script's last line, with the versions of `packages`."""
    rounded = [[steps, round(cpu_s, 3), float(f"{value:.5g}")] for steps, cpu_s, value in points]
    print(json.dumps({"curve": rounded, "versions": {name: version(name) for name in packages}}), flush=True)
