"""The environment in a sandbox, its limits, and the results that it reports."""

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.sandbox import ResourceLimits, RunResult, Sandbox, SandboxError, client, open_sandbox
from palestra.sandbox.base import CALL

MIB = 2**20
Run = Callable[..., RunResult]


@pytest.fixture(params=["sandlock", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bubblewrap", "unsafe"))])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program, with each backend that works here."""
    if request.param != "unsafe" and (reason := client.backend_problem(request.param)):
        pytest.skip(f"{request.param} does not work here: {reason}")
    sandbox = Sandbox(request.param)

    def one(source: str, **options: object) -> RunResult:
        return asyncio.run(sandbox.run_python(source, **options))  # type: ignore[arg-type]

    return one


@pytest.fixture
def sandbox() -> Sandbox:
    return open_sandbox(unsafe=True)


def test_a_call_whose_request_is_slow_to_arrive_delays_no_program(run: Run) -> None:
    with client.fork_server().connect(CALL) as slow:
        slow.sendall(b'{"call": ')  # the rest is still to come
        assert asyncio.run(asyncio.wait_for(asyncio.to_thread(run, "print(1)"), 30)).stdout == "1\n"
        slow.sendall(b'"operator:itemgetter", "x": 1}')
    assert run("print(2)").stdout == "2\n"  # the call ended without its line, and the server lives


# ---- the environment of a program


def test_program_uses_stdin_stdout_and_stderr(run: Run) -> None:
    outcome = run("import sys\nprint(int(input()) + int(input()))\nprint('no', file=sys.stderr)", stdin="40\n2\n")
    assert (outcome.stdout, outcome.stderr, outcome.code, outcome.ended) == ("42\n", "no\n", 0, "exit")
    assert outcome.ok and 0 < outcome.seconds < 10


def test_large_input_and_output(run: Run) -> None:
    text = "x" * (3 * MIB)
    outcome = run(
        "import sys; print(len(sys.stdin.read())); print('y' * 500_000)", stdin=text, limits=ResourceLimits(output=MIB)
    )
    assert outcome.ok and outcome.stdout == f"{len(text)}\n{'y' * 500_000}\n"


def test_unread_input_does_not_block(run: Run) -> None:
    assert run("print(1)", stdin="x" * MIB).stdout == "1\n"


def test_files_are_passed_in_and_out(run: Run) -> None:
    source = """
import helper, os
data = open("deep/data.bin", "rb").read()
os.makedirs("new/er"); open("new/er/out.bin", "wb").write(data[::-1]); os.remove("deep/data.bin")
os.symlink("/etc/passwd", "link")
print(helper.word, os.listdir("."))
"""
    files = {"helper.py": "word = 'hello'", "deep/data.bin": b"\x00\xff\x80"}
    outcome = run(source, files=files, keep=True)
    assert outcome.ok and outcome.stdout.startswith("hello ")
    assert outcome.files == {"helper.py": b"word = 'hello'", "new/er/out.bin": b"\x80\xff\x00"}
    assert run("print(1)", files=files).files == {}


def test_only_named_files_are_returned_up_to_the_limit(run: Run) -> None:
    source = """
import os
open("a", "w").write("0123456789")
open("b", "wb").write(b"\\xff" * 8_000_000)
os.symlink("a", "link")
os.mkdir("folder")
os.mkfifo("pipe")
"""
    wanted = {"a": 100, "b": 3, "link": 100, "folder": 100, "pipe": 100, "missing": 100}
    assert run(source, keep=wanted).files == {"a": b"0123456789", "b": b"\xff\xff\xff"}


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "folder/a", "..", ""])
def test_kept_files_must_be_in_the_folder(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="give a plain name"):
        asyncio.run(sandbox.run_python("print(1)", keep={name: 10}))


def test_each_run_has_its_own_folder(run: Run) -> None:
    assert run("open('left', 'w').close()").ok
    assert run("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_program_runs_in_ordinary_python(run: Run) -> None:
    source = """
import dataclasses, multiprocessing, pickle, shutil, subprocess, sys, tempfile, threading
@dataclasses.dataclass
class Point:
    x: int
print(__name__, sys.argv, pickle.loads(pickle.dumps(Point(3))))
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
process = multiprocessing.Process(target=print, args=("process",)); process.start(); process.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout.strip())
open("a", "w").write("copied"); shutil.copy("a", "b"); print(open("b").read())
with tempfile.NamedTemporaryFile() as file: print(file.write(b"123"))
print("ünïcödé")
exit(3)
"""
    outcome = run(source)
    assert outcome.stderr == "" and outcome.code == 3
    assert outcome.stdout.splitlines() == [
        *("__main__ ['main.py'] Point(x=3)", "thread", "process", "child", "copied", "3", "ünïcödé"),
    ]


def test_only_the_standard_library_is_available(run: Run) -> None:
    assert "No module named 'numpy'" in run("import numpy").stderr


def test_the_environment_is_clean(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    client.stop_fork_server()
    monkeypatch.setenv("PALESTRA_TEST_SECRET", "hush")
    outcome = run("import os; print(*sorted(os.environ))")
    assert set(outcome.stdout.split()) <= {
        *("HOME", "LANG", "LC_CTYPE", "MALLOC_ARENA_MAX", "PWD", "PYTHONHASHSEED", "TMPDIR"),
    }


def test_equal_programs_give_equal_output(run: Run) -> None:
    source = "print({f'{i}' for i in range(50)}, hash('x'))\nraise ValueError(__import__('os').getcwd())"
    first, second = run(source), run(source)
    assert first.stdout and (first.stdout, first.stderr) == (second.stdout, second.stderr)


# ---- ends


def test_traceback_names_the_program_only(run: Run) -> None:
    outcome = run("def f():\n    1 / 0\nf()")
    assert (outcome.ended, outcome.code, outcome.ok) == ("exit", 1, False)
    assert outcome.stderr == (
        "Traceback (most recent call last):\n"
        '  File "main.py", line 3, in <module>\n  File "main.py", line 2, in f\nZeroDivisionError: division by zero\n'
    )


def test_syntax_error_is_reported_in_the_program(run: Run) -> None:
    outcome = run("print(1)\nprint(")
    assert outcome.code == 1 and outcome.stdout == ""
    assert outcome.stderr.startswith('  File "main.py", line 2') and "SyntaxError" in outcome.stderr


def test_null_byte_in_the_source_is_reported(run: Run) -> None:
    outcome = run("print(1)\0")
    assert outcome.code == 1 and "null byte" in outcome.stderr


def test_signal_is_reported(run: Run) -> None:
    outcome = run("import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (outcome.ended, outcome.code, outcome.stdout) == ("signal", -11, "so far\n")


def test_undecodable_output_is_replaced(run: Run) -> None:
    assert run("import os; os.write(1, b'a\\xff')").stdout == "a\N{REPLACEMENT CHARACTER}"


# ---- limits


def test_wall_limit(run: Run) -> None:
    outcome = run("import time; print('begun', flush=True); time.sleep(60)", limits=ResourceLimits(wall=0.5))
    assert (outcome.ended, outcome.code, outcome.ok, outcome.stdout) == ("wall", None, False, "begun\n")
    assert 0.5 <= outcome.seconds < 2


@pytest.mark.parametrize("heed", ["signal.signal(n, signal.SIG_IGN)", "signal.signal(n, lambda *_: None)"])
def test_wall_limit_with_ignored_signals(run: Run, heed: str) -> None:
    source = f"import signal, time\nfor n in (1, 2, 3, 13, 14, 15, 24): {heed}\nwhile True: time.sleep(9)"
    assert run(source, limits=ResourceLimits(wall=0.5)).ended == "wall"


def test_wall_limit_for_a_stopped_program(run: Run) -> None:
    assert (
        run("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", limits=ResourceLimits(wall=0.5)).ended == "wall"
    )


def test_wall_limit_for_closed_pipes(run: Run) -> None:
    source = "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(60)"
    assert run(source, limits=ResourceLimits(wall=0.5)).ended == "wall"


def test_cpu_limit(run: Run) -> None:
    outcome = run("while True: pass", limits=ResourceLimits(wall=60, cpu=0.4))
    assert outcome.ended == "cpu"


def test_cpu_limit_counts_all_processes(run: Run) -> None:
    source = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end: pass
        os._exit(0)
    os.wait()
time.sleep(60)
"""
    assert run(source, limits=ResourceLimits(wall=30, cpu=0.8)).ended == "cpu"


def test_a_program_that_sleeps_uses_no_cpu(run: Run) -> None:
    assert run("import time; time.sleep(0.6)", limits=ResourceLimits(wall=10, cpu=0.5)).ok


@pytest.mark.parametrize("size", [200, 10_000])
def test_memory_limit(run: Run, size: int) -> None:
    """Slightly too much is found by the monitor, far too much is refused by the kernel."""
    outcome = run(f"x = b'x' * ({size} * 2**20); print('got it')", limits=ResourceLimits(memory=100 * MIB))
    assert (outcome.ended, outcome.stdout) == ("memory", "")


def test_memory_below_the_limit(run: Run) -> None:
    assert run("x = b'x' * (80 * 2**20); print(len(x))", limits=ResourceLimits(memory=120 * MIB)).ok


def test_memory_limit_counts_all_processes(run: Run) -> None:
    source = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = b'x' * (40 * 2**20)
        time.sleep(60)
time.sleep(60)
"""
    assert run(source, limits=ResourceLimits(wall=30, memory=150 * MIB)).ended == "memory"


def test_shared_memory_counts_once(run: Run) -> None:
    source = """
import os, time
x = b'x' * (60 * 2**20)
children = [os.fork() or (time.sleep(0.5), os._exit(0)) for _ in range(6)]
for _ in children: os.wait()
print('done')
"""
    assert run(source, limits=ResourceLimits(memory=150 * MIB)).stdout == "done\n"


def test_unused_reserved_stacks_do_not_count(run: Run) -> None:
    source = "import threading; threading.stack_size(2**28); threading.Thread(target=print, args=(1,)).start()"
    assert run(source).stdout == "1\n"


def test_process_limit(run: Run) -> None:
    source = """
import os, time
made = 0
try:
    for _ in range(60):
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
        print(made, flush=True)
        time.sleep(0.005)
except OSError:
    pass
"""
    outcome = run(source, limits=ResourceLimits(wall=5, processes=8))
    assert 4 <= int(outcome.stdout.split()[-1]) < 30
    if outcome.ended == "exit":  # the kernel refused
        assert int(outcome.stdout.split()[-1]) == 7


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_limit(run: Run, stream: str) -> None:
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", limits=ResourceLimits(output=5000))
    assert outcome.ended == "output" and outcome.code is None
    assert getattr(outcome, stream) == "x" * 5000


def test_output_up_to_the_limit(run: Run) -> None:
    assert run("print('x' * 4999)", limits=ResourceLimits(output=5000)).ok


def test_file_size_limit(run: Run) -> None:
    outcome = run("open('a', 'wb').write(b'x' * 3_000_000)", limits=ResourceLimits(disk=MIB), keep=True)
    assert outcome.code == 1 and "File too large" in outcome.stderr
    assert sum(map(len, outcome.files.values())) <= MIB


def test_total_file_size_limit(run: Run) -> None:
    source = "import itertools\nfor i in itertools.count(): open(f'{i}', 'wb').write(b'x' * 9000)"
    outcome = run(source, limits=ResourceLimits(disk=MIB), keep=True)
    assert outcome.ended == "output" and sum(map(len, outcome.files.values())) <= MIB


def test_crash_starts_no_core_dump_handler(run: Run) -> None:
    """A limit of 1, not 0, keeps Linux from starting a program that collects crashes."""
    most = min(1, resource.getrlimit(resource.RLIMIT_CORE)[1] % 2**64)
    assert run("import resource; print(*resource.getrlimit(resource.RLIMIT_CORE))").stdout == f"{most} {most}\n"


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="processes is 0"):
        ResourceLimits(processes=0)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_outside_the_folder_are_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        asyncio.run(sandbox.run_python("print(1)", files={name: ""}))


# ---- concurrency, and leftovers


def test_hung_programs_do_not_block_others(sandbox: Sandbox) -> None:
    async def both() -> tuple[list[RunResult], int]:
        source, limits = "import time; time.sleep(99)", ResourceLimits(wall=60)
        hanging = [asyncio.create_task(sandbox.run_python(source, limits=limits)) for _ in range(12)]
        await asyncio.sleep(0)
        quick = await asyncio.gather(*(sandbox.run_python("print(1)") for _ in range(5)))
        over = sum(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await wait_until(lambda: not supervisors())
        return quick, over

    quick, over = asyncio.run(both())
    assert all(outcome.ok for outcome in quick) and over == 0


def test_cancelling_ends_the_program(sandbox: Sandbox, tmp_path: Path) -> None:
    source = "import os, time\nopen('up', 'w').close()\nif os.fork() == 0: os.setsid()\ntime.sleep(60)"

    async def cancelled() -> None:
        await wait_until(lambda: not supervisors())  # a sandbox of an earlier test may not have ended yet
        task = asyncio.create_task(sandbox.run_python(source, limits=ResourceLimits(wall=60)))
        await wait_until(lambda: len(supervisors()) == len(folders()) == 1)
        (folder,) = folders()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: not supervisors())
        assert folder.name not in {path.name for path in run_folders_in(Path("/"))}

    asyncio.run(cancelled())


def test_dead_fork_server_is_replaced(sandbox: Sandbox) -> None:
    first = asyncio.run(sandbox.run_python("print(1)"))
    process = client.fork_server().process  # by then there may be a new one
    process.kill()
    process.wait()
    assert replace(asyncio.run(sandbox.run_python("print(1)")), seconds=0) == replace(first, seconds=0)


def test_killed_supervisor_leaves_nothing(sandbox: Sandbox) -> None:
    """As the kernel kills it when memory runs out."""

    async def killed() -> None:
        await wait_until(lambda: not supervisors())  # a sandbox of an earlier test may not have ended yet
        task = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)", limits=ResourceLimits(wall=60)))
        await wait_until(lambda: len(supervisors()) == len(folders()) == 1)
        (supervisor,) = supervisors()
        (folder,) = folders()
        os.kill(supervisor, 9)
        with pytest.raises(SandboxError, match="supervisor process died"):
            await task
        await wait_until(lambda: not supervisors())
        assert folder.name not in {path.name for path in run_folders_in(Path("/"))}

    asyncio.run(killed())


def test_runs_from_several_loops_and_threads(sandbox: Sandbox) -> None:
    async def threads() -> list[str]:
        one = lambda i: asyncio.run(sandbox.run_python(f"print({i})")).stdout  # noqa: E731
        return list(await asyncio.gather(*(asyncio.to_thread(one, i) for i in range(4))))

    assert asyncio.run(threads()) == ["0\n", "1\n", "2\n", "3\n"]


# ---- choice of the backend


def test_first_working_sandbox_is_used() -> None:
    works = [name for name in client.BACKENDS_BY_PREFERENCE if client.backend_problem(name) is None]
    if not works:
        pytest.skip("no sandbox works here")
    assert open_sandbox().name == works[0] == open_sandbox(unsafe=True).name


@pytest.fixture
def without_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the package sandlock nor bwrap is available."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    client.backend_problem.cache_clear()
    yield
    client.backend_problem.cache_clear()


def test_no_working_sandbox_is_refused_unless_unsafe(without_backends: None) -> None:
    with pytest.raises(ValueError) as error:
        open_sandbox()
    for word in ("the package is not installed", "pip install 'palestra[sandbox]'", "no program bwrap", "unsafe: true"):
        assert word in str(error.value)
    assert open_sandbox(unsafe=True).name == "unsafe"


async def wait_until(happened: Callable[[], bool], most: float = 10.0) -> None:
    end = time.monotonic() + most
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


def supervisors() -> list[int]:
    """The children of this process's fork server."""
    fork_server = client.fork_server().process.pid
    return [int(pid) for pid in Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()]


def folders() -> list[Path]:
    """The folders of runs of this process's fork server, as its supervisors see them."""
    return [
        path for pid in supervisors() for path in run_folders_in(Path(f"/proc/{pid}/root")) if path.name == f"{pid}"
    ]


def run_folders_in(root: Path) -> list[Path]:
    """The folders of runs of any fork server."""
    return list((root / os.environ.get("TMPDIR", "/tmp").lstrip("/")).glob("palestra-sandbox-*/*"))
