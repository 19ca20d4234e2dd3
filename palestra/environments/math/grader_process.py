"""The grader process: a server that forks a child for each request, started by `grader_client.py`.

Mathematics is parsed by sympy, which some expressions keep busy forever, in code that no exception interrupts. A child
that exceeds its time is killed by a kernel timer, whatever it does and even if the server is gone; the server has sympy
loaded, so a child costs a few milliseconds. A few children run at once; a child that takes long no longer counts among
them, so a hanging child does not delay the others.

A child confines itself (`confinement.py`) before it reads an answer. It sends its score through a pipe to the server,
which accepts it only if the child then exits with status 0: an exit status alone is not a score.

Run as a file and not as a module, it imports nothing of palestra and no torch: `python -P grader_process.py math
FILTER`. Each input line is a request, {"id": 1, "answer": ..., "gold": ..., "seconds": 2.0}; each output line a reply,
{"id": 1, "ended": "scored", "score": 1.0}, where `ended` is how grading ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

GraderOutcome = Literal["scored", "unreadable", "overtime", "crashed"]
MAX_YOUNG_CHILDREN = 4  # young children at once: more would only slow each other down
YOUNG_CPU_S = 0.1  # seconds of CPU time after which a child no longer delays the next one
SLOW_CHILD_NICENESS = 5  # priority of older children: lower, but not so low that they starve
MAX_CHILDREN = 64  # children at once
EXTRA_WALL_TIME_S = 30  # seconds of wall time beyond the CPU limit: a busy machine must not make an answer wrong
DIE_WITH_PARENT, NO_NEW_PRIVILEGES, SECCOMP = 1, 38, 22  # options of prctl
MAX_ADDRESS_SPACE_BYTES = 2 * 2**30  # bytes of address space; a tower of powers would take all memory
MAX_REPORT_BYTES = 64  # bytes of a child's report
DECIMAL_TOLERANCE = 1e-6  # relative tolerance for a decimal compared with a closed form

Request = dict[str, Any]


class Grader(NamedTuple):
    """`judge` returns a score in [0, 1], or None for an unreadable answer. `prepare` runs in the server, once for each
    request: children inherit what it caches.
    """

    grade: Callable[[Request], float | None]
    prepare: Callable[[Request], object]


def math_grader() -> Grader:
    """Grades with `math-verify`.

    Its own time limits are disabled: they are signals, which do not interrupt C code. Texts are parsed as LaTeX only:
    math-verify passes plain expressions to sympy's `parse_expr`, which evaluates them.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    form = import_sibling("expression_form")

    def read(text: str) -> Any:
        found = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        return next((one for one in found if not isinstance(one, str)), None)

    def is_equal(gold: Any, answer: Any) -> bool:
        near = form.is_near(gold, answer, DECIMAL_TOLERANCE)
        if near is not None:
            return bool(near)
        return bool(verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True))

    def is_given(gold: Any, texts: Sequence[str]) -> bool:
        given = [found for found in map(read, texts) if found is not None]
        sides = [side for found in given if hasattr(found, "lhs") for side in found.args]
        return any(is_equal(gold, found) for found in given + sides)

    def judge(request: Request) -> float | None:
        gold, answer = read(request["gold"]), read(request["answer"])
        if answer is None:
            return None
        if gold is None or not form.is_finished(answer, gold) or not is_equal(gold, answer):
            return 0.0
        if form.keeps_form(answer, gold):
            return 1.0
        return float(not (request["asks_for_form"] or is_given(gold, request["given"])))

    # warm-up: sympy and the parser initialise caches on first use
    for gold, answer in (("x > 1/2", "\\frac{1}{2} < x"), ("2\\pi", "6.28"), ("(x+1)^2", "x(x+2)+1")):
        judge({"gold": gold, "answer": answer, "asks_for_form": False, "given": []})
    return Grader(judge, lambda request: None)


def reasoning_grader() -> Grader:
    """Grades with the scorer of the requested task, or with sympy if the request holds formulas as trees."""
    package, form = import_reasoning_gym(), import_sibling("expression_form")

    @lru_cache(maxsize=256)
    def task(name: str, size: int) -> Any:
        return package.create_dataset(name, seed=0, size=size)

    @lru_cache(maxsize=4096)
    def entry(name: str, size: int, index: int) -> Any:
        return task(name, size)[index]

    def judge(request: Request) -> float | None:
        if "formula" in request:
            return float(form.formulas_equal(request))
        made = prepare(request)
        if str(made["question"]) != request["question"]:
            raise ValueError("another problem was made of the same seed")
        scorer = task(request["task"], request["size"])
        return min(max(float(scorer.score_answer(answer=request["answer"], entry=made)), 0.0), 1.0)

    def prepare(request: Request) -> Any:
        return None if "formula" in request else entry(request["task"], request["size"], request["index"])

    return Grader(judge, prepare)


def import_sibling(name: str) -> Any:
    """Imports and returns a module of this folder by its path, without the package."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def import_reasoning_gym() -> Any:
    """Imports and returns the package; also used to generate problems."""
    import reasoning_gym

    return reasoning_gym


class Child(NamedTuple):
    """A child's request id, its start time (monotonic, s), and the read end of the pipe for its report."""

    request_id: int
    started_at_s: float
    report_fd: int


class GraderServer:
    """The running children by process id, and the queue of requests."""

    def __init__(self, judge: Grader, rules: bytes, replies: int) -> None:
        self.grader, self.seccomp_filter, self.reply_fd = judge, rules, replies
        self.queue: deque[Request] = deque()
        self.running: dict[int, Child] = {}
        self.slow_children: set[int] = set()

    def serve(self) -> None:
        """Runs until stdin is closed, which the system does when the parent process ends for any reason."""
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        unread = b""
        while True:
            ready, _, _ = select.select(
                [0, wakeup_read], [], [], YOUNG_CPU_S if len(self.running) > len(self.slow_children) else None
            )
            if wakeup_read in ready:
                os.read(wakeup_read, 4096)
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return self.stop()
                *lines, unread = (unread + data).split(b"\n")
                self.queue.extend(map(json.loads, lines))
            self.reap()
            self.lower_priorities()
            self.start()

    def start(self) -> None:
        """Forks children for waiting requests, within the limits `MAX_YOUNG_CHILDREN` and `MAX_CHILDREN`."""
        while (
            self.queue
            and len(self.running) < MAX_CHILDREN
            and len(self.running) - len(self.slow_children) < MAX_YOUNG_CHILDREN
        ):
            request = self.queue.popleft()
            with contextlib.suppress(Exception):  # the child fails in the same way and is reported as crashed
                self.grader.prepare(request)
            report, end = os.pipe()
            server, child = os.getpid(), os.fork()
            if not child:
                run_child(self.grader.grade, request, self.seccomp_filter, server, end)
            os.close(end)
            self.running[child] = Child(request["id"], time.monotonic(), report)

    def lower_priorities(self) -> None:
        """Lowers the priority of children that have used more than `YOUNG_CPU_S` seconds of CPU time."""
        for child, (_, began, _) in self.running.items():
            if child not in self.slow_children and _used(child, began) > YOUNG_CPU_S:
                self.slow_children.add(child)
                os.setpriority(os.PRIO_PROCESS, child, SLOW_CHILD_NICENESS)

    def reap(self) -> None:
        """Collects ended children and writes their replies."""
        while self.running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            name, _, report = self.running.pop(child)
            self.slow_children.discard(child)
            with os.fdopen(report, "rb") as pipe:
                ended, score = child_outcome(status, pipe.read(MAX_REPORT_BYTES))
            write_line(self.reply_fd, {"id": name, "ended": ended, "score": score})

    def stop(self) -> None:
        """Kills all children."""
        for child in self.running:
            os.kill(child, signal.SIGKILL)


def _used(child: int, began: float) -> float:
    """Returns a child's CPU time in seconds; without /proc, its elapsed time."""
    try:
        with open(f"/proc/{child}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return time.monotonic() - began
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_outcome(status: int, report: bytes) -> tuple[GraderOutcome, float]:
    """Returns how grading ended and the score, from a child's wait status and the bytes it wrote to its pipe."""
    code = os.waitstatus_to_exitcode(status)
    if code:
        return ("overtime" if -code in (signal.SIGPROF, signal.SIGALRM) else "crashed"), 0.0
    try:
        score = json.loads(report)
    except ValueError:
        return "crashed", 0.0
    if score is None:
        return "unreadable", 0.0
    return ("scored", score) if isinstance(score, float) and 0 <= score <= 1 else ("crashed", 0.0)


def run_child(
    judge: Callable[[Request], float | None], request: Request, rules: bytes, server: int, report: int
) -> None:
    """Runs in a child and never returns. Closes the server's pipes, so that the other ends see end-of-file."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, report)
        os.closerange(report + 1, 4096)
        set_limits(request["seconds"])
        if os.getppid() == server:  # else the server died before PR_SET_PDEATHSIG took effect
            install_seccomp(rules)
            os.write(report, json.dumps(judge(request)).encode())
            code = 0
    finally:
        os._exit(code)


def install_seccomp(rules: bytes) -> None:
    """Installs the seccomp filter `rules` in this process, permanently. Raises OSError if that fails."""
    if not rules:
        return

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    program = Program(len(rules) // 8, rules)
    control = ctypes.CDLL(None, use_errno=True).prctl
    for call in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SECCOMP, 2, ctypes.byref(program))):
        if control(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def probe(rules: bytes) -> None:
    """Confines this process, attempts forbidden calls, and prints "confined" if all of them fail."""
    install_seccomp(rules)
    attempts: list[Callable[[], object]] = [
        lambda: os.open("palestra-was-here", os.O_WRONLY | os.O_CREAT),
        lambda: os.mkdir("palestra-was-here"),
        lambda: socket.socket(socket.AF_UNIX),
        lambda: os.kill(os.getppid(), 0),
        lambda: os.execv("/bin/true", ["true"]),
        os.fork,
        os.pipe,
    ]
    for attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        os._exit(1)
    os.write(1, b"confined\n")


def set_limits(seconds: float) -> None:
    """Makes the kernel kill this process after `seconds` of CPU time, `EXTRA_WALL_TIME_S` + `seconds` of wall time, or
    when the server ends; limits its address space.
    """
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, EXTRA_WALL_TIME_S + seconds)
    if sys.platform == "linux":  # neither works on other systems
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, MAX_ADDRESS_SPACE_BYTES))


def write_line(replies: int, message: dict[str, Any]) -> None:
    """Writes a message as one JSON line."""
    os.write(replies, json.dumps(message).encode() + b"\n")


def main(kind: str, rules: bytes) -> None:
    logging.disable(logging.CRITICAL)
    if kind == "probe":
        return probe(rules)
    replies = os.dup(1)
    os.dup2(2, 1)  # output of packages must not reach the reply pipe
    try:
        judge = {"math": math_grader, "reasoning": reasoning_grader}[kind]()
    except ImportError as error:
        write_line(replies, {"missing": str(error)})
        return
    GraderServer(judge, rules, replies).serve()


if __name__ == "__main__":
    main(sys.argv[1], bytes.fromhex(sys.argv[2]))
