"""Policies without a model: fixed answers, random legal ones, a function, or a person."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence

from palestra.chat import visible
from palestra.policies.base import Query
from palestra.types import Answer

Script = Callable[[Query, random.Random], str | Awaitable[str]]
Ask = Callable[[Query], Awaitable[str]]  # shows a person what a seat is asked, and comes back with the answer


class ScriptedPolicy:
    """Answers with `script`: a function of the query and a seeded random generator (it may be a coroutine function), or
    a list with one answer for each of a line's turns, again and again."""

    def __init__(self, script: Script | Sequence[str], name: str = "scripted") -> None:
        self.name, self._script = name, script

    async def act(self, query: Query) -> list[Answer]:
        return [Answer(await self._text(query, i), self.name) for i in range(query.n)]

    async def _text(self, query: Query, i: int) -> str:
        if not callable(self._script):
            return self._script[len(query.history) % len(self._script)]
        said = self._script(query, random.Random(f"{query.seed}.{i}"))
        return await said if inspect.isawaitable(said) else said


class RandomPolicy(ScriptedPolicy):
    """Uniform over the legal actions an env names, else over `vocabulary`, `length` words long."""

    def __init__(self, vocabulary: Sequence[str] = ("up", "down", "left", "right"), length: int = 3) -> None:
        def script(query: Query, rng: random.Random) -> str:
            if query.legal:
                return str(rng.choice(query.legal))
            return " ".join(rng.choices(list(vocabulary), k=rng.randint(1, length)))

        super().__init__(script, "random")


class ExpertPolicy(ScriptedPolicy):
    """Says what the env's own expert would, who knows the solution: a teacher to learn from, never an opponent to
    measure against. Raises ValueError in an env that has none."""

    def __init__(self, name: str = "expert") -> None:
        def script(query: Query, rng: random.Random) -> str | Awaitable[str]:
            if query.expert is None:
                raise ValueError("this env knows no solution to its instances, and so has no expert: play another")
            return query.expert(rng)

        super().__init__(script, name)


async def at_terminal(query: Query) -> str:
    """A person's answer at the terminal; the end of input (Ctrl-D) raises EOFError."""
    role = f"\n[{query.role}]" if query.role and not query.history else ""
    choices = f"\n({', '.join(map(str, query.legal))})" if query.legal else ""
    return await asyncio.to_thread(input, visible(f"{role}\n{query.observation}{choices}\n> "))


class HumanPolicy:
    """A person, whom `ask` asks: at the terminal, or on a page (`palestra.dashboard.game`). What it raises, such as the
    end of input, fails the episode."""

    name = "human"

    def __init__(self, ask: Ask = at_terminal) -> None:
        self._ask = ask

    async def act(self, query: Query) -> list[Answer]:
        text = await self._ask(query)
        return [Answer(text.strip(), self.name) for _ in range(query.n)]
