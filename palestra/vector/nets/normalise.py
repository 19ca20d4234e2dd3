"""Running normalisation of observations and returns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from palestra.parallel.process_group import SumOverProcesses


class RunningNorm(nn.Module):
    """Running mean and variance (float64) for each of P members and D numbers (merged as by Chan et
    al., 1983). With `decay` below 1 each update multiplies the weight of older rows by `decay`, for
    returns that change with the policy (van Hasselt et al., 2016; `rescale_outputs` is PopArt's
    correction of the last layer). Normalised values are clamped to `clip` deviations."""

    def __init__(self, members: int, size: int, decay: float = 1.0, clip: float = math.inf) -> None:
        super().__init__()
        self.decay = decay
        self.clip = clip
        self.register_buffer("mean", torch.zeros(members, size, dtype=torch.float64))
        self.register_buffer("square", torch.ones(members, size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(members, 1, dtype=torch.float64))
        self.mean: Tensor
        self.square: Tensor
        self.count: Tensor

    @torch.no_grad()
    def update(self, rows: Tensor, weight: Tensor, total: SumOverProcesses = lambda x: x) -> None:
        """Adds rows [P, R, D] with weights [P, R]; `total` sums statistics over processes.
        Statistics of a member whose rows are not finite do not change: its loss is not finite
        either, which raises an error before the weights change."""
        rows = rows.double()
        weight = weight.double()[..., None]
        size = rows.shape[-1]
        sums = torch.cat([(rows * weight).sum(1), (rows.square() * weight).sum(1), weight.sum(1)], -1)
        sums = total(sums)
        fits = torch.isfinite(sums).all(-1, keepdim=True)
        count = self.count * self.decay + sums[:, -1:]
        share = torch.where(count > 0, sums[:, -1:] / count.clamp(min=1e-12), 0.0)
        mean = sums[:, :size]
        square = sums[:, size : 2 * size]
        here = sums[:, -1:].clamp(min=1e-12)
        self.mean += torch.where(fits, share * (mean / here - self.mean), 0.0)
        self.square += torch.where(fits, share * (square / here - self.square), 0.0)
        self.count.copy_(torch.where(fits, count, self.count))

    def std(self) -> Tensor:
        """Returns the standard deviation [P, D] float64, at least 1e-4; 1 before the first row."""
        variance = (self.square - self.mean.square()).clamp(min=1e-8)
        return torch.where(self.count > 0, variance.sqrt(), 1.0)

    def normalise(self, x: Tensor) -> Tensor:
        """Returns x [P, ..., D] in deviations from the mean, clamped to `clip`."""
        if not x.is_floating_point():
            x = x.float()
        mean = self._like(self.mean, x)
        deviation = self._like(self.std(), x)
        scaled = (x - mean) / deviation
        return scaled if self.clip == math.inf else scaled.clamp(-self.clip, self.clip)

    def denormalise(self, x: Tensor) -> Tensor:
        """Returns denormalised values, the inverse of `normalise` without clipping."""
        return x * self._like(self.std(), x) + self._like(self.mean, x)

    @staticmethod
    def _like(statistic: Tensor, x: Tensor) -> Tensor:
        """Broadcasts a statistic to x: [P, D] -> [P, 1, ..., D] in x's dtype."""
        return statistic.to(x.dtype).view(len(statistic), *[1] * (x.dim() - 2), statistic.shape[-1])


def normalise(norm: RunningNorm | None, x: Tensor) -> Tensor:
    """Returns x [P, ..., D] normalised by `norm`; with None unchanged."""
    return x if norm is None else norm.normalise(x)


@torch.no_grad()
def rescale_outputs(weight: Tensor, bias: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Changes a last layer (weight [P, H, D], bias [P, 1, D]) in place so that its denormalised outputs do not change
    when mean and deviation ([P, D] each) change from `old` to `new` (PopArt; Hessel et al., 2019, eq. 9)."""
    old_mean, old_std, new_mean, new_std = (statistic[:, None] for statistic in (*old, *new))
    weight.copy_(weight * (old_std / new_std))
    bias.copy_((old_std * bias + old_mean - new_mean) / new_std)
