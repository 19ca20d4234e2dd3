"""Checks that training matches sampling, which top-k, top-p and temperature 0 restrict, and with dropout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from palestra.core.losses import has_dropout
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig


def check_sampling_masks(parts: Sequence[TextConfig], trained: Collection[str]) -> None:
    """Raises ValueError if a policy of `trained` keeps sampling masks in a stage whose loss is not of the sampled
    distribution."""
    for part in parts:
        for name, sampling in _truncated(part, trained):
            if sampling.keep_sampling_mask and not part.algorithm.needs_old_logprobs:
                raise ValueError(
                    f"policies.{name}.sampling.keep_sampling_mask trains the distribution that top_k and top_p leave, "
                    f"but type: {part.algorithm.type} trains that of all tokens: set keep_sampling_mask: false"
                )


def check_dropout(parts: Sequence[TextConfig], trained: Collection[str]) -> None:
    """Raises ValueError if a policy of `trained` has dropout, but no stage has a loss that uses it."""
    if any(has_dropout(part.algorithm.loss) for part in parts):
        return
    for name, policy in parts[0].policies.items():
        if name in trained and isinstance(policy, LoraPolicyConfig) and policy.lora_dropout:
            raise ValueError(
                f"policies.{name}.lora_dropout has no effect with type: {parts[0].algorithm.type}, which compares "
                "log-probabilities with passes that have no dropout: leave it out, or train with sft or reward_model"
            )


def biased_sampling_notes(parts: Sequence[TextConfig], trained: Collection[str]) -> list[str]:
    """Returns a line for each policy of `trained` whose policy gradient is biased by top-k, top-p or temperature 0."""
    played = [part for part in parts if part.algorithm.needs_old_logprobs and not part.data]
    biased = [
        f"biased: {name} samples with {_cuts(sampling)}, and its gradient is taken as if from all tokens: set "
        f"policies.{name}.sampling.keep_sampling_mask: true, or top_p: 1.0 and top_k: 0"
        for part in played
        for name, sampling in _truncated(part, trained)
        if not sampling.keep_sampling_mask
    ]
    biased += [
        f"biased: {name} always takes the most likely token, and its gradient is taken as if from samples at "
        f"temperature 1: set policies.{name}.sampling.temperature above 0, or freeze the policy (type: frozen)"
        for part in played
        for name, policy in part.policies.items()
        if isinstance(policy, LoraPolicyConfig | FullPolicyConfig) and name in trained
        if policy.sampling.temperature == 0 and policy.lr != 0
    ]
    return list(dict.fromkeys(biased))


def _truncated(part: TextConfig, trained: Collection[str]) -> Iterator[tuple[str, SamplingConfig]]:
    for name, policy in part.policies.items():
        if isinstance(policy, LoraPolicyConfig | FullPolicyConfig) and name in trained and policy.sampling.is_truncated:
            yield name, policy.sampling


def _cuts(sampling: SamplingConfig) -> str:
    cuts = [f"top_k: {sampling.top_k}"] * (sampling.top_k > 0) + [f"top_p: {sampling.top_p:g}"] * (sampling.top_p < 1)
    return " and ".join(cuts)
