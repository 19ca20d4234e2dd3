"""Long runs written through palestra's own `Run`, with which the dashboard is timed."""

import math
import random
from pathlib import Path

import numpy as np

from palestra.core.types import TEAM, Answer, Episode, Node
from palestra.runs import Run

CONFIG = """\
name: {name}
seed: {seed}
steps: {steps}
env: {{type: plan_path, size: 7}}
policies: {{planner: {{type: lora, base: tiny}}, executor: {{type: lora, base: tiny}}}}
algorithm: {{type: grpo, group_size: 2}}
evals: {{dev: {{episodes: 100}}}}
"""
SEEN = "size 7 you r2 c0 goal r3 c2 walls r3 c1 r3 c6 r4 c3 r5 c5 r6 c6"
SEATS = ("planner", "executor")


def write_long_run(
    root: Path, name: str = "long", *, steps: int = 10_000, episodes: int = 10, total: int = 0, seed: int = 0
) -> Path:
    """The folder of a run of `steps` steps, each with `episodes` episodes of two joint steps and two siblings each;
    `total` is the number of steps in the config, if larger."""
    rng = random.Random(seed)
    with Run.create(root, CONFIG.format(name=name, seed=seed, steps=total or steps), name, {"seed": seed}) as run:
        for step in range(steps):
            solved = 1 / (1 + math.exp(4 - 8 * step / steps))
            _log(run, rng, step, solved)
            run.write_episodes(step, [_episode(rng, step * episodes + i, step, solved) for i in range(episodes)])
        return run.path


def _log(run: Run, rng: random.Random, step: int, solved: float) -> None:
    for seat in SEATS:
        figures = {
            "answers": 40.0,
            "local_reward": solved * rng.random(),
            "team_reward": solved * rng.random(),
            "invalid": 0.3 * (1 - solved) * rng.random(),
            "tokens": 5 + rng.random(),
            "clip_fraction": 0.01 * rng.random(),
            "zero_std_fraction": solved * 0.5,
            "kl": 0.001 * rng.random(),
            "entropy": 1.5 - solved + 0.1 * rng.random(),
            "grad_norm": rng.random(),
            "loss": rng.gauss(0, 0.1),
        }
        run.log_metrics(step, seat, figures)
        run.log_timings(step, seat, {"rollout_s": 1.0, "train_s": 0.5, "tokens_per_s": 3000 + 100 * rng.random()})
    success = min(1.0, max(0.0, rng.gauss(solved, 0.1)))
    run.log_metrics(
        step, TEAM, {"success": success, "steps_per_episode": 2.0, "team_return": 2 * success, "episodes": 10.0}
    )
    run.log_timings(step, TEAM, {"rollout_s": 1.0, "train_s": 1.0, "tokens_per_s": 6000 + 100 * rng.random()})
    if step % 500 == 0:
        run.log_eval(step, "dev", {"success": solved, "episodes": 100.0, "steps_per_episode": 2.0})


def _episode(rng: random.Random, seed: int, step: int, solved: float) -> Episode:
    nodes: list[Node] = []
    won = rng.random() < solved
    for depth, seat in enumerate(SEATS):
        parent = nodes[-2].id if depth else None
        for sibling in range(2):
            node = Node(len(nodes), parent, depth, {seat: SEEN}, {seat: _answer(rng, seat, step)})
            node.rewards, node.advantages = {seat: rng.random()}, {seat: rng.gauss(0, 1)}
            node.chosen, node.done = sibling == 0, bool(depth)
            node.team_reward = float(won and sibling == 0 and depth)
            node.info = {"success": won and sibling == 0, "turn": depth, "invalid": rng.random() < 0.1}
            nodes.append(node)
    return Episode("train", seed, {seat: f"{seat}@{step}" for seat in SEATS}, nodes)


def _answer(rng: random.Random, seat: str, step: int) -> Answer:
    ids = np.array([rng.randrange(250, 400) for _ in range(6)], np.int32)
    logprobs = np.array([-rng.expovariate(2) for _ in ids], np.float32)
    return Answer("r3 c0 r3 c3 r3 c3", f"{seat}@{step}", np.arange(8, dtype=np.int32), ids, logprobs)
