"""The learning rate of an adapter whose config gives none."""

import asyncio

import numpy as np
import pytest

from palestra.core.config import validate
from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.text.build.build import build
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import LoraPolicyConfig, base_parameters, default_lora_lr


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
    assert learner.weights.optimizer.param_groups[0]["lr"] == logged


@pytest.mark.parametrize("lr", [None, 0.0, 2e-3])
@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.few(2)
def test_the_critics_learning_rate_follows_the_schedule(lr: float | None, critic: str):
    """At half of a linear schedule it is half of `critic_lr`, whatever the policy's own rate is."""
    config = LoraPolicyConfig(base="tiny", lr=lr, critic_lr=0.02, lr_schedule="linear")
    setup = build(
        validate(
            TextConfig,
            {
                "steps": 1,
                "episodes": 1,
                "env": {"type": "guess_number"},
                "policies": {"agent": config.model_dump(mode="json")},
                "algorithm": {"type": "ppo", "critic": critic},
            },
        )
    )
    learner = setup.learners["agent"]
    ids = np.array([5, 6], np.int32)
    one = np.ones(1, np.float32)
    sample = Sample(ids, ids[:1], np.zeros(1, np.float32), one, values=one, returns=one)
    algorithm = setup.stages[0].algorithm

    async def step():
        await learner.forward_backward([sample], algorithm.loss, **algorithm.loss_options)
        return await learner.optim_step(0.5)

    metrics = asyncio.run(step())
    assert metrics["lr"] == pytest.approx(0.5 * (1e-3 if lr is None else lr))
    trainer = learner.weights.critic_weights if critic == "separate" else learner.weights
    assert [group["lr"] for group in trainer.optimizer.param_groups if group["critic"]] == [pytest.approx(0.01)]
