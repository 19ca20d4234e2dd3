"""Local sampler processes of a run: started with it, restarted when they die, stopped with it."""

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

from palestra.core.stop_signals import stop_signals_blocked
from palestra.parallel.processes import exit_reason, wait_or_kill
from palestra.text.samplers.wire import KEY_VARIABLE, READY_PREFIX

SERVE_COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "from palestra.cli.main import app; app()",
    "serve-sampler",
    "--port",
    "0",
    "--with-parent",
]
MAX_START_ATTEMPTS = 3  # starts in a row that may fail before the process serves
USAGE_ERROR_EXIT_CODE = 2  # exit code of a usage error, which a restart cannot fix
STOP_TIMEOUT_S = 5.0  # seconds until a terminated process is killed


@dataclass(eq=False)
class SamplerProcess:
    """A `palestra serve-sampler` process.

    `gpu`: the only CUDA device it sees (None: all). `log`: file of its stderr.
    """

    options: Sequence[str]
    key: str
    log: Path
    gpu: int | None = None
    process: subprocess.Popen[bytes] | None = None
    url: str | None = None
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Starts the process and returns at once; `wait_url` waits until it serves."""
        device = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        self.url = None
        with open(self.log, "ab") as log, stop_signals_blocked():  # it answers until this process stops it
            self.process = subprocess.Popen(
                [*SERVE_COMMAND, *self.options],
                stdin=subprocess.PIPE,  # the server stops when this pipe closes, so it ends with this process
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | device | {KEY_VARIABLE: self.key},
                start_new_session=True,
            )

    def wait_url(self) -> str:
        """Waits until the process serves and returns its URL; restarts a dead process.

        Raises ValueError if it has been stopped, exits with a usage error, or dies `MAX_START_ATTEMPTS` times before it
        serves; the message has its exit code and the last lines of its log.
        """
        with self._lock:
            for attempt in range(MAX_START_ATTEMPTS):
                if self.is_stopped:
                    raise ValueError("the sampler processes have been ended")
                assert self.process is not None
                if self.process.poll() is None and (self.url or self._read_url()):
                    assert self.url is not None
                    return self.url
                self.stop()
                code = self.process.returncode
                if code == USAGE_ERROR_EXIT_CODE or attempt == MAX_START_ATTEMPTS - 1:
                    break
                self.start()
            raise ValueError(f"a sampler process does not start ({exit_reason(code)}): {self._complaint()}")

    def _read_url(self) -> bool:
        """Waits for the first output line or the end of the process; returns True if the line has the URL."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if line.startswith(READY_PREFIX):
            self.url = line.removeprefix(READY_PREFIX).split()[0]
        return self.url is not None

    def _complaint(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " ".join(lines[-12:]) or "it says nothing"

    def begin_stop(self) -> None:
        """Closes the process's standard input, so that it ends after its requests; kills it if it does not serve
        yet."""
        if self.process is None:
            return
        if self.url is None:
            self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        """Ends the process, kills it after `STOP_TIMEOUT_S` seconds, and closes its pipes."""
        if self.process is None:
            return
        self.begin_stop()
        wait_or_kill(self.process, STOP_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class SamplerProcesses:
    """Sampler processes with a common random API key.

    They stop with `close`, when this object is garbage-collected, and when this process ends in any way.
    """

    def __init__(self, options: Sequence[str], count: int, gpus: Sequence[int], log_folder: Path) -> None:
        self.key = secrets.token_urlsafe(24)
        devices: list[int | None] = [*gpus] or [None] * count
        self.children = [
            SamplerProcess(options, self.key, log_folder / f"sampler-{i}.log", gpu) for i, gpu in enumerate(devices)
        ]
        self.close = weakref.finalize(self, _end, self.children)
        for child in self.children:
            child.start()


def _end(children: Sequence[SamplerProcess]) -> None:
    for child in children:
        child.is_stopped = True
        child.begin_stop()
    for child in children:
        child.stop()
