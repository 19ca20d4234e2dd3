"""Compares env steps per second of palestra and other libraries: simple_spread (three agents, three landmarks, 25
steps), Atari's two-player Pong, Overcooked and Hanabi.

    python bench/throughput.py            about 40 minutes; the first run makes the peers' virtual environments
    python bench/throughput.py --quick    about 4 minutes; --peers jaxmarl leaves out all others
    python bench/throughput.py --markdown throughput.md    also writes the tables for a docs page

A step is a joint step of all agents. All libraries train with PPO: two networks of 64-64 tanh units, a batch of 6000
steps, two passes over it in four minibatches. They run one at a time, alternately and several times; medians count.
The scripts in `bench/peers/` describe the setup of each and its differences. Figures are ratios of steps per second:

    native_vs_*         training on the fastest simple_spread of each; palestra's with one or two processes, the faster
    sampling_vs_rllib   the same with networks that act without learning
    same_env_vs_*       training on one env in Python, mpe2's through PettingZoo
    overhead_over_raw   time of a step of that env in training, in one process, over that in a bare loop, less one
    overhead_over_unchecked   the same over a bare loop without PettingZoo's checking wrappers, which palestra removes
    workers2_vs_1       two processes that train on palestra's own simple_spread, over one, at 1024 games
    pong_vs_*           training on Atari's two-player Pong
    overcooked_*        Overcooked's cramped room, training and random moves, palestra's own over JaxMARL's
    hanabi_vs_raw       random moves in OpenSpiel's Hanabi, in one process, over a bare loop

`workers2_vs_1_small` is the ratio of workers2_vs_1 for a batch of 6000 steps: an update has fixed costs, which both
processes pay.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import zoo
from peers.running import PEERS, Failed, Job, install, installed, run
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))
from palestra.core.processor import processor
from results.ledger import absent, commit, finish

TARGETS = {
    "native_vs_rllib": 40.0,
    "native_vs_sample_factory": 20.0,
    "native_vs_jaxmarl": 1.2,
    "sampling_vs_rllib": 100.0,
    "same_env_vs_rllib": 2.2,
    "same_env_vs_sample_factory": 1.3,
    "overhead_over_raw": 0.15,
    "workers2_vs_1": 1.7,
}
AT_MOST = {"overhead_over_raw"}  # figures whose target is an upper bound
NAMES = {
    "ours": "palestra",
    "raw": "no framework",
    "raw_spiel": "OpenSpiel alone",
    "jaxmarl": "JaxMARL, IPPO",
    "benchmarl": "BenchMARL, IPPO",
    "rllib": "RLlib, PPO",
    "sample_factory": "Sample Factory, APPO",
}
HOME = {"jaxmarl": "JaxMARL's", "benchmarl": "VMAS's", "rllib": "mpe2", "sample_factory": "mpe2", "raw": "mpe2"}
NO_RANDOM = {"sample_factory"}  # cannot sample with random actions
PONG = {"rllib", "sample_factory"}  # also measured on Atari's Pong
WHATS = ("train", "sample", "random")
OVERCOOKED_WHATS = ("train", "random")
SIZES = (1, 4, 16, 64, 256, 1024)
BATCH, STEPS = 6000, 25
console = Console(width=120)


@dataclass
class Results:
    """The measurements of each job, and the error of each job that failed."""

    measured: dict[Job, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[Job, str] = field(default_factory=dict)

    def rate(self, job: Job) -> float | None:
        """Median joint steps per second of a job; None if it was not measured."""
        lines = self.measured.get(job)
        return statistics.median(one["env_steps_per_s"] for one in lines) if lines else None

    def best(self, jobs: Sequence[Job]) -> float | None:
        """The best rate of some jobs; None if none was measured."""
        return max((rate for job in jobs if (rate := self.rate(job))), default=None)


def main_jobs(peers: Sequence[str], whats: Sequence[str]) -> list[Job]:
    """The jobs of all tables but the last: each library on its fastest env, palestra also on the envs of others."""
    jobs = []
    for what in whats:
        jobs += native(what)
        jobs += [theirs(peer, what) for peer in peers if what != "random" or peer not in NO_RANDOM]
    jobs += [*on_python_env(), RAW, UNCHECKED, *on_hanabi(), RAW_HANABI]
    if "jaxmarl" in peers:
        jobs += [job for what in OVERCOOKED_WHATS for job in (*overcooked(what), theirs_on_overcooked(what))]
    of_pong = [theirs_on_pong(peer) for peer in peers if peer in PONG]
    return [*jobs, *on_pong(), *of_pong, RAW_PONG] if of_pong else jobs


def native(what: str) -> list[Job]:
    """palestra on its own simple_spread, in one process and in two."""
    return [Job("ours", what, "simple_spread", workers) for workers in (1, 2)]


def on_python_env() -> list[Job]:
    """palestra training on mpe2's simple_spread, in one process and in two."""
    return [Job("ours", "train", "mpe2", workers, games=60, horizon=BATCH // 60) for workers in (1, 2)]


def on_pong() -> list[Job]:
    """palestra training on Atari's Pong, in one process and in two."""
    return [Job("ours", "train", "atari_pong", workers, games=16, horizon=BATCH // 16) for workers in (1, 2)]


def overcooked(what: str) -> list[Job]:
    """palestra on its own Overcooked, in one process and in two."""
    return [Job("ours", what, "overcooked", workers) for workers in (1, 2)]


def on_hanabi() -> list[Job]:
    """palestra on OpenSpiel's Hanabi, random moves and training in one process."""
    return [Job("ours", what, "hanabi", 1, games=60, horizon=BATCH // 60) for what in ("random", "train")]


def theirs_on_overcooked(what: str) -> Job:
    return Job("jaxmarl", what, "overcooked")


def theirs_on_pong(peer: str) -> Job:
    return Job(peer, "train", "atari_pong")


def theirs(peer: str, what: str) -> Job:
    return Job(peer, what, HOME[peer])


RAW = Job("raw", "random", "mpe2", 1, games=1)
UNCHECKED = Job("raw", "unchecked", "mpe2", 1, games=1)
RAW_PONG = Job("raw", "random", "atari_pong", 1, games=1)
RAW_HANABI = Job("raw_spiel", "random", "hanabi", 1, games=1)


def growth_jobs(sizes: Sequence[int]) -> list[Job]:
    """palestra with growing numbers of games; a batch has 6000 steps, but at least 25 of each game."""
    return [
        Job("ours", "train", "simple_spread", workers, games, horizon=max(STEPS, BATCH // games))
        for games in sizes
        for workers in (1, 2)
        if games >= workers
    ]


def measure(jobs: Sequence[Job], seconds: float, repeats: int) -> Results:
    """Runs all jobs one after another, `repeats` times; prints a line for each."""
    results = Results()
    for repeat in range(repeats):
        for number, job in enumerate(jobs, 1):
            start = time.perf_counter()
            try:
                line = run(job, seconds, limit=300 + 20 * seconds)
                results.measured.setdefault(job, []).append(line)
                said = f"{line['env_steps_per_s']:>12,.0f} steps/s"
            except Failed as error:
                results.failed[job] = str(error)
                said = "[red]failed[/]"
            place = f"{repeat + 1}/{repeats} {number:>2}/{len(jobs)}"
            spent = time.perf_counter() - start
            console.print(f"{place} {label(job):<42} {job.what:<6} {said} ({spent:.0f} s)", highlight=False)
    return results


def label(job: Job) -> str:
    return f"{name(job)} ({job.env}{f', {job.games} games' if job.script == 'ours' else ''})"


def name(job: Job) -> str:
    """Returns the name of the job's library."""
    return f"palestra, {job.workers} process{'es' * (job.workers > 1)}" if job.script == "ours" else NAMES[job.script]


# ---- figures and tables


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def figures(results: Results) -> dict[str, float | None]:
    """The figures by name; None for a figure whose jobs were not measured."""
    training, sampling, same = (results.best(jobs) for jobs in (native("train"), native("sample"), on_python_env()))
    small, large = (
        ratio(results.rate(two), results.rate(one)) for one, two in (native("train"), growth_jobs(SIZES[-1:]))
    )
    pong, one_process = results.best(on_pong()), results.rate(on_python_env()[0])

    def of(peer: str, what: str = "train") -> float | None:
        return results.rate(theirs(peer, what))

    def overhead(bare: Job) -> float | None:
        slowed = ratio(results.rate(bare), one_process)
        return None if slowed is None else slowed - 1

    return {
        "native_vs_rllib": ratio(training, of("rllib")),
        "native_vs_sample_factory": ratio(training, of("sample_factory")),
        "native_vs_jaxmarl": ratio(training, of("jaxmarl")),
        "sampling_vs_rllib": ratio(sampling, of("rllib", "sample")),
        "same_env_vs_rllib": ratio(same, of("rllib")),
        "same_env_vs_sample_factory": ratio(same, of("sample_factory")),
        "overhead_over_raw": overhead(RAW),
        "overhead_over_unchecked": overhead(UNCHECKED),
        "workers2_vs_1": large,
        "workers2_vs_1_small": small,
        **{
            f"overcooked_{what}_vs_jaxmarl": ratio(
                results.best(overcooked(what)), results.rate(theirs_on_overcooked(what))
            )
            for what in OVERCOOKED_WHATS
        },
        "hanabi_vs_raw": ratio(results.rate(on_hanabi()[0]), results.rate(RAW_HANABI)),
        **{f"pong_vs_{peer}": ratio(pong, results.rate(theirs_on_pong(peer))) for peer in sorted(PONG)},
    }


@dataclass(frozen=True)
class Sheet:
    """A table, to print or to write as Markdown."""

    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if 0 < number < len(self.headings) - 1 else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        sides = ["---", *["---:"] * (len(self.headings) - 2), "---"]
        lines = [self.headings, sides, *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sheets(results: Results, peers: Sequence[str]) -> list[Sheet]:
    on_mpe2 = [*on_python_env(), *(theirs(peer, "train") for peer in peers if HOME[peer] == "mpe2"), UNCHECKED]
    python = python_envs(results, "mpe2's env", RAW, on_mpe2)
    atari = [*on_pong(), *(theirs_on_pong(peer) for peer in peers if peer in PONG)]
    pong = python_envs(results, "Atari's Pong", RAW_PONG, atari)
    others = [*([pong] if PONG & set(peers) else []), *([overcooked_env(results)] if "jaxmarl" in peers else [])]
    return [own_envs(results, peers), python, *others, hanabi(results), growth(results)]


def own_envs(results: Results, peers: Sequence[str]) -> Sheet:
    """The table of each library on its fastest env, with palestra's best training rate over the library's."""
    best, rows = results.best(native("train")), []
    who = [[native(what)[i] for what in WHATS] for i in (0, 1)] + [[theirs(peer, w) for w in WHATS] for peer in peers]
    for jobs in who:
        times = ratio(best, results.rate(jobs[0]))
        shown = [number(results, job) for job in jobs]
        rows.append([name(jobs[0]), jobs[0].env, *shown, f"{times:.2f}" if times else "", notes(results, jobs[0])])
    rows.append([name(RAW), RAW.env, "", "", number(results, RAW), "", notes(results, RAW)])
    headings = ("", "env", "training", "sampling", "random moves", "palestra is x", "set up")
    return Sheet("Steps per second, each library on its fastest simple_spread", headings, rows)


def python_envs(results: Results, env: str, bare: Job, jobs: Sequence[Job]) -> Sheet:
    """The table of an env in Python: training rates, and their share of the rate of a bare loop."""
    raw, rows = results.rate(bare), []
    for job in [*jobs, bare]:
        share = ratio(results.rate(job), raw)
        rows.append([name(job), number(results, job), f"{share:.2f}" if share else "", notes(results, job)])
    return Sheet(f"Steps per second in training on {env}", ("", "training", "of the bare loop", "set up"), rows)


def overcooked_env(results: Results) -> Sheet:
    """The table of palestra's and JaxMARL's Overcooked."""
    rows = []
    for train, random in zip(*([*overcooked(w), theirs_on_overcooked(w)] for w in OVERCOOKED_WHATS), strict=True):
        rows.append([name(train), number(results, train), number(results, random), notes(results, train)])
    title = "Steps per second in Overcooked's cramped room, each library on its own implementation"
    return Sheet(title, ("", "training", "random moves", "set up"), rows)


def hanabi(results: Results) -> Sheet:
    """The table of palestra on OpenSpiel's Hanabi and a bare loop."""
    random, train = on_hanabi()
    rows = [[name(random), number(results, train), number(results, random), notes(results, random)]]
    rows.append([name(RAW_HANABI), "", number(results, RAW_HANABI), notes(results, RAW_HANABI)])
    return Sheet("Steps per second in OpenSpiel's Hanabi", ("", "training", "random moves", "set up"), rows)


def growth(results: Results) -> Sheet:
    """The table of palestra's training by the number of games."""
    rows = []
    for games in sorted({job.games for job in growth_jobs(SIZES) if job in results.measured or job in results.failed}):
        jobs = {job.workers: job for job in growth_jobs([games])}
        one, two = (results.rate(jobs[workers]) if workers in jobs else None for workers in (1, 2))
        times = ratio(two, one)
        shown = [number(results, jobs[workers]) if workers in jobs else "" for workers in (1, 2)]
        rows.append([f"{games}", *shown, f"{times:.2f}" if times else "", f"{games} x {jobs[1].horizon} steps"])
    headings = ("games", "1 process", "2 processes", "2 over 1", "batch")
    return Sheet("Steps per second in palestra's training, by the number of games", headings, rows)


def number(results: Results, job: Job) -> str:
    rate = results.rate(job)
    return f"{rate:,.0f}" if rate else "failed" if job in results.failed else ""


def notes(results: Results, job: Job) -> str:
    lines = results.measured.get(job)
    return lines[0]["notes"] if lines else ""


def machine() -> str:
    """Returns a description of the machine."""
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"commit {commit()}, {os.cpu_count()} cores of {processor()}, {system}"


def versions(results: Results) -> str:
    """Returns the package versions of every library."""
    lines = {}
    for job, measured in results.measured.items():
        lines[NAMES[job.script]] = ", ".join(f"{what} {version}" for what, version in measured[0]["versions"].items())
    return "; ".join(f"{who}: {line}" for who, line in sorted(lines.items()))


def page(results: Results, shown: Sequence[Sheet], load: float, repeats: int, seconds: float) -> str:
    """The tables, the machine and the versions, as Markdown."""
    how = f"Medians of {repeats} runs of {seconds:.0f} s after warm-up, in turn. {machine()}; load {load:.1f} before."
    parts = [f"{how}\n\n{versions(results)}.\n", *(sheet.markdown() for sheet in shown)]
    return "\n".join([*parts, verdicts(results).markdown()])


def verdicts(results: Results) -> Sheet:
    rows = []
    for what, value in figures(results).items():
        target = f"{'at most ' if what in AT_MOST else ''}{TARGETS[what]:g}" if what in TARGETS else ""
        rows.append([what, "not measured" if value is None else f"{value:.3g}", target])
    return Sheet("Figures", ("figure", "measured", "target"), rows)


def report_failures(results: Results) -> None:
    for job, why in results.failed.items():
        console.print(f"[red]failed:[/] {label(job)}, {job.what}: ", end="")
        console.print(why, markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of a few seconds each, fewer tables")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=PEERS, help="libraries to compare with (default: all)"
    )
    parser.add_argument("--repeats", type=int, help="runs of each job (default: 3)")
    parser.add_argument("--markdown", type=Path, help="also write the tables as Markdown to this file")
    options = parser.parse_args()
    repeats, seconds = options.repeats or (1 if options.quick else 3), 3.0 if options.quick else 12.0
    load = os.getloadavg()[0]
    if load > 0.3:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): the figures are not reliable[/]")
    for peer in options.peers:
        if options.quick and not installed(peer):
            absent(f"{peer} in an environment of its own: this script without --quick makes it, or --peers without it")
    if PONG & set(options.peers):
        try:
            zoo.options("atari_pong")  # reports a missing package now rather than after half an hour
        except ValueError as error:
            parser.error(str(error))
    for peer in options.peers:
        install(peer)
    jobs = main_jobs(options.peers, WHATS[:2] if options.quick else WHATS)
    results = measure([*jobs, *growth_jobs(SIZES[::3] if options.quick else SIZES)], seconds, repeats)
    shown = sheets(results, options.peers)
    for sheet in shown:
        console.print(sheet.rich())
    report_failures(results)
    if options.markdown:
        options.markdown.write_text(page(results, shown, load, repeats, seconds))
    found = {what: value for what, value in figures(results).items() if value is not None}
    finish("throughput", found, TARGETS, page="speed", is_stored=not options.quick)


if __name__ == "__main__":
    main()
