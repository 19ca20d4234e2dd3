"""PSRO with learned best responses on Leduc poker: its NashConv, and its speed compared with OpenSpiel's.

    python -m results.populations.parts.learned ours 600        the curve of PSRO, ten minutes
    python -m results.populations.parts.learned xdo 600         the curve of extensive-form double oracle
    python -m results.populations.parts.learned responses       quality and cost of single responses
    python -m results.populations.parts.learned openspiel 3600  OpenSpiel's PSRO with a DQN oracle

palestra's responses are learned by DQN, as OpenSpiel's are. Its payoffs are exact, where OpenSpiel plays 1,000 games a
cell. Seconds are wall seconds of all work except measuring NashConv. `wall_vs_openspiel` is OpenSpiel's time to its
lowest NashConv over palestra's time to the same value.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.peers.running import Job, install, run
from palestra.core.config import dump, validate
from palestra.core.files import read_lines
from palestra.populations.build.build import PopulationConfig, build_population, run_population
from palestra.populations.plans.solvers import Nash
from palestra.populations.population import Sides
from palestra.populations.scheduler import PlanCallback
from palestra.populations.tabular.best_response import best_response
from palestra.populations.tabular.game_tree import GameTree, expected_returns
from palestra.populations.tasks import Opponents, TrainTask
from palestra.populations.workers.member_loader import write_table
from palestra.populations.workers.net_oracle import NetOracle, NetWorker
from palestra.runs import Run
from results.populations.parts.double_oracle import psro
from results.populations.parts.keeping import kept

TARGETS = {"wall_vs_openspiel": 30.0, "leduc_exploitability": 0.15}
AT_LEAST = {"wall_vs_openspiel"}
SECONDS = {"xdo": 300.0, "psro": 200.0, "openspiel": 1800.0}
ENV_STEPS = {"xdo": 1_200_000, "psro": 400_000}  # of a response; XDO needs responses that are good in all states
SEEDS = range(3)
SEATS = ("player_0", "player_1")
ENV = {"type": "leduc_poker", "num_envs": 256}
POLICY = {"hidden": [64, 64], "activation": "relu", "lr": 3e-3, "schedule": "linear"}
DQN = {
    "type": "dqn",
    "rollout_length": 16,
    "gradient_steps": 16,
    "batch_size": 1024,
    "learning_starts": 5000,
    "buffer_size": 200_000,
    "gamma": 1.0,
    "epsilon_end": 0.1,
    "epsilon_share": 0.8,
    "tau": 0.02,
}
PPO = {  # its critic sees both hands, so that the deal adds no noise
    "type": "ppo",
    "rollout_length": 16,
    "epochs": 2,
    "minibatches": 2,
    "gamma": 1.0,
    "gae_lambda": 0.9,
    "entropy_coef": 0.02,
    "critic": "central",
    "value_norm": False,
}
console = Console(width=120)
Curve = list[tuple[float, float]]  # seconds and NashConv, oldest first


# ---- PSRO


def config(seed: int, plan: str, workers: int = 2) -> PopulationConfig:
    tree = {
        "name": f"leduc_{plan}",
        "seed": seed,
        "env": ENV,
        "population": {"type": plan, "iterations": 1000, "env_steps": ENV_STEPS[plan]},
        "oracle": {"type": "net", "policy": POLICY, "algorithm": DQN, "greedy": True, "payoffs": "exact"},
        "backend": {"type": "local", "workers": workers},
    }
    return validate(PopulationConfig, tree)


def ours(seconds: float, seed: int = 0, plan: str = "psro") -> Curve:
    """The NashConv curve of a run that ends after so many seconds."""
    made, start = config(seed, plan), time.perf_counter()
    setup = build_population(made)
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(made)) as kept:
        run_population(setup, kept, PlanCallback(), lambda: time.perf_counter() - start > seconds)
        return curve_of(kept.path)


def xdo(seconds: float, seed: int = 0) -> Curve:
    """The NashConv curve of extensive-form double oracle, likewise."""
    return ours(seconds, seed, "xdo")


def curve_of(path: Path) -> Curve:
    """The NashConv curve in a run's logs."""
    measured = {line["step"]: line["nash_conv"] for line in read_lines(path / "metrics.jsonl") if "nash_conv" in line}
    times = {line["step"]: line["elapsed_s"] for line in read_lines(path / "timings.jsonl")}
    return [(times[step], value) for step, value in sorted(measured.items())]


# ---- single responses


def responses(stages: Sequence[int] = (0, 10, 40), seeds: int = 1) -> Table:
    """A table of learned responses: the share of an exact response's gain over the mixture that they respond to, and of
    its value. Mixtures are uniform play and those of PSRO with exact responses after some iterations."""
    shown = Table("algorithm", "env steps", "answers", "share of the gain", "of the value", "CPU s", title="Responses")
    for steps in (400_000, 1_200_000):
        for algorithm in (DQN, PPO):
            tree = {"env": ENV, "policy": POLICY, "algorithm": algorithm, "env_steps": steps, "best": True}
            worker = NetWorker(NetOracle.model_validate(tree), Sides.of(SEATS))
            assert worker.loader.tree is not None
            for stage, policy in stages_of(worker.loader.tree, stages).items():
                found = [response(worker, policy, seat, seed) for seat in (0, 1) for seed in range(seeds)]
                won, exact, before, cpu = np.array(found).mean(0)
                gain, share = (won - before) / (exact - before), won / exact
                row = (
                    str(algorithm["type"]),
                    f"{steps:,}",
                    f"PSRO {stage}",
                    f"{gain:.2f}",
                    f"{share:.2f}",
                    f"{cpu:.1f}",
                )
                shown.add_row(*row)
    return shown


def stages_of(tree: GameTree, wanted: Sequence[int]) -> dict[int, np.ndarray]:
    """The policies [I, A] of exact PSRO after the `wanted` iterations."""
    found: dict[int, np.ndarray] = {}
    for number, stage in enumerate(psro(tree, Nash().solve)):
        if number in wanted:
            found[number] = stage.policy
        if number == max(wanted):
            break
    return found


def response(worker: NetWorker, policy: np.ndarray, seat: int, seed: int) -> tuple[float, float, float, float]:
    """Expected returns against `policy` of a learned response, of an exact one and of `policy` itself; and the CPU
    seconds of learning."""
    tree = worker.loader.tree
    assert tree is not None
    with tempfile.TemporaryDirectory() as root:
        met, name = f"met-{hash(policy.tobytes())}", f"{seed}-{hash(policy.tobytes())}-{seat}"
        members = {met: Path(root) / met, name: Path(root) / name}
        write_table(members[met], policy)
        members[name].mkdir()
        opponents = Opponents({SEATS[1 - seat]: {met: 1.0}})
        task = TrainTask(f"train/{name}", player=SEATS[seat], opponents=opponents, output_member=name)
        start = time.process_time()
        worker.run_task(task, members, members[name])
        spent = time.process_time() - start
        joined, own = policy.copy(), tree.player_rows(seat)
        joined[own] = worker.loader.policy(name, members)[own]
    exact = best_response(tree, policy, seat)[1]
    return float(expected_returns(tree, joined)[seat]), exact, float(expected_returns(tree, policy)[seat]), spent


# ---- comparison with OpenSpiel


def openspiel(seconds: float) -> Curve:
    """The curve of OpenSpiel's PSRO with a DQN oracle."""
    install("openspiel")
    result = run(Job("openspiel", "psro", "leduc_poker"), seconds, 4 * seconds + 3600)
    return list(zip(result["seconds"], result["nash_conv"], strict=True))


def reached(curve: Curve, level: float) -> float | None:
    """Seconds until NashConv was at most `level`; None if it never was."""
    return next((seconds for seconds, value in curve if value <= level), None)


def ratio(mine: Curve, theirs: Curve) -> float:
    """Their seconds to their lowest NashConv, over ours to the same value; 0 if ours did not reach it."""
    lowest = min(value for _, value in theirs)
    fast, slow = reached(mine, lowest), reached(theirs, lowest)
    return slow / fast if fast and slow else 0.0


def show(curves: Mapping[str, Curve]) -> None:
    """Prints a table of the seconds until each run was at most at each NashConv."""
    levels = [4.0, 3.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
    shown = Table("seconds to NashConv", *map(str, levels), "last", title="Leduc poker", title_justify="left")
    for name, curve in curves.items():
        times = [reached(curve, level) for level in levels]
        shown.add_row(name, *("" if t is None else f"{t:.0f}" for t in times), f"{curve[-1][1]:.3f}" if curve else "")
    console.print(shown)


def figures(quick: bool = False) -> dict[str, float]:
    """The figures. `leduc_exploitability` is XDO's last exploitability (half of NashConv), a mean over seeds;
    `leduc_psro_exploitability` is that of PSRO with shorter responses. The two ratios of wall time,
    `wall_vs_openspiel` and `wall_vs_openspiel_psro`, are the lowest over seeds."""
    if quick:
        solved, mine, theirs = {"XDO": xdo(60)}, {"PSRO": ours(60)}, openspiel(120)
    else:
        solved = {
            f"XDO, seed {seed}": kept(f"learned/xdo-{seed}", partial(xdo, SECONDS["xdo"], seed)) for seed in SEEDS
        }
        mine = {
            f"PSRO, seed {seed}": kept(f"learned/psro-{seed}", partial(ours, SECONDS["psro"], seed)) for seed in SEEDS
        }
        theirs = kept("learned/openspiel", partial(openspiel, SECONDS["openspiel"]))
    show(solved | mine | {"OpenSpiel, PSRO": theirs})
    found: dict[str, float] = {}
    for curves, label in ((solved, ""), (mine, "_psro")):
        found[f"leduc{label}_exploitability"] = float(np.mean([curve[-1][1] / 2 for curve in curves.values()]))
        found[f"wall_vs_openspiel{label}"] = min(ratio(curve, theirs) for curve in curves.values())
    return found


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "ours"
    if what == "responses":
        console.print(responses())
    else:
        show({what: {"ours": ours, "xdo": xdo, "openspiel": openspiel}[what](float(sys.argv[2]))})
