"""Data splits of problem instances: each instance belongs to exactly one split, by a hash of its content.

Small boards recur: at 4x4 with one box a new seed often draws a known layout. The split is therefore a function of the
layout, not of the seed: the SHA-256 of its canonical form, the smallest of its 8 rotations and reflections, so a
reflected layout is never "new". A state reached during an episode may belong to another split than its instance: where
that matters (collecting data for a base model), check it with `split_of`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeVar

import numpy as np

from palestra.envs.text.grids import symmetries

Split = Literal["base", "train", "dev", "test"]
SHARES: dict[Split, float] = {"base": 0.4, "train": 0.4, "dev": 0.1, "test": 0.1}
TRIES = 20_000

T = TypeVar("T")


class Layout(Protocol):
    """Puzzle layout as required by `draw`: board size, groups of cells (walls, goals, ...), and a solvability test."""

    @property
    def size(self) -> int: ...

    @property
    def groups(self) -> tuple[Iterable[int], ...]: ...

    def solvable(self) -> bool: ...


L = TypeVar("L", bound=Layout)


def canonical(size: int, groups: tuple[Iterable[int], ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the smallest of the 8 symmetric images. Each group (walls, goals, ...) is a set: its order is ignored."""
    kept = [tuple(group) for group in groups]
    return min(tuple(tuple(sorted([image[c] for c in group])) for group in kept) for image in symmetries(size))


def split_of(size: int, groups: tuple[Iterable[int], ...]) -> Split:
    """Returns the split of a layout, which all its symmetric images share."""
    return split_of_text(_text(size, groups))


def split_of_text(text: str) -> Split:
    """Returns the split of an instance with content `text`. Equal problems must have equal text (a canonical form)."""
    digest = hashlib.sha256(text.encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    for split, width in SHARES.items():
        if share < width:
            return split
        share -= width
    return "test"


def first_of_split(
    draws: Iterable[T | None],
    split: Split | Literal["all"],
    text: Callable[[T], str],
    lacking: str,
    fits: Callable[[T], bool] = lambda drawn: True,
) -> T:
    """Returns the first of `draws` that belongs to `split`, by its content `text`, and satisfies `fits`.

    Draws of None are skipped. Raises ValueError with the message `lacking` if there is none.
    """
    for drawn in draws:
        if drawn is not None and (split == "all" or split_of_text(text(drawn)) == split) and fits(drawn):
            return drawn
    raise ValueError(lacking)


def draw(seed: int, propose: Callable[[np.random.Generator], L | None], split: Split, what: str) -> L:
    """Returns the first solvable layout of `split` among those that `propose` draws from `seed`.

    `propose` returns None for an invalid draw. Raises ValueError, with the description `what`, if 20,000 draws give
    none, as there are then too few such layouts.
    """
    rng = np.random.default_rng([seed])
    return first_of_split(
        (propose(rng) for _ in range(TRIES)),
        split,
        lambda layout: _text(layout.size, layout.groups),
        f'no solvable layout of split "{split}" in {TRIES} draws of {what}: '
        "there are too few such layouts; give a larger size, or fewer walls",
        fits=lambda layout: layout.solvable(),
    )


def _text(size: int, groups: tuple[Iterable[int], ...]) -> str:
    return f"{size}:{canonical(size, groups)}"
