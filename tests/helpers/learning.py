"""Scores of learning tests: each is compared with a bar that is far below what other seeds reach, or far above.

`learning_scores.json` holds the bar and the distribution of each score over seeds; README.md explains how it is made.
A processor that rounds otherwise is another seed, so that a bar near the mean fails on some machines.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

TABLE = Path(__file__).parents[1] / "learning_scores.json"
RECORDS = "LEARNING_SCORES"  # a file: scores are appended to it, and not compared
MIN_SEEDS = 10
MIN_DEVIATIONS = 4.0

T = TypeVar("T")


class Entry(NamedTuple):
    """A score's bar, and its distribution over seeds."""

    bar: float | None  # None: not yet chosen
    reached: str  # "above" or "below" the bar
    mean: float
    deviation: float
    seeds: int

    def passes(self, value: float) -> bool:
        assert self.bar is not None
        return value > self.bar if self.reached == "above" else value < self.bar

    def problem(self) -> str:
        """Returns why another seed or another processor may fail, or nothing."""
        if self.bar is None:
            return "it has no bar yet"
        if self.seeds < MIN_SEEDS:
            return f"measured with {self.seeds} seeds, not {MIN_SEEDS}"
        if not self.passes(self.mean) or abs(self.mean - self.bar) < MIN_DEVIATIONS * self.deviation:
            return f"the bar {self.bar} is nearer than {MIN_DEVIATIONS:g} deviations to {self.mean} ± {self.deviation}"
        return ""


def read_table() -> dict[str, Entry]:
    return {name: Entry(**entry) for name, entry in json.loads(TABLE.read_text()).items()}


def check_score(test: str, name: str, value: float) -> None:
    """Compares the score `name` of a test with its bar in the table, or records it."""
    key = f"{test} {name}".strip()
    if RECORDS in os.environ:
        with open(os.environ[RECORDS], "a") as file:
            file.write(json.dumps([key, float(value)]) + "\n")
        return
    entry = read_table().get(key)
    assert entry, f"{key} is not in {TABLE.name}: give it a bar, and measure it with tests/learning_scores.py"
    assert not entry.problem(), f"{key}: {entry.problem()}"
    assert entry.passes(value), f"{key}: {value:.4g} is not {entry.reached} {entry.bar:g}"


def reseed(offset: int) -> None:
    """Gives every generator that is seeded from now on another seed, so that any test runs with other numbers."""
    if not _offset:
        _patch_generators()
    _offset[:] = [offset]


_offset: list[int] = []


def _patch_generators() -> None:
    import torch

    import palestra.core.seeding

    class Generator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed((seed + _offset[0]) % 2**63)

    class Random(random.Random):
        def seed(self, a: object = None, version: int = 2) -> None:
            super().seed(None if a is None else f"{a} {_offset[0]}", version)

    seed_all = torch.manual_seed
    torch.Generator, random.Random = Generator, Random
    torch.manual_seed = lambda seed: seed_all(seed + _offset[0])
    np.random.default_rng = _other_seed(np.random.default_rng)
    np.random.PCG64 = _other_seed(np.random.PCG64)
    palestra.core.seeding.repr = lambda key: f"{_offset[0]} {key!r}"


def _other_seed(make: Callable[..., T]) -> Callable[..., T]:
    return lambda *seed: make([_offset[0], *np.ravel(seed[0])]) if seed else make()
