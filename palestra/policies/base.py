"""What a policy is to the rest of the house: something with a name that answers observations.

The name carries the version (`planner@12`), so that staleness can be seen in recorded episodes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from palestra.types import Answer, Message


@dataclass(frozen=True)
class Query:
    """What a policy is asked: `n` independent answers to one observation.

    `role` is the env's word for what the seat is there for; `seed` fixes the answers; `history` holds this seat's
    earlier (observation, answer) pairs of the line being played, oldest first, for policies that remember. `expert`
    says what one who knows the solution would, where the env knows it; of an env on another machine it is awaited.
    """

    role: str
    observation: Any
    n: int = 1
    seed: int = 0
    history: tuple[tuple[Any, Answer], ...] = field(default=())
    legal: list[Any] | None = None
    expert: Callable[[random.Random], str | Awaitable[str]] | None = None


class Policy(Protocol):
    name: str

    async def act(self, query: Query) -> list[Answer]:
        """`query.n` answers."""
        ...


def chat(query: Query, system: str | None = None) -> list[Message]:
    """The conversation that `query` stands for, in the chat format: role, earlier turns, observation."""
    role = query.role if system is None else system
    messages = [{"role": "system", "content": role}] if role else []
    for observation, answer in query.history:
        messages += [{"role": "user", "content": str(observation)}, {"role": "assistant", "content": answer.text}]
    return [*messages, {"role": "user", "content": str(query.observation)}]
