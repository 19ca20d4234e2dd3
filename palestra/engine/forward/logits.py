"""Limits of the number of logits that exist at a time: rows of vocabulary size, the largest tensors of a pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_LOGITS = 2**23  # logits of a chunk: 32 MiB in float32, of which training holds two (frozen head) to five copies
MAX_DRAWN_LOGITS = 2**19  # of a chunk in sampling on CPU: its copies fit the processor's cache
MAX_DRAWN_LOGITS_GPU = 2**25  # of a chunk in sampling on a GPU, whose memory and launches cost more than its cache


def fits_at_once(rows: int, vocab_size: int) -> bool:
    """Returns whether the logits of all rows may exist at the same time."""
    return rows * vocab_size <= MAX_LOGITS


def row_chunks(rows: int, vocab_size: int, most: int | None = None) -> Iterator[slice]:
    """Yields slices of `rows` rows with at most `most` (None: `MAX_LOGITS`) logits each (at least one row)."""
    step = max(1, (most or MAX_LOGITS) // vocab_size)
    step -= step % 8 if step > 16 else 0  # products are computed with that many rows (linear.py)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def cached_chunks(logits_RV: Tensor) -> Iterator[slice]:
    """Yields slices of rows whose copies fit the processor's cache (on a GPU, slices that keep it busy)."""
    rows, vocab_size = logits_RV.shape
    return row_chunks(rows, vocab_size, MAX_DRAWN_LOGITS if logits_RV.device.type == "cpu" else MAX_DRAWN_LOGITS_GPU)


def widen(logits: Tensor) -> Tensor:
    """Returns `logits` in float32, or in their own dtype if it is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
