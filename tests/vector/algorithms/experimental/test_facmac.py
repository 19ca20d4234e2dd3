"""FACMAC: targets and gradients of the mixed critic by hand and by finite differences; state; learning."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.remembered import SMALL, constant, linear, made, moments, noise
from helpers.vector_toys import Countdown, train

from palestra.envs.vector_base import Continuous, Discrete
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.mixers import QMIXMixer, SeatValues
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

LINE = Continuous((-2.0,), (2.0,))
BOTH = {"a": [0], "b": [1]}
VIEW = 4  # numbers in an observation of Countdown; the seat's own action follows


def test_target_of_the_sum_by_hand() -> None:
    """Mean reward of the team, and the target critics' values of the target policies' actions: 2x + 10u and 5u."""
    learner = made(FACMAC(mixer="vdn"), Countdown(space=LINE), seats=BOTH)
    constant(learner.copies[0], [[math.atanh(0.3)], [math.atanh(-0.5)]])
    linear(learner.critics[0].target, [{0: 2.0, VIEW: 10.0}, {VIEW: 5.0}])
    obs = torch.tensor([[[1.5, 9.0, 9.0, 9.0]] * 2]).expand(3, 2, 4)
    acts = torch.tensor([[True, True], [True, False], [True, True]])
    drawn = moments(
        learner.env,
        3,
        rewards=torch.tensor([[1.0, 2.0]]).expand(3, 2),
        discounts=torch.tensor([0.8, 0.8, 0.0])[:, None].expand(3, 2),
        next_obs=obs,
        next_agent_mask=acts,
    )
    target = learner.team_target(drawn, noise())
    expected = torch.tensor([1.5 + 0.8 * (3 + 3 - 2.5), 1.5 + 0.8 * (3 + 3), 1.5])
    torch.testing.assert_close(target, expected, atol=1e-3, rtol=0)


def mixed(learner: Any, mixer: Any, values: list[float], state: torch.Tensor) -> float:
    return mixer(SeatValues(torch.tensor([values])), state[None])[0].item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mixer", ["qmix", "nonmonotonic"])
def test_target_is_the_mixed_value_of_the_next_actions(mixer: Any) -> None:
    learner = made(FACMAC(mixer=mixer), Countdown(space=LINE), seats=BOTH)
    constant(learner.copies[0], [[math.atanh(0.3)], [math.atanh(-0.5)]])
    linear(learner.critics[0].target, [{VIEW: 10.0}, {VIEW: 5.0}])
    state = torch.tensor([[4.0, 9.0]])
    drawn = moments(learner.env, 1, discounts=torch.full((1, 2), 0.5), next_state=state)
    expected = 0.5 * mixed(learner, learner.target_mixer, [3.0, -2.5], state[0])
    assert learner.team_target(drawn, noise()).item() == pytest.approx(expected, abs=1e-3)


def test_weights_of_the_nonmonotonic_mixer_may_be_negative() -> None:
    """The same network: with |w| its value rises with each seat's, without it does not."""
    rises = []
    for monotonic in (True, False):
        mixer = QMIXMixer(2, 3, 4, 0, monotonic=monotonic)
        q, state = torch.randn(200, 2, generator=noise()).requires_grad_(), 5 * torch.randn(200, 3, generator=noise(1))
        (slope,) = torch.autograd.grad(mixer(SeatValues(q), state).sum(), q)
        rises.append((slope >= 0).float().mean().item())
    assert rises[0] == 1 and rises[1] < 0.9


def policy_value(learner: Any, drawn: Any) -> float:
    """The mean team value of the current policies' actions at all seats, computed row by row."""
    total = 0.0
    for m in range(len(drawn.rewards)):
        values = []
        for seat in range(2):
            stack, critic = learner.stacks[0], learner.critics[0]
            view = drawn.obs[m, seat].expand(2, 1, -1)
            action = torch.tanh(stack.net(view))
            q = critic.net(torch.cat([view, action], -1))[seat, 0, 0].item()
            values.append(q * bool(drawn.agent_mask[m, seat]))
        total += mixed(learner, learner.mixer, values, drawn.state[m])
    return total / len(drawn.rewards)


@pytest.mark.parametrize("mixer", ["qmix", "nonmonotonic"])
def test_policy_gradient_equals_finite_differences(mixer: Any) -> None:
    """Equation 7: the gradient of the value of all seats' current actions; recorded actions have no part in it."""
    policy = NetPolicyConfig(hidden=[4], activation="tanh", max_grad_norm=1e9)
    learner = made(FACMAC(mixer=mixer, action_l2_coef=0), Countdown(space=LINE), policy, BOTH)
    generator = noise(3)
    drawn = moments(
        learner.env,
        5,
        obs=torch.randn(5, 2, 4, generator=generator),
        state=torch.randn(5, 2, generator=generator),
        actions=torch.randn(5, 2, 1, generator=generator),
        agent_mask=torch.tensor([[True, True]] * 4 + [[True, False]]),
    )
    with torch.no_grad():  # policies with actions other than 0
        learner.stacks[0].optimizer.flat.copy_(torch.randn(learner.stacks[0].optimizer.flat.shape, generator=generator))
    joint = learner.action_encoder.encode(drawn.actions, drawn.agent_mask)
    batches = [learner.update_batch(learner.stacks[0], drawn, joint)]
    answers = [learner.policy_output(0, batches[0].observations, None, noise())]
    objective, slopes = learner.policy_gradient(drawn, batches, answers)
    assert objective.item() == pytest.approx(policy_value(learner, drawn), abs=1e-5)
    flat = learner.stacks[0].optimizer.flat
    parts = torch.autograd.grad((answers[0].action_codes * slopes[0]).sum(), learner.stacks[0].optimizer.parameters)
    gradient = torch.cat([part.flatten(1) for part in parts], 1)
    assert gradient.abs().max() > 1e-3
    for p, column in [(0, 0), (0, 9), (1, 3), (1, flat.shape[1] - 1)]:
        ends = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                flat[p, column] += step
                ends.append(policy_value(learner, drawn))
                flat[p, column] -= step
        assert gradient[p, column].item() == pytest.approx((ends[0] - ends[1]) / 2e-2, abs=2e-4, rel=2e-2)


def test_critic_gradient_equals_finite_differences() -> None:
    """The gradient of half the squared error of the mixed value, for a weight of a seat's network and one of the
    mixer."""
    policy = NetPolicyConfig(hidden=[4], activation="tanh", max_grad_norm=1e9, lr=1e-9)
    learner = made(FACMAC(), Countdown(space=LINE), policy, BOTH)
    generator = noise(5)
    drawn = moments(
        learner.env,
        6,
        obs=torch.randn(6, 2, 4, generator=generator),
        state=torch.randn(6, 2, generator=generator),
        actions=torch.randn(6, 2, 1, generator=generator),
        rewards=torch.randn(6, 2, generator=generator),
    )
    target = learner.team_target(drawn, noise())

    def loss() -> float:
        errors = []
        for m in range(6):
            unit = drawn.actions[m] / 2  # of actions within 2
            rows = torch.cat([drawn.obs[m], unit.clamp(-1, 1)], -1)[:, None]
            q = learner.critics[0].net(rows)[:, 0, 0].tolist()
            errors.append(mixed(learner, learner.mixer, q, drawn.state[m]) - target[m].item())
        return float(0.5 * np.mean(np.square(errors)))

    before = loss()
    (line,) = learner.train_step(drawn, noise(), 0.0)
    assert line["critic_loss"][0].item() == pytest.approx(before, rel=1e-4)
    for adam in (learner.critics[0].optimizer, learner.mixer_adam):
        for column in (0, 7, adam.flat.shape[1] - 1):
            ends = []
            for step in (1e-2, -1e-2):
                with torch.no_grad():
                    adam.flat[0, column] += step
                    ends.append(loss())
                    adam.flat[0, column] -= step
            slope = adam.rule.exp_avg[0, column].item() / 0.1  # after one step of Adam
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-2, abs=2e-3, rel=3e-2)


@pytest.mark.parametrize("space", [LINE, Discrete(3)])
@pytest.mark.parametrize("mixer", ["qmix", "nonmonotonic", "vdn"])
@pytest.mark.few(2)
def test_resume_is_bit_identical(mixer: Any, space: Any) -> None:
    env = Countdown(8, space=space)
    config = FACMAC(mixer=mixer, learning_starts=64, batch_size=16, rollout_length=5, gradient_steps=3, buffer_size=150)
    policy = NetPolicyConfig(hidden=[16], normalize_observations=True)
    learner, sweeper = made(config, env, policy, BOTH), VectorRollout(env, np.arange(8))
    batches = [copy.deepcopy(sweeper.collect(learner.rollout_policies(0.0), 5, k)) for k in range(6)]
    for batch in batches[:4]:
        learner.update(batch, 0.1)
    kept = {name: array.copy() for name, array in learner.state_arrays().items()}
    expected = [learner.update(batch, 0.5) for batch in batches[4:]]
    other = made(config, env, policy, BOTH)
    other.load_arrays(kept)
    assert [other.update(batch, 0.5) for batch in batches[4:]] == expected
    assert any(name.startswith("mixer_adam") for name in kept) == (mixer != "vdn")


def test_seats_without_learner_are_no_part_of_the_team() -> None:
    env = Countdown(space=LINE, seats=3)
    config = FACMAC(learning_starts=16, batch_size=8, rollout_length=8)
    learner = made(config, env, seats={"a": [0], "b": [2]})
    figures = train(learner, VectorRollout(env, np.arange(4)), 8, 2, [UniformVectorPolicy(env, [1])])
    assert learner.mixer.seats == 2 and figures["b"]["critic_loss"] > 0


def test_pixels_without_a_state_are_refused() -> None:
    env = Countdown(space=LINE)
    env.observation_shapes, env.state_size = ((40, 40, 3),) * 2, 0
    with pytest.raises(ValueError, match="cannot see the pixels"):
        made(FACMAC(), env, SMALL, BOTH)
