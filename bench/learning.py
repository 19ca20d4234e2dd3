"""Does it learn? Trains shipped configs to a bar, several seeds each, and writes docs/results-games.md with curves.

    python bench/learning.py                      all tasks, 3 seeds each, two at a time
    python bench/learning.py --tasks combat_vdn   some of them
    python bench/learning.py --quick              a twentieth of the steps and one seed: does the road hold?

A task is a config in configs/games/, scored at the end on held-out seeds, the policies at their best (in Kuhn poker by
the exploitability of what they play when they draw their moves). What was measured lies in runs/learning/; a task and
seed that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.config import load
from palestra.runs import read_lines

ROOT = Path("runs/learning")
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t, 97.5 %, by number of seeds


@dataclass(frozen=True)
class Task:
    """A config, what is scored, and the bar: at least `bar`, or with `low` at most."""

    name: str
    scored: str
    bar: float
    why: str
    score: Callable[[Path], float]
    low: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.bar if self.low else value >= self.bar


def held_out(key: str, scale: float = 1.0) -> Callable[[Path], float]:
    """A figure of the last exam."""
    return lambda run: scale * float(read_lines(run / "evals.jsonl")[-1][key])


def exploitability(run: Path) -> float:
    """Half the NashConv of two policies in Kuhn poker (OpenSpiel's measure), from every information state they meet."""
    import pyspiel
    import torch
    from open_spiel.python import policy as spiel_policy
    from open_spiel.python.algorithms import exploitability as spiel

    from palestra.envs.vector.kuhn import KuhnPoker
    from palestra.learners.nets import read_member
    from palestra.setup_games import member_folder

    game = pyspiel.load_game("kuhn_poker")
    players = [read_member(member_folder(f"{run}:player_{seat}"), KuhnPoker(1), [seat]) for seat in (0, 1)]
    table = spiel_policy.TabularPolicy(game)
    for i, state in enumerate(table.states):
        player = players[state.current_player()]
        view = torch.tensor(state.information_state_tensor()).view(1, 1, -1)
        with torch.no_grad():
            table.action_probability_array[i] = torch.softmax(player.net(view)[0, 0], -1).numpy()
    return float(spiel.exploitability(game, table))


SPREAD = (
    "the return of all three, in rewards as the env first had them (six times our mean return, whose `local_ratio` "
    "halves them): MAPPO's authors' code reaches about -120 (github.com/marlbenchmark/on-policy, issues 49 and 112)"
)
TASKS = [
    Task("kuhn_ppo", "exploitability", 0.05, "uniform play has 11/24 = 0.458", exploitability, low=True),
    Task("spread_mappo", "team return", -120.0, SPREAD, held_out("return", 6.0)),
    Task("combat_vdn", "win rate", 0.8, "greedy, 3m", held_out("success")),
    Task("combat_qmix", "win rate", 0.8, "greedy, 3m", held_out("success")),
]


def train(task: Task, seed: int, quick: bool) -> dict[str, Any]:
    """One run and its score."""
    settings = [f"seed={seed}"]
    if quick:
        steps = int(load(f"configs/games/{task.name}.yaml")["env_steps"])
        settings.append(f"env_steps={steps // 20}")
    name = f"{task.name}-{seed}" + ("-quick" if quick else "")
    command = [
        str(Path(sys.executable).parent / "palestra"),
        "train",
        f"configs/games/{task.name}.yaml",
        "--root",
        str(ROOT),
    ]
    command += ["--name", name, *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    run = sorted(ROOT.glob(f"{name}*"), key=lambda path: path.stat().st_mtime)[-1]
    cpu = sum(
        value
        for line in read_lines(run / "timings.jsonl")
        for key, value in line.items()
        if key.endswith("cpu_s") and line["policy"] == "team"
    )
    return {"task": task.name, "seed": seed, "quick": quick, "score": task.score(run), "cpu": cpu, "run": str(run)}


def all_results(tasks: list[Task], seeds: int, quick: bool) -> list[dict[str, Any]]:
    """Runs what has not been run yet, two at a time."""
    ROOT.mkdir(parents=True, exist_ok=True)
    ledger = ROOT / "results.jsonl"
    known = [line for line in (read_lines(ledger) if ledger.exists() else []) if line["quick"] == quick]
    have = {(line["task"], line["seed"]) for line in known}
    todo = [(task, seed) for seed in range(seeds) for task in tasks if (task.name, seed) not in have]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: train(*job, quick), todo):
            known.append(line)
            with ledger.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{line['task']}, seed {line['seed']}: {line['score']:.3f} in {line['cpu']:.0f} CPU-s", flush=True)
    return known


def interval(values: list[float]) -> str:
    """Mean and 95 % half-width over seeds (Student's t)."""
    n, mean = len(values), np.mean(values)
    return f"{mean:.3f} ± {T95[n] * np.std(values, ddof=1) / n**0.5:.3f}" if n in T95 else f"{mean:.3f}"


def report(tasks: list[Task], results: list[dict[str, Any]], target: Path) -> None:
    """The table, the curves, and where the bars come from."""
    lines = ["# What is learned in vectorised games", "", HEAD, ""]
    lines += [
        "| config | scored | mean of the seeds | bar | seeds that reach it | CPU-s | env steps |",
        f"|{'---|' * 7}",
    ]
    for task in tasks:
        own = [line for line in results if line["task"] == task.name]
        scores = [line["score"] for line in own]
        steps = int(load(f"configs/games/{task.name}.yaml")["env_steps"])
        reached = sum(map(task.reached, scores))
        sign = "≤" if task.low else "≥"
        link, cpu = f"[{task.name}](../configs/games/{task.name}.yaml)", np.mean([line["cpu"] for line in own])
        cells = [link, task.scored, interval(scores), f"{sign} {task.bar:g}", f"{reached} of {len(scores)}"]
        lines.append(f"| {' | '.join([*cells, f'{cpu:.0f}', f'{steps:,}'])} |")
    lines += ["", f"![curves]({target.stem}.png)", "", *(f"- {task.name}: {task.why}." for task in tasks)]
    target.write_text("\n".join(lines) + "\n")
    draw(tasks, results, target.with_suffix(".png"))


HEAD = """Made by `python bench/learning.py`. Each config is trained with several seeds and scored at the end on
held-out seeds, mean with its 95 % interval (Student's t). CPU seconds are those of sweeps and updates, on one core."""


def draw(tasks: list[Task], results: list[dict[str, Any]], target: Path) -> None:
    """The held-out exams of every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), constrained_layout=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for line in (line for line in results if line["task"] == task.name):
            exams = [e for e in read_lines(Path(line["run"]) / "evals.jsonl")]
            key = "success" if "success" in exams[-1] else "return"
            values = [max(e["returns"].values(), key=abs) if task.low else e[key] for e in exams]
            axis.plot([e["step"] + 1 for e in exams], values, "o-", markersize=3, label=f"seed {line['seed']}")
        axis.set_title(f"{task.name}: {'return of one player' if task.low else key}", fontsize=10)
        axis.set_xlabel("sweeps")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    tasks = [task for task in TASKS if not options.tasks or task.name in options.tasks]
    results = all_results(tasks, 1 if options.quick else options.seeds, options.quick)
    results = [line for line in results if line["task"] in {task.name for task in tasks}]
    if not options.quick and not options.tasks:
        report(tasks, results, Path("docs/results-games.md"))
    figures = {t.name: float(np.mean([line["score"] for line in results if line["task"] == t.name])) for t in tasks}
    print(json.dumps({"bench": "learning", "figures": figures, "targets": {t.name: t.bar for t in tasks}}))


if __name__ == "__main__":
    main()
