"""Reproduces docs/results.md: how well a team learns, and which parts of AT-GRPO matter.

    python results/reproduction/run.py                  all 198 rows, some twelve hours of one core
    python results/reproduction/run.py --list           the rows: published, measured here, open
    python results/reproduction/run.py --only "plan_path/team + AT-GRPO, per role"  one to two CPU minutes a seed
    python results/reproduction/run.py --only sokoban/  all methods and seeds of a game
    python results/reproduction/run.py --publish        publish what was measured here, and rewrite the page
    python results/reproduction/run.py --report         only rewrite the page from the published rows
    python results/reproduction/run.py --tune           choose learning rates again and stop; --publish as for rows
    python results/reproduction/run.py --quick          a smoke test of a few rows, under a minute

A row is a method on a game with a seed. Rows go to runs/measured/reproduction/rows.jsonl, also where they are published
(results/reproduction/measured/rows.jsonl), and each is printed beside the published one; its run is in runs/reproduce/.
Every trained method may sample as many answers as any other ("equal CPU": train for the CPU seconds that AT-GRPO took).
A method is scored once on test layouts by play without branching at temperature 1.

Each method of TUNED has the learning rate that has the highest mean on dev layouts over two seeds that are not reported
(results/reproduction/rates.yaml; Plan-Path's are of one seed); the ablations have that of the method that they change
one thing of (RATE_OF). A row
whose rate is the lowest or the highest that was tried is not published: try another with --tune, --only "GAME/METHOD/lr
RATE", or add it to RATES.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from palestra.core.config import dump, load, override, validate
from palestra.envs import make_env
from palestra.evaluation.evaluate import evaluate
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, play_evals, restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from results.ledger import Ledger, Line, Rows, add_options, choose
from results.rates import RatesFile, Score
from results.reproduction.report import write_report

ROOT = Path("runs/reproduce")
GAMES = ("plan_path", "sokoban", "sokoban_large")
SEEDS, MAIN_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
HERE = Path(__file__).parent
RATES = (1e-3, 3e-3, 6e-3, 1.2e-2)
TUNING_SEEDS = (100, 101)
FILE = RatesFile(
    HERE / "rates.yaml",
    "Success on 200 dev layouts by learning rate and seed, as `python results/reproduction/run.py --tune` measured it.",
)

TEAM = {"env.team": "planner_executor"}
ALONE = {"env.team": "single"}
ONE_TURN = ALONE | {"env.max_turns": 1, "env.max_moves": 24, "policies.agent.sampling.max_tokens": 26}
LINES = {"algorithm.branch_at": "root"}
TURNS = {"algorithm.branch_at": "turn", "algorithm.continue_from": "best"}
SHARED = {"seats": {"planner": "agent", "executor": "agent"}}

# The changes of each method to results/reproduction/configs/GAME.yaml. An untrained method has no algorithm.
METHODS: dict[str, dict[str, Any]] = {
    "single agent, one turn": ONE_TURN,
    "single agent, multi-turn": ALONE,
    "single agent, one turn + GRPO": ONE_TURN | LINES,
    "single agent, multi-turn + GRPO": ALONE | LINES,
    "single agent, multi-turn + AT-GRPO": ALONE | TURNS,
    "team, untrained": TEAM,
    "team + GRPO, equal samples": TEAM | LINES,
    "team + GRPO, equal CPU": TEAM | LINES,
    "team + AT-GRPO, shared": TEAM | TURNS | SHARED,
    "team + AT-GRPO, per role": TEAM | TURNS,
    "AT-GRPO, outcome reward only": TEAM | TURNS | {"env.reward": "outcome"},
    "AT-GRPO, random continuation": TEAM | TURNS | {"algorithm.continue_from": "random"},
    "planner trained alone": TEAM | TURNS | {"seats": {"executor": "untrained"}},
    "executor trained alone": TEAM | TURNS | {"seats": {"planner": "untrained"}},
}
UNTRAINED = [name for name in METHODS if "algorithm.branch_at" not in METHODS[name]]
TRAINED = [name for name in METHODS if name not in UNTRAINED]
EQUAL_CPU = "team + GRPO, equal CPU"
JOINED, SWAPPED = "trained alone, then joined", "AT-GRPO, roles swapped"
BEST, PLANNER, EXECUTOR = "team + AT-GRPO, per role", "planner trained alone", "executor trained alone"
JOINS = {JOINED: (BEST, PLANNER, EXECUTOR), SWAPPED: (BEST,)}  # rows without training, and whose runs they join
NEEDS = JOINS | {EQUAL_CPU: (BEST,)}
# The methods whose comparison is the result, by five seeds, and those without training that they begin from.
MAIN = [name for name in METHODS if name.startswith(("single agent", "team")) and name != EQUAL_CPU]
RATE_OF = {name: BEST for name in TRAINED if name not in MAIN} | {EQUAL_CPU: "team + GRPO, equal samples"}
TUNED = [name for name in TRAINED if name not in RATE_OF]
QUICK_ROWS = (f"plan_path/{EQUAL_CPU}/0", f"plan_path/{SWAPPED}/0")  # and those they need


@dataclass(frozen=True)
class Row:
    """A method on a game with a seed. `rate` is the learning rate of a row that tunes, scored on split dev."""

    game: str
    method: str
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        last = self.seed if self.rate is None else f"lr {self.rate:g}, seed {self.seed}"
        return f"{self.game}/{self.method}/{last}"

    @property
    def is_trained(self) -> bool:
        return self.method in TRAINED

    @property
    def lr(self) -> float:
        """The row's learning rate: its own, or the one with the best dev score."""
        if self.rate is not None or not self.is_trained:
            return self.rate or RATES[0]
        scores = self.scores()
        if not scores:
            raise ValueError(f"no learning rate of {self.game}/{self.method} is chosen yet: run with --tune")
        return max(scores, key=lambda rate: scores[rate])

    def scores(self) -> dict[float, float]:
        """Mean success on dev by the learning rates that were tried for the row's method."""
        runs = FILE.read().get(self.game, {}).get(RATE_OF.get(self.method, self.method), {})
        return {rate: float(np.mean(list(by_seed.values()))) for rate, by_seed in runs.items()}

    def folder(self, quick: bool) -> Path:
        """The folder of the row's run."""
        words = "".join(c if c.isalnum() else "-" for c in f"{self.game} {self.method}")
        name = f"{words}-{'test' if self.rate is None else 'dev'}-{self.seed}-{self.lr:g}"
        return ROOT / "quick" / name if quick else ROOT / name

    def of(self, method: str) -> Row:
        """The row of another method with the same game and seed."""
        return Row(self.game, method, self.seed, self.rate)


def table_rows() -> dict[str, Row]:
    """Returns the rows of the page, by name."""
    rows = [
        Row(game, method, seed)
        for seed in MAIN_SEEDS
        for game in GAMES
        for method in [*METHODS, *JOINS]
        if method in MAIN or seed in SEEDS
    ]
    return {row.name: row for row in rows}


def tuning_rows() -> dict[str, Row]:
    """Returns the rows that choose learning rates, by name."""
    rows = [
        Row(game, method, seed, rate) for game in GAMES for method in TUNED for rate in RATES for seed in TUNING_SEEDS
    ]
    return {row.name: row for row in rows}


def find_row(name: str) -> Row:
    return table_rows().get(name) or tuning_rows()[name]


def needed(name: str) -> list[str]:
    """Returns the rows whose runs or CPU seconds a row needs."""
    row = find_row(name)
    return [row.of(method).name for method in NEEDS.get(row.method, ())]


def config_of(row: Row, quick: bool) -> TextConfig:
    """The row's config: the game's config with the method's changes."""
    tree = load(HERE / "configs" / f"{row.game}.yaml")
    changes = METHODS[row.method] | {"seed": row.seed}
    if row.method.startswith("single agent"):  # as many answers as a team, whose two seats answer in each turn
        turns = tree["env"]["max_turns"] if "env.max_turns" in changes else 1
        changes["episodes"] = 2 * turns * tree["episodes"]
    tree = override(tree, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    for policy in tree["policies"].values():
        if policy["type"] == "lora":
            policy["lr"] = row.lr
    split, episodes = ("test", 300) if row.rate is None else ("dev", 200)
    tree["evals"] = {split: {"episodes": 4 if quick else episodes, "env": {"split": split}}}
    return validate(TextConfig, override(tree, ["steps=2", "episodes=4"] if quick else []))


def check(quick: bool, name: str) -> None:
    """Raises ValueError if the row's config is wrong."""
    if find_row(name).method in METHODS:
        make_env(**config_of(find_row(name), quick).env)


def measure(quick: bool, name: str) -> Line:
    """Trains and scores a row in this process; returns its result."""
    row = find_row(name)
    result = joined(row, quick) if row.method in JOINS else trained(row, quick)
    return {"game": row.game, "method": row.method, "seed": row.seed, "rate": row.lr} | result


def trained(row: Row, quick: bool) -> Line:
    folder = row.folder(quick)
    shutil.rmtree(folder, ignore_errors=True)
    config = config_of(row, quick)
    setup = build(config)
    if not row.is_trained:
        setup.stages, setup.learners = [], {}
    limit = spent(row.of(BEST), quick) if row.method == EQUAL_CPU else None
    with Run.create(folder.parent, dump(config), folder.name, {"seed": row.seed}) as run:
        restore_checkpoint(setup, run)
        start = time.process_time()
        done = run_training(setup, run, should_stop=lambda: limit is not None and time.process_time() - start > limit)
        cpu = time.process_time() - start
        if not done:
            with setup.open(run, Callback()):
                play_evals(setup, run, run.next_step - 1, Callback(), due_only=False)
    return outcome(folder) | {"cpu": cpu}


def spent(row: Row, quick: bool) -> float:
    """The CPU seconds that a row took."""
    return float(make_ledger(quick).here[row.name]["cpu"])


def outcome(folder: Path) -> Line:
    """The run's last evaluation, its training curve of success and turns, and the number of sampled answers."""
    evaluation = read_lines(folder / "evals.jsonl")[-1]
    lines = read_lines(folder / "metrics.jsonl")
    team = [line for line in lines if line["policy"] == "team"]
    return {
        "success": evaluation["success"],
        "episodes": evaluation["episodes"],
        "turns": evaluation["steps_per_episode"],
        "curve": [[line["step"], line["success"], line["steps_per_episode"]] for line in team],
        "answers": sum(line["answers"] for line in lines if "answers" in line),
    }


def joined(row: Row, quick: bool) -> Line:
    """Scores without training: members trained alone and then joined, or roles swapped."""
    best, swap = row.of(BEST).folder(quick), row.method == SWAPPED
    seats = {
        "planner": f"{row.of(PLANNER).folder(quick)}:planner",
        "executor": f"{row.of(EXECUTOR).folder(quick)}:executor",
    }
    episodes = 4 if quick else 300
    scored = evaluate(best, {}, {} if swap else seats, swap=swap, episodes=episodes, seed=row.seed).metrics
    return {"success": scored["success"], "episodes": scored["episodes"], "turns": scored["steps_per_episode"]}


def figure(line: Line) -> str:
    half = f" ± {100 * line['half']:.1f}" if "half" in line else ""
    return f"{100 * line['success']:.1f}{half} %"


def is_current(name: str, line: Line) -> bool:
    """True if a row was measured at today's learning rate."""
    return not find_row(name).is_trained or line["rate"] == find_row(name).lr


def make_ledger(quick: bool) -> Ledger:
    return Ledger("reproduction", figure, quick, is_current)


def tuned_scores(ledger: Ledger) -> list[Score]:
    """The dev scores that were measured here."""
    rows = [(row, ledger.here[row.name]) for row in tuning_rows().values() if row.name in ledger.here]
    return [(row.game, row.method, row.lr, row.seed, round(line["success"], 3)) for row, line in rows]


def check_inside(rows: Iterable[Row]) -> None:
    """Raises SystemExit if the learning rate of a row is the lowest or the highest that was tried."""
    for row in rows:
        scores = row.scores()
        if row.is_trained and row.lr in (min(scores), max(scores)):
            tried = ", ".join(f"{rate:g}" for rate in sorted(scores))
            raise SystemExit(f"--publish: the rate of {row.name}, {row.lr:g}, is at an edge of those tried: {tried}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, processes=2)
    parser.add_argument("--tune", action="store_true", help="choose learning rates on dev layouts and stop")
    options = parser.parse_args()
    quick, ledger = options.quick, make_ledger(options.quick)
    names = list(tuning_rows() if options.tune else table_rows())
    chosen = choose(names, options.only or (QUICK_ROWS if quick else []))
    if options.publish and not options.tune:
        check_inside(find_row(name) for name in chosen if ledger.is_measured(name))
    Rows(ledger, partial(measure, quick), partial(check, quick), needed).run(chosen, options)
    if options.tune and not (quick or options.list or options.report):
        FILE.write(tuned_scores(ledger), FILE.path if options.publish else ledger.here_file.with_name(FILE.path.name))
    if options.report or options.publish:
        lines = [line for name, line in ledger.published.items() if name not in tuning_rows()]
        write_report(lines, [*METHODS, *JOINS], Path("docs/results.md"))


if __name__ == "__main__":
    main()
