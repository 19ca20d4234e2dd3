"""The built-in tools by name, and the tools that each kind of task requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from palestra.envs.text.toolbox import Tool, make_tool
from palestra.envs.tooling.calculator import calculator
from palestra.envs.tooling.library import read_document, search_tool
from palestra.envs.tooling.repl import python_tool
from palestra.envs.tooling.scratch import list_files, read_file, write_file
from palestra.envs.tooling.tasks import Kind
from palestra.envs.tooling.worlds import WorldName
from palestra.sandbox import Sandbox, open_sandbox
from palestra.types import Seat

BuiltIn = Literal["search", "read_document", "calculator", "python", "write_file", "read_file", "list_files"]
RESEARCH: tuple[BuiltIn, ...] = ("search", "read_document")
FILES: tuple[BuiltIn, ...] = ("write_file", "read_file", "list_files")
ALL: dict[WorldName, tuple[BuiltIn, ...]] = {
    "corpus": (*RESEARCH, "calculator", "python", *FILES),
    "drills": (*RESEARCH, "calculator", *FILES),
}
NEEDED: dict[Kind, tuple[BuiltIn, ...]] = {
    "lookup": RESEARCH,
    "compute": ("calculator",),
    "lookup_compute": (*RESEARCH, "calculator"),
    "files": ("read_file", "write_file", "calculator"),
    "program": ("python",),
}


def check_offered(offered: Sequence[BuiltIn], kinds: Sequence[Kind]) -> None:
    """Raises ValueError if a kind of task cannot be solved with these tools."""
    for kind in kinds:
        if missing := [name for name in NEEDED[kind] if name not in offered]:
            raise ValueError(
                f"tasks of kind {kind} need the tool {missing[0]}, which built_in: leaves out; "
                f"add it, or name other kinds of tasks in kinds:"
            )


@lru_cache(maxsize=64)  # an env is created per episode, and building a schema is slow
def built_in_tools(
    offered: tuple[BuiltIn, ...], results: int, is_compact: bool, time_limit: float, unsafe: bool
) -> tuple[Tool, ...]:
    """Returns the tools named in `offered`, in a fixed order.

    Raises ValueError if python is among them and no sandbox works.
    """
    functions: dict[BuiltIn, Callable[..., Any]] = {
        "search": search_tool(results, is_compact),
        "read_document": read_document,
        "calculator": calculator,
        "write_file": write_file,
        "read_file": read_file,
        "list_files": list_files,
    }
    if "python" in offered:
        functions["python"] = python_tool(_sandbox(unsafe), time_limit)
    return tuple(make_tool(functions[name], ours=True) for name in ALL["corpus"] if name in offered)


def held_by(seat: Seat, ours: Sequence[Tool], own: Sequence[Tool]) -> list[Tool]:
    """Returns the tools of a seat: of the built-in ones and the user's own. Raises ValueError if a team's seat has
    none.
    """
    if seat == "agent":
        return [*ours, *own]
    tools = [tool for tool in ours if (tool.name in RESEARCH) == (seat == "researcher")]
    tools += own if seat == "solver" else []
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
