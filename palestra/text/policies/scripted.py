"""Policies without a model: fixed answers, random legal actions, a function, or a person."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence

from palestra.core.chat import escape_control_chars
from palestra.core.seeding import derive_seed
from palestra.core.types import Answer
from palestra.text.policies.base import Query

Script = Callable[[Query, random.Random], str | Awaitable[str]]
AskPerson = Callable[[Query], Awaitable[str]]  # shows the query to a person and returns the answer


class ScriptedPolicy:
    """Answers with `script`: a function of the query and a seeded random generator (it may be a coroutine function), or
    a list with one answer per turn of a trajectory, repeated cyclically."""

    def __init__(self, script: Script | Sequence[str], name: str = "scripted") -> None:
        self.name = name
        self._script = script

    async def act(self, query: Query) -> list[Answer]:
        return [Answer(await self._text(query, i), self.name) for i in range(query.n)]

    async def _text(self, query: Query, i: int) -> str:
        if not callable(self._script):
            return self._script[len(query.history) % len(self._script)]
        text = self._script(query, random.Random(f"{query.seed}.{i}"))
        return await text if inspect.isawaitable(text) else text


class RandomPolicy(ScriptedPolicy):
    """Random over the legal actions if the env lists them, otherwise 1 to `length` random words of `vocabulary`.

    With `odds` above 1 the legal actions have unequal probabilities, which follow from `seed` and what the policy sees:
    two of them differ by a factor of at most `odds`. Raises ValueError then in an env that lists none.
    """

    def __init__(
        self,
        vocabulary: Sequence[str] = ("up", "down", "left", "right"),
        length: int = 3,
        name: str = "random",
        *,
        odds: float = 1.0,
        seed: int = 0,
    ) -> None:
        def script(query: Query, rng: random.Random) -> str:
            if words := query.legal_actions:
                chosen = rng.choice(words) if odds == 1 else rng.choices(words, self.weights(query, len(words)))[0]
                return str(chosen)
            if odds != 1:
                raise ValueError("odds weighs legal actions, and this env lists none: leave odds out")
            return " ".join(rng.choices(list(vocabulary), k=rng.randint(1, length)))

        super().__init__(script, name)
        self.odds = odds
        self._seed = seed

    def weights(self, query: Query, count: int) -> list[float]:
        """Returns the weights from 1 to `odds` of the `count` legal actions at a query."""
        if self.odds == 1:
            return [1.0] * count
        rng = random.Random(derive_seed(self._seed, "odds", query.role, query.observation))
        return [self.odds ** rng.uniform(0, 1) for _ in range(count)]


class ExpertPolicy(ScriptedPolicy):
    """Plays the env's own expert, which knows the solution: a teacher for imitation, not an opponent for evaluation.
    Raises ValueError in an env without an expert."""

    def __init__(self, name: str = "expert") -> None:
        def script(query: Query, rng: random.Random) -> str | Awaitable[str]:
            if query.expert is None:
                raise ValueError("this env has no expert policy: choose another policy")
            return query.expert(rng)

        super().__init__(script, name)


async def ask_at_terminal(query: Query) -> str:
    """Asks a person at the terminal. Raises EOFError at the end of input (Ctrl-D)."""
    role = f"\n[{query.role}]" if query.role and not query.history else ""
    choices = f"\n({', '.join(map(str, query.legal_actions))})" if query.legal_actions else ""
    return await asyncio.to_thread(input, escape_control_chars(f"{role}\n{query.observation}{choices}\n> "))


class HumanPolicy:
    """A person, asked by `ask` at the terminal or in a browser (`palestra.dashboard.play_session`). An exception of
    `ask`, such as the end of input, fails the episode."""

    name = "human"

    def __init__(self, ask: AskPerson = ask_at_terminal) -> None:
        self._ask = ask

    async def act(self, query: Query) -> list[Answer]:
        text = await self._ask(query)
        return [Answer(text.strip(), self.name) for _ in range(query.n)]
