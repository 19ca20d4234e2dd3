"""Weights of training samples in the means of an optimizer batch, and means over several batches."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.core.types import Metrics, Sample, num_sampled


def trained_weight(samples: Sequence[Sample]) -> float:
    """Returns the sum of the weights of the tokens with gradient, of which a loss's metrics are means."""
    return sum(s.weight * num_sampled(s) for s in samples if s.has_gradient) or 1.0


def batch_denominator(samples: Sequence[Sample]) -> float:
    """Returns the denominator of a loss's mean: samples without gradient count too."""
    return sum(s.weight * num_sampled(s) if s.denominator is None else s.denominator for s in samples) or 1.0


class WeightedMeans:
    """Means of metrics over the batches that have them."""

    def __init__(self) -> None:
        self._sums: Metrics = {}
        self._weights: Metrics = {}

    def add(self, metrics: Metrics, weight: float = 1.0) -> None:
        """Adds the metrics of a batch."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def means(self) -> Metrics:
        return {name: total / self._weights[name] for name, total in self._sums.items()}
