"""The token budget of a conversation: long tool results are cut, and a conversation above the budget is rewritten.

A policy is trained on exactly the tokens that it saw: an answer's prompt is the rewritten conversation, and later turns
continue from it until it exceeds the budget again.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import Field, field_validator

from palestra.core.chat import Json
from palestra.core.config import StrictModel, load_object
from palestra.core.user_functions import check_function

CountTokens = Callable[[Sequence[Json]], int]
Compressor = Callable[[Sequence[Json], int, CountTokens], Sequence[Json] | Awaitable[Sequence[Json]]]

DROPPED_RESULT = "[tool result dropped]"


class ContextConfig(StrictModel):
    """Budget of the conversations that a policy sees."""

    max_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of a prompt. A longer conversation is rewritten by `compress`. null: only the base's own
    limit, at which a trajectory ends, truncated."""
    target: float = Field(0.5, gt=0, le=1)
    """Share of `max_tokens` to which a conversation is rewritten. Lower values rewrite less often; between rewrites
    only the new tokens of a turn are computed."""
    compress: str = "drop_oldest"
    """How a conversation is rewritten: "drop_oldest" drops the oldest tool results and then the oldest turns;
    "module:function" is a function of your own, `compress(messages, limit, count_tokens)`, which returns messages of at
    most `limit` tokens and may be a coroutine function."""
    max_tool_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of a tool's result. A longer one is cut and marked as cut. null: no limit."""

    @field_validator("compress")
    @classmethod
    def _loadable(cls, path: str) -> str:
        load_compressor(path)
        return path

    async def rewrite(self, messages: Sequence[Json], count_tokens: CountTokens) -> list[Json]:
        """Returns the messages as `compress` rewrites them."""
        assert self.max_tokens is not None
        limit = max(1, int(self.target * self.max_tokens))
        rewritten = load_compressor(self.compress)(messages, limit, count_tokens)
        return list(await rewritten if inspect.isawaitable(rewritten) else rewritten)


def load_compressor(path: str) -> Compressor:
    """Returns the function that `path` names. Raises ValueError if there is none."""
    if path in COMPRESSORS:
        return COMPRESSORS[path]
    function: Compressor = load_object(path, f"context.compress: not one of {', '.join(COMPRESSORS)}, and the function")
    check_function(function, f"context.compress: {path}", "messages", "limit", "count_tokens")
    return function


def drop_oldest(messages: Sequence[Json], limit: int, count_tokens: CountTokens) -> list[Json]:
    """Returns the messages shortened to `limit` tokens: the oldest tool results are replaced by a mark, as few as
    possible; if all are replaced and that is not enough, the oldest turns are dropped, as few as possible.

    A turn is an answer with the messages up to the next answer. The messages before the first answer and the last turn
    are never dropped; the result exceeds `limit` if these alone do.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    results = [i for i, message in enumerate(messages[:last]) if message["role"] == "tool"]

    def without_results(count: int) -> list[Json]:
        dropped = set(results[:count])
        return [m | {"content": DROPPED_RESULT} if i in dropped else m for i, m in enumerate(messages)]

    count = _fewest(len(results), lambda n: count_tokens(without_results(n)) <= limit)
    shorter = without_results(count)
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

    def without_turns(turns: int) -> list[Json]:
        if not turns:
            return shorter
        return [*_append_mark(shorter[: starts[0]], f"[{turns} earlier turns dropped]"), *shorter[starts[turns] :]]

    return without_turns(_fewest(max(0, len(starts) - 1), lambda n: count_tokens(without_turns(n)) <= limit))


def _append_mark(head: list[Json], mark: str) -> list[Json]:
    """Returns the messages before the first answer with `mark` at their end."""
    if not head:
        return [{"role": "user", "content": mark}]
    content = head[-1].get("content")
    text: Any = [*content, {"type": "text", "text": mark}] if isinstance(content, list) else f"{content or ''}\n{mark}"
    return [*head[:-1], head[-1] | {"content": text}]


def _fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the smallest number below `most` for which `is_enough` is true, or `most` if there is none. `is_enough`
    must stay true for larger numbers."""
    return bisect_left(range(most), True, key=is_enough)


COMPRESSORS: dict[str, Compressor] = {"drop_oldest": drop_oldest}
