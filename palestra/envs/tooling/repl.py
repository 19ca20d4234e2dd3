"""A Python REPL that keeps state between calls, though each call is a separate process and the sandbox keeps nothing.

Earlier successful cells are replayed without output, with the files they had then (`cells.py`): variables are restored,
and a fork of an episode copies no process. Random numbers and hashes are seeded; the clock is not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from palestra.envs.tooling.scratch import Cell, Scratch, check, clean
from palestra.sandbox import Limits, Outcome, Sandbox

MOST_CELLS = 32  # programs in an episode
LONGEST_CODE = 20_000  # characters of a program
WHY = {
    "wall": "it took too long",
    "cpu": "it took too much computing time",
    "memory": "it took too much memory, or too many processes",
    "output": "it wrote too much",
    "signal": "it was killed",
}
_PROGRAM = Path(__file__).with_name("cells.py").read_text(encoding="utf-8")


def python_tool(sandbox: Sandbox, seconds: float) -> Callable[..., Awaitable[str]]:
    """Returns a tool that runs programs in this sandbox; `seconds` limits a call, including the replay before it."""
    limits = Limits(wall=seconds, cpu=seconds)

    async def python(code: str, scratch: Scratch) -> str:
        """Runs Python and shows what it prints, and the value of its last line. Variables stay for later calls.

        code: the program; the scratch files are in its folder, and text files that it leaves there are kept
        """
        if len(code) > LONGEST_CODE:
            raise ValueError(f"the code has {len(code)} characters: give at most {LONGEST_CODE}")
        if len(scratch.cells) >= MOST_CELLS:
            raise ValueError(f"{MOST_CELLS} programs have been run, which is all there is")
        cells = (*scratch.cells, Cell(code, dict(scratch.files)))
        outcome = await sandbox.run_python(_PROGRAM, stdin=_packed(cells), limits=limits, keep=True)
        told = [outcome.stdout.strip("\n"), outcome.stderr.strip("\n")]
        if outcome.ok:
            scratch.cells = cells
            told.append(_keep(scratch, outcome.files))
        else:
            told.append(_lost(outcome))
        return "\n".join(part for part in told if part) or "(nothing was printed)"

    return python


def _packed(cells: Sequence[Cell]) -> str:
    """Returns the input of `cells.py` as JSON; equal texts are stored once."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    told = [{"source": c.source, "files": {path: place(text) for path, text in c.files.items()}} for c in cells]
    return json.dumps({"cells": told, "texts": list(places)})


def _keep(scratch: Scratch, files: Mapping[str, bytes]) -> str:
    """Stores the files that a program left in its folder; returns a note to the agent on files it could not keep."""
    kept, lost = dict[str, str](), list[str]()
    for path, data in files.items():
        try:
            kept[clean(path)] = data.decode()
        except ValueError:  # an invalid name, or not UTF-8
            lost.append(path)
    try:
        check(kept)
    except ValueError as error:
        return f"[no changes to files were kept: {error}]"
    scratch.files = kept
    return f"[not kept, for it is no plain text file: {', '.join(lost[:5])}]" if lost else ""


def _lost(outcome: Outcome) -> str:
    why = WHY.get(outcome.ended, "it failed")
    return f"[{why}; nothing of this call is kept]"
