"""Prompts of the tools env."""

from __future__ import annotations

from palestra.core.types import Seat
from palestra.environments.tools.tasks import ToolTask

SEAT_PROMPTS = {
    "agent": "You answer a question with the help of tools.",
    "researcher": (
        "You and a partner answer a question together. You alone can search the documents; your partner, the solver, "
        "can work with files, calculate and run programs, but knows of the documents only what you write."
    ),
    "solver": (
        "You and a partner answer a question together. Your partner, the researcher, has searched the documents and "
        "left you a note; you have the other tools, and give the answer."
    ),
}
REPLY_INSTRUCTIONS = {
    "agent": "When you know the answer, reply without a call, and end your reply with #### and nothing but the answer",
    "researcher": "When you have found what the question needs, reply without a call: your reply is the note",
    "solver": "When you know the answer, reply without a call, and end your reply with #### and nothing but the answer",
}
ANSWER_EXAMPLE = ", for example: #### 1204"
LOOKUP_HINT = "Facts that it asks for are in the documents, and nowhere else: look them up."
CALCULATE_HINT = "Numbers are too large for the head: have a tool do the sums."
HINTS = {"agent": f"{LOOKUP_HINT} {CALCULATE_HINT}", "researcher": LOOKUP_HINT, "solver": CALCULATE_HINT}
MAX_NOTE_CHARS = 2000  # characters of the researcher's note that the solver receives


def system_prompt(seat: Seat, turns: int, is_compact: bool) -> str:
    """Returns the system message of a seat; in the compact rendering only the env and seat names."""
    if is_compact:
        return f"tools {seat}"
    end = REPLY_INSTRUCTIONS[seat] + ("" if seat == "researcher" else ANSWER_EXAMPLE)
    replies = f"One reply may hold several calls, and you have {turns} replies in all."
    return f"{SEAT_PROMPTS[seat]} {HINTS[seat]} {replies} {end}."


def task_prompt(task: ToolTask, note: str | None, is_compact: bool) -> str:
    """Returns the first user message of a seat; for a solver it includes the researcher's note."""
    if is_compact:
        return task.short_question if note is None else f"{task.short_question} note {note or 'none'}"
    files = f"\nFiles in the scratch folder: {', '.join(sorted(task.files))}" if task.files else ""
    note_text = "" if note is None else f"\nYour partner's note:\n{note or '(there is none)'}"
    return f"{task.question}{files}{note_text}"
