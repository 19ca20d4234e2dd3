"""The built-in tools by name, and the tools that each kind of task requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from palestra.core.types import Seat
from palestra.environments.tools.calculator import calculator
from palestra.environments.tools.library import read_document, search_tool
from palestra.environments.tools.repl import python_tool
from palestra.environments.tools.task_source import WorldName
from palestra.environments.tools.tasks import TaskKind
from palestra.environments.tools.tool_state import list_files, read_file, write_file
from palestra.environments.tools.toolbox import Tool, make_tool
from palestra.sandbox import Sandbox, open_sandbox

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
    """Returns the tools of a seat: of the built-in ones and the user's own. Raises ValueError if a team's seat has
    none.
    """
    if seat == "agent":
        return [*built_in, *user_tools]
    tools = [tool for tool in built_in if (tool.name in SEARCH_TOOLS) == (seat == "researcher")]
    tools += user_tools if seat == "solver" else []
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
