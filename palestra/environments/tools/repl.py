"""A Python REPL that keeps state between calls, though each call is a separate process and the sandbox keeps nothing.

Earlier successful cells are replayed without output, with the files they had then (`repl_driver.py`): variables are
restored, and a fork of an episode copies no process. Random numbers and hashes are seeded; the clock is not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from palestra.environments.tools.tool_state import ReplCell, ToolState, check_files, normalize_path
from palestra.sandbox import ResourceLimits, RunResult, Sandbox

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
        outcome = await sandbox.run_python(_PROGRAM, stdin=_packed(cells), limits=limits, keep=True)
        parts = [outcome.stdout.strip("\n"), outcome.stderr.strip("\n")]
        if outcome.ok:
            scratch.cells = cells
            parts.append(_keep(scratch, outcome.files))
        else:
            parts.append(_lost(outcome))
        return "\n".join(part for part in parts if part) or "(nothing was printed)"

    return python


def _packed(cells: Sequence[ReplCell]) -> str:
    """Returns the input of `repl_driver.py` as JSON; equal texts are stored once."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    encoded = [{"source": c.source, "files": {path: place(text) for path, text in c.files.items()}} for c in cells]
    return json.dumps({"cells": encoded, "texts": list(places)})


def _keep(scratch: ToolState, files: Mapping[str, bytes]) -> str:
    """Stores the files that a program left in its folder; returns a note to the agent on files it could not keep."""
    kept, lost = dict[str, str](), list[str]()
    for path, data in files.items():
        try:
            kept[normalize_path(path)] = data.decode()
        except ValueError:  # an invalid name, or not UTF-8
            lost.append(path)
    try:
        check_files(kept)
    except ValueError as error:
        return f"[no changes to files were kept: {error}]"
    scratch.files = kept
    return f"[not kept, for it is no plain text file: {', '.join(lost[:5])}]" if lost else ""


def _lost(outcome: RunResult) -> str:
    why = LIMIT_MESSAGES.get(outcome.ended, "it failed")
    return f"[{why}; nothing of this call is kept]"
