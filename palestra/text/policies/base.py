"""Protocol of a policy in text envs: an object with a name that answers observations.

The name carries the version (`planner@12`), so that staleness is visible in recorded episodes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from palestra.core.failures import ContextLengthExceeded
from palestra.core.types import Answer, Message

CONTEXT_MESSAGES = ("context length", "context_length_exceeded", "context window", "context size", "max_model_len")


def request_error(message: str) -> ValueError:
    """Returns the error for a request that a server refused with `message`: `ContextLengthExceeded` if the message says
    that the prompt is too long, else a ValueError."""
    lowered = message.lower()
    return ContextLengthExceeded(message) if any(text in lowered for text in CONTEXT_MESSAGES) else ValueError(message)


@dataclass(frozen=True)
class Query:
    """A request to a policy: `n` independent answers to one observation.

    `role` is the env's description of the seat's role; `seed` determines the answers; `history` holds this seat's
    earlier (observation, answer) pairs of the trajectory, oldest first, for policies with a history. `legal_actions`
    lists the legal actions (None: not restricted). `expert`, if the env has one, returns the action of an expert that
    knows the solution; for an env on another machine the result is awaitable.
    """

    role: str
    observation: Any
    n: int = 1
    seed: int = 0
    history: tuple[tuple[Any, Answer], ...] = field(default=())
    legal_actions: list[Any] | None = None
    expert: Callable[[random.Random], str | Awaitable[str]] | None = None


class Policy(Protocol):
    """A policy for the seats of a text env. `name` carries its version. If this process computes its answers on a CPU,
    it has an attribute `samples_on_cpu` that is true."""

    name: str

    async def act(self, query: Query) -> list[Answer]:
        """Returns `query.n` answers."""
        ...


def samples_on_cpu(policy: Policy) -> bool:
    """Returns whether this process computes a policy's answers, on a CPU."""
    return getattr(policy, "samples_on_cpu", False)


def observation_text(observation: Any) -> str:
    """Returns what a prompt shows of an observation; an array is shown as it is stored, as a list of all numbers, of
    which NumPy's own text leaves out the middle."""
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)


def chat_messages(query: Query, system: str | None = None, *, thoughts: bool = False) -> list[Message]:
    """Returns the chat messages of `query`: role as system message, earlier turns (with their `thoughts`),
    observation."""
    role = query.role if system is None else system
    messages = [{"role": "system", "content": role}] if role else []
    for observation, answer in query.history:
        thought = {"reasoning_content": answer.thought} if thoughts and answer.thought else {}
        messages.append({"role": "user", "content": observation_text(observation)})
        messages.append({"role": "assistant", "content": answer.text, **thought})
    return [*messages, {"role": "user", "content": observation_text(query.observation)}]
