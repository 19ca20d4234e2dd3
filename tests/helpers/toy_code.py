"""Small programming problems, and episodes of their env."""

import asyncio
import json
from pathlib import Path
from typing import Any

from palestra.core.types import Step
from palestra.environments.code.env import CoderTester

ADD = {  # a problem in palestra's own format
    "id": "add",
    "difficulty": 1,
    "question": "Write a function `add(a, b)` that returns the sum.",
    "short": "sum of a b",
    "entry": "add",
    "reference": "def add(a, b):\n    return a + b\n",
    "examples": [[[5, 1], 6]],
    "tests": [[[0, 0], 0], [[2, 2], 4], [[-1, 5], 4], [[10, 20], 30]],
}
ECHO = ADD | {
    "id": "echo",
    "question": "Print the line that you read.",
    "entry": None,
    "reference": "print(input())",
    "examples": [["a\n", "a\n"]],
    "tests": [["b\n", "b\n"], ["c d\n", "c d\n"]],
}
GOOD, BAD = "```python\ndef add(a, b):\n    return a + b\n```", "```python\ndef add(a, b):\n    return a - b\n```"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def play(env: CoderTester, *turns: dict[str, str], seed: int = 0) -> list[Step]:
    """The steps of an episode, that of `reset` first."""

    async def steps() -> list[Step]:
        return [env.reset(seed), *[await env.step(answers) for answers in turns]]

    return asyncio.run(steps())


def scripted_pair(coder: str, tester: str) -> dict[str, str]:
    return {"coder": coder, "tester": tester}
