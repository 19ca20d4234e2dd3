"""The first thing that runs inside a sandbox: gives up what the program shall not have, then becomes the program.

A fresh interpreter reads it, compiled, from stdin; then come its orders and the program, and then the program's own
input: no file is needed and nothing shows in a process list. It imports nothing of ours and as little as it can.
"""

import builtins
import marshal
import os
import sys

TYPE_CHECKING = False  # importing `typing` would take longer than all that is done here
if TYPE_CHECKING:
    from types import TracebackType

PROGRAM = "main.py"  # what tracebacks call the program; no such file exists
FATAL = 127  # the exit status where the sandbox could not be closed


def boot() -> None:
    user, limits, rules, source = marshal.loads(_read(int.from_bytes(_read(8), "big")))
    try:
        _give_up(user, limits, rules)
    except (OSError, ValueError, ImportError) as error:
        os.write(2, f"the sandbox could not be closed: {error!r}".encode())
        os._exit(FATAL)
    sys.argv, sys.path = [PROGRAM], ["", *sys.path]
    sys.excepthook = _complain
    for word in ("exit", "quit"):  # `site` makes them, which is not loaded
        setattr(builtins, word, sys.exit)
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(source, PROGRAM, "exec"), main.__dict__)


def _give_up(user: int, limits: list[tuple[int, int]], rules: bytes) -> None:
    """Becomes `user` unless that is 0, and sets hard limits and, if there are any, the rules for system calls."""
    import resource

    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for which, most in limits:
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    if rules:
        _filter(rules)


def _filter(rules: bytes) -> None:
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    control = ctypes.CDLL(None, use_errno=True).prctl
    program = Program(len(rules) // 8, rules)
    # PR_SET_THP_DISABLE: of a huge page, of which one small page is left, all stays in memory and little is counted.
    # Then PR_SET_NO_NEW_PRIVS and PR_SET_SECCOMP.
    for call in ((41, 1, 0, 0, 0), (38, 1, 0, 0, 0), (22, 2, ctypes.byref(program))):
        if control(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def _complain(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """The usual traceback, without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename != PROGRAM:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _read(size: int) -> bytes:
    """Exactly `size` bytes, and not one of the program's own input, so not through a buffer."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(FATAL)
        data += piece
    return data


if __name__ == "__main__":
    boot()
