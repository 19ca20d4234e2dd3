"""The wire's losses by name: sums over tokens, with inputs and options under the names that clients send.

The formulas are those of palestra/vector/losses; this module maps options such as `clip_low_threshold` onto them.
Data have passed `validation.py`: every input is present in the targets' shape, `weights` always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from palestra.core.losses import LOSSES, LossInputs, TensorMetrics
from palestra.engine.training.multi_adapter import JobLossFunction, JobLossInputs
from palestra.service.wire.validation import CLIP_OPTIONS, LOSS_SPECS, WEIGHTED_ONLY


def build_loss(name: str, options: Mapping[str, float | str]) -> JobLossFunction:
    """Returns the loss that clients call `name`: a function that returns a scalar and metrics."""

    def loss(predicted: JobLossInputs) -> tuple[Tensor, TensorMetrics]:
        inputs = predicted.inputs
        entropy = float(options.get("entropy", 0.0))
        entropy_M = torch.zeros_like(predicted.logp_M)
        if entropy:
            entropy_M = predicted.map_logits(lambda logits_CV, _: entropy_of(logits_CV), None)
        scored = LossInputs(
            logp_M=predicted.logp_M,
            entropy_M=entropy_M,
            old_logp_M=inputs.get("logprobs", predicted.logp_M.detach()),
            ref_logp_M=None,
            advantage_M=inputs.get("advantages", torch.ones_like(predicted.logp_M)),
            weight_M=inputs["weights"],
            sequence_M=predicted.sequence_M,
        )
        value, metrics = LOSSES[LOSS_SPECS[name].formula](scored, **_options(name, options, inputs))
        return value, metrics if entropy else {k: v for k, v in metrics.items() if k != "entropy"}

    return loss


def _options(name: str, options: Mapping[str, float | str], inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the options of the formula. Bounds may also be given per token, as inputs."""
    bounds = LOSS_SPECS[name].ratio_bounds
    if bounds is None:
        return {key: value for key, value in options.items() if key != WEIGHTED_ONLY}
    low, high = (inputs.get(k, options.get(k, default)) for k, default in zip(CLIP_OPTIONS, bounds, strict=True))
    if name == "ppo":
        return {"clip": 1 - low, "clip_high": high - 1, "entropy": float(options.get("entropy", 0.0))}  # type: ignore[operator]
    mask = {"sequence_ratio_mask": inputs["sequence_ratio_mask"]} if "sequence_ratio_mask" in inputs else {}
    return dict(zip(CLIP_OPTIONS, (low, high), strict=True)) | mask


def entropy_of(logits_MV: Tensor) -> Tensor:
    """Returns the entropy [M], in nats, of the distribution in each row of logits [M, V]."""
    logp_MV = torch.log_softmax(logits_MV, -1)
    return -(logp_MV.exp() * logp_MV).sum(-1)
