"""The built-in tools by name, and the tools that each kind of task requires."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from palestra.core.types import Seat
from palestra.environments.tools.calculator import calculator
from palestra.environments.tools.library import read_document, search_tool
from palestra.environments.tools.task_source import WorldName
from palestra.environments.tools.tasks import TaskKind
from palestra.environments.tools.tool_state import (
    ReplCell,
    ToolState,
    check_files,
    list_files,
    normalize_path,
    read_file,
    write_file,
)
from palestra.environments.tools.toolbox import Tool, make_tool
from palestra.sandbox import ResourceLimits, Sandbox, open_sandbox

BuiltInTool = Literal["search", "read_document", "calculator", "python", "write_file", "read_file", "list_files"]
SEARCH_TOOLS: tuple[BuiltInTool, ...] = ("search", "read_document")
FILE_TOOL_NAMES: tuple[BuiltInTool, ...] = ("write_file", "read_file", "list_files")
TOOLS_BY_WORLD: dict[WorldName, tuple[BuiltInTool, ...]] = {
    "corpus": (*SEARCH_TOOLS, "calculator", "python", *FILE_TOOL_NAMES),
    "drills": (*SEARCH_TOOLS, "calculator", *FILE_TOOL_NAMES),
}
TOOLS_BY_TASK_KIND: dict[TaskKind, tuple[BuiltInTool, ...]] = {
    "lookup": SEARCH_TOOLS,
    "compute": ("calculator",),
    "lookup_compute": (*SEARCH_TOOLS, "calculator"),
    "files": ("read_file", "write_file", "calculator"),
    "program": ("python",),
}


def check_tools_suffice(tool_names: Sequence[BuiltInTool], kinds: Sequence[TaskKind]) -> None:
    """Raises ValueError if a kind of task cannot be solved with these tools."""
    for kind in kinds:
        if missing := [name for name in TOOLS_BY_TASK_KIND[kind] if name not in tool_names]:
            raise ValueError(
                f"tasks of kind {kind} need the tool {missing[0]}, which built_in: leaves out; "
                f"add it, or name other kinds of tasks in kinds:"
            )


@lru_cache(maxsize=64)  # an env is created per episode, and building a schema is slow
def built_in_tools(
    tool_names: tuple[BuiltInTool, ...], num_results: int, is_compact: bool, timeout_s: float, unsafe: bool
) -> tuple[Tool, ...]:
    """Returns the tools named in `tool_names`, in a fixed order.

    Raises ValueError if python is among them and no sandbox works.
    """
    functions: dict[BuiltInTool, Callable[..., Any]] = {
        "search": search_tool(num_results, is_compact),
        "read_document": read_document,
        "calculator": calculator,
        "write_file": write_file,
        "read_file": read_file,
        "list_files": list_files,
    }
    if "python" in tool_names:
        functions["python"] = python_tool(_sandbox(unsafe), timeout_s)
    return tuple(
        make_tool(functions[name], is_built_in=True) for name in TOOLS_BY_WORLD["corpus"] if name in tool_names
    )


def tools_of_seat(seat: Seat, built_in: Sequence[Tool], user_tools: Sequence[Tool]) -> list[Tool]:
    """Returns the tools of a seat, built-in and the user's. Raises ValueError if a team's seat has none."""
    if seat == "agent":
        return [*built_in, *user_tools]
    tools = [tool for tool in built_in if (tool.name in SEARCH_TOOLS) == (seat == "researcher")]
    if seat == "solver":
        tools += user_tools
    if not tools:
        raise ValueError(f"the {seat} has no tools: name some of its own in built_in:, or play team: single")
    return tools


def _sandbox(unsafe: bool) -> Sandbox:
    try:
        return open_sandbox(unsafe)
    except ValueError as error:
        raise ValueError(
            f"{error}; or do without the tool: leave python out of built_in:, and program out of kinds:"
        ) from error


# ---- a Python REPL that keeps state between calls
#
# Each call is a separate process and the sandbox keeps nothing. Earlier successful cells are replayed without output,
# with the files they had then (`repl_driver.py`): variables are restored, and a fork of an episode copies no process.
# Random numbers and hashes are seeded; the clock is not.

MAX_CELLS = 32  # programs in an episode
MAX_CODE_CHARS = 20_000  # characters of a program
LIMIT_MESSAGES = {
    "wall": "it took too long",
    "cpu": "it took too much computing time",
    "memory": "it took too much memory, or too many processes",
    "output": "it wrote too much",
    "signal": "it was killed",
}
_PROGRAM = Path(__file__).with_name("repl_driver.py").read_text(encoding="utf-8")


def python_tool(sandbox: Sandbox, timeout_s: float) -> Callable[..., Awaitable[str]]:
    """Returns a tool that runs programs in this sandbox; `timeout_s` limits a call, including the replay before it."""
    limits = ResourceLimits(wall=timeout_s, cpu=timeout_s)

    async def python(code: str, scratch: ToolState) -> str:
        """Runs Python and shows what it prints, and the value of its last line. Variables stay for later calls.

        code: the program; the scratch files are in its folder, and text files that it leaves there are kept
        """
        if len(code) > MAX_CODE_CHARS:
            raise ValueError(f"the code has {len(code)} characters: give at most {MAX_CODE_CHARS}")
        if len(scratch.cells) >= MAX_CELLS:
            raise ValueError(f"{MAX_CELLS} programs have been run, which is all there is")
        cells = (*scratch.cells, ReplCell(code, dict(scratch.files)))
        outcome = await sandbox.run_python(_PROGRAM, stdin=_encode_cells(cells), limits=limits, keep=True)
        texts = [outcome.stdout.strip("\n"), outcome.stderr.strip("\n")]
        if outcome.ok:
            scratch.cells = cells
            texts.append(_keep(scratch, outcome.files))
        else:
            why = LIMIT_MESSAGES.get(outcome.ended, "it failed")
            texts.append(f"[{why}; nothing of this call is kept]")
        return "\n".join(text for text in texts if text) or "(nothing was printed)"

    return python


def _encode_cells(cells: Sequence[ReplCell]) -> str:
    """Returns the input of `repl_driver.py` as JSON; equal texts are stored once."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    encoded = [{"source": c.source, "files": {path: place(text) for path, text in c.files.items()}} for c in cells]
    return json.dumps({"cells": encoded, "texts": list(places)})


def _keep(scratch: ToolState, files: Mapping[str, bytes]) -> str:
    """Stores the files that a program left in its folder; returns a note to the agent on files it could not keep."""
    stored = dict[str, str]()
    lost = list[str]()
    for path, data in files.items():
        try:
            stored[normalize_path(path)] = data.decode()
        except ValueError:  # an invalid name, or not UTF-8
            lost.append(path)
    try:
        check_files(stored)
    except ValueError as error:
        return f"[no changes to files were kept: {error}]"
    scratch.files = stored
    return f"[not kept, for it is no plain text file: {', '.join(lost[:5])}]" if lost else ""
