"""What a sampler is asked and answers, and a request while it is served.

Shapes: `P` prompt tokens, `K` siblings, `T` answer positions, `k` best tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from palestra.engine.draw import Sampling, StopStrings
from palestra.engine.lora import Snapshot
from palestra.engine.models import Engine


@dataclass(frozen=True)
class Request:
    """`n` answers to the prompt `prompt_ids` [P] under `adapter` (None: the bare base). `keep` remembers the answers'
    keys and values for a later turn that goes on from one of them. `seed` counts modulo 2**64. `top_logprobs` asks for
    that many of the likeliest tokens at each position."""

    prompt_ids: np.ndarray
    n: int
    sampling: Sampling
    adapter: Snapshot | None = None
    seed: int = 0
    keep: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True)
class Sampled:
    """`token_ids` [T] with the end token if there was one; `logprobs` [T] under the sampling temperature, before top-k
    and top-p cut the distribution (at temperature 0: of the plain softmax); `stop` is "stop" or "length". Where the
    request asked for them, `top_ids` [T, k] are the likeliest tokens, best first, and `top_logps` [T, k] theirs."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop: str
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None


Outcome = list[Sampled] | Exception


@dataclass(eq=False)
class Group:
    """A request being served. Arrays are [K, T], [K] and [K, T, k]; `t` tokens are sampled so far."""

    request: Request
    done: Callable[[Outcome], None]
    tokens_KT: np.ndarray = field(init=False)
    logps_KT: np.ndarray = field(init=False)
    length_K: np.ndarray = field(init=False)
    stopped_K: np.ndarray = field(init=False)
    alive_K: np.ndarray = field(init=False)
    top_ids_KTk: np.ndarray = field(init=False)
    top_logps_KTk: np.ndarray = field(init=False)
    tails_K: list[deque[int]] = field(init=False)
    t: int = 0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        shape = (self.request.n, sampling.max_tokens)
        self.tokens_KT, self.logps_KT = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.length_K, self.stopped_K = np.zeros(shape[0], np.int64), np.zeros(shape[0], bool)
        self.alive_K = np.ones(shape[0], bool)
        top_shape = (*shape, self.request.top_logprobs)
        self.top_ids_KTk, self.top_logps_KTk = np.zeros(top_shape, np.int32), np.zeros(top_shape, np.float32)
        self.tails_K = [StopStrings.tail(sampling.stop) for _ in range(shape[0])] if sampling.stop else []
        self.seed = int(self.request.seed) % 2**64

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def owner(self) -> int:
        return self.request.adapter.id if self.request.adapter else 0

    @cached_property
    def asked(self) -> tuple[int, bytes]:
        """The same for groups whose prompts have the same keys and values."""
        return self.owner, np.asarray(self.request.prompt_ids, np.int64).tobytes()

    def note(self, k: int, token: int, logp: float, *, ends: bool) -> None:
        """Adds a token to sibling `k`, which `ends` with it or is as long as it may be."""
        self.tokens_KT[k, self.t], self.logps_KT[k, self.t], self.length_K[k] = token, logp, self.t + 1
        self.stopped_K[k] = ends
        self.alive_K[k] = not ends and self.t + 1 < self.request.sampling.max_tokens

    def result(self) -> list[Sampled]:
        return [self._sampled(k, n) for k, n in enumerate(self.length_K)]

    def _sampled(self, k: int, n: int) -> Sampled:
        stop = "stop" if self.stopped_K[k] else "length"
        if not self.request.top_logprobs:
            return Sampled(self.tokens_KT[k, :n], self.logps_KT[k, :n], stop)
        top = self.top_ids_KTk[k, :n], self.top_logps_KTk[k, :n]
        return Sampled(self.tokens_KT[k, :n], self.logps_KT[k, :n], stop, *top)


def by_owner(group: Group) -> tuple[bool, str, int]:
    adapter = group.request.adapter
    return (adapter is None, adapter.name if adapter else "", group.owner)


def check_prompt(engine: Engine, prompt_ids: np.ndarray, new: int) -> None:
    """Raises ValueError unless the prompt is one of the base's tokens that leaves room for `new` ones."""
    config = engine.model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not len(prompt_ids):
        raise ValueError("a prompt needs at least one token")
    if limit and len(prompt_ids) + new > limit:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens and {new} new ones exceed the base's {limit} positions. "
            "Shorten the observation or lower sampling.max_tokens."
        )
    # a GPU does not come back from an index beyond the table
    if int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= config.vocab_size:
        raise ValueError(f"a prompt's tokens must be ids from 0 to {config.vocab_size - 1}, as the base has them")


def check_top(engine: Engine, k: int) -> None:
    """Raises ValueError unless `k` likeliest tokens can be asked for."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    if not 0 <= k <= vocabulary:
        raise ValueError(f"{k} likeliest tokens asked for: it must be 0 to {vocabulary}, the base's vocabulary")
