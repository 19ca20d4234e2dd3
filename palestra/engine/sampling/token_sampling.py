"""Token sampling: temperature, top-k, top-p, most likely tokens, and stop strings.

Shapes: `R` live rows, `V` vocabulary, `C` candidates, `k` best tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.config import StrictModel
from palestra.engine.forward.logits import cached_chunks

MIN_TEMPERATURE = 1e-6  # minimum temperature above 0: with lower ones, scaled logits overflow to NaN
MAX_CANDIDATES = 1024  # top-k and top-p look among this many tokens first: sorting all takes longer than the model
MAX_UTF8_BYTES = 4  # maximum bytes, and so tokens, of one UTF-8 character
REPLACEMENT_CHAR = "\ufffd"  # decoders' replacement for the rest of a cut character
NO_IDS = np.zeros(0, np.int32)


class SamplingConfig(StrictModel):
    """Sampling parameters of a policy.

    An answer ends with the model's end token (unless `stop_at_eos` is false), with one of `stop_token_ids`, with the
    token that completes one of the `stop` strings, or after `max_tokens`. The ending token is part of the answer.
    `thinking_token_budget` and `legal_only` are the policy's to keep, which knows what a thought is and what an
    observation allows; a sampler has no use for them.
    """

    max_tokens: int = Field(32, ge=1)
    """Maximum number of tokens of an answer, at least 1."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Softmax temperature, at least 0. 0 is greedy: the most likely token is always taken."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keeps the smallest set of tokens with at least this total probability, in (0, 1], among those
    that `top_k` keeps, whose probabilities then sum to 1. 1 keeps all tokens."""
    top_k: int = Field(0, ge=0)
    """Keeps the k most likely tokens. 0 keeps all tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer."""
    stop_at_eos: bool = True
    """True if the model's end token ends an answer. Set it to false to sample up to `max_tokens`."""
    keep_sampling_mask: bool = False
    """Records the tokens that top-k and top-p kept, with log-probabilities of the distribution that they leave, and
    trains that distribution too (DeepSeek-V3.2, 2025, "Keep Sampling Mask"). Without it log-probabilities are of all
    tokens, and the policy gradient of truncated samples is biased."""
    legal_only: bool = False
    """Samples an answer among the legal actions that the env lists with an observation (guided choice): no other token
    is sampled, and log-probabilities and entropies are of what is left, in training too."""

    thinking_token_budget: int | None = Field(None, ge=1)
    """Tokens after which an answer that is still a thought is made to end it, with the marks of the chat template, and
    goes on up to `max_tokens`. These marks are in the answer's tokens and are not trained on. null: thoughts end by
    themselves, or with the answer."""

    @property
    def is_truncated(self) -> bool:
        """True if top-k or top-p removes tokens from what is sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def records_mask(self) -> bool:
        return self.legal_only or (self.keep_sampling_mask and self.is_truncated)

    @model_validator(mode="after")
    def _can_be_legal(self) -> Self:
        if self.legal_only and (self.stop or self.stop_token_ids or not self.stop_at_eos or self.thinking_token_budget):
            raise ValueError(
                "legal_only: an answer is one of the legal actions and its end token, as a whole: leave out stop, "
                "stop_token_ids, stop_at_eos and thinking_token_budget"
            )
        return self


class SampledTokens(NamedTuple):
    """Sampled tokens [R] int64, and their log-probabilities [R] float32 (after top-k and top-p for rows that record
    masks, else before). `kept_ids` are the tokens that top-k and top-p kept, int32 for each row; empty for rows without
    a mask."""

    tokens_R: np.ndarray
    logps_R: np.ndarray
    kept_ids: list[np.ndarray]


def counter_uniform(seeds_R: np.ndarray, siblings_R: np.ndarray, steps_R: np.ndarray) -> np.ndarray:
    """Returns uniform float64 numbers [R] in [0, 1), a pure function of (seed, sibling, step), each uint64 [R]: two
    rounds of splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        x = _mix(seeds_R + np.uint64(0x9E3779B97F4A7C15) * (siblings_R + np.uint64(1)))
        x = _mix(x + np.uint64(0x9E3779B97F4A7C15) * (steps_R + np.uint64(1)))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_tokens(
    logits_RV: Tensor,
    settings: Sequence[SamplingConfig],
    u_R: np.ndarray,
    allowed: Mapping[int, np.ndarray] | None = None,
) -> SampledTokens:
    """Samples a token of each row by inverse CDF at `u_R`. `allowed` has the only tokens that may be sampled, by the
    number of the row; rows that it lacks are not restricted."""
    if allowed:
        logits_RV = _only(logits_RV, allowed)
    chunks = [_sample_chunk(logits_RV[few], settings[few], u_R[few]) for few in cached_chunks(logits_RV)]
    tokens, logps, kept_ids = zip(*chunks, strict=True)
    # one transfer of all chunks: each would wait for the device
    return SampledTokens(torch.cat(tokens).cpu().numpy(), torch.cat(logps).cpu().numpy(), list(chain(*kept_ids)))


def _sample_chunk(
    logits_RV: Tensor, settings: Sequence[SamplingConfig], u_R: np.ndarray
) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    logp_RV = _at_temperature(logits_RV, settings)
    kept_RV = _restrict(logp_RV, settings)
    # the sum is in double: u close to 1 stays below the total
    cdf_RV = kept_RV.exp().cumsum(-1, dtype=torch.float64)
    target_R1 = torch.as_tensor(u_R, device=cdf_RV.device, dtype=cdf_RV.dtype)[:, None] * cdf_RV[:, -1:]
    tokens_R = torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
    if greedy := [i for i, s in enumerate(settings) if s.temperature == 0]:
        tokens_R[greedy] = logp_RV[greedy].argmax(-1)
    logps_R = logp_RV.gather(1, tokens_R[:, None])[:, 0]
    kept_ids = [NO_IDS] * len(settings)
    if masked := [i for i, s in enumerate(settings) if s.records_mask]:
        logps_R[masked] -= kept_RV[masked].logsumexp(-1)
        which, ids = (kept_RV[masked] > -torch.inf).nonzero().cpu().numpy().T
        parts = np.split(ids.astype(np.int32), np.searchsorted(which, np.arange(1, len(masked))))
        for i, part in zip(masked, parts, strict=True):
            kept_ids[i] = part
    return tokens_R, logps_R, kept_ids


def _only(logits_RV: Tensor, allowed: Mapping[int, np.ndarray]) -> Tensor:
    """Returns the logits with those of tokens that are not allowed set to minus infinity."""
    rows_K = np.repeat(list(allowed), [len(ids) for ids in allowed.values()])
    ids_K = np.concatenate(list(allowed.values()))
    index = torch.as_tensor(rows_K, device=logits_RV.device), torch.as_tensor(ids_K, device=logits_RV.device).long()
    restricted_RV = logits_RV.clone()
    restricted_RV[list(allowed)] = -torch.inf
    restricted_RV[index] = logits_RV[index]
    return restricted_RV


def top_tokens(logits_RV: Tensor, settings: Sequence[SamplingConfig], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `k` most likely tokens [R, k] int64, best first, and their log-probabilities [R, k] float32 before
    top-k and top-p."""
    logp_Rk, ids_Rk = _at_temperature(logits_RV, settings).topk(k)
    return ids_Rk.cpu().numpy(), logp_Rk.cpu().numpy()


def _at_temperature(logits_RV: Tensor, settings: Sequence[SamplingConfig]) -> Tensor:
    """Returns log-probabilities [R, V] float32 at each row's temperature (at 0: of the plain softmax)."""
    warmth = [max(s.temperature, MIN_TEMPERATURE) if s.temperature else 1.0 for s in settings]
    if all(t == 1 for t in warmth):
        return torch.log_softmax(logits_RV.float(), -1)
    temperature = torch.tensor(warmth, device=logits_RV.device)
    return torch.log_softmax(logits_RV.float() / temperature[:, None], -1)


def _restrict(logp_RV: Tensor, settings: Sequence[SamplingConfig]) -> Tensor:
    """Returns `logp_RV` with the tokens removed by top-k, and then by top-p (Holtzman et al., 2020) of what top-k
    leaves, set to minus infinity: in the order of transformers and vLLM."""
    if all(s.top_k == 0 and s.top_p == 1 for s in settings):
        return logp_RV
    if logp_RV.shape[1] > 2 * MAX_CANDIDATES:
        among_best_RV = _restrict_among(*logp_RV.topk(MAX_CANDIDATES), logp_RV, settings)
        if among_best_RV is not None:
            return among_best_RV
    among_all_RV = _restrict_among(*logp_RV.sort(-1, descending=True), logp_RV, settings)
    assert among_all_RV is not None
    return among_all_RV


def _restrict_among(
    best_RC: Tensor, ids_RC: Tensor, logp_RV: Tensor, settings: Sequence[SamplingConfig]
) -> Tensor | None:
    """Returns `_restrict` from the `C` most likely tokens, best first, and their log-probabilities; None if a row keeps
    more tokens than these, or top-p depends on more."""
    count = best_RC.shape[1]
    vocabulary = logp_RV.shape[1]
    ks = [min(s.top_k or vocabulary, vocabulary) for s in settings]
    if any(count < k < vocabulary for k in ks):
        return None
    rank = torch.arange(count, device=logp_RV.device)
    top_k = torch.tensor(ks, device=logp_RV.device)
    # without top-p no sum is compared: rounded, it can exceed 1 before the last tokens
    top_p = torch.tensor([s.top_p if s.top_p < 1 else torch.inf for s in settings], device=logp_RV.device)
    sums_RC = best_RC.exp().cumsum(-1)
    left_R1 = sums_RC.gather(1, top_k.clamp(max=count)[:, None] - 1)  # by top-k
    left_R1 = left_R1.masked_fill(top_k[:, None] == vocabulary, 1.0)
    before_RC = sums_RC - best_RC.exp()
    cut_RC = (rank >= top_k[:, None]) | (before_RC >= top_p[:, None] * left_R1)
    if count == vocabulary:
        return logp_RV.scatter(1, ids_RC, best_RC.masked_fill(cut_RC, -torch.inf))
    is_free_R = torch.tensor([s.top_k == 0 and s.top_p == 1 for s in settings], device=logp_RV.device)
    if not bool((cut_RC[:, -1] | is_free_R).all()):
        return None
    kept_RV = torch.full_like(logp_RV, -torch.inf).scatter_(1, ids_RC, best_RC.masked_fill(cut_RC, -torch.inf))
    return torch.where(is_free_R[:, None], logp_RV, kept_RV) if bool(is_free_R.any()) else kept_RV


class StopStringMatcher:
    """Finds stop strings in answers that grow token by token, however the strings are split into tokens.

    Only the last tokens are decoded; the caller keeps them in a `tail` (see `empty_tail`) for each answer. A visible
    token holds at least one byte, so a match has at most as many tokens as the longest string has bytes. One extra
    token before them absorbs what decoders do at the start of a text, such as dropping a space. `MAX_UTF8_BYTES - 1`
    further tokens let the text start at a character boundary, since some decoders replace a whole run of byte tokens if
    the first character is cut.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._shows: dict[int, bool] = {}

    @staticmethod
    def empty_tail(stops: Sequence[str]) -> deque[int]:
        """Returns an empty tail, of the length needed for `stops`."""
        return deque(maxlen=max(len(stop.encode()) for stop in stops) + MAX_UTF8_BYTES)

    def append_and_match(self, stops: Sequence[str], tail: deque[int], token: int) -> bool:
        """Appends `token` to `tail`; returns whether the tail's text, without special tokens, contains one of
        `stops`."""
        if not self._adds_text(token):
            return False
        tail.append(token)
        ids = list(tail)
        for start in range(min(MAX_UTF8_BYTES, len(ids))):
            text = self._decode(ids[start:])
            if any(stop in text for stop in stops):
                return True
            if not text.startswith(REPLACEMENT_CHAR):
                return False
        return False

    def _adds_text(self, token: int) -> bool:
        """Returns whether a token adds to the text. Decodes it twice in a row, as a decoder may drop the space at the
        start of a text."""
        if token not in self._shows:
            self._shows[token] = self._decode([token, token]) != ""
        return self._shows[token]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
