"""Sampler processes on this machine, started for a run, started again when they die, ended with it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palestra.remote.sampler_wire import KEY, READY

COMMAND = [sys.executable, "-c", "from palestra.cli import app; app()", "serve-sampler", "--port", "0", "--with-parent"]
TRIES = 3  # processes in a row that may die before they serve
MISTAKE = 2  # the exit code of what no second try will mend
FAREWELL = 5.0  # seconds that a process has to end


@dataclass(eq=False)
class Child:
    """One process of `palestra serve-sampler`; `gpu` is the one device that it sees. Its complaints go to `log`."""

    options: Sequence[str]
    key: str
    log: Path
    gpu: int | None = None
    process: subprocess.Popen[bytes] | None = None
    url: str | None = None
    over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Returns at once: `where` waits until it serves."""
        device = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        self.url = None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self.options],
                stdin=subprocess.PIPE,  # it ends with this process, which holds the other end
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | device | {KEY: self.key},
                start_new_session=True,  # Ctrl-C is this process's to handle
            )

    def where(self) -> str:
        """Its address, once it serves; where it died it is started again. Raises ValueError where it cannot serve, or
        dies three times before it does."""
        with self._lock:
            for _ in range(TRIES):
                if self.over:
                    raise ValueError("the sampler processes have been ended")
                assert self.process is not None
                if self.process.poll() is None and (self.url or self._heard()):
                    assert self.url is not None
                    return self.url
                self.end()
                if self.process.returncode == MISTAKE:
                    break
                self.start()
            raise ValueError(f"a sampler process does not start: {self._complaint()}")

    def _heard(self) -> bool:
        """Whether it says where it serves: waits for its first line, or its end."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if line.startswith(READY):
            self.url = line.removeprefix(READY).split()[0]
        return self.url is not None

    def _complaint(self) -> str:
        said = self.log.read_text(errors="replace").strip().splitlines()
        return " ".join(said[-12:]) or "it says nothing"

    def end(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


class Processes:
    """Some processes that share a key nobody else knows. They end when this object does, or the process, however."""

    def __init__(self, options: Sequence[str], count: int, gpus: Sequence[int], logs: Path) -> None:
        self.key = secrets.token_urlsafe(24)
        devices: list[int | None] = [*gpus] or [None] * count
        self.children = [Child(options, self.key, logs / f"sampler-{i}.log", gpu) for i, gpu in enumerate(devices)]
        self.close = weakref.finalize(self, _end, self.children)
        for child in self.children:
            child.start()


def _end(children: Sequence[Child]) -> None:
    for child in children:
        child.over = True
        if child.process:
            child.process.terminate()
    for child in children:
        child.end()
