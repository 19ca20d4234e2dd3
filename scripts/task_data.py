"""Training data of the base model `tasks`: answers of mediocre players to all shipped tasks, in their shortest form.

A player takes the expert's answer and adds errors: sometimes it gives the right answer of another instance, and each
number, name or sign in an answer may be replaced by another. So the model learns the form of a task, not how to solve
it well. All instances are of split "base".
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from palestra.core.chat import Chat, render_message
from palestra.envs import make_env

BLIND = 0.15  # share of answers that are right for another instance
SLIP = 0.08  # share of the numbers, names and signs in the other answers that are replaced
PIECE = re.compile(r"[A-Za-z_]*\d+|[A-Za-z_]+|[-+*]")
SORTS = (("yes", "no"), ("+", "-", "*"), ("higher", "lower"), ("pro", "con"))


@dataclass(frozen=True)
class Task:
    """An env with its options, and the weight with which it is drawn."""

    name: str
    weight: float
    env: dict[str, Any]
    first: bool = False  # only the first answers are used, since further steps would run programs


@dataclass(frozen=True)
class Example:
    """One answer, its question, and the question as the chat template writes it (`prompt`). `kind` is for the counts in
    the model's README."""

    kind: str
    question: str
    prompt: str
    answer: str


def _task(name: str, weight: float, type: str, first: bool = False, **options: Any) -> Task:
    return Task(name, weight, {"type": type, "rendering": "compact", "split": "base"} | options, first)


SUMS: dict[str, Any] = {"kinds": ["arithmetic"], "difficulty": [1, 2]}
DEBATE: dict[str, Any] = {"source": "drills"}
ECHO = 2.0  # weight of examples that repeat their input, which all tasks need, relative to the tasks' weights
TASKS = [
    _task("math", 5, "math", team="solver_checker", turns=2, **SUMS),
    _task("math alone", 1, "math", team="single", turns=1, **SUMS),
    _task("code", 3, "code", source="drills", first=True),
    _task("debate", 2, "debate", rounds=1, **DEBATE),
    _task("debate of two rounds", 1, "debate", rounds=2, **DEBATE),
    _task("truth", 1.5, "debate", mode="truth", judge="seat", rounds=1, **DEBATE),
    _task("tools", 3, "tools", world="drills", team="single"),
    _task("tools of two", 2, "tools", world="drills", team="researcher_solver"),
    _task("sudoku", 0.7, "sudoku", size=4),
    _task("guess the number", 0.4, "guess_number"),
    _task("twenty questions", 0.1, "twenty_questions", answers="seat"),
]


def runs(seed: int) -> Iterator[list[Example]]:
    """Yields the examples of one episode after another, without end. They depend only on `seed`, not on the machine."""
    rng = random.Random(seed)
    players = {task.name: Player(task) for task in TASKS}
    weights = [task.weight for task in TASKS]
    with asyncio.Runner() as runner:
        while True:
            (task,) = rng.choices([*TASKS, None], [*weights, ECHO])
            yield from runner.run(players[task.name].episode(rng)) if task else [[echo(rng)]]


def echo(rng: random.Random) -> Example:
    """An example that repeats numbers, names and signs."""
    kinds = (
        lambda: str(rng.randrange(10 ** rng.randint(1, 3))),
        lambda: "".join(rng.choice("bdfgklmnprst") + rng.choice("aiou") for _ in range(2)),
        lambda: rng.choice("rc") + str(rng.randrange(16)),
        lambda: rng.choice("+-*"),
    )
    text = " ".join(rng.choice(kinds)() for _ in range(rng.randint(1, 6)))
    return Example("echo", text, written("echo", text), text)


@dataclass
class Player:
    """Plays all seats of a task with errors. `heard` has the expert's answers in earlier instances, by seat."""

    task: Task
    heard: dict[str, list[str]] = field(default_factory=dict)

    async def episode(self, rng: random.Random) -> list[list[Example]]:
        env, examples = make_env(**self.task.env), list[list[Example]]()
        step = await _now(env.reset(rng.randrange(2**31)))
        while not step.done:
            answers = {seat: self.answer(env, seat, seen, rng) for seat, seen in step.observations.items()}
            for seat, seen in step.observations.items():
                prompt = written(env.roles.get(seat, ""), seen)
                examples.append([Example(f"{self.task.name} {seat}", str(seen), prompt, answers[seat])])
            if self.task.first:
                break
            step = await _now(env.step(answers))
        env.close()
        return examples

    def answer(self, env: Any, seat: str, seen: Any, rng: random.Random) -> str:
        right = env.expert(seat, rng)
        heard = self.heard.setdefault(seat, [])
        heard.append(right)
        del heard[:-50]
        if rng.random() < BLIND:
            return rng.choice(heard)
        return slipped(right, str(seen), rng)


async def _now(step: Any) -> Any:
    return await step if inspect.isawaitable(step) else step


def written(role: str, seen: Any) -> str:
    """The prompt as the base's chat template writes it. Written out here because the template takes a millisecond."""
    if not isinstance(seen, Chat):
        system = f"<|system|>{role}<|end|>" if role else ""
        return f"{system}<|user|>{seen}<|end|><|assistant|>"
    return "".join(f"<|{m['role']}|>{render_message(m)}<|end|>" for m in seen.messages) + "<|assistant|>"


# ---- errors


def slipped(answer: str, seen: str, rng: random.Random) -> str:
    """The `answer` with some of its parts replaced: a number or name by another one in `seen`, a digit by another
    digit, yes by no, a sign by another sign."""
    others = sorted(set(PIECE.findall(seen)))

    def slip(found: re.Match[str]) -> str:
        return other(found[0], others, rng) if rng.random() < SLIP else found[0]

    return PIECE.sub(slip, answer)


def other(piece: str, seen: list[str], rng: random.Random) -> str:
    """A random replacement of the same kind; the piece itself if it is of no kind, such as a fixed word of the form."""
    for sort in SORTS:
        if piece in sort:
            return rng.choice(sort)
    if piece not in seen and not piece.isdigit():
        return piece
    alike = [one for one in seen if shape(one) == shape(piece)]
    if piece.isdigit() and (not alike or rng.random() < 0.5):
        place = rng.randrange(len(piece))
        return piece[:place] + rng.choice("0123456789") + piece[place + 1 :]
    return rng.choice(alike)


def shape(piece: str) -> str:
    """The kind of a piece: the same for "r7" and "b12", for "7" and "12", for "arle" and "tor"."""
    return re.sub(r"\d+", "0", re.sub(r"[a-z]+", "a", piece))
