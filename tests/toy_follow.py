"""Goes on with a run of `toy_tasks`, in a process that tests end: python -m toy_follow RUN BACKEND LEAVES N SECONDS"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from toy_tasks import Adder, Sums

from palestra.backends.inline import Inline
from palestra.backends.local import Local
from palestra.populations.scheduler import follow
from palestra.runs import Run

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.move")


def main(path: str, backend: str, leaves: str, deadly: str = "-1", seconds: str = "0.01") -> None:
    """The process kills itself (-9) before its file operation number `deadly`; Ctrl-C stops it in good order."""
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
    workers = Local(make, 2) if backend == "local" else Inline(make)
    with Run.open(path) as run:
        sys.addaudithook(hook)
        follow(Sums(int(leaves)), workers, run, stop=lambda: bool(stopped))
    workers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
