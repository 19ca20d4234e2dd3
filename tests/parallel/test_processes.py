"""Child processes end when they should, and report how they ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.toy_processes import describe, echo, sleep_long

from palestra.parallel.processes import PipeProcess, exit_reason, join_or_kill, start_process, wait_or_kill


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_pipe_process_ends_when_its_pipe_closes() -> None:
    child = PipeProcess(echo, "to you: ", daemon=True)
    child.pipe.send("hello")
    assert child.pipe.recv() == "to you: hello"
    child.stop(30)
    assert child.exit_reason() == "exit code 0"


def test_pipe_of_a_killed_process_closes() -> None:
    child = PipeProcess(echo, "", daemon=True)
    child.process.kill()
    with pytest.raises((EOFError, ConnectionError)):
        child.pipe.recv()
    child.stop(30)
    assert child.exit_reason() == "exit code -9, SIGKILL"


def test_child_process_does_not_receive_ctrl_c() -> None:
    child = PipeProcess(echo, "", daemon=True)
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGINT)  # before its first line of code
    child.pipe.send("still here")
    assert child.pipe.recv() == "still here"
    os.kill(child.process.pid, signal.SIGINT)
    child.pipe.send("and now")
    assert child.pipe.recv() == "and now"
    child.stop(30)


def test_process_that_exceeds_the_join_timeout_is_killed() -> None:
    process = start_process(sleep_long, (), daemon=True)
    assert join_or_kill(process, 0.1) and process.exitcode == -signal.SIGKILL
    assert not join_or_kill(process, 0.1)


def test_command_that_exceeds_its_timeout_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    wait_or_kill(process, 0.1)
    assert process.returncode == -signal.SIGKILL


def test_orphaned_busy_child_cleans_up_and_exits(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from palestra.parallel.processes import PipeProcess
from helpers.toy_processes import wait_for_parent
child = PipeProcess(wait_for_parent, {str(note)!r})
print(child.pipe.recv(), flush=True)
child.pipe.recv()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(note.exists)
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("variable", ["OF_A_USER", "OMP_OF_A_LIBRARY"])
def test_a_child_takes_over_the_environment_and_the_outputs_of_now(variable, monkeypatch, capfd):
    first = describe_child()
    monkeypatch.setenv(variable, "new")
    second = describe_child()
    monkeypatch.delenv(variable)
    third = describe_child()
    assert [variable in environment for _, environment, _ in (first, second, third)] == [False, True, False]
    assert capfd.readouterr().err == "a word\nand the end\n" * 3
    assert len({number for _, _, number in (first, second, third)}) == 3  # the global generator of NumPy
    forked = sys.platform == "linux"
    assert (first[0] == third[0] != os.getpid()) == forked
    assert (second[0] == first[0]) == (
        forked and variable == "OF_A_USER"
    )  # a library would not read its variable again


def describe_child() -> tuple[int, dict[str, str], float]:
    child = PipeProcess(describe, daemon=True)
    told = child.pipe.recv()
    child.process.join()
    assert child.exit_reason() == "exit code 0"
    assert told[1].items() >= os.environ.items() and "PYTHONSAFEPATH" not in told[1]
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_the_fork_server_survives_sigterm_and_ends_with_its_parent():
    """It leaves nothing in the folder of temporary files."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from palestra.parallel.processes import PipeProcess
from helpers.toy_processes import describe, sleep_with
print(PipeProcess(describe).pipe.recv()[0], flush=True)
for line in sys.stdin:
    child = PipeProcess(sleep_with)
    print(child.pipe.recv(), child.process.exitcode, flush=True)
"""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, whose name is too long for sockets
        end_fork_server(code, Path(folder))


def end_fork_server(code: str, folder: Path) -> None:
    pipe, environment = subprocess.PIPE, os.environ | {"TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert parent.stdin and parent.stdout
    server = int(parent.stdout.readline())
    os.kill(server, signal.SIGTERM)  # as a cluster sends it to all processes
    os.kill(server, signal.SIGINT)
    parent.stdin.write("start another\n")
    parent.stdin.flush()
    child, forked_by, exit_code = parent.stdout.readline().split()
    assert int(forked_by) == server and exit_code == "None"
    assert list(folder.iterdir())
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()  # not read to its end: the fork holds it, too
    wait_until(lambda: not is_running(server))  # although its fork still runs
    assert is_running(int(child))
    assert not list(folder.iterdir())
    os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: not is_running(int(child)))


def test_exit_reason_names_the_signal() -> None:
    assert exit_reason(3) == "exit code 3" and exit_reason(-11) == "exit code -11, SIGSEGV"
    assert exit_reason(-40) == "exit code -40"  # a real-time signal, which has no name
