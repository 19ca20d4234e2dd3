"""Grading in a process of its own for each answer: what the fork server of the sandbox (`sandbox/fork_server.py`) does
for `grader_client.py`.

Mathematics is parsed by sympy, which some expressions keep busy forever, in code that no exception interrupts. A
process that exceeds its time is killed by a kernel timer, whatever it does and even if the server is gone; the server
has sympy loaded since the first answer, so the others cost a few milliseconds. Many run at once, so a hanging one does
not delay the others.

A child of the server forks a process that confines itself (`confinement.py`) before it reads an answer. That process
sends its score through a pipe to the child, which accepts it only if the process then exits with status 0: an exit
status alone is not a score. Neither has torch loaded.

A request is a line of JSON, {"call": ..., "kind": "math", "answer": ..., "gold": ..., "seconds": 2.0}; the reply is
{"outcome": "scored", "score": 1.0}, where `outcome` is how grading ended, or {"missing": why} if the package of the
kind cannot be loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from palestra.environments.math.confinement import seccomp_filter
from palestra.sandbox.boot import install_filter

GraderKind = Literal["math", "reasoning"]
GraderOutcome = Literal["scored", "unreadable", "overtime", "crashed"]
EXTRA_WALL_TIME_S = 30  # seconds of wall time beyond the CPU limit: a busy machine must not make an answer wrong
DIE_WITH_PARENT = 1  # option of prctl
MAX_ADDRESS_SPACE_BYTES = 2 * 2**30  # bytes of address space; a tower of powers would take all memory
MAX_REPORT_BYTES = 64  # bytes of a child's report
DECIMAL_TOLERANCE = 1e-6  # relative tolerance for a decimal compared with a closed form

Request = dict[str, Any]


class Grader(NamedTuple):
    """`grade` returns a score in [0, 1], None for an unreadable answer. `prepare` runs in the server, once for each
    request: children inherit what it caches."""

    grade: Callable[[Request], float | None]
    prepare: Callable[[Request], object]


def math_grader() -> Grader:
    """Grades with `math-verify`.

    Its own time limits are disabled: they are signals, which do not interrupt C code. Texts are parsed as LaTeX only:
    math-verify passes plain expressions to sympy's `parse_expr`, which evaluates them.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    from palestra.environments.math import expression_form as form

    def read(text: str) -> Any:
        extracted = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        return next((one for one in extracted if not isinstance(one, str)), None)

    def is_equal(gold: Any, answer: Any) -> bool:
        near = form.is_near(gold, answer, DECIMAL_TOLERANCE)
        if near is not None:
            return bool(near)
        return bool(verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True))

    def is_given(gold: Any, texts: Sequence[str]) -> bool:
        values = [value for value in map(read, texts) if value is not None]
        sides = chain.from_iterable(value.args for value in values if hasattr(value, "lhs"))
        return any(is_equal(gold, value) for value in [*values, *sides])

    def judge(request: Request) -> float | None:
        gold = read(request["gold"])
        answer = read(request["answer"])
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
    """Grades with the scorer of the requested task."""
    package = import_reasoning_gym()

    @lru_cache(maxsize=256)
    def task(name: str, size: int) -> Any:
        return package.create_dataset(name, seed=0, size=size)

    @lru_cache(maxsize=4096)
    def entry(name: str, size: int, index: int) -> Any:
        return task(name, size)[index]

    def judge(request: Request) -> float | None:
        problem = prepare(request)
        if str(problem["question"]) != request["question"]:
            raise ValueError("another problem was made of the same seed")
        scorer = task(request["task"], request["size"])
        return min(max(float(scorer.score_answer(answer=request["answer"], entry=problem)), 0.0), 1.0)

    def prepare(request: Request) -> Any:
        return entry(request["task"], request["size"], request["index"])

    return Grader(judge, prepare)


def import_reasoning_gym() -> Any:
    """Imports and returns the package; also used to generate problems."""
    import reasoning_gym

    return reasoning_gym


def prepare_grading(request: Request) -> Callable[[socket.socket], None]:
    """Prepares a request in the fork server and returns what the child does: grade and reply."""
    try:
        grader = _load_grader(request["kind"])
    except ImportError as error:
        return partial(_reply, {"missing": str(error)})
    with contextlib.suppress(Exception):  # the child fails in the same way and is reported as crashed
        grader.prepare(request)
    return partial(_grade, grader, request, os.getpid())


@cache
def _load_grader(kind: GraderKind) -> Grader:
    logging.disable(logging.CRITICAL)
    grader = {"math": math_grader, "reasoning": reasoning_grader}[kind]()
    gc.collect()
    gc.freeze()
    return grader


def _reply(answer: dict[str, Any], requester: socket.socket) -> None:
    requester.sendall(json.dumps(answer).encode())


def _grade(grader: Grader, request: Request, server: int, requester: socket.socket) -> None:
    die_with_parent()
    if os.getppid() != server:
        raise ConnectionError("the server died before it could take this process with it")
    outcome, score = grade_in_child(grader, request, seccomp_filter(), requester)
    _reply({"outcome": outcome, "score": score}, requester)


def grade_in_child(
    grader: Grader, request: Request, rules: bytes, requester: socket.socket
) -> tuple[GraderOutcome, float]:
    """Returns how grading ended in a confined child, and the score. Kills it if the requester is gone."""
    report, end = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        run_child(grader.grade, request, rules, parent, end)
    os.close(end)
    with os.fdopen(report, "rb") as pipe:
        if report not in select.select([report, requester.fileno()], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        data = pipe.read(MAX_REPORT_BYTES)
    return child_outcome(os.waitpid(child, 0)[1], data)


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
    if isinstance(score, float) and 0 <= score <= 1:
        return "scored", score
    return "crashed", 0.0


def run_child(
    judge: Callable[[Request], float | None], request: Request, rules: bytes, parent: int, report: int
) -> None:
    """Grades in a child and never returns. Closes what it inherits, so that other ends see end-of-file."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, report)
        os.closerange(report + 1, 4096)
        set_limits(request["seconds"])
        if os.getppid() == parent:  # else the parent died before PR_SET_PDEATHSIG took effect
            install_filter(rules)
            os.write(report, json.dumps(judge(request)).encode())
            code = 0
    finally:
        os._exit(code)


def set_limits(seconds: float) -> None:
    """Makes the kernel kill this process after `seconds` of CPU time, `EXTRA_WALL_TIME_S` + `seconds` of wall time, or
    when the server ends; limits its address space.
    """
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, EXTRA_WALL_TIME_S + seconds)
    die_with_parent()
    if sys.platform == "linux":  # it does not work on other systems
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, MAX_ADDRESS_SPACE_BYTES))


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
