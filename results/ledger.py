"""Ledgers of measured rows: those published in the repository, and those measured on this machine.

A ledger has a line of JSON for each row of a results page, by name. Published lines are in
results/PAGE/measured/; what a script measures goes to runs/measured/PAGE/, and only `--publish`
copies it over what is published. So a row that is published is still measured, and both figures are
printed. Every new line has its commit and processor; lines of before have what is known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from palestra.core.files import atomic_write, read_lines
from palestra.core.processor import processor
from palestra.parallel.processes import exit_with_parent

Line = dict[str, Any]
PUBLISHED, HERE = Path("results"), Path("runs/measured")
ABSENT = 77  # exit code of a script that lacks a GPU, or a package of another environment
FIGURES = "figures"  # the file of scripts whose result is a set of figures


@cache
def commit() -> str:
    """Returns the commit of this checkout, with "-modified" if tracked files differ from it."""
    folder = Path(__file__).parent
    head = _git("rev-parse", "--short=12", "HEAD", folder=folder)
    if head is None:
        return "not a git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no", folder=folder)
    return f"{head}-modified" if changed else head


def _git(*words: str, folder: Path) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass
class Ledger:
    """The rows of the page results/PAGE. `figure` returns a row's main figure as text. `is_current` is
    False for a row that was measured with other settings than those of now. `--quick` has a file of
    its own. `name` is that of the file: a page may have several."""

    page: str
    figure: Callable[[Line], str]
    quick: bool = False
    is_current: Callable[[str, Line], bool] = lambda name, line: True
    name: str = "rows"
    published: dict[str, Line] = field(init=False)
    here: dict[str, Line] = field(init=False)

    def __post_init__(self) -> None:
        self.published = _read(self.published_file)
        self.here = _read(self.here_file)

    @property
    def published_file(self) -> Path:
        return PUBLISHED / self.page / "measured" / f"{self.name}.jsonl"

    @property
    def here_file(self) -> Path:
        return HERE / self.page / f"{self.name}{'-quick' if self.quick else ''}.jsonl"

    def is_measured(self, name: str) -> bool:
        """True if the row was measured here, with the settings of now."""
        return name in self.here and self.is_current(name, self.here[name])

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Appends a row to the file of this machine, in one write: several programs may share it."""
        line = {"name": name, **result, "commit": commit(), "processor": processor()}
        self.here_file.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.here_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)
        self.here[name] = line

    def forget(self, names: Iterable[str]) -> None:
        """Removes rows that were measured here."""
        for name in names:
            self.here.pop(name, None)
        if self.here_file.exists():
            _write(self.here_file, self.here)

    def publish(self, names: Iterable[str]) -> list[str]:
        """Copies rows that were measured here over those that are published; returns their names."""
        if self.quick:
            raise SystemExit("--publish: rows of --quick are not results")
        copied = [name for name in names if self.is_measured(name)]
        if not copied:
            raise SystemExit(f"--publish: none of these rows is in {self.here_file}")
        self.published |= {name: self.here[name] for name in copied}
        self.published_file.parent.mkdir(parents=True, exist_ok=True)
        _write(self.published_file, self.published)
        return copied

    def known(self, name: str) -> Line | None:
        """Returns the published row, or that of all its seeds if no single one is known."""
        whole, _, seed = name.rpartition("/")
        mean = self.published.get(whole, {})
        return self.published.get(name) or (mean if seed in map(str, mean.get("seeds", [])) else None)

    def compared(self, name: str) -> str:
        """Returns a row's figures: "68.0 % published, 66.7 % here"."""
        known = self.known(name)
        told = []
        if known and not self.quick:
            seeds = "" if name in self.published else f", mean of {len(known['seeds'])} seeds"
            told.append(f"{self.figure(known)} published{seeds}")
        if name in self.here:
            told.append(f"{self.figure(self.here[name])} here")
        return f"{name}: {', '.join(told)}" if told else name

    def state(self, name: str) -> str:
        """Returns whether a row is published, and whether it was measured here."""
        known = "published" if self.known(name) else "-"
        return f"{known:9}  {'measured here' if self.is_measured(name) else 'open':13}"


def _read(file: Path) -> dict[str, Line]:
    return {line["name"]: line for line in read_lines(file)}


def _write(file: Path, lines: Mapping[str, Line]) -> None:
    atomic_write(file, "".join(json.dumps(line) + "\n" for line in lines.values()).encode())


def provenance(lines: Iterable[Line]) -> str:
    """Returns a sentence of where rows were measured, for the page that shows them."""
    found = list(lines)
    known = Counter((line["commit"], line["processor"]) for line in found if "commit" in line)
    told = [
        f"{number} {'row' if number == 1 else 'rows'} at commit {at} on {where}"
        for (at, where), number in known.items()
    ]
    if old := [line for line in found if "commit" not in line]:
        text = f"commit and processor not recorded for {len(old)} rows"
        if any("added" in line for line in old):
            text += " (`added` in the ledger is the commit that published a row)"
        told.append(text)
    return f"Measured: {'; '.join(told)}."


# ---- the command


def add_options(parser: argparse.ArgumentParser, processes: int = 1) -> None:
    """Adds the options that all scripts of results have."""
    say = parser.add_argument
    say("--only", nargs="+", default=[], metavar="NAME", help="rows whose names begin with a NAME")
    say("--list", action="store_true", help="print the rows: published, measured here, open")
    say("--again", action="store_true", help="also measure rows that were measured here before")
    say("--quick", action="store_true", help="a smoke test of a few rows, not comparable")
    say("--report", action="store_true", help="only write the page, from the published rows")
    say("--publish", action="store_true", help="publish the rows measured here, and write the page")
    say("--processes", type=int, default=processes, help=f"rows at once (default: {processes})")


def choose(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Returns the names that begin with one of `only`. Raises SystemExit if one matches nothing."""
    for start in only:
        if not any(name.startswith(start) for name in names):
            known = dict.fromkeys(name.rpartition("/")[0] or name for name in names)
            listed = "\n  ".join(known)
            raise SystemExit(f"--only: no row begins with {start!r}. Rows are:\n  {listed}")
    return [name for name in names if not only or name.startswith(tuple(only))]


@dataclass
class Rows:
    """How rows are measured. `measure` runs in a process of its own. `check` raises ValueError if a
    row's config is wrong; `needs` names the rows whose runs it needs; `discard` removes its run."""

    ledger: Ledger
    measure: Callable[[str], Mapping[str, Any]]
    check: Callable[[str], object] = lambda name: None
    needs: Callable[[str], Sequence[str]] = lambda name: ()
    discard: Callable[[str], None] = lambda name: None

    def run(self, names: Sequence[str], options: argparse.Namespace) -> None:
        """Lists, publishes or measures rows, as the options say, and prints the figures of each.
        Raises SystemExit if a config is wrong or a row fails."""
        if options.list:
            for name in names:
                print(f"{self.ledger.state(name)}  {self.ledger.compared(name)}")
        elif options.publish:
            print(f"published: {', '.join(self.ledger.publish(names))}")
        elif not options.report:
            self._measure(names, options)

    def _measure(self, names: Sequence[str], options: argparse.Namespace) -> None:
        if options.again:
            self.ledger.forget(names)
            for name in names:
                self.discard(name)
        todo = self._with_needed(name for name in names if not self.ledger.is_measured(name))
        for name in todo:
            try:
                self.check(name)
            except ValueError as error:
                raise SystemExit(f"{name}: {error}") from error
        done = [name for name in names if name not in todo]
        for name in done:
            print(self.ledger.compared(name))
        if not todo:
            where = self.ledger.here_file
            print(f"nothing to do: all {len(names)} rows are in {where}. Use --again to measure them.")
            return
        if more := [name for name in todo if name not in names]:
            print(f"also measured, since other rows need their runs: {', '.join(more)}")
        print(f"{len(todo)} rows to measure, {len(done)} measured before", flush=True)
        self._measure_all(todo, options.processes)

    def _with_needed(self, names: Iterable[str]) -> list[str]:
        """Returns the rows, each after those that it needs."""
        ordered: list[str] = []
        for name in names:
            missing = [one for one in self.needs(name) if not self.ledger.is_measured(one)]
            ordered += [*self._with_needed(missing), name]
        return list(dict.fromkeys(ordered))

    def _measure_all(self, names: list[str], processes: int) -> None:
        """Measures rows as those they need are ready. After one that fails no other begins."""
        todo, running = list(names), dict[Future[Mapping[str, Any]], str]()
        failed: list[str] = []
        context = multiprocessing.get_context("spawn")
        tasks = None if self.ledger.quick else 1  # a process for each row, so that memory is freed
        with ProcessPoolExecutor(processes, context, initializer=exit_with_parent, max_tasks_per_child=tasks) as pool:
            while todo or running:
                unfinished = {*todo, *running.values()}
                ready = [name for name in todo if unfinished.isdisjoint(self.needs(name))]
                for name in ready[: processes - len(running)]:
                    running[pool.submit(self.measure, name)] = name
                    todo.remove(name)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    if error := future.exception():
                        traceback.print_exception(error)
                        failed.append(f"{name}: {type(error).__name__}: {error}")
                        todo.clear()
                        for other in running.values():
                            print(f"{name} failed; waits for {other}", file=sys.stderr, flush=True)
                        continue
                    self.ledger.add(name, future.result())
                    left = len(todo) + len(running)
                    print(f"{self.ledger.compared(name)}  ({left} left)", flush=True)
        if failed:
            raise SystemExit("\n".join(f"failed: {each}" for each in failed))


def absent(what: str) -> NoReturn:
    """Ends a script that lacks `what`, with one line and the exit code ABSENT."""
    print(f"{Path(sys.argv[0]).name} needs {what}", file=sys.stderr)
    sys.exit(ABSENT)


def finish(
    bench: str,
    figures: Mapping[str, float],
    targets: Mapping[str, float | None],
    *,
    page: str = "",
    is_stored: bool = True,
    is_published: bool = False,
    **more: Any,
) -> None:
    """Ends a script: prints the figures beside those published on `page`, if there is one, and the
    line of JSON. The figures are added to figures.jsonl in runs/measured/PAGE if `is_stored`: those of
    a smoke test are not. If `is_published`, since the script has written the page, they replace the
    published ones."""
    rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
    if is_stored:
        ledger = Ledger(page, lambda line: "", name=FIGURES)
        known = ledger.published.get(bench, {}).get("figures", {})
        for name in known.keys() & rounded.keys():
            print(f"{name}: {known[name]:g} published, {rounded[name]:g} here")
        ledger.add(bench, {"figures": rounded, **more})
        if is_published:
            ledger.publish([bench])
    print(json.dumps({"bench": bench, "figures": rounded, "targets": dict(targets), **more}))
