"""Requests and completions of the sampler, and the state of a request while it is served.

Shapes: `P` prompt tokens, `T` answer positions, `k` best tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from palestra.core.failures import ContextLengthExceeded
from palestra.core.types import SamplingMask
from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_pages import CacheSlot
from palestra.engine.forward.length_limit import position_limit
from palestra.engine.lora.adapters import RowOrder, Snapshot, row_order
from palestra.engine.sampling.token_sampling import SamplingConfig

MAX_MERGED_CHARS = 4  # characters that a tokenizer's normaliser may merge into one


@dataclass(frozen=True)
class Request:
    """A request for `n` answers to the prompt `prompt_ids` [P] (int) under `adapter` (None: the bare base).

    `keep_kv` stores the answers' keys and values for a later turn that continues one of them. `seed` is taken modulo
    2**64. `top_logprobs` is the number of most likely tokens to return at each position. `client` is the name under
    which rows are shared fairly. `choices` are token sequences of which an answer must be one (none: not restricted),
    each with its end token, so that none begins another.
    """

    prompt_ids: np.ndarray
    n: int
    sampling: SamplingConfig
    adapter: Snapshot | None = None
    seed: int = 0
    keep_kv: bool = False
    top_logprobs: int = 0
    client: str = ""
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `token_ids` [T] int32 includes the end token if there is one; `logprobs` [T] float32 are at the sampling
    temperature, before top-k and top-p (at temperature 0: of the plain softmax); `stop_reason` is "stop" or "length".
    If the request asked for them, `top_ids` [T, k] int32 are the most likely tokens, best first, and `top_logprobs` [T,
    k] float32 their log-probabilities. `adapters` are the names of the snapshots that sampled, each with the index of
    its first token: more than one if the adapter was replaced while the answer was sampled; none if not recorded.
    `sampling_mask` is None unless the sampling records it; `logprobs` are then of the distribution that it leaves.
    `routed_experts` [P + T - 1, L, K] int32 is None unless a server returns it (routing_replay.py).
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: str
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    adapters: tuple[tuple[int, str], ...] = ()
    sampling_mask: SamplingMask | None = None
    routed_experts: np.ndarray | None = None


SamplingOutcome = list[Completion] | Exception


@dataclass(eq=False)
class CachedPrompt:
    """A prompt in the cache; `num_groups` unfinished groups use it, with `num_rows` live answers."""

    slot: CacheSlot
    num_groups: int = 0
    num_rows: int = 0


@dataclass(eq=False)
class SequenceGroup:
    """A sequence group: a request being served. Its siblings start in order, all at once or some later: `num_started`
    have started, `num_admitted` may start. `prompt` and the logits [V] of the first token are set once the prompt is
    computed. `preempted` are started answers that gave their cache slots back, in sibling order; `resumed` are those of
    them that may continue. `on_done` is called with the answers or the error."""

    request: Request
    on_done: Callable[[SamplingOutcome], None]
    num_started: int = 0
    num_admitted: int = 0
    prompt: CachedPrompt | None = None
    first_logits_V: Tensor | None = None

    def __post_init__(self) -> None:
        self.seed = int(self.request.seed) % 2**64
        self.finished: dict[int, Completion] = {}
        self.preempted: list[LiveSequence] = []
        self.resumed: list[LiveSequence] = []

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_unadmitted(self) -> int:
        """Number of siblings that wait: not yet admitted, or preempted."""
        return self.request.n - self.num_admitted + len(self.preempted)

    def admit(self, count: int) -> None:
        """Lets `count` more siblings start or continue, preempted ones first."""
        resumed = self.preempted[:count]
        self.preempted = self.preempted[count:]
        self.resumed += resumed
        self.num_admitted += count - len(resumed)

    def take_back(self, count: int) -> None:
        """Takes back the admission of the last `count` siblings that have not started or continued."""
        new = min(count, self.num_admitted - self.num_started)
        self.num_admitted -= new
        num_kept = len(self.resumed) - (count - new)
        self.preempted = self.resumed[num_kept:] + self.preempted
        self.resumed = self.resumed[:num_kept]

    @property
    def num_starting(self) -> int:
        """Number of admitted siblings that have not started or continued."""
        return self.num_admitted - self.num_started + len(self.resumed)

    @property
    def rows_per_answer(self) -> int:
        """Number of rows that one answer counts as: returning the most likely tokens takes memory too."""
        return 1 + self.request.top_logprobs // 16

    @property
    def is_done(self) -> bool:
        """True if all answers are finished."""
        return len(self.finished) == self.request.n

    @property
    def snapshot_id(self) -> int:
        """Id of the snapshot that computes the prompt; 0 for the bare base."""
        return self.sort_key[-1]

    @property
    def adapter_name(self) -> str:
        """Name of the adapter's snapshot; "" for the bare base."""
        return self.sort_key[2]

    def replace_adapter(self, adapter: Snapshot, *, keep_kv: bool) -> None:
        """Sets the adapter of the tokens to come. Without `keep_kv` no keys and values are stored for a later turn."""
        self.request = replace(self.request, adapter=adapter, keep_kv=keep_kv and self.request.keep_kv)
        for name in ("prompt_key", "sort_key"):
            self.__dict__.pop(name, None)

    @cached_property
    def prompt_key(self) -> tuple[int, bytes]:
        """Cache key of the prompt: equal for groups whose prompts have the same keys and values."""
        return self.snapshot_id, np.asarray(self.request.prompt_ids, np.int64).tobytes()

    @cached_property
    def sort_key(self) -> RowOrder:
        """Sort key: by adapter, the bare base last."""
        return row_order(self.request.adapter)

    def completions(self) -> list[Completion]:
        """Returns the answers in sibling order."""
        return [self.finished[k] for k in range(self.request.n)]


@dataclass(eq=False)
class LiveSequence:
    """A live answer, sibling `sibling` of `group`: tokens, log-probabilities, the most likely tokens and those that
    top-k and top-p kept if asked for, the tail searched for stop strings, the cache slot, and the names of the adapters
    that sampled it, each with the index of its first token."""

    group: SequenceGroup
    sibling: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    kept_ids: list[np.ndarray] = field(default_factory=list)
    tail: deque[int] = field(default_factory=deque)
    slot: CacheSlot | None = None
    adapters: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note_adapter()

    def note_adapter(self) -> None:
        """Notes that the group's adapter samples from the next token on."""
        self.adapters = [entry for entry in self.adapters if entry[0] < len(self.token_ids)]
        self.adapters.append((len(self.token_ids), self.group.adapter_name))

    @property
    def cache_position(self) -> int:
        """Sort key of live rows: their order in our KV cache, if they are in it."""
        return self.slot.pages[0] if self.slot else 0

    @property
    def allowed_ids(self) -> np.ndarray:
        """The tokens, int32, with which the answer can go on to one of the request's choices."""
        choices = self.group.request.choices
        so_far = tuple(self.token_ids)
        count = len(so_far)
        return np.array(sorted({choice[count] for choice in choices if choice[:count] == so_far}), np.int32)

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) == self.group.request.sampling.max_tokens

    def to_completion(self, stop_reason: str) -> Completion:
        """Returns the completion, with the stop reason `stop_reason`."""
        ids = np.array(self.token_ids, np.int32)
        logps = np.array(self.logprobs, np.float32)
        more: dict[str, Any] = {"adapters": tuple(self.adapters)}
        if self.group.request.sampling.records_mask:
            more["sampling_mask"] = SamplingMask.join(self.kept_ids)
        if not self.group.request.top_logprobs:
            return Completion(ids, logps, stop_reason, **more)
        top_ids, top_logps = (np.stack(column) for column in zip(*self.top_tokens, strict=True))
        return Completion(ids, logps, stop_reason, top_ids.astype(np.int32), top_logps.astype(np.float32), **more)


def max_positions(engine: Engine) -> int | None:
    """Returns the base's maximum number of tokens, prompt and answer together; None if its config names no limit.

    With LongRoPE (Phi-3 for 128k tokens) it is the length from which on the embedding of a token would depend on the
    longest sequence of its batch, and on the length of its sequence when it entered the cache.
    """
    return position_limit(engine.model.config.get_text_config())


def max_chars_per_token(tokenizer: Any) -> int:
    """Returns an upper bound on the characters of a text that one token stands for.

    A text of more characters than this times a base's positions does not fit it, however it is tokenized.
    """
    return MAX_MERGED_CHARS * max(map(len, tokenizer.get_vocab()))


def check_prompt(engine: Engine, prompt_ids: np.ndarray, new_tokens: int) -> None:
    """Raises ValueError unless the prompt is non-empty, has valid token ids, and leaves room for `new_tokens`
    tokens (then ContextLengthExceeded)."""
    limit = max_positions(engine)
    if not len(prompt_ids):
        raise ValueError("a prompt needs at least one token")
    if limit and len(prompt_ids) + new_tokens > limit:
        raise ContextLengthExceeded(
            f"a prompt of {len(prompt_ids)} tokens and {new_tokens} new ones exceed the base's context length, "
            f"{limit}: shorten the observation or lower sampling.max_tokens"
        )
    # on a GPU an index out of range makes the process unusable
    vocabulary = engine.model.config.get_text_config().vocab_size
    if int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= vocabulary:
        raise ValueError(f"a prompt's tokens must be ids from 0 to {vocabulary - 1}, as the base has them")


def check_top_logprobs(engine: Engine, k: int) -> None:
    """Raises ValueError unless `k` most likely tokens can be returned: 0 to the size of the vocabulary."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    if not 0 <= k <= vocabulary:
        raise ValueError(f"{k} likeliest tokens asked for: it must be 0 to {vocabulary}, the base's vocabulary")


def check_choices(engine: Engine, choices: Sequence[Sequence[int]], most: int) -> None:
    """Raises ValueError unless the choices are token ids of the base, at most `most`, and none begins another: the
    longer of two such choices could never be sampled."""
    longest = max(map(len, choices), default=0)
    if longest > most:
        raise ValueError(
            f"the longest of the choices (legal actions) has {longest} tokens with its end, and sampling.max_tokens is "
            f"{most}: set sampling.max_tokens: {longest}"
        )
    vocabulary = engine.model.config.get_text_config().vocab_size
    ordered = sorted({*map(tuple, choices)})
    if any(not choice or min(choice) < 0 or max(choice) >= vocabulary for choice in ordered):
        raise ValueError(f"choices must be token ids from 0 to {vocabulary - 1}, as the base has them")
    if any(after[: len(choice)] == choice for choice, after in pairwise(ordered)):
        raise ValueError("one of the choices begins another, so that the longer one could not be sampled")
