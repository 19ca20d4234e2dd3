"""Runs a program on inputs, in the sandbox: each in a process of its own, forked from one that has compiled it.

Its text is run there by itself, so it imports nothing of ours. Only inputs are told to it, never the outputs that are
expected: those are compared outside, where no program can read or forge them. What came of input 3 is left in the file
"3": "ok" or "error", and on the lines below the value, what was printed, or the exception.
"""

import os
import sys

TYPE_CHECKING = False  # importing `typing` would take longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "main.py"
ERROR = 300  # characters of an exception's message


def main() -> None:
    kind, entry, preamble, source, givens = eval(sys.stdin.read())
    try:
        before = compile(preamble, "given.py", "exec")
        code = compile(source, PROGRAM, "eval" if kind == "expression" else "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        _leave("built", "error", _named(error))
        return
    _leave("built", "ok", "")
    if kind == "expression":
        _expressions(code, givens)
        return
    for number, given in enumerate(givens):
        pid = os.fork()
        if pid == 0:
            _one(str(number), kind, entry, before, code, given)
        os.waitpid(pid, 0)
        for end in ("in", "out"):
            if os.path.exists(f"{number}.{end}"):
                os.remove(f"{number}.{end}")


def _expressions(code: object, givens: list[str]) -> None:
    """Tries inputs one after the other, here: an expression leaves nothing behind that another could trip over."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for number, given in enumerate(givens):
        try:
            result = ("ok", literal(eval(code, {"xs": eval(given)[0]})))  # type: ignore[arg-type]
        except Exception as error:  # whatever the expression raises is its result
            result = ("error", _named(error))
        _leave(str(number), *result)


def _one(name: str, kind: str, entry: str, before: object, code: object, given: str) -> None:
    """Tries one input and ends this process."""
    _leave(name, "error", "it ended without a result")
    try:
        _redirect(name, given if kind == "stdin" else "")
        module = type(sys)("__main__" if kind == "stdin" else "program")
        sys.modules[module.__name__] = module
        exec(before, module.__dict__)  # type: ignore[arg-type]
        exec(code, module.__dict__)  # type: ignore[arg-type]
        if kind == "function":
            _end(name, kind, literal(_entry(module.__dict__, entry)(*eval(given))))
        if kind == "assertion":
            exec(given, module.__dict__)
        _end(name, kind, "")
    except SystemExit as stop:
        if stop.code in (None, 0) and kind == "stdin":
            _end(name, kind, "")
        _leave(name, "error", f"it stopped with status {str(stop.code)[:ERROR]}")
    except BaseException as error:  # whatever the program raises is its result
        _leave(name, "error", _named(error))
    finally:
        os._exit(0)


def _end(name: str, kind: str, answer: str) -> None:
    """Leaves the result: what was printed, or a value."""
    if kind == "stdin":
        sys.stdout.flush()
        with open(f"{name}.out", encoding="utf-8", errors="replace", newline="") as file:
            answer = file.read()
    _leave(name, "ok", answer)
    os._exit(0)


def _redirect(name: str, given: str) -> None:
    """Gives this process files for its pipes, which a program may read and write in any way it knows."""
    with open(f"{name}.in", "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(given)
    for number, path, flags in ((0, f"{name}.in", os.O_RDONLY), (1, f"{name}.out", os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(path, flags, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _entry(names: dict[str, object], entry: str) -> "Callable[..., object]":
    """The function to call: the program's own, or a method of its class Solution."""
    if entry not in names and "Solution" in names:
        return getattr(names["Solution"](), entry)  # type: ignore[operator]
    if entry not in names:
        raise NameError(f"the program defines no {entry}")
    return names[entry]  # type: ignore[return-value]


def literal(value: object) -> str:
    """A value of Python's own plain types as Python writes it, whatever classes derived from them say of themselves."""
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind in (int, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, float) and value == value:
        return {float("inf"): "1e999", float("-inf"): "-1e999"}.get(value, float.__repr__(value))
    if isinstance(value, dict):
        return "{" + ", ".join([f"{literal(key)}: {literal(item)}" for key, item in dict.items(value)]) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(literal, value))) + "}" if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, list.__iter__(value))) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{literal(item)}, " for item in tuple.__iter__(value)) + ")"
    raise TypeError(f"the result is {type(value).__name__}, which is no plain value")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR].rstrip(": ")


def _leave(name: str, status: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(f"{status}\n{text}")


if __name__ == "__main__":
    main()
