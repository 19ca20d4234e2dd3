"""Servers of envs for measurements, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def servers(number: int, envs: str, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts servers of `envs` on free ports, each a process with its address in `address`; ends them on exit."""
    command = [str(Path(sys.executable).parent / "palestra"), "serve-envs", "--envs", envs, "--port", "0", *options]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # of envs in bench/
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(number)]
    try:
        for process in processes:
            assert process.stdout
            process.address = process.stdout.readline().split()[-1]  # type: ignore[attr-defined]
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate()
