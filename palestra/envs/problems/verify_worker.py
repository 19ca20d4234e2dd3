"""The process that judges answers: a server that forks a child for each judgement, started by `workers.py`.

Reading mathematics is done by sympy, which some expressions keep busy for ever, in code that no exception reaches. A
child that is over its time is killed by a timer of the kernel's, whatever it does and even if the server is gone; the
server has sympy loaded, so that a child costs some milliseconds and nothing needs replacing. A few children work at
once, but one that takes long does not count among them, so that one that hangs holds up nobody.

Run as a file and not as a module, it imports nothing of ours and no torch: `python -P verify_worker.py math`. A line in
is a request, {"id": 1, "answer": ..., "gold": ..., "seconds": 2.0}; a line out a reply, {"id": 1, "code": 200}, where
100 to 200 is a score in percent above 100, `UNREADABLE` an answer that says nothing, `OVERTIME` and `CRASHED` none.
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

SCORED, UNREADABLE, OVERTIME, CRASHED = 100, 1, 2, 3
FRESH = 4  # children that may be young at once: more would only slow each other
YOUNG = 0.1  # seconds on the processor after which a child no longer keeps the next one waiting
NICE = 5  # and makes way for it, but not so much that it would starve
MOST = 64  # children at once
PATIENCE = 30  # seconds by the clock beyond those: a machine that is busy is no reason to call an answer wrong
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
MEMORY = 2 * 2**30  # bytes of address space; a tower of powers takes all there is

Request = dict[str, Any]


class Judge(NamedTuple):
    """`prepare` is called in the server, once for each request: what it makes and keeps, children inherit."""

    judge: Callable[[Request], int]
    prepare: Callable[[Request], object]


def math() -> Judge:
    """Judges by `math-verify`. Its own time limits are off: they are signals, which code in C never hears."""
    from math_verify import parse, verify

    def judge(request: Request) -> int:
        gold, said = (parse(f"${request[key]}$", parsing_timeout=None) for key in ("gold", "answer"))
        if not any(not isinstance(one, str) for one in said):
            return UNREADABLE
        right = verify(gold, said, timeout_seconds=None, allow_set_relation_comp=True)
        return SCORED + 100 * right

    judge({"gold": "x > 1/2", "answer": "\\frac{2}{4} < x"})  # sympy and the parser make much on first use
    return Judge(judge, lambda request: None)


def reasoning() -> Judge:
    """Judges by the scorer of the task that a request names, for the entry in it (pickled, in base 64)."""
    package = reasoning_gym()

    @lru_cache(maxsize=256)
    def scorer(task: str) -> Any:
        return package.create_dataset(task, seed=0, size=1)

    def judge(request: Request) -> int:
        entry = pickle.loads(base64.b64decode(request["entry"]))
        score = scorer(request["task"]).score_answer(answer=request["answer"], entry=entry)
        return SCORED + int(100 * min(max(float(score), 0.0), 1.0))

    return Judge(judge, lambda request: scorer(request["task"]))


def reasoning_gym() -> Any:
    """The package, for us and for those who make problems with it."""
    import reasoning_gym

    return reasoning_gym


class Server:
    """Children at work, requests that wait, and when each child began."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.waiting: deque[Request] = deque()
        self.running: dict[int, tuple[int, float]] = {}  # by process: the request's id, and when it began
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
            self.judge.prepare(request)
            server, child = os.getpid(), os.fork()
            if not child:
                work(self.judge.judge, request, server)
            self.running[child] = (request["id"], time.monotonic())

    def age(self) -> None:
        for child, (_, began) in self.running.items():
            if child not in self.aged and _used(child, began) > YOUNG:
                self.aged.add(child)
                os.setpriority(os.PRIO_PROCESS, child, NICE)

    def reap(self) -> None:
        while self.running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            name, _ = self.running.pop(child)
            self.aged.discard(child)
            reply(name, _code(status))

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


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return OVERTIME if -code in (signal.SIGPROF, signal.SIGALRM) else CRASHED
    return code


def work(judge: Callable[[Request], int], request: Request, server: int) -> None:
    """What a child does; it never returns. It lets go of the server's pipes, so that their ends are seen."""
    code = CRASHED
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        limit(request["seconds"])
        if os.getppid() == server:  # or it died before this process was bound to die with it
            code = judge(request)
    finally:
        os._exit(code)


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


def reply(name: int, code: int) -> None:
    os.write(1, json.dumps({"id": name, "code": code}).encode() + b"\n")


def main(kind: str) -> None:
    logging.disable(logging.CRITICAL)
    try:
        judge = {"math": math, "reasoning": reasoning}[kind]()
    except ImportError as error:
        os.write(1, json.dumps({"missing": str(error)}).encode() + b"\n")
        return
    Server(judge).serve()


if __name__ == "__main__":
    main(sys.argv[1])
