"""Limit of the number of logits that exist at a time: rows of vocabulary size, the largest tensors of a pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_LOGITS = 2**23  # logits of a chunk: 32 MiB in float32, of which a pass holds five (training) or seven copies


def fits_at_once(rows: int, vocab_size: int) -> bool:
    """Returns whether the logits of all rows may exist at the same time."""
    return rows * vocab_size <= MAX_LOGITS


def row_chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    """Yields slices of `rows` rows with at most `MAX_LOGITS` logits each (at least one row)."""
    step = max(1, MAX_LOGITS // vocab_size)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def widen(logits: Tensor) -> Tensor:
    """Returns `logits` in float32, or in their own dtype if it is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
