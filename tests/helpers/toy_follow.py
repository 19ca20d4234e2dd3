"""Runs of `toy_tasks`. As a program it resumes such a run, in a process that tests kill:
python -m toy_follow RUN BACKEND LEAVES N SECONDS"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

from helpers.toy_tasks import Adder, Sums

from palestra.parallel.inline import InlineBackend
from palestra.parallel.local import LocalBackend
from palestra.populations.scheduler import run_plan
from palestra.runs import Run

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.move")


def new_run(root: Path, name: str = "demo") -> Run:
    return Run.create(root, "leaves: 8\n", name)


def done_run(root: Path, leaves: int = 8, name: str = "demo") -> tuple[Path, Sums]:
    plan, backend = Sums(leaves), InlineBackend(Adder)
    with new_run(root, name) as run:
        assert run_plan(plan, backend, run)
    backend.close()
    return run.path, plan


def resume(path: Path, leaves: int = 8) -> Sums:
    plan, backend = Sums(leaves), InlineBackend(Adder)
    with Run.open(path) as run:
        assert run_plan(plan, backend, run)
    backend.close()
    return plan


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a run that is determined by its plan."""
    others = ("meta.json", "timings.jsonl", "workers.jsonl", ".lock")
    files = [file for file in path.rglob("*") if file.is_file() and file.name not in others]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def main(path: str, backend: str, leaves: str, deadly: str = "-1", seconds: str = "0.01") -> None:
    """The process kills itself (-9) before its file operation number `deadly`; Ctrl-C requests a stop."""
    count = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS:
            if count == int(deadly):
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    make = partial(Adder, float(seconds))
    workers = LocalBackend(make, 2) if backend == "local" else InlineBackend(make)
    with Run.open(path) as run:
        sys.addaudithook(hook)
        run_plan(Sums(int(leaves)), workers, run, stop=lambda: bool(stopped))
    workers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
