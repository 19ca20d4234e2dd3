"""Trains shipped configs with several seeds, compares scores with a bar, and writes docs/results-games.md with curves.

    python bench/learning.py                      all tasks, 3 seeds each, one at a time: 39 rows, 2.5 hours of one core
    python bench/learning.py --list               the rows: published, measured here, open
    python bench/learning.py --only combat_vdn    rows whose names begin with this: 15 CPU seconds a seed
    python bench/learning.py --publish            publish what was measured here, and rewrite the page
    python bench/learning.py --report             only rewrite the page from the published rows
    python bench/learning.py --quick              one task and a twentieth of its steps: a smoke test

A row is a config in configs/games/ with a seed. Its run, in runs/learning/, is scored at the end by the config's
evaluation on held-out seeds (in Kuhn poker, by the exploitability of the policies' sampled play). Rows go to
runs/measured/learning.jsonl, also where they are published (bench/measured/learning.jsonl), and each is printed beside
the published one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ledger import Ledger, Line, Rows, add_options, choose, finish, provenance

from palestra.core.config import load, override, validate
from palestra.runs import Checkpoint, list_checkpoints, read_lines
from palestra.vector.config import VectorConfig

ROOT = Path("runs/learning")
SEEDS = 3
QUICK_ROWS = ("two_step_vdn/0",)
ENVS = Path(".cache/envs")  # virtual environment that `make test-envs` makes
NOTES = Path("bench/learning-notes.md")  # the text of the page
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t, 97.5 %, by number of seeds
Curve = list[tuple[float, float]]  # joint steps, score


@dataclass(frozen=True)
class Task:
    """A config, the name of its score, the bar (the score must be at least `bar`, with `low` at most) and why it is the
    bar. `curve` reads the scores of a run; the last one counts."""

    name: str
    scored: str
    bar: float
    why: str
    curve: Callable[[Path], Curve]
    low: bool = False
    first: int = 0  # first seed that counts: settings were chosen on those before it
    venv: Path = Path(sys.prefix)  # virtual environment with the env's package

    @property
    def config(self) -> Path:
        return Path(f"configs/games/{self.name}.yaml")

    def reached(self, value: float) -> bool:
        return value <= self.bar if self.low else value >= self.bar


# ---- scores


def env_steps_per_step(run: Path) -> int:
    """Joint steps in one training step of a run."""
    config = load(run / "config.yaml")
    return int(config["algorithm"]["rollout_length"]) * int(config["env"]["num_envs"])


def held_out(key: str, scale: float = 1.0, shift: float = 0.0) -> Callable[[Path], Curve]:
    """A function that reads the curve of a metric in the evaluation `held_out`, as `scale * value + shift`."""

    def curve(run: Path) -> Curve:
        each = env_steps_per_step(run)
        lines = [line for line in read_lines(run / "evals.jsonl") if line["name"] == "held_out"]
        return [((line["step"] + 1) * each, scale * line[key] + shift) for line in lines]

    return curve


def exploitability(run: Path) -> Curve:
    """Curve of exploitability: half the NashConv of two policies in Kuhn poker (as in OpenSpiel) at each checkpoint
    that the run still has."""
    each = env_steps_per_step(run)
    return [((checkpoint.step + 1) * each, exploitability_at(checkpoint)) for checkpoint in list_checkpoints(run)]


def exploitability_at(checkpoint: Checkpoint) -> float:
    """Exploitability at one checkpoint, from the policies' probabilities at every information state."""
    import pyspiel
    import torch
    from open_spiel.python import policy as spiel_policy
    from open_spiel.python.algorithms import exploitability as spiel

    from palestra.envs.vector.kuhn import KuhnPoker
    from palestra.vector.learners.policy_stack import read_policy

    game, env = pyspiel.load_game("kuhn_poker"), KuhnPoker(1)
    players = [read_policy(checkpoint.path / f"player_{seat}", env, [seat]) for seat in (0, 1)]
    table = spiel_policy.TabularPolicy(game)
    for i, state in enumerate(table.states):
        view = torch.tensor(state.information_state_tensor()).view(1, 1, -1)
        with torch.no_grad():
            out = players[state.current_player()].net(view)[0, 0]
        table.action_probability_array[i] = torch.softmax(out, -1).numpy()
    return float(spiel.exploitability(game, table))


# ---- tasks

TWO_STEP = "the best return is 8; Rashid et al. (2018, section 5)"
OLD_SCALE = (
    "in rewards as the env first had them, summed over the team. There every agent also collides with itself, which "
    "costs a team of three 75 in 25 steps, and nothing is halved: six times our mean return, less 75. Uniform play has "
    "-236 on that scale (github.com/uoe-agents/epymarl, issue 29: about -700 / 3)"
)
TASKS = [
    Task("two_step_qmix", "return", 8.0, f"{TWO_STEP}: QMIX gets 8", held_out("return")),
    Task("two_step_vdn", "return", 7.0, f"{TWO_STEP}: VDN gets 7, not 8", held_out("return"), low=True),
    Task(
        "two_step_dqn",
        "return",
        7.0,
        "to an independent learner the other plays at random, and the certain 7 is worth more than the mean of 1 and 8",
        held_out("return"),
        low=True,
    ),
    Task(
        "spread_mappo",
        "team return",
        -133.5,
        f"{OLD_SCALE}. MAPPO has -133.5 in Papoudakis et al. (2021, table 3), 20 million steps, and about -120 in its "
        "authors' code (github.com/marlbenchmark/on-policy, issues 49 and 112), which draws landmarks from a field 0.8 "
        "as wide",
        held_out("return", 6.0, -75.0),
    ),
    Task("combat_vdn", "win rate", 0.8, "the bar set for this project; greedy, map 3m", held_out("success")),
    Task("combat_qmix", "win rate", 0.8, "the bar set for this project; greedy, map 3m", held_out("success")),
    *(
        Task(
            f"smax_{mixer}",
            "win rate",
            0.8,
            "the bar set for this project; greedy, map 3m of JaxMARL's SMAX against its heuristic enemy",
            held_out("success"),
            venv=ENVS,
        )
        for mixer in ("vdn", "qmix")
    ),
    Task("kuhn_ppo", "exploitability", 0.05, "uniform play has 11/24 = 0.458", exploitability, low=True, first=1),
    Task(
        "foraging_mappo",
        "food eaten",
        0.9,
        "share of all food, by level, on 8 x 8 cells, agents drawing their moves; the bar set for this project",
        held_out("return", 2.0),
    ),
    Task(
        "overcooked_ppo",
        "return",
        200.0,
        "ten soups of 20 in the 400 steps of a game in cramped_room, cooks drawing their moves; the bar set for this "
        "project",
        held_out("return"),
    ),
    Task(
        "spread_maddpg",
        "team return",
        -141.7,
        f"{OLD_SCALE}. MADDPG has -141.7 in Papoudakis et al. (2021, table 3), with one network for all agents; about "
        "-400 / 3 = -133 in the same issue",
        held_out("return", 6.0, -75.0),
    ),
    Task(
        "pong_ppo",
        "points won",
        0.9,
        "share of the points against the scripted player that follows the ball; games of one point",
        held_out("success"),
    ),
]

# ---- runs


def table_rows() -> dict[str, tuple[Task, int]]:
    """Returns the task and seed of each row, by name."""
    rows = [(task, seed) for task in TASKS for seed in range(task.first, task.first + SEEDS)]
    return {f"{task.name}/{seed}": (task, seed) for task, seed in rows}


def settings_of(name: str, quick: bool) -> list[str]:
    """Returns what a row changes in its config."""
    task, seed = table_rows()[name]
    steps = int(load(task.config)["env_steps"])
    return [f"seed={seed}", *([f"env_steps={steps // 20}"] if quick else [])]


def check(quick: bool, name: str) -> None:
    """Raises ValueError if the row's config is wrong, or the package of its env is missing."""
    task, _ = table_rows()[name]
    if not (task.venv / "bin" / "palestra").exists():
        raise ValueError(f"needs {task.venv}: `make test-envs` makes it")
    if task.venv == Path(sys.prefix):  # configs of other envs can only be read where these are installed
        validate(VectorConfig, override(load(task.config), settings_of(name, quick)))


def run_folder(quick: bool, name: str) -> Path:
    return (ROOT / "quick" if quick else ROOT) / name.replace("/", "-")


def discard(quick: bool, name: str) -> None:
    shutil.rmtree(run_folder(quick, name), ignore_errors=True)


def train(quick: bool, name: str) -> Line:
    """Trains a run; returns its result. Raises RuntimeError if training fails."""
    task, seed = table_rows()[name]
    discard(quick, name)
    run = run_folder(quick, name)
    command = [str(task.venv / "bin" / "palestra"), "train", str(task.config), "--root", str(run.parent)]
    command += ["--name", run.name]
    command += [part for setting in settings_of(name, quick) for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    points = [(steps, float(f"{value:.4g}")) for steps, value in task.curve(run)]
    return {"task": task.name, "seed": seed, "score": points[-1][1], "cpu": round(cpu_seconds(run)), "curve": points}


def cpu_seconds(run: Path) -> float:
    """CPU seconds of a run's rollouts and updates."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["policy"] == "team"]
    return float(sum(value for line in lines for key, value in line.items() if key.endswith("cpu_s")))


# ---- the page

HEAD = """Made by `python bench/learning.py --report` from the published rows; `python bench/learning.py` measures them
again, two and a half hours of one core, and prints both. Each config is trained with several seeds and scored at the
end on held-out seeds: means with 95 % intervals (Student's t). CPU seconds are those of rollouts and updates, on one
core of a machine that other programs used too. The scores and curves of all runs are in
[bench/measured/learning.jsonl](../bench/measured/learning.jsonl)."""


def interval(values: list[float]) -> str:
    """Mean and 95 % half-width over seeds (Student's t)."""
    n, mean = len(values), np.mean(values)
    return f"{mean:.3f} ± {T95[n] * np.std(values, ddof=1) / n**0.5:.3f}" if n in T95 else f"{mean:.3f}"


def row(task: Task, lines: list[dict[str, Any]]) -> str:
    """A row of the page's table."""
    bar, steps = f"{'≤' if task.low else '≥'} {task.bar:g}", int(load(task.config)["env_steps"])
    link = f"[{task.name}](../palestra/data/configs/games/{task.name}.yaml)"
    if not lines:
        return f"| {link} | {task.scored} | not run | {bar} | | | {steps:,} |"
    scores, cpu = [line["score"] for line in lines], np.mean([line["cpu"] for line in lines])
    count = sum(map(task.reached, scores))
    verdict = "yes" if count == len(scores) else "**no**" if count == 0 else "**not always**"
    cells = [link, task.scored, interval(scores), bar, f"{verdict}: {count} of {len(scores)}", f"{cpu:.0f}"]
    return f"| {' | '.join([*cells, f'{steps:,}'])} |"


def report(results: list[dict[str, Any]], target: Path) -> None:
    """Writes the page: the table, the curves, the sources of the bars, and the notes."""
    lines = ["# What is learned in vectorised games", "", HEAD, ""]
    lines += [provenance(results), ""]
    lines += ["| config | scored | mean of the seeds | bar | seeds reach it | CPU-s | env steps |", f"|{'---|' * 7}"]
    lines += [row(task, [line for line in results if line["task"] == task.name]) for task in TASKS]
    lines += ["", f"![curves]({target.stem}.png)", "", "## Where the bars come from", ""]
    lines += [f"- {task.name}: {task.why}." for task in TASKS]
    lines += ["", NOTES.read_text().rstrip()]
    target.write_text("\n".join(lines) + "\n")
    draw(results, target.with_suffix(".png"))


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Draws the curve of each run, and the bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [task for task in TASKS if any(line["task"] == task.name for line in results)]
    rows = -(-len(shown) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(14, 2.9 * rows), constrained_layout=True, squeeze=False)
    seeds: dict[int, Any] = {}
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, task in zip(axes.flat, shown, strict=False):
        for line in (line for line in results if line["task"] == task.name):
            steps, values = zip(*line["curve"], strict=True)
            style = {"color": f"C{line['seed']}", "marker": "o", "markersize": 2.5, "linewidth": 1}
            (seeds[line["seed"]],) = axis.plot(np.array(steps) / 1000, values, label=f"seed {line['seed']}", **style)
        axis.axhline(task.bar, color="black", linestyle=":", linewidth=1)
        axis.set_title(f"{task.name}: {task.scored}", fontsize=9)
        axis.set_xlabel("thousand joint steps", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    lines = [seeds[seed] for seed in sorted(seeds)]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    quick = options.quick
    names = choose(list(table_rows()), options.only or (QUICK_ROWS if quick else []))
    ledger = Ledger("learning", lambda line: f"{line['score']:.3f}", quick)
    Rows(ledger, partial(train, quick), partial(check, quick), discard=partial(discard, quick)).run(names, options)
    if options.report or options.publish:
        report(list(ledger.published.values()), Path("docs/results-games.md"))
    elif not options.list:
        scores: dict[str, list[float]] = {}
        for name in names:
            scores.setdefault(table_rows()[name][0].name, []).append(ledger.here[name]["score"])
        figures = {name: float(np.mean(own)) for name, own in scores.items()}
        finish("learning", figures, {task.name: task.bar for task in TASKS if task.name in scores}, is_stored=False)


if __name__ == "__main__":
    main()
