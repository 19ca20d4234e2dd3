"""The process that judges answers: a server that forks a child for each judgement, started by `workers.py`.

Reading mathematics is done by sympy, which some expressions keep busy for ever, in code that no exception reaches. A
child that is over its time is killed by a timer of the kernel's, whatever it does and even if the server is gone; the
server has sympy loaded, so that a child costs some milliseconds and nothing needs replacing. A few children work at
once, but one that takes long does not count among them, so that one that hangs holds up nobody.

A child confines itself (`confinement.py`) before it looks at an answer. Its score goes through a pipe to the server,
which takes it only from a child that then ended with status 0: an exit status alone is no score.

Run as a file and not as a module, it imports nothing of ours and no torch: `python -P verify_worker.py math FILTER`. A
line in is a request, {"id": 1, "answer": ..., "gold": ..., "seconds": 2.0}; a line out a reply,
{"id": 1, "ended": "scored", "score": 1.0}, where `ended` says how the judgement did.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import operator
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple

Ended = Literal["scored", "unreadable", "overtime", "crashed"]
FRESH = 4  # children that may be young at once: more would only slow each other
YOUNG = 0.1  # seconds on the processor after which a child no longer keeps the next one waiting
NICE = 5  # and makes way for it, but not so much that it would starve
MOST = 64  # children at once
PATIENCE = 30  # seconds by the clock beyond those: a machine that is busy is no reason to call an answer wrong
DIE_WITH_PARENT, NO_NEW_PRIVILEGES, SECCOMP = 1, 38, 22  # of prctl
MEMORY = 2 * 2**30  # bytes of address space; a tower of powers takes all there is
LONGEST_REPORT = 64  # bytes
NEAR = 1e-6  # of the right value, for a decimal that answers a closed form
FUNCTIONS = "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log sqrt Abs".split()  # noqa: SIM905
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

Request = dict[str, Any]


class Judge(NamedTuple):
    """`judge` returns a score in [0, 1], or None for an answer that says nothing. `prepare` is called in the server,
    once for each request: what it makes and keeps, children inherit."""

    judge: Callable[[Request], float | None]
    prepare: Callable[[Request], object]


def math() -> Judge:
    """Judges by `math-verify`. Its own time limits are off: they are signals, which code in C never hears. Texts are
    read as LaTeX alone: what math-verify takes for a plain expression it gives to sympy's `parse_expr`, which
    evaluates."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> Any:
        found = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        return next((one for one in found if not isinstance(one, str)), None)

    def judge(request: Request) -> float | None:
        gold, said = read(request["gold"]), read(request["answer"])
        if said is None:
            return None
        if gold is None or not is_worked_out(said, gold):
            return 0.0
        if (near := is_near(gold, said)) is not None:
            return float(near)
        return float(verify(gold, said, timeout_seconds=None, allow_set_relation_comp=True))

    judge({"gold": "x > 1/2", "answer": "\\frac{2}{4} < x"})  # sympy and the parser make much on first use
    judge({"gold": "2\\pi", "answer": "6.28"})
    return Judge(judge, lambda request: None)


def is_worked_out(said: Any, gold: Any) -> bool:
    """False if an answer holds a sum, power or root of plain numbers that has a rational value and the right answer has
    none: 1 + 2, 2^10, the root of 1764."""
    return not any(map(is_open, walk(said))) or any(map(is_open, walk(gold)))


def is_open(part: Any) -> bool:
    """True for a sum, power or root of plain numbers with a rational value, and for a power of a constant power."""
    from sympy import Add, Pow

    if isinstance(part, Add):
        return sum(argument.is_Rational is True for argument in part.args) > 1
    if not isinstance(part, Pow) or part.exp == -1:
        return False
    if isinstance(part.base, Pow) and not part.free_symbols:
        return True
    numbers = part.base.is_Rational and part.exp.is_Rational
    return bool(numbers and abs(part.exp) < 1000 and Pow(part.base, part.exp).is_Rational)


def walk(expression: Any) -> Any:
    """An expression and all its parts."""
    from sympy import preorder_traversal

    return preorder_traversal(expression)


def is_near(gold: Any, said: Any) -> bool | None:
    """For constants of which one is written as a decimal: True if they differ by a millionth of the right one at most.
    None for anything else."""
    from sympy import Expr, Float

    constants = isinstance(gold, Expr) and isinstance(said, Expr) and not (gold.free_symbols | said.free_symbols)
    if not constants or not (gold.has(Float) or said.has(Float)):
        return None
    wanted, got = complex(gold.evalf(20)), complex(said.evalf(20))
    return abs(wanted - got) <= NEAR * abs(wanted)


def reasoning() -> Judge:
    """Judges by the scorer of the task that a request names, or, where it holds formulas as trees, by sympy."""
    package = reasoning_gym()

    @lru_cache(maxsize=256)
    def task(name: str, size: int) -> Any:
        return package.create_dataset(name, seed=0, size=size)

    @lru_cache(maxsize=4096)
    def entry(name: str, size: int, index: int) -> Any:
        return task(name, size)[index]

    def judge(request: Request) -> float | None:
        if "formula" in request:
            return float(same_formula(request))
        made = prepare(request)
        if str(made["question"]) != request["question"]:
            raise ValueError("another problem was made of the same seed")
        scorer = task(request["task"], request["size"])
        return min(max(float(scorer.score_answer(answer=request["answer"], entry=made)), 0.0), 1.0)

    def prepare(request: Request) -> Any:
        return None if "formula" in request else entry(request["task"], request["size"], request["index"])

    return Judge(judge, prepare)


def same_formula(request: Request) -> bool:
    """True if `formula` is `wanted`, or, with a `variable`, if its derivative is. As reasoning-gym 0.1.25 compares."""
    import sympy

    formula, wanted = in_sympy(request["formula"]), in_sympy(request["wanted"])
    if "variable" not in request:
        return bool(formula == wanted)
    return bool(sympy.simplify(sympy.diff(formula, sympy.Symbol(request["variable"])) - wanted) == 0)


def in_sympy(formula: list[Any]) -> Any:
    """The expression of a tree of `answer_syntax`. No text is evaluated: names become symbols, and functions are looked
    up in a fixed table."""
    import sympy

    functions = {"abs": sympy.Abs, "ln": sympy.log} | {name: getattr(sympy, name) for name in FUNCTIONS}

    def made(tree: list[Any]) -> Any:
        kind, *parts = tree
        if kind == "number":
            return sympy.Float(parts[0]) if "." in parts[0] else sympy.Integer(int(parts[0]))
        if kind == "name":
            return {"pi": sympy.pi, "E": sympy.E}.get(parts[0]) or sympy.Symbol(parts[0])
        if kind == "negative":
            return -made(parts[0])
        if kind == "**":
            return made(parts[0]) ** made(parts[1])
        if kind in functions:
            return functions[kind](made(parts[0]))
        (_, first), *others = parts
        return reduce(lambda whole, part: SIGNS[part[0]](whole, made(part[1])), others, made(first))

    return made(formula)


def reasoning_gym() -> Any:
    """The package, for us and for those who make problems with it."""
    import reasoning_gym

    return reasoning_gym


class Child(NamedTuple):
    """The request that a child works on, when it began, and the end of the pipe that its report comes through."""

    name: int
    began: float
    report: int


class Server:
    """Children at work by their process, and requests that wait."""

    def __init__(self, judge: Judge, rules: bytes, replies: int) -> None:
        self.judge, self.rules, self.replies = judge, rules, replies
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Child] = {}
        self.aged: set[int] = set()

    def serve(self) -> None:
        """Until the other end of stdin is closed, which the system does when its process dies, however it dies."""
        bell, rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(rope, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        unread = b""
        while True:
            ready, _, _ = select.select([0, bell], [], [], YOUNG if len(self.running) > len(self.aged) else None)
            if bell in ready:
                os.read(bell, 4096)
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    return self.stop()
                *lines, unread = (unread + data).split(b"\n")
                self.waiting.extend(map(json.loads, lines))
            self.reap()
            self.age()
            self.start()

    def start(self) -> None:
        while self.waiting and len(self.running) < MOST and len(self.running) - len(self.aged) < FRESH:
            request = self.waiting.popleft()
            with contextlib.suppress(Exception):  # the child meets the same, and ends as crashed
                self.judge.prepare(request)
            report, end = os.pipe()
            server, child = os.getpid(), os.fork()
            if not child:
                work(self.judge.judge, request, self.rules, server, end)
            os.close(end)
            self.running[child] = Child(request["id"], time.monotonic(), report)

    def age(self) -> None:
        for child, (_, began, _) in self.running.items():
            if child not in self.aged and _used(child, began) > YOUNG:
                self.aged.add(child)
                os.setpriority(os.PRIO_PROCESS, child, NICE)

    def reap(self) -> None:
        while self.running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            name, _, report = self.running.pop(child)
            self.aged.discard(child)
            with os.fdopen(report, "rb") as pipe:
                ended, score = outcome(status, pipe.read(LONGEST_REPORT))
            write_line(self.replies, {"id": name, "ended": ended, "score": score})

    def stop(self) -> None:
        for child in self.running:
            os.kill(child, signal.SIGKILL)


def _used(child: int, began: float) -> float:
    """Seconds that a child has had on the processor; where the system does not tell, seconds by the clock."""
    try:
        with open(f"/proc/{child}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return time.monotonic() - began
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def outcome(status: int, report: bytes) -> tuple[Ended, float]:
    """The end of a judgement and its score, from a child's wait status and the bytes that it wrote to its pipe."""
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


def work(judge: Callable[[Request], float | None], request: Request, rules: bytes, server: int, report: int) -> None:
    """What a child does; it never returns. It lets go of the server's pipes, so that their ends are seen."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, report)
        os.closerange(report + 1, 4096)
        limit(request["seconds"])
        if os.getppid() == server:  # or it died before this process was bound to die with it
            confine(rules)
            os.write(report, json.dumps(judge(request)).encode())
            code = 0
    finally:
        os._exit(code)


def confine(rules: bytes) -> None:
    """Lets the kernel refuse this process every system call that `rules` do not allow, for good. Raises OSError where
    it cannot."""
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
    """Confines this process, tries to get out, and prints "confined" if every attempt failed."""
    confine(rules)
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


def limit(seconds: float) -> None:
    """Let the kernel kill this process after that long on the processor, `PATIENCE` more by the clock, or with the
    server."""
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE + seconds)
    if sys.platform == "linux":  # elsewhere neither works
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def write_line(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def main(kind: str, rules: bytes) -> None:
    logging.disable(logging.CRITICAL)
    if kind == "probe":
        return probe(rules)
    replies = os.dup(1)
    os.dup2(2, 1)  # what packages print is no reply
    try:
        judge = {"math": math, "reasoning": reasoning}[kind]()
    except ImportError as error:
        write_line(replies, {"missing": str(error)})
        return
    Server(judge, rules, replies).serve()


if __name__ == "__main__":
    main(sys.argv[1], bytes.fromhex(sys.argv[2]))
