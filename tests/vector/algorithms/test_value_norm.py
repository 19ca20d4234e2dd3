"""PopArt and value clipping: cases by hand, values that stay while statistics change, and values in units of reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, ppo, train

from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import VectorStep
from palestra.vector.algorithms.actor_critic import ActorCriticLearner
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.losses import value_loss
from palestra.vector.nets.normalise import rescale_outputs
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[16], lr=1e-2)


def learner(config: PPO, env: Any, policy: NetPolicyConfig = POLICY) -> ActorCriticLearner:
    made = config.build_learner(env, {"a": [0], "b": [1]}, dict.fromkeys("ab", policy), {"a": 5, "b": 6})
    assert isinstance(made, ActorCriticLearner)
    return made


def values(made: ActorCriticLearner, batch: RolloutBatch) -> torch.Tensor:
    """The critics' values of every step, in units of reward."""
    return made._values(RolloutTensors.of(batch))[0]


def test_rescaled_layer_by_hand() -> None:
    """Features (1, 2) give 2 * 1 + 1 * 2 - 1 = 3, times 2 plus 10 that is 16; with mean 4 and deviation 6 the same
    value is the output 2."""
    weight, bias = torch.tensor([[[2.0], [1.0]]]), torch.tensor([[[-1.0]]])
    rescale_outputs(
        weight, bias, (torch.tensor([[10.0]]), torch.tensor([[2.0]])), (torch.tensor([[4.0]]), torch.tensor([[6.0]]))
    )
    assert (torch.tensor([1.0, 2.0]) @ weight[0] + bias[0]).item() == pytest.approx(2.0)
    assert weight.flatten().tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (1.0, 0.5 * 4.0, -2.0),  # within the clip: the plain error
        (2.0, 0.5 * 1.5**2, 0.0),  # beyond it towards the target: the error of 1.5, without a gradient
        (0.0, 0.5 * 9.0, -3.0),  # beyond it away from the target: the plain error is the larger
        (9.0, 0.5 * 36.0, 6.0),  # past the target: the plain error is the larger again
    ],
)
def test_clipped_value_loss_by_hand(value: float, loss: float, slope: float) -> None:
    """Before the update the value was 1, the target is 3, and the clip 0.5."""
    now = torch.tensor([value], requires_grad=True)
    found = value_loss(now, torch.tensor([3.0]), torch.ones(1), torch.tensor([1.0]), 0.5)
    found.backward()
    assert now.grad is not None
    assert (found.item(), now.grad.item()) == pytest.approx((loss, slope))


def test_value_clipping_needs_old_values() -> None:
    with pytest.raises(ValueError, match="from before the update"):
        value_loss(torch.ones(1), torch.ones(1), torch.ones(1), clip=0.1)


@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("critics", ["each", "one"])
def test_values_stay_when_the_statistics_move(critics: Any, memory: int) -> None:
    """Returns grow by a factor of 1,000. Values change by rounding only; without PopArt they would grow with the
    deviation of the returns."""
    env = Countdown(4)
    for norm, stays in (("popart", True), (True, False)):
        config = ppo(rollout_length=8, value_norm=norm, critic="central", critics=critics)
        made = learner(config, env, POLICY.model_copy(update={"gru_units": memory}))
        batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0), 8, 0)
        for scale in (1.0, 1000.0):
            before = values(made, batch)
            for critic in made.critics:
                shape = len(critic.seat_mapping.names), 8, 4
                target = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 3 * scale
                critic.update_norm(target, torch.ones(shape), lambda x: x)
            error = (values(made, batch) - before).abs().max().item() / scale
            assert (error < 2e-6) if stays else (error > 1e-2), (norm, scale)


def test_value_clipping_bounds_how_far_values_move(check_score: Any) -> None:
    """Many small steps on one batch: outside the clip the gradient is 0."""
    env = Countdown(4)
    for clip in (None, 0.05):
        config = ppo(rollout_length=8, epochs=200, minibatches=1, value_clip=clip)
        made = learner(config, env, NetPolicyConfig(hidden=[16], lr=1e-3, max_grad_norm=10))
        batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0), 8, 0)
        before = values(made, batch)[:-1]
        made.update(batch, 0.0)
        check_score((values(made, batch)[:-1] - before).abs().median(), f"clip {clip}")


class Scaled(Cues):
    """Cues with the rewards of the second seat multiplied by 1,000."""

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = super().step(actions)
        frame.rewards[:, 1] *= 1000
        return frame


def test_popart_values_have_units_of_reward(check_score: Any) -> None:
    """Two seats in one stack, paid 1 and 1,000 for the right answer, learn the answer and its value; a critic of plain
    returns stays far below 1,000 in as many steps."""
    for norm in ("popart", False):
        env = Scaled(32)
        made = learner(ppo(rollout_length=8, gamma=0.9, value_norm=norm, value_clip=0.2), env)
        sweeper = VectorRollout(env, np.arange(32))
        train(made, sweeper, 8, 25)
        batch = sweeper.collect(made.rollout_policies(1.0), 8, 99)
        paid, worth = batch.rewards.mean((0, 1)), values(made, batch).mean((0, 1)).numpy()
        if norm:
            check_score((paid / np.array([1, 1000])).min(), "share of the pay")
            check_score(np.abs(worth / paid - 1).max(), "error of the values")
        else:
            check_score(worth[1], "value in plain returns")
