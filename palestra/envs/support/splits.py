"""Data splits of problem instances: each instance belongs to exactly one split, by a hash of its content.

Small boards recur: at 4x4 with one box a new seed often draws a known layout. The split is therefore a function of the
layout, not of the seed: the SHA-256 of its canonical form, the smallest of its 8 rotations and reflections, so a
reflected layout is never "new". A state reached during an episode may belong to another split than its instance: where
that matters (collecting data for a base model), check it with `split_of_layout`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal, Protocol, TypeVar

import numpy as np

Split = Literal["base", "train", "dev", "test"]
SPLIT_SHARES: dict[Split, float] = {"base": 0.4, "train": 0.4, "dev": 0.1, "test": 0.1}
MAX_DRAWS = 20_000

T = TypeVar("T")


class PuzzleLayout(Protocol):
    """Puzzle layout as required by `draw_layout`: groups of cells (walls, goals, ...), and a solvability test."""

    @property
    def cell_groups(self) -> tuple[Iterable[int], ...]: ...

    def is_solvable(self) -> bool: ...


L = TypeVar("L", bound=PuzzleLayout)


def canonical_layout(size: int, groups: tuple[Iterable[int], ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the smallest of the 8 symmetric images. Each group (walls, goals, ...) is a set: its order is ignored."""
    kept = [tuple(group) for group in groups]
    return min(tuple(tuple(sorted([image[c] for c in group])) for group in kept) for image in symmetries(size))


def split_of_layout(size: int, groups: tuple[Iterable[int], ...]) -> Split:
    """Returns the split of a layout, which all its symmetric images share."""
    return split_of_text(f"{size}:{canonical_layout(size, groups)}")


def hash_share(text: str) -> float:
    """Returns a number in [0, 1) that depends on `text` only, evenly distributed over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of_text(text: str) -> Split:
    """Returns the split of an instance with content `text`. Equal problems must have equal text (a
    canonical form)."""
    share = hash_share(text)
    for split, width in SPLIT_SHARES.items():
        if share < width:
            return split
        share -= width
    return "test"


def first_of_split(
    draws: Iterable[T | None],
    split: Split | Literal["all"],
    split_of: Callable[[T], Split | None],
    error_message: str,
    accept: Callable[[T], bool] = lambda drawn: True,
) -> T:
    """Returns the first of `draws` whose split by `split_of` is `split`, and that satisfies `accept`.

    Draws of None are skipped. Raises ValueError with the message `error_message` if there is none.
    """
    for drawn in draws:
        if drawn is not None and (split == "all" or split_of(drawn) == split) and accept(drawn):
            return drawn
    raise ValueError(error_message)


def draw_layout(
    seed: int, propose: Callable[[np.random.Generator], L | None], size: int, split: Split, description: str
) -> L:
    """Returns the first solvable layout of `split` among those of boards of `size` that `propose` draws from `seed`.

    `propose` returns None for an invalid draw. Raises ValueError, with the description `description`, if 20,000 draws
    give none, as there are then too few such layouts.
    """
    rng = np.random.default_rng([seed])
    return first_of_split(
        (propose(rng) for _ in range(MAX_DRAWS)),
        split,
        lambda layout: split_of_layout(size, layout.cell_groups),
        f'no solvable layout of split "{split}" in {MAX_DRAWS} draws of {description}: '
        "there are too few such layouts; give a larger size, or fewer walls",
        accept=lambda layout: layout.is_solvable(),
    )


@cache
def symmetries(size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the 8 rotations and reflections of a square, each a tuple `image[cell]` of `size * size` cells."""
    cells = np.arange(size * size).reshape(size, size)
    return tuple(tuple(np.rot90(square, k).ravel().tolist()) for square in (cells, cells.T) for k in range(4))
