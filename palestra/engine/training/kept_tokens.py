"""Log-probabilities over the tokens that a sampler's top-k and top-p kept: their sets, one for each scored token.

The sets are those of the policy that sampled, so that both sides of a probability ratio are distributions over the same
tokens ("Keep Sampling Mask", DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1).

Shapes: `M` scored tokens, `K` kept tokens of all of them, `C` rows of a chunk, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import Sample, SamplingMask

REMOVED = -1e30  # logit of a removed token; with minus infinity, 0 * log 0 of an entropy would be NaN


class KeptTokens(NamedTuple):
    """The kept set of each of M scored tokens, int64: `ids_K`, set after set, and the index `start_M` of each set and
    its size `count_M`, 0 if all tokens of the vocabulary were kept."""

    ids_K: Tensor
    start_M: Tensor
    count_M: Tensor

    def at(self, index: slice | Tensor) -> KeptTokens:
        """Returns the sets of some of the tokens."""
        return KeptTokens(self.ids_K, self.start_M[index], self.count_M[index])

    def mask_removed(self, logits_CV: Tensor) -> Tensor:
        """Returns the logits with those of removed tokens set to `REMOVED`; row i belongs to token i."""
        rows = torch.arange(len(self.count_M), device=logits_CV.device)
        row = rows.repeat_interleave(self.count_M)
        shift_M = self.start_M - (self.count_M.cumsum(0) - self.count_M)
        ids = self.ids_K[torch.arange(len(row), device=row.device) + shift_M.repeat_interleave(self.count_M)]
        removed_CV = (self.count_M > 0)[:, None].repeat(1, logits_CV.shape[1])
        removed_CV[row, ids] = False
        return logits_CV.masked_fill(removed_CV, REMOVED)


def kept_tokens(samples: Sequence[Sample], device: torch.device | str) -> KeptTokens | None:
    """Returns the kept sets of all answer tokens of `samples`; None if no sample has a sampling mask."""
    if all(sample.sampling_mask is None for sample in samples):
        return None
    none = np.zeros(0, np.int32)
    masks = [s.sampling_mask or SamplingMask(none, np.zeros(len(s.token_ids), np.int32)) for s in samples]
    count_M = np.abs(np.concatenate([mask.counts for mask in masks]).astype(np.int64))
    ids_K = np.concatenate([mask.ids for mask in masks]).astype(np.int64)
    parts = ids_K, np.cumsum(count_M) - count_M, count_M
    return KeptTokens(*(torch.as_tensor(part, device=device) for part in parts))
