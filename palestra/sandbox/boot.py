"""First code that runs in a sandboxed process: drops privileges, sets limits, then executes the program.

A fresh interpreter reads this module, compiled, from stdin, followed by its settings with the program's source, and the
program's own input. No file is needed, and nothing shows in a process list. The module imports nothing of palestra and
as little of the standard library as possible.
"""

import builtins
import marshal
import os
import sys

TYPE_CHECKING = False  # importing `typing` would take longer than all of this module
if TYPE_CHECKING:
    from types import TracebackType

PROGRAM_NAME = "main.py"  # file name of the program in tracebacks; no such file exists
FAILURE_EXIT_CODE = 127  # exit status if the restrictions could not be applied


def boot() -> None:
    """Reads the settings from stdin, applies the restrictions and runs the program as `__main__`."""
    user, limits, rules, source = marshal.loads(_read(int.from_bytes(_read(8), "big")))
    try:
        _give_up(user, limits, rules)
    except (OSError, ValueError, ImportError) as error:
        os.write(2, f"the sandbox could not be closed: {error!r}".encode())
        os._exit(FAILURE_EXIT_CODE)
    sys.argv = [PROGRAM_NAME]
    sys.path = ["", *sys.path]
    sys.excepthook = _complain
    for word in ("exit", "quit"):  # normally made by `site`, which is not loaded
        setattr(builtins, word, sys.exit)
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(source, PROGRAM_NAME, "exec"), main.__dict__)


def _give_up(user: int, limits: list[tuple[int, int]], rules: bytes) -> None:
    """Switches to user id `user` (0: no change), sets hard resource limits and installs the seccomp filter, if any."""
    import resource

    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for which, most in limits:
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    install_filter(rules)


def install_filter(rules: bytes) -> None:
    """Installs the seccomp filter `rules`, if any, in this process, permanently. Raises OSError if that fails."""
    if not rules:
        return
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    control = ctypes.CDLL(None, use_errno=True).prctl
    program = Program(len(rules) // 8, rules)
    # PR_SET_THP_DISABLE: a huge page with one small page still mapped stays in memory whole but counts as little.
    # Then PR_SET_NO_NEW_PRIVS and PR_SET_SECCOMP.
    for call in ((41, 1, 0, 0, 0), (38, 1, 0, 0, 0), (22, 2, ctypes.byref(program))):
        if control(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def _complain(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """Prints the usual traceback without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename != PROGRAM_NAME:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _read(size: int) -> bytes:
    """Reads exactly `size` bytes, unbuffered so that the program's own input stays in the pipe."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(FAILURE_EXIT_CODE)
        data += piece
    return data


if __name__ == "__main__":
    boot()
