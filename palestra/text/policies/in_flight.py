"""A language model policy whose running answers continue with newer weights (in-flight weight updates)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from palestra.core.types import Answer
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy

KVUpdate = Literal["keep_kv", "recompute_kv"]


class InFlightPolicy:
    """Plays with the weights of the last `update`, which take effect also within an episode and within an answer.

    `current` returns the learner's policy at its current weights, whose sampler must be in this process. `kv_update`
    determines whether the keys and values of running answers are computed again, see `Sampler.replace_adapter`. Each
    answer has the version of each of its tokens. `name` has the version of the weights that a new answer starts with.
    """

    def __init__(self, current: Callable[[], LanguagePolicy], kv_update: KVUpdate) -> None:
        self._current = current
        self.kv_update = kv_update
        self._policy = current()
        self.name = self._policy.name

    def update(self) -> None:
        """Switches to the learner's current weights: running answers use them from their next token on, and so do all
        later answers."""
        old = self._policy
        new = self._current()
        if new is old:
            return
        self._policy = new
        self.name = new.name
        if old.adapter and new.adapter:
            old.sampler.replace_adapter(old.adapter, new.adapter, recompute=self.kv_update == "recompute_kv")

    async def act(self, query: Query) -> list[Answer]:
        """Returns `query.n` answers, which start with the current weights."""
        return await self._policy.act(query, lambda: self._policy)
