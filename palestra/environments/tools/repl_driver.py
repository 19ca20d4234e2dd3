"""The program that the python tool runs in the sandbox: replays earlier cells without output, then runs the last one.

It reads JSON from stdin: `texts`, and for each of `cells` its `source` and its `files`, a mapping of paths to indices
into `texts`. It needs only the standard library.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import random
import sys
import traceback
from types import TracebackType


def main() -> int:
    """Runs the cells from stdin. Returns the exit status of the last one."""
    request = json.load(sys.stdin)
    random.seed(0)
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(request["cells"], start=1):
        restore_files({path: request["texts"][i] for path, i in cell["files"].items()})
        if number == len(request["cells"]):
            return run_cell(cell["source"], number, space)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_cell(cell["source"], number, space)
    return 0


def restore_files(files: dict[str, str]) -> None:
    """Makes the working folder hold exactly these files."""
    for folder, _, names in os.walk("."):
        for name in names:
            if os.path.relpath(os.path.join(folder, name)) not in files:
                os.remove(os.path.join(folder, name))
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def run_cell(source: str, number: int, space: dict[str, object]) -> int:
    """Runs a cell, and prints the value of its last line or its traceback. Returns 0 on success, else 1."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        execute_cell(source, name, space)
    except SystemExit as end:
        return int(end.code not in (None, 0))
    except BaseException as error:  # any exception of the program is printed, as Python does
        traceback.print_exception(type(error), error, cell_traceback(error.__traceback__))
        return 1
    return 0


def execute_cell(source: str, name: str, space: dict[str, object]) -> None:
    """Executes a cell in the namespace `space`, and prints the `repr` of its last expression unless it is None."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), space)
        if value is not None:
            print(repr(value))


def cell_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that belongs to the cell."""
    while trace and not trace.tb_frame.f_code.co_filename.startswith("<cell"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main())
