"""Runs a program on inputs, in the sandbox: each input in its own process, forked from one that has compiled the
program.

This module imports nothing of palestra. It receives inputs, never the expected outputs: those are compared outside, so
a program can forge its result but cannot know which result is right. The result of input 3 is the file "3": "ok" or
"error", and on the lines below the value as JSON (`encode_value`) or the exception; printed text is in the file
"3.out".
"""

import os
import sys
from _json import encode_basestring_ascii  # `json` itself would take 8 ms to import, in every run

TYPE_CHECKING = False  # importing `typing` would take longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "main.py"
MAX_ERROR_CHARS = 300  # characters of an exception's message
NUMBER_NAMES = {"inf": float("inf"), "nan": float("nan")}  # names in Python's `repr`


def main() -> None:
    """Reads kind, entry point, preamble, source and inputs from stdin, and writes one result file for each input."""
    kind, entry, preamble, source, givens = eval(sys.stdin.read())
    try:
        before = compile(preamble, "given.py", "exec")
        code = compile(source, PROGRAM, "eval" if kind == "expression" else "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        write_result("built", "error", error_text(error))
        return
    write_result("built", "ok")
    if kind == "expression":
        _expressions(code, givens)
        return
    for number, given in enumerate(givens):
        pid = os.fork()
        if pid == 0:
            _one(str(number), kind, entry, before, code, given)
        os.waitpid(pid, 0)
        for end in ("in",) if kind == "stdin" else ("in", "out"):
            if os.path.exists(f"{number}.{end}"):
                os.remove(f"{number}.{end}")


def _expressions(code: object, givens: list[str]) -> None:
    """Evaluates all inputs in this process: an expression leaves no state behind that could affect the next."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for number, given in enumerate(givens):
        try:
            result = ("ok", encode_value(eval(code, {"xs": eval(given)[0]})))  # type: ignore[arg-type]
        except Exception as error:  # any exception of the expression is its result
            result = ("error", error_text(error))
        write_result(str(number), *result)


def _one(name: str, kind: str, entry: str, before: object, code: object, given: str) -> None:
    """Runs one input and ends this process."""
    write_result(name, "error", "it ended without a result")
    try:
        _redirect(name, given if kind == "stdin" else "")
        module = type(sys)("__main__" if kind == "stdin" else "program")
        sys.modules[module.__name__] = module
        exec(before, module.__dict__)  # type: ignore[arg-type]
        exec(code, module.__dict__)  # type: ignore[arg-type]
        answer = ""
        if kind != "stdin":
            answer = _encode_result(_entry(module.__dict__, entry), kind, given)
        _end(name, kind, answer)
    except SystemExit as stop:
        if stop.code in (None, 0) and kind == "stdin":
            _end(name, kind, "")
        write_result(name, "error", f"it stopped with status {str(stop.code)[:MAX_ERROR_CHARS]}")
    except BaseException as error:  # any exception of the program is its result
        write_result(name, "error", error_text(error))
    finally:
        os._exit(0)


def _end(name: str, kind: str, answer: str) -> None:
    """Writes the result and ends this process."""
    if kind == "stdin":
        sys.stdout.flush()
    write_result(name, "ok", answer)
    os._exit(0)


def _encode_result(function: "Callable[..., object]", kind: str, given: str) -> str:
    """Returns the encoded result of a call. `given` is an argument tuple, or for an assertion's call a tuple and a
    dict of keyword arguments. An assertion may test the truth of an object that is no plain value, so its truth value
    is kept.
    """
    args, kwargs = eval(given, dict(NUMBER_NAMES)) if kind == "assertion" else (eval(given), {})
    value = function(*args, **kwargs)
    try:
        return encode_value(value)
    except TypeError:
        if kind != "assertion":
            raise
        return f'["object",{encode_value(bool(value))}]'


def _redirect(name: str, given: str) -> None:
    """Replaces stdin and stdout of this process by files, which a program may use in any way."""
    with open(f"{name}.in", "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(given)
    for number, path, flags in ((0, f"{name}.in", os.O_RDONLY), (1, f"{name}.out", os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(path, flags, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _entry(names: dict[str, object], entry: str) -> "Callable[..., object]":
    """Returns the function to call: the program's own, or a method of its class Solution. Else raises NameError."""
    if entry not in names and "Solution" in names:
        return getattr(names["Solution"](), entry)  # type: ignore[operator]
    if entry not in names:
        raise NameError(f"the program defines no {entry}")
    return names[entry]  # type: ignore[return-value]


def encode_value(value: object) -> str:
    """Returns a value of Python's plain types as JSON; instances of subclasses are encoded as the plain type.

    Scalars are JSON's; everything else is an array that starts with its type: `(1, {"a": {2.5}})` is
    `["tuple",1,["dict",["a",["set",2.5]]]]`. A reader thus builds no hash table of values that a program chose. Raises
    TypeError for any other value.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value).replace("inf", "Infinity").replace("nan", "NaN")
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, bytes):
        return f'["bytes","{bytes.hex(value)}"]'
    if isinstance(value, complex):
        return f'["complex",{encode_value(complex(value).real)},{encode_value(complex(value).imag)}]'
    kind, items = _parts(value)
    return "[" + ",".join([f'"{kind}"', *items]) + "]"


def _parts(value: object) -> "tuple[str, list[str]]":
    if isinstance(value, dict):
        return "dict", [f"[{encode_value(key)},{encode_value(item)}]" for key, item in dict.items(value)]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(map(encode_value, value))
    if isinstance(value, list):
        return "list", list(map(encode_value, list.__iter__(value)))
    if isinstance(value, tuple):
        return "tuple", list(map(encode_value, tuple.__iter__(value)))
    raise TypeError(f"the result is {type(value).__name__}, which is no plain value")


def error_text(error: BaseException) -> str:
    """Returns an exception as "Type: message", at most `MAX_ERROR_CHARS` characters."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS].rstrip(": ")


def write_result(name: str, status: str, text: str = "") -> None:
    """Writes a result file: the status, and the text below it."""
    with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(f"{status}\n{text}")
