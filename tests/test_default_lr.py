"""The learning rate of an adapter whose config gives none."""

import asyncio

import numpy as np
import pytest

from palestra.builders.engines import Engines
from palestra.learners.lm import LoraPolicyConfig, base_parameters, default_lora_lr
from palestra.losses.policy import cross_entropy_loss
from palestra.types import Sample


def test_default_lora_lr_falls_with_base_size():
    assert base_parameters("tiny") < 20e6 and base_parameters("smollm2") == 134_515_008
    assert [default_lora_lr(n) for n in (1_000_000, 134_515_008, 600_000_000, 8_000_000_000)] == [
        1e-3,
        2e-4,
        2e-4,
        1e-4,
    ]


@pytest.mark.parametrize(("lr", "logged"), [(None, 1e-3), (3e-3, 3e-3)])
def test_default_lr_is_used_and_logged(lr: float | None, logged: float):
    learner = Engines("cpu", 8).build_learner("a", LoraPolicyConfig(base="tiny", lr=lr), 0)
    sample = Sample(
        np.array([5, 6], np.int32), np.array([7], np.int32), np.zeros(1, np.float32), np.ones(1, np.float32)
    )

    async def step():
        await learner.forward_backward([sample], cross_entropy_loss)
        return await learner.optim_step()

    assert asyncio.run(step())["lr"] == logged
    assert learner.weights.trainer.optimizer.param_groups[0]["lr"] == logged
