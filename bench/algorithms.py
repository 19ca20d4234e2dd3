"""Every algorithm for language agents on two small tasks, with equal samples: what each learns and what it costs.

    python bench/algorithms.py                       tunes, then 3 seeds each; about an hour and a half on one core
    python bench/algorithms.py --methods grpo dpo    some of them
    python bench/algorithms.py --no-tune             without tuning, at the lower of a task's two learning rates
    python bench/algorithms.py --report              prints the tables of what was measured
    python bench/algorithms.py --quick               two steps, one seed, no tuning: does the road hold?

One task is cooperative (configs/algorithms/sums.yaml), one zero-sum (configs/algorithms/duel.yaml). A method's learning
rate is the better of two on instances of split dev, with a seed that is not counted; scores are of split test. What was
measured is kept in bench/measured/; what is there is not run again. Runs are in runs/algorithms/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from palestra.config import load
from palestra.engine.models import Engine
from palestra.engine.trainer import Trainer
from palestra.evaluation.evaluate import evaluate
from palestra.experiments.statistics import estimate, mean_score
from palestra.rollouts.metrics import member_name
from palestra.runs import read_lines
from palestra.types import Episode, Sample

ROOT = Path("runs/algorithms")
LEDGER, QUICK = Path("bench/measured/algorithms.jsonl"), ROOT / "quick.jsonl"  # a line for each run
UNTRAINED = Path("bench/measured/untrained.json")  # scores of the base
TUNING = 100  # the seed of runs that choose a learning rate


@dataclass(frozen=True)
class Task:
    """A config and its score: the mean over `sides` of an evaluation metric. Each side is an evaluation on split dev,
    and the seats that others take in it; `seat` None scores success, else that seat's return."""

    name: str
    scored: str
    sides: dict[str, tuple[dict[str, str], str | None]]
    bar: float
    learners: Sequence[str]
    rates: Sequence[float]
    base: str = "tasks"

    @property
    def config(self) -> Path:
        return Path(f"configs/algorithms/{self.name}.yaml")

    def score(self, side: str, figures: dict[str, Any]) -> float:
        seat = self.sides[side][1]
        return float(figures["success"] if seat is None else figures["returns"][seat])


TASKS = [
    Task("sums", "success", {"dev": ({}, None)}, 0.3, ("reasoner", "tool"), (5e-3, 1e-2)),
    Task(
        "duel",
        "payoff against the untrained base, mean of both sides",
        {"as_pro": ({"con": "untrained"}, "pro"), "as_con": ({"pro": "untrained"}, "con")},
        0.15,
        ("speaker",),
        (2e-3, 5e-3),
    ),
]


@dataclass(frozen=True)
class Method:
    """A known name, and the settings it stands for. `lines` is how many lines of play grow from one instance: a step
    plays that many fewer instances than methods with one."""

    name: str
    algorithm: dict[str, Any]
    lines: int = 8
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: Sequence[str] = ("sums", "duel")


def group(**options: Any) -> dict[str, Any]:
    return {"type": "grpo", "branch_at": "root", "group_size": 8, "entropy_coef": 0.01} | options


def turns(**options: Any) -> dict[str, Any]:
    return group(branch_at="turn", continue_from="best", scale="none") | options


BOTH = {"reasoner": {"teacher": "expert"}, "tool": {"teacher": "expert"}}
METHODS = [
    Method("GRPO", group()),
    Method("Dr. GRPO", group(scale="none")),
    Method("DAPO", group(clip_high=0.28, overlong="drop")),
    Method("GSPO", group(surrogate="gspo", clip=3e-4, clip_high=4e-4)),
    Method("CISPO", group(surrogate="cispo", clip_high=3.0)),
    Method("RLOO", group(baseline="others", scale="none")),
    Method("REINFORCE++", group(group_size=1, baseline="batch", scale="batch"), lines=1),
    Method("RAE", group(group_size=1, baseline="role", scale="none"), lines=1),
    Method("AT-GRPO", turns(), tasks=("sums",)),
    Method("counterfactual", turns(credit="counterfactual")),
    Method("Shapley", turns(credit="shapley")),
    Method("PPO", {"type": "ppo", "entropy_coef": 0.01, "gae_lambda": 1.0}, lines=1),
    Method(
        "PPO, KL", {"type": "ppo", "entropy_coef": 0.01, "gae_lambda": 1.0, "kl_coef": 0.05, "kl_target": 0.1}, lines=1
    ),
    Method("online DPO", {"type": "dpo", "branch_at": "root", "group_size": 8, "beta": 0.1}),
    Method("online SimPO", {"type": "dpo", "branch_at": "root", "group_size": 8, "loss_type": "simpo", "beta": 2.0}),
    Method("online KTO", {"type": "kto", "branch_at": "root", "group_size": 8}),
    Method("MAGRPO", {"type": "magrpo", "group_size": 8, "entropy_coef": 0.01}, tasks=("duel",)),
    Method("SFT, best of 8", {"type": "sft", "group_size": 8, "imitate": "best"}),
    Method("online IPO", {"type": "dpo", "branch_at": "root", "group_size": 8, "beta": 0.1, "loss_type": "ipo"}),
    Method("SFT, own successes", {"type": "sft", "group_size": 8}, tasks=("sums",)),
    Method("SFT, own wins", {"type": "sft", "group_size": 8, "imitate": "all", "min_return": 0.5}, tasks=("duel",)),
    Method("SFT, expert", {"type": "sft", "imitate": "all"}, 1, {"policies": BOTH}, ("sums",)),
    Method(
        "SFT, expert", {"type": "sft", "imitate": "all"}, 1, {"policies": {"speaker": {"teacher": "expert"}}}, ("duel",)
    ),
]

# ---- runs


def settings_of(task: Task, method: Method, rate: float, seed: int, quick: bool) -> dict[str, Any]:
    """The whole config of a run."""
    tree = load(task.config)
    tree |= {"seed": seed, "name": f"{task.name}-{slug(method)}-{rate:g}-{seed}", "algorithm": method.algorithm}
    tree["episodes"] = tree["episodes"] * 8 // method.lines
    for name in task.learners:
        tree["policies"][name] |= {"lr": rate} | method.settings.get("policies", {}).get(name, {})
    if quick:
        tree |= {"steps": 2, "episodes": max(2, tree["episodes"] // 16)}
        for evaluation in tree["evals"].values():
            evaluation["episodes"] = 10
    return tree


def slug(method: Method) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in method.name.lower())


def train(task: Task, method: Method, rate: float, seed: int, quick: bool) -> Path:
    """The finished run; one that was broken off goes on."""
    tree = settings_of(task, method, rate, seed, quick)
    root = ROOT / ("quick" if quick else "runs")
    path = root / tree["name"]
    root.mkdir(parents=True, exist_ok=True)
    config = root / f"{tree['name']}.yaml"
    config.write_text(yaml.safe_dump(tree))
    program = str(Path(sys.prefix) / "bin" / "palestra")
    order = ["--resume", str(path)] if path.exists() else [str(config), "--root", str(root)]
    done = subprocess.run(
        [program, "train", *order], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{tree['name']} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return path


def curve(task: Task, run: Path) -> list[tuple[float, float]]:
    """Answers sampled in training until then, and the score on dev."""
    answers = np.cumsum([sampled(run, step) for step in range(load(run / "config.yaml")["steps"])])
    points: dict[int, list[float]] = {}
    for line in read_lines(run / "evals.jsonl"):
        if line["name"] in task.sides:
            points.setdefault(line["step"], []).append(task.score(line["name"], line))
    return [(float(answers[step]) if step >= 0 else 0.0, float(np.mean(own))) for step, own in sorted(points.items())]


def sampled(run: Path, step: int) -> float:
    """Answers sampled in a step."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["step"] == step and line["policy"] == "team"]
    return float(lines[0]["answers"])


def cpu_seconds(run: Path) -> float:
    """Seconds of rollouts and of learning, without evaluations."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["policy"] == "team"]
    return float(sum(value for line in lines for key, value in line.items() if key.endswith("cpu_s")))


def evaluate_run(task: Task, run: Path, episodes: int) -> dict[str, float]:
    """The score on split test; how far from the base the learners are there, and how undecided, by token."""
    scores, answers = [], []
    for side, (seats, _) in task.sides.items():
        scored = evaluate(run, {}, seats, episodes=episodes)
        scores.append(task.score(side, scored.metrics))
        answers += samples(scored.episodes, task.learners)
    base = Trainer(Engine.load(task.base), None).logprobs(answers)
    own = np.concatenate([sample.logprobs for sample in answers])
    return {
        "score": float(np.mean(scores)),
        "kl": float((own - np.concatenate(base)).mean()),
        "entropy": -float(own.mean()),
    }


def samples(episodes: Sequence[Episode], learners: Sequence[str]) -> list[Sample]:
    """What learners said."""
    found = [
        a for e in episodes for node in e.nodes for a in node.answers.values() if member_name(a.policy) in learners
    ]
    return [
        Sample(a.prompt_ids, a.token_ids, a.logprobs, np.zeros(len(a.token_ids))) for a in found if len(a.token_ids)
    ]


# ---- what was measured


def known(quick: bool) -> dict[tuple[str, str, float, int], dict[str, Any]]:
    path = QUICK if quick else LEDGER
    lines = read_lines(path) if path.exists() else []
    return {(line["task"], line["method"], line["rate"], line["seed"]): line for line in lines}


def measure(task: Task, method: Method, rate: float, seed: int, quick: bool) -> dict[str, Any]:
    """A run and its figures, made where they are not known."""
    key = (task.name, method.name, rate, seed)
    if key in (have := known(quick)):
        return have[key]
    run = train(task, method, rate, seed, quick)
    points = curve(task, run)
    line = {"task": task.name, "method": method.name, "rate": rate, "seed": seed, "run": str(run)}
    line |= {"dev": points[-1][1], "answers": points[-1][0], "cpu": cpu_seconds(run), "curve": points}
    line["to_bar"] = next((count for count, score in points if score >= task.bar), None)
    if seed != TUNING:
        line |= evaluate_run(task, run, 10 if quick else 300)
    ledger = QUICK if quick else LEDGER
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{task.name}, {method.name}, lr {rate:g}, seed {seed}: {points[-1][1]:.3f} on dev", flush=True)
    return line


def untrained(task: Task, quick: bool) -> float:
    """The base's score on split test."""
    path = ROOT / "untrained.json" if quick else UNTRAINED
    have = json.loads(path.read_text()) if path.exists() else {}
    if task.name not in have:
        run = next(Path(line["run"]) for (name, *_), line in known(quick).items() if name == task.name)
        everywhere = dict.fromkeys(load(run / "config.yaml").get("seats") or task.learners, "base")
        figures = [evaluate(run, {}, everywhere, episodes=10 if quick else 1000).metrics for _ in task.sides]
        have[task.name] = float(np.mean([task.score(side, f) for side, f in zip(task.sides, figures, strict=True)]))
        path.write_text(json.dumps(have) + "\n")
    return float(have[task.name])


def best_rate(task: Task, method: Method, tune: bool) -> float:
    """The learning rate with the highest score on dev; untuned, the lowest."""
    if not tune:
        return task.rates[0]
    return max(task.rates, key=lambda rate: measure(task, method, rate, TUNING, False)["dev"])


def run_all(tasks: Sequence[Task], methods: Sequence[Method], seeds: int, quick: bool, tune: bool) -> None:
    """Tunes first, then one seed after the other, so that what is broken off has as many seeds of each."""
    jobs = [(task, method) for method in methods for task in tasks if task.name in method.tasks]
    rates = [best_rate(task, method, tune and not quick) for task, method in jobs]
    for seed in range(1 if quick else seeds):
        for (task, method), rate in zip(jobs, rates, strict=True):
            measure(task, method, rate, seed, quick)


# ---- the page


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean over seeds, by bootstrap; None for one seed."""
    return estimate(mean_score, [np.asarray(values)]).interval


def chosen(task: Task, method: Method) -> list[dict[str, Any]]:
    """The runs that count."""
    return [
        line
        for (name, own, _, seed), line in known(False).items()
        if (name, own) == (task.name, method.name) and seed != TUNING
    ]


def row(task: Task, method: Method, start: float) -> str:
    lines = chosen(task, method)
    scores = [line["score"] for line in lines]
    bounds = interval(scores)
    spread, better = "–", "–"
    if bounds:
        spread, better = "[{:.3f}, {:.3f}]".format(*bounds), "yes" if bounds[0] > start else "**no**"
    reached = [line["to_bar"] for line in lines if line["to_bar"] is not None]
    to_bar = f"{np.mean(reached):,.0f} ({len(reached)} of {len(lines)})" if reached else "never"
    cells = [method.name, str(len(scores)), f"{np.mean(scores):.3f}", spread, better, to_bar]
    cells += [f"{np.mean([line[key] for line in lines]):.{digits}f}" for key, digits in (("kl", 2), ("entropy", 2))]
    cells += [f"{np.mean([line['answers'] for line in lines]):,.0f}", f"{np.mean([line['cpu'] for line in lines]):.0f}"]
    return f"| {' | '.join([*cells, format(lines[0]['rate'], 'g')])} |"


def report(tasks: Sequence[Task]) -> None:
    """Prints a table for each task that has runs."""
    for task in tasks:
        own = [method for method in METHODS if task.name in method.tasks and chosen(task, method)]
        if not own:
            continue
        start = untrained(task, False)
        own.sort(key=lambda method: -np.mean([line["score"] for line in chosen(task, method)]))
        print(f"### {task.name}: {task.scored}\n\nUntrained: {start:.3f}. The bar on dev: {task.bar:g}.\n")
        print("| | seeds | mean | 95 % | above untrained | answers to the bar | KL | entropy | answers | CPU-s | lr |")
        print("\n".join([f"|{'---|' * 11}", *(row(task, method, start) for method in own), ""]))


def main() -> None:
    names = list(dict.fromkeys(method.name for method in METHODS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--methods", nargs="+", choices=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-tune", action="store_true", help="the lowest learning rate of a task for all methods")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    tasks = [task for task in TASKS if task.name in (options.tasks or [task.name])]
    methods = [method for method in METHODS if method.name in (options.methods or [method.name])]
    if not options.report:
        run_all(tasks, methods, options.seeds, options.quick, not options.no_tune)
    elif not options.quick:
        report(tasks)
    figures = {
        f"{name}, {method}": line["score"]
        for (name, method, _, seed), line in known(options.quick).items()
        if seed != TUNING
    }
    measured = {name for name, *_ in known(options.quick)}
    targets = {task.name: untrained(task, options.quick) for task in tasks if task.name in measured}
    print(json.dumps({"bench": "algorithms", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
