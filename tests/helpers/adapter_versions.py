"""Versions of an adapter as in training, for tests of updates while answers are sampled."""

import torch

from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.config import LoraConfig


def adapter_versions(engine: Engine, count: int) -> list[Snapshot]:
    """Returns versions of one adapter, far enough apart that their probabilities differ by more than rounding."""
    adapter, generator = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=1), torch.Generator().manual_seed(5)
    found = []
    for version in range(count):
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.normal_(0, 0.1, generator=generator)
        found.append(adapter.snapshot(f"walker@{version}"))
    return found
