"""A critic with an adapter of its own, on the same base as the policy's adapter.

It reads the policy's tokens or, as a central critic, the prompts of all seats. Its value loss does not change the
policy. It costs an additional pass and an additional adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.losses import LossFunction, value_function_loss
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.sampling.request import max_positions
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.train_pass import TrainPass
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.text.learners.lm import load_start, new_adapter, weights_options
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig

CRITIC_DIR = "critic"  # subfolder of a checkpoint
VALUE_OPTIONS = ("value_coef", "value_clip")  # loss options that apply to the critic


class SeparateCriticWeights(AdapterWeights):
    """A policy's adapter, and a second adapter with a value head that is its critic."""

    def __init__(
        self,
        config: LoraPolicyConfig | FullPolicyConfig,
        engine: Engine,
        *,
        seed: int,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Raises ValueError for a full model: its critic would be an adapter on weights that are trained."""
        if isinstance(config, FullPolicyConfig):
            raise ValueError(
                "critic: separate and central are an adapter on the policy's base, which type: full trains too: set "
                "type: lora, or critic: shared"
            )
        options = weights_options(config, group)
        super().__init__(engine, new_adapter(config, engine, seed if config.seed is None else config.seed), **options)
        load_start(self, config)
        own = Adapter(engine.linear_layers, config.lora, seed=derive_seed(seed, "critic"), model=engine.model)
        self.critic_weights = AdapterWeights(engine, own, critic=True, **options)
        self._has_gradient = False

    def passes(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> list[TrainPass]:
        """Returns the policy's passes with `loss` and, for samples with returns, the critic's with its value loss."""
        of_value = {name: options.pop(name) for name in VALUE_OPTIONS if name in options}
        passes = super().passes(samples, loss, **options)
        if not samples or samples[0].returns is None:
            return passes
        self._has_gradient = True
        return passes + self.critic_weights.passes(self._critic_samples(samples), value_function_loss, **of_value)

    def metrics_of(self, passes: Sequence[TrainPass]) -> Metrics:
        """Returns the metrics of the policy's loss and of the critic's; `loss` is the policy's."""
        metrics = super().metrics_of([each for each in passes if each.weights is self])
        if not self._has_gradient:
            return metrics
        found = self.critic_weights.metrics_of([each for each in passes if each.weights is not self])
        return metrics | {name: figure for name, figure in found.items() if name != "loss"}

    def optim_step(self, adam: OptimConfig) -> Metrics:
        """Takes a step of the policy, and one of the critic's adapter and head with `critic_lr` and
        `critic_max_grad_norm`. The metric `critic_grad_norm` is the norm over adapter and head."""
        metrics = super().optim_step(adam)
        if not self._has_gradient:
            return metrics
        self._has_gradient = False
        own = {"lr": adam.rate_of_critic, "critic_lr": None, "max_grad_norm": adam.critic_max_grad_norm}
        found = self.critic_weights.optim_step(adam.model_copy(update=own))
        return metrics | {"critic_grad_norm": math.hypot(found["grad_norm"], found["critic_grad_norm"])}

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the critic's value before each token [T] float32, or [1] for samples with `critic_ids`."""
        return self.critic_weights.values(self._critic_samples(samples))

    def _critic_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples as the critic reads them: unchanged, or with `critic_ids` as the prompt and a single
        token, at which the value is read."""
        limit = max_positions(self.engine)
        longest = max((len(s.critic_ids) for s in samples if s.critic_ids is not None), default=0)
        if limit and longest > limit:
            raise ValueError(
                f"a central critic reads the prompts of all seats, here {longest} tokens, and the base has {limit} "
                "positions: shorten the observations, or set critic: separate"
            )
        return [sample if sample.critic_ids is None else _first_token(sample) for sample in samples]

    def start_stage(self) -> None:
        super().start_stage()
        self.critic_weights.reset_optimizer()

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.critic_weights.save(folder / CRITIC_DIR)

    def load(self, folder: Path) -> None:
        """Raises ValueError if the checkpoint has no separate critic."""
        if not (folder / CRITIC_DIR).exists():
            raise ValueError(f"the checkpoint at {folder} holds no separate critic: it was trained without one")
        super().load(folder)
        self.critic_weights.load(folder / CRITIC_DIR)


def _first_token(sample: Sample) -> Sample:
    def cut(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[:1]

    assert sample.critic_ids is not None
    return replace(
        sample,
        prompt_ids=sample.critic_ids,
        token_ids=sample.token_ids[:1],
        logprobs=sample.logprobs[:1],
        advantages=sample.advantages[:1],
        old_logprobs=None,
        reference_logprobs=None,
        values=cut(sample.values),
        returns=cut(sample.returns),
        sampling_mask=None,
        routed_experts=None,
    )
