"""Requests and completions of the sampler, and the state of a request while it is served.

Shapes: `P` prompt tokens, `T` answer positions, `k` best tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from palestra.engine.cache import Slot
from palestra.engine.draw import Sampling
from palestra.engine.lora import Snapshot
from palestra.engine.models import Engine


@dataclass(frozen=True)
class Request:
    """A request for `n` answers to the prompt `prompt_ids` [P] (int) under `adapter` (None: the bare base).

    `keep` stores the answers' keys and values for a later turn that continues one of them. `seed` is taken modulo
    2**64. `top_logprobs` is the number of most likely tokens to return at each position. `client` is the name under
    which rows are shared fairly.
    """

    prompt_ids: np.ndarray
    n: int
    sampling: Sampling
    adapter: Snapshot | None = None
    seed: int = 0
    keep: bool = False
    top_logprobs: int = 0
    client: str = ""


@dataclass(frozen=True)
class Sampled:
    """One sampled completion.

    `token_ids` [T] int32 includes the end token if there is one; `logprobs` [T] float32 are at the sampling
    temperature, before top-k and top-p (at temperature 0: of the plain softmax); `stop` is "stop" or "length". If the
    request asked for them, `top_ids` [T, k] int32 are the most likely tokens, best first, and `top_logps` [T, k]
    float32 their log-probabilities.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop: str
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None


Outcome = list[Sampled] | Exception


@dataclass(eq=False)
class Prompt:
    """A prompt in the cache, with the number of unfinished `groups` that use it and of their live answers (`rows`)."""

    slot: Slot
    groups: int = 0
    rows: int = 0


@dataclass(eq=False)
class Group:
    """A sequence group: a request being served. Its siblings start in order, all at once or some later: `begun` have
    started, `admitted` may start. `prompt` and the logits [V] of the first token are set once the prompt is computed.
    `done` is called with the answers or the error."""

    request: Request
    done: Callable[[Outcome], None]
    begun: int = 0
    admitted: int = 0
    prompt: Prompt | None = None
    first_V: Tensor | None = None

    def __post_init__(self) -> None:
        self.seed = int(self.request.seed) % 2**64
        self.answers: dict[int, Sampled] = {}

    @property
    def size(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def left(self) -> int:
        """Number of siblings that are not yet admitted."""
        return self.request.n - self.admitted

    @property
    def weight(self) -> int:
        """Number of rows that one answer counts as: returning the most likely tokens takes memory too."""
        return 1 + self.request.top_logprobs // 16

    @property
    def over(self) -> bool:
        """True if all answers are finished."""
        return len(self.answers) == self.request.n

    @property
    def owner(self) -> int:
        """Id of the snapshot that computes the prompt; 0 for the bare base."""
        return self.request.adapter.id if self.request.adapter else 0

    @cached_property
    def asked(self) -> tuple[int, bytes]:
        """Cache key of the prompt: equal for groups whose prompts have the same keys and values."""
        return self.owner, np.asarray(self.request.prompt_ids, np.int64).tobytes()

    @cached_property
    def order(self) -> tuple[bool, str, int]:
        """Sort key: by adapter, the bare base last, which is the row order of a `Stacked` route."""
        adapter = self.request.adapter
        return adapter is None, adapter.name if adapter else "", self.owner

    def result(self) -> list[Sampled]:
        """Returns the answers in sibling order."""
        return [self.answers[k] for k in range(self.request.n)]


@dataclass(eq=False)
class Row:
    """A live answer, sibling `k` of `group`: tokens, log-probabilities, the most likely tokens if asked for, the tail
    searched for stop strings, and the cache slot."""

    group: Group
    k: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    tail: deque[int] = field(default_factory=deque)
    slot: Slot | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Sort key of live rows: their order in the cache."""
        assert self.slot is not None
        return self.slot.pool.room, self.slot.index

    @property
    def full(self) -> bool:
        """True if the answer has `max_tokens` tokens."""
        return len(self.token_ids) == self.group.request.sampling.max_tokens

    def sampled(self, stop: str) -> Sampled:
        """Returns the completion, with the stop reason `stop`."""
        ids, logps = np.array(self.token_ids, np.int32), np.array(self.logprobs, np.float32)
        if not self.group.request.top_logprobs:
            return Sampled(ids, logps, stop)
        top_ids, top_logps = (np.stack(column) for column in zip(*self.top, strict=True))
        return Sampled(ids, logps, stop, top_ids.astype(np.int32), top_logps.astype(np.float32))


def positions(engine: Engine) -> int | None:
    """Returns the base's maximum number of tokens, prompt and answer together; None if its config names no limit."""
    limit: int | None = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_prompt(engine: Engine, prompt_ids: np.ndarray, new: int) -> None:
    """Raises ValueError unless the prompt is non-empty, has valid token ids, and leaves room for `new` tokens."""
    limit = positions(engine)
    if not len(prompt_ids):
        raise ValueError("a prompt needs at least one token")
    if limit and len(prompt_ids) + new > limit:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens and {new} new ones exceed the base's {limit} positions. "
            "Shorten the observation or lower sampling.max_tokens."
        )
    # on a GPU an index out of range makes the process unusable
    vocabulary = engine.model.config.get_text_config().vocab_size
    if int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= vocabulary:
        raise ValueError(f"a prompt's tokens must be ids from 0 to {vocabulary - 1}, as the base has them")


def check_top(engine: Engine, k: int) -> None:
    """Raises ValueError unless `k` most likely tokens can be returned: 0 to the size of the vocabulary."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    if not 0 <= k <= vocabulary:
        raise ValueError(f"{k} likeliest tokens asked for: it must be 0 to {vocabulary}, the base's vocabulary")
