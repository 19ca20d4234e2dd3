"""Which instances a model may train on: each belongs to exactly one split, whoever draws it and when.

Small boards recur: at 4x4 with one box a fresh seed often draws a layout already met. So the split is a property of the
layout, not of the seed: the SHA-256 of its canonical form, the least of its 8 rotations and mirrors. A mirrored layout
is therefore never "new". A state reached in play is not held to its episode's split: where that matters (collecting
data for a base model), ask `split_of` about the state.
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


class Layout(Protocol):
    """What `draw` needs to know of a puzzle: the groups of cells that make it up, and whether it can be solved."""

    @property
    def size(self) -> int: ...

    @property
    def groups(self) -> tuple[Iterable[int], ...]: ...

    def solvable(self) -> bool: ...


L = TypeVar("L", bound=Layout)


def canonical(size: int, groups: tuple[Iterable[int], ...]) -> tuple[tuple[int, ...], ...]:
    """The least of the 8 symmetric images. Each group (walls, goals, ...) is a set of cells: its order is ignored."""
    kept = [tuple(group) for group in groups]
    return min(tuple(tuple(sorted([image[c] for c in group])) for group in kept) for image in symmetries(size))


def split_of(size: int, groups: tuple[Iterable[int], ...]) -> Split:
    """The one split that a layout and its mirror images belong to."""
    return split_of_text(f"{size}:{canonical(size, groups)}")


def split_of_text(text: str) -> Split:
    """The one split that an instance belongs to whose whole content is `text`, in a form of its own: give what is the
    same problem the same text."""
    digest = hashlib.sha256(text.encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    for split, width in SHARES.items():
        if share < width:
            return split
        share -= width
    return "test"


def draw(seed: int, propose: Callable[[np.random.Generator], L | None], split: Split, what: str) -> L:
    """The first solvable layout of `split` among those that `propose` draws from `seed`.

    `propose` returns None for a draw that is no puzzle at all. Raises ValueError, naming `what` was asked for, where
    20,000 draws hold none: there are then too few such layouts.
    """
    rng = np.random.default_rng([seed])
    for _ in range(TRIES):
        layout = propose(rng)
        if layout and split_of(layout.size, layout.groups) == split and layout.solvable():
            return layout
    raise ValueError(
        f'no solvable layout of split "{split}" in {TRIES} draws of {what}: '
        "there are too few such layouts; give a larger size, or fewer walls"
    )
