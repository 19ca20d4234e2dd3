"""Standardised advantages: by hand, with a mean far from 0, and over several processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.vector.algorithms.minibatches import standardise


def advantages(mean: float, deviation: float) -> tuple[Tensor, Tensor]:
    """Advantages and weights [P, T, C] of two members, a fifth of them with weight 0."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 64, 50, generator=generator, dtype=torch.float64)
    weight = (torch.rand(2, 64, 50, generator=generator) > 0.2).float()
    return (mean + deviation * noise).float(), weight


def reference(advantage: Tensor, weight: Tensor) -> Tensor:
    """Standardised advantages computed in float64."""
    x, w = advantage.double(), weight.double()
    count = w.sum((1, 2), keepdim=True)
    mean = (w * x).sum((1, 2), keepdim=True) / count
    return (x - mean) / ((w * (x - mean) ** 2).sum((1, 2), keepdim=True) / count).sqrt()


def test_standardised_advantages_by_hand() -> None:
    found = standardise(
        torch.tensor([[[1.0, 2.0, 3.0, 99.0]]]), torch.tensor([[[1.0, 1.0, 1.0, 0.0]]]), SINGLE_PROCESS.all_reduce
    )
    torch.testing.assert_close(found[0, 0, :3], torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5]))
    for constant in (0.0, 0.1, -1000.1):
        x = torch.full((1, 3, 4), constant)
        assert torch.equal(standardise(x, torch.ones_like(x), SINGLE_PROCESS.all_reduce), torch.zeros(1, 3, 4))
    nothing = standardise(torch.ones(1, 3, 4), torch.zeros(1, 3, 4), SINGLE_PROCESS.all_reduce)
    assert torch.isfinite(nothing).all()


@pytest.mark.parametrize(("mean", "deviation"), [(0.3, 1.0), (-1000, 0.1), (1e5, 1.0), (0, 1e-4), (3e3, 3e3)])
def test_advantages_far_from_zero_are_standardised(mean: float, deviation: float) -> None:
    """In float32 the mean of squares minus the square of the mean has no correct digit for a mean of -1000 and a
    deviation of 0.1."""
    advantage, weight = advantages(mean, deviation)
    found = standardise(advantage, weight, SINGLE_PROCESS.all_reduce)
    torch.testing.assert_close(found.double(), reference(advantage, weight), rtol=1e-3, atol=1e-3)


def test_advantages_are_standardised_over_processes() -> None:
    advantage, weight = advantages(-1000, 0.1)
    parts, barrier = [None, None], Barrier(2)

    def in_process(rank: int) -> Tensor:
        def all_reduce(x: Tensor) -> Tensor:
            parts[rank] = x
            barrier.wait(60)
            total = parts[0] + parts[1]
            barrier.wait(60)
            return total

        share = slice(0, 40) if rank else slice(40, 64)
        return standardise(advantage[:, share], weight[:, share], all_reduce)

    with ThreadPoolExecutor(2) as threads:
        second, first = threads.map(in_process, range(2))
    whole = reference(advantage, weight)
    torch.testing.assert_close(torch.cat([first, second], 1).double(), whole, rtol=1e-3, atol=1e-3)
