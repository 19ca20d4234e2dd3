"""The next token: how it is drawn, what else was likely, and whether it ends the answer.

Shapes: `R` live rows, `V` vocabulary, `k` best tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Strict

COLDEST = 1e-6  # lower temperatures are taken as this: logits divided by less overflow to NaN
CHARACTER = 4  # a character of UTF-8 has at most so many bytes, and may come in as many tokens
BROKEN = "\ufffd"  # what decoders make of the rest of a cut character


class Sampling(Strict):
    """How a policy samples. `top_k` 0 and `top_p` 1 leave the distribution whole; temperature 0 is greedy.

    An answer ends with the model's end token (not where `end` is false), with one of `stop_ids`, with the token that
    completes a string of `stop`, or after `max_tokens`; what ends it is part of it.
    """

    max_tokens: int = Field(32, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_ids: tuple[int, ...] = ()
    end: bool = True


def uniform(seeds_R: np.ndarray, siblings_R: np.ndarray, steps_R: np.ndarray) -> np.ndarray:
    """Uniform numbers [R] in [0, 1), a pure function of (seed, sibling, step): two rounds of splitmix64 (Steele et al.,
    2014)."""
    with np.errstate(over="ignore"):
        x = _mix(seeds_R + np.uint64(0x9E3779B97F4A7C15) * (siblings_R + np.uint64(1)))
        x = _mix(x + np.uint64(0x9E3779B97F4A7C15) * (steps_R + np.uint64(1)))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(logits_RV: Tensor, settings: Sequence[Sampling], u_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [R] drawn by inverse CDF at `u_R`, and their log-probabilities [R] before top-k and top-p."""
    logp_RV = _at_temperature(logits_RV, settings)
    cdf_RV = _restrict(logp_RV, settings).double().exp().cumsum(-1)  # double: u close to 1 stays below the total
    target_R1 = torch.as_tensor(u_R, device=cdf_RV.device, dtype=cdf_RV.dtype)[:, None] * cdf_RV[:, -1:]
    tokens_R = torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
    greedy = [i for i, s in enumerate(settings) if s.temperature == 0]
    if greedy:
        tokens_R[greedy] = logp_RV[greedy].argmax(-1)
    return tokens_R.cpu().numpy(), logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy()


def best(logits_RV: Tensor, settings: Sequence[Sampling], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `k` likeliest tokens [R, k], best first, and their log-probabilities [R, k] before top-k and top-p."""
    logp_Rk, ids_Rk = _at_temperature(logits_RV, settings).topk(k)
    return ids_Rk.cpu().numpy(), logp_Rk.cpu().numpy()


def _at_temperature(logits_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [R, V] at each row's temperature (at 0: of the plain softmax)."""
    warmth = [max(s.temperature, COLDEST) if s.temperature else 1.0 for s in settings]
    temperature = torch.tensor(warmth, device=logits_RV.device)
    return torch.log_softmax(logits_RV.float() / temperature[:, None], -1)


def _restrict(logp_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """`logp_RV` with what top-k and top-p cut away at minus infinity (Holtzman et al., 2020)."""
    if all(s.top_k == 0 and s.top_p == 1 for s in settings):
        return logp_RV
    vocabulary = logp_RV.shape[1]
    sorted_RV, order_RV = logp_RV.sort(-1, descending=True)
    rank = torch.arange(vocabulary, device=logp_RV.device)
    top_k = torch.tensor([s.top_k or vocabulary for s in settings], device=logp_RV.device)
    top_p = torch.tensor([s.top_p for s in settings], device=logp_RV.device)
    before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    cut = (rank >= top_k[:, None]) | (before_RV >= top_p[:, None])
    return logp_RV.scatter(1, order_RV, sorted_RV.masked_fill(cut, -torch.inf))


class StopStrings:
    """Finds stop strings in answers that grow token by token, whichever tokens the strings are spread over.

    It decodes the last tokens only, which the caller keeps in a `tail` for each answer. A token that shows holds a byte
    or more, so the tokens of a match are at most the bytes of the longest string. One more before them takes what
    decoders do at the start of a text, such as dropping a space; and `CHARACTER - 1` more let the text start where a
    character does, since some decoders give up a whole run of byte tokens for one cut character at its start.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._shows: dict[int, bool] = {}

    @staticmethod
    def tail(stops: Sequence[str]) -> deque[int]:
        return deque(maxlen=max(len(stop.encode()) for stop in stops) + CHARACTER)

    def found(self, stops: Sequence[str], tail: deque[int], token: int) -> bool:
        """Adds `token` to `tail`; whether its text, special tokens left out, now holds one of `stops`."""
        if not self._shown(token):
            return False
        tail.append(token)
        ids = list(tail)
        for start in range(min(CHARACTER, len(ids))):
            text = self._decode(ids[start:])
            if any(stop in text for stop in stops):
                return True
            if not text.startswith(BROKEN):
                return False
        return False

    def _shown(self, token: int) -> bool:
        """Whether a token adds to the text. Asked of a pair, as a decoder may drop the space that starts a text."""
        if token not in self._shows:
            self._shows[token] = self._decode([token, token]) != ""
        return self._shows[token]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
