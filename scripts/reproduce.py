"""Reproduces docs/results.md: how well a team learns, and which parts of AT-GRPO matter.

    python scripts/reproduce.py              every method and seed; finished jobs are skipped
    python scripts/reproduce.py --tune       choose learning rates again (scripts/reproduce_rates.yaml) and stop
    python scripts/reproduce.py --quick      a smoke test of all steps in a few minutes
    python scripts/reproduce.py --report     only rewrite the page from the results measured so far
    python scripts/reproduce.py real         docs/results-real.md instead: see reproduce_real.py

Every trained method may sample as many answers as any other (those named "equal CPU": train for the CPU seconds that
AT-GRPO took). Learning rates are chosen on dev layouts with a seed that is not reported. A method is scored once on
test layouts by play without branching at temperature 1. Jobs run in two processes of one thread each; results are
stored in bench/measured/reproduce.jsonl.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from reproduce_report import write_report

from palestra.builders.text import build
from palestra.builders.text_config import TextConfig
from palestra.config import dump, load, override, validate
from palestra.evaluation.evaluate import evaluate
from palestra.runs import Run, read_lines
from palestra.training.loop import Callback, play_evals, restore_checkpoint, run_training

ROOT = Path("runs/reproduce")
LEDGER, QUICK = Path("bench/measured/reproduce.jsonl"), ROOT / "quick.jsonl"  # a line for each job
GAMES = ("plan_path", "sokoban")
SEEDS = (0, 1, 2)
RATES_FILE = Path(__file__).parent / "reproduce_rates.yaml"
RATES_SAY = "# Success on 200 dev layouts by learning rate, as `python scripts/reproduce.py --tune` measured it.\n"
TUNING_SEED = 100
RATES = (1e-3, 3e-3, 6e-3)

TEAM = {"env.team": "planner_executor"}
# A single agent answers once where a team answers twice: with twice the episodes a step, the samples are equal.
ALONE = {"env.team": "single", "episodes": 64}
ONE_TURN = {"env.team": "single", "env.max_turns": 1, "env.max_moves": 24, "policies.agent.sampling.max_tokens": 26}
LINES = {"algorithm.branch_at": "root"}
TURNS = {"algorithm.branch_at": "turn", "algorithm.continue_from": "best"}
SHARED = {"seats": {"planner": "agent", "executor": "agent"}}

# The changes of each method to configs/reproduce/GAME.yaml. An untrained method has no algorithm.
METHODS: dict[str, dict[str, Any]] = {
    "single agent, one turn": ONE_TURN,
    "single agent, multi-turn": ALONE,
    "single agent, one turn + GRPO": ONE_TURN | LINES,
    "single agent, multi-turn + GRPO": ALONE | LINES,
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


@dataclass(frozen=True)
class Job:
    """One training run and its score."""

    game: str
    method: str
    seed: int
    rate: float
    phase: str  # "tune" scores on dev, "test" on test
    cpu: float | None = None  # CPU seconds of training after which to stop

    @property
    def key(self) -> tuple:
        return (self.game, self.method, self.seed, self.phase, self.rate if self.phase == "tune" else None)

    @property
    def folder(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in f"{self.game} {self.method}")
        return f"{words}-{self.phase}-{self.seed}-{self.rate:g}"


def config_of(job: Job, quick: bool) -> TextConfig:
    """The job's config: the game's config with the method's changes."""
    tree = load(Path("configs/reproduce") / f"{job.game}.yaml")
    changes = METHODS[job.method] | {"seed": job.seed}
    if changes.get("env.max_turns") == 1:  # as many answers as a single agent gives in all its turns
        changes["episodes"] = ALONE["episodes"] * tree["env"]["turns"]
    tree = override(tree, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    for policy in tree["policies"].values():
        if policy["type"] == "lora":
            policy["lr"] = job.rate
    evaluation = (
        {"episodes": 300, "env": {"split": "test"}}
        if job.phase == "test"
        else {"episodes": 200, "env": {"split": "dev"}}
    )
    tree["evals"] = {job.phase: evaluation | ({"episodes": 20} if quick else {})}
    return validate(TextConfig, override(tree, ["steps=2"] if quick else []))


def run(job: Job, quick: bool) -> dict[str, Any]:
    """Trains and scores one job in this process; returns its line of results."""
    shutil.rmtree(ROOT / job.folder, ignore_errors=True)
    config = config_of(job, quick)
    setup = build(config)
    if job.method in UNTRAINED:
        setup.stages, setup.learners = [], {}
    with Run.create(ROOT, dump(config), job.folder, {"seed": job.seed}) as run:
        restore_checkpoint(setup, run)
        start = time.process_time()
        done = run_training(
            setup, run, should_stop=lambda: job.cpu is not None and time.process_time() - start > job.cpu
        )
        cpu = time.process_time() - start
        if not done:
            with setup.open(run, Callback()):
                play_evals(setup, run, run.next_step - 1, Callback(), due_only=False)
    return asdict(job) | outcome(ROOT / job.folder) | {"cpu": cpu, "folder": job.folder}


def outcome(folder: Path) -> dict[str, Any]:
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


def joined(game: str, seed: int, results: list[dict], quick: bool) -> Iterable[dict[str, Any]]:
    """Yields the result lines that need no training: members trained alone and then joined, and roles swapped."""
    where = {
        (r["game"], r["method"], r["seed"]): r["folder"] for r in results if "folder" in r and r["phase"] == "test"
    }
    best = ROOT / where[game, BEST, seed]
    seats = {
        "planner": f"{ROOT / where[game, PLANNER, seed]}:planner",
        "executor": f"{ROOT / where[game, EXECUTOR, seed]}:executor",
    }
    for method, chosen, swap in ((JOINED, seats, False), (SWAPPED, {}, True)):
        scored = evaluate(best, {}, chosen, swap=swap, episodes=20 if quick else 300, seed=seed)
        yield {
            "game": game,
            "method": method,
            "seed": seed,
            "phase": "test",
            "rate": None,
            "success": scored.metrics["success"],
            "episodes": scored.metrics["episodes"],
            "turns": scored.metrics["steps_per_episode"],
        }


class Ledger:
    """The file of results; a job that has a line is not run again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results: list[dict[str, Any]] = read_lines(path) if path.exists() else []

    def add(self, line: dict[str, Any]) -> None:
        self.results.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def has(self, job: Job) -> bool:
        return any(
            job.key == Job(**{k: r[k] for k in ("game", "method", "seed", "rate", "phase")}).key for r in self.results
        )

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        return [r for r in self.results if all(r[k] == v for k, v in wanted.items())]


def run_all(jobs: list[Job], ledger: Ledger, quick: bool) -> None:
    """Runs the jobs that are not yet in the ledger, two at a time."""
    todo = [job for job in jobs if not ledger.has(job)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = {pool.submit(run, job, quick): job for job in todo}
        for done, future in enumerate(as_completed(futures), 1):
            job, line = futures[future], future.result()
            ledger.add(line)
            print(
                f"[{done}/{len(todo)}] {job.phase} {job.game}: {job.method}, seed {job.seed}, lr {job.rate:g}: "
                f"{line['success']:.1%} in {line['cpu']:.0f} CPU-s",
                flush=True,
            )


def tune(ledger: Ledger, games: Sequence[str], quick: bool) -> None:
    """Scores every trained method at every learning rate on dev, and writes the scores to the file of rates."""

    def jobs(method: str, cpu: dict[str, float]) -> list[Job]:
        return [Job(g, method, TUNING_SEED, rate, "tune", cpu.get(g)) for g in games for rate in RATES]

    run_all([job for method in TRAINED if method != EQUAL_CPU for job in jobs(method, {})], ledger, quick)
    best = {g: max(ledger.find(game=g, method=BEST, phase="tune"), key=lambda r: r["success"]) for g in games}
    run_all(jobs(EQUAL_CPU, {g: result["cpu"] for g, result in best.items()}), ledger, quick)
    if not quick:
        table: dict[str, Any] = {g: {method: {} for method in TRAINED} for g in games}
        for result in ledger.find(phase="tune"):
            table[result["game"]][result["method"]][result["rate"]] = round(result["success"], 3)
        RATES_FILE.write_text(RATES_SAY + yaml.safe_dump(load_rates() | table, sort_keys=False))


def load_rates() -> dict[str, dict[str, dict[float, float]]]:
    """Success on dev by game, method and learning rate."""
    return (yaml.safe_load(RATES_FILE.read_text()) or {}) if RATES_FILE.exists() else {}


def tuned(game: str, method: str) -> float:
    """The learning rate with the best dev score."""
    scores = load_rates()[game][method]
    return max(scores, key=lambda rate: scores[rate])


def score(ledger: Ledger, games: Sequence[str], seeds: Sequence[int], quick: bool) -> None:
    """Scores every method and seed on test, at the method's chosen learning rate."""

    def job(game: str, method: str, seed: int, cpu: float | None = None) -> Job:
        return Job(game, method, seed, tuned(game, method) if method in TRAINED else RATES[0], "test", cpu)

    first = [method for method in METHODS if method != EQUAL_CPU]
    run_all([job(g, m, s) for s in seeds for g in games for m in first], ledger, quick)
    spent = {(g, s): ledger.find(game=g, method=BEST, seed=s, phase="test")[0]["cpu"] for g in games for s in seeds}
    run_all([job(g, EQUAL_CPU, s, cpu) for (g, s), cpu in spent.items()], ledger, quick)


def main() -> None:
    if sys.argv[1:2] == ["real"]:
        from reproduce_real import main as reproduce_real

        return reproduce_real(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: two steps, one seed")
    parser.add_argument("--report", action="store_true", help="only rewrite the page")
    parser.add_argument("--tune", action="store_true", help="choose learning rates on dev layouts and stop")
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=GAMES, help="games to run (default: all)")
    options = parser.parse_args()
    quick, games = options.quick, options.games
    ledger = Ledger(QUICK if quick else LEDGER)
    if options.tune:
        tune(ledger, games, quick)
        return
    if not options.report:
        seeds = SEEDS[:1] if quick else SEEDS
        score(ledger, games, seeds, quick)
        for g in games:
            for s in seeds:
                if not ledger.find(game=g, method=SWAPPED, seed=s):
                    for line in joined(g, s, ledger.results, quick):
                        ledger.add(line)
    write_report(
        ledger.results,
        [*METHODS, JOINED, SWAPPED],
        Path("runs/reproduce/quick.md") if quick else Path("docs/results.md"),
    )


if __name__ == "__main__":
    main()
