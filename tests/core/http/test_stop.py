"""A server stops on request, whatever it is doing."""

import signal
import subprocess
import sys
import time

import pytest

WELL = "import threading; begun = threading.Event(); on_stop(begun.set, 60); print(flush=True); begun.wait()"
STUCK = "on_stop(lambda: None, {seconds}); print(flush=True)\nwhile True: pass"  # no event loop would receive a signal


def started(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from palestra.core.http.server import on_stop; {code}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout
    process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_shuts_down_gracefully(number: signal.Signals) -> None:
    process = started(WELL)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_hung_server_is_ended_with_a_traceback() -> None:
    process = started(STUCK.format(seconds=0.2))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and "Timeout" in said and "most recent call first" in said


def test_second_signal_exits_at_once() -> None:
    process = started(STUCK.format(seconds=60))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)  # otherwise both signals would be merged
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
