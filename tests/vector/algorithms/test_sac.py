"""Soft actor-critic: losses and targets worked by hand, exact resumption, refusals; and learning, well above chance."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers.remembered import constant, made, moments, noise
from helpers.vector_toys import Countdown, Cues, Track, mean_return, train

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.losses import (
    actor_loss,
    critic_loss,
    expected_soft_value,
    soft_value,
    td_target,
    temperature_loss,
)
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

LINE = Continuous((-2.0,), (2.0,))
FAST = dict(learning_starts=500, batch_size=64, tau=0.02, rollout_length=4, gradient_steps=4, gamma=0.9)


# ---- losses


def test_targets_and_losses_by_hand():
    target = td_target(torch.tensor([1.0, 1.0]), torch.tensor([0.9, 0.0]), torch.tensor([10.0, 10.0]))
    torch.testing.assert_close(target, torch.tensor([10.0, 1.0]))
    q = torch.tensor([[[1.0, 2.0]], [[4.0, 2.0]]], requires_grad=True)  # two critics, one member, two rows
    loss = critic_loss(q, torch.tensor([[3.0, 0.0]]), torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(loss, torch.tensor([0.5 * (0.75 * (4 + 1) + 0.25 * (4 + 4))]))
    loss.sum().backward()
    torch.testing.assert_close(q.grad, torch.tensor([[[-1.5, 0.5]], [[0.75, 0.5]]]))
    torch.testing.assert_close(
        actor_loss(torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5, 0.25]])), torch.tensor([-2.0])
    )


def test_soft_values_by_hand():
    alpha = torch.tensor([[0.5], [2.0]])
    value = soft_value(torch.tensor([[1.0], [1.0]]), torch.tensor([[-2.0], [3.0]]), alpha)
    torch.testing.assert_close(value, torch.tensor([[2.0], [-5.0]]))
    logp = torch.tensor([0.75, 0.25, 1e-38]).log().expand(2, 1, 3)
    q = torch.tensor([1.0, 3.0, 100.0]).expand(2, 1, 3)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = torch.tensor([[1.5 + 0.5 * entropy], [1.5 + 2.0 * entropy]])
    torch.testing.assert_close(expected_soft_value(q, logp, alpha), expected)


def test_temperature_rises_if_entropy_is_below_target():
    log_alpha = torch.zeros(2, 1, requires_grad=True)
    entropy = torch.tensor([[0.1, 0.3], [0.9, 0.7]])
    temperature_loss(log_alpha, entropy, torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)).sum().backward()
    torch.testing.assert_close(log_alpha.grad, torch.tensor([[-0.3], [0.3]]))  # descent raises the first


# ---- targets of the learner


def test_discrete_targets_by_hand():
    """Policy 3 : 1 over the two legal actions, two critics, of which the smaller value counts for each action."""
    env = Countdown(seats=1)
    learner = made(SAC(alpha=0.2), env)
    constant(learner.stacks[0].net, [[math.log(3.0), 0.0, 9.0]])
    constant(learner.critics[0].target, [[1.0, 4.0, 50.0], [2.0, 3.0, 70.0]])
    constant(learner.critics[0].net, [[-99.0] * 3, [-99.0] * 3])
    action_mask = torch.tensor([True, True, False]).expand(2, 1, 3)
    rewards, discounts = torch.tensor([[0.5], [0.5]]), torch.tensor([[0.9], [0.0]])
    (target,) = learner.targets(
        moments(env, 2, rewards=rewards, discounts=discounts, next_action_mask=action_mask), noise()
    )
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(target, torch.tensor([[0.5 + 0.9 * (0.75 * 1 + 0.25 * 3 + 0.2 * entropy), 0.5]]))


def test_continuous_targets_by_hand():
    env = Countdown(space=LINE, seats=1)
    learner = made(SAC(alpha=0.3), env)
    constant(learner.stacks[0].net, [[0.4, -1.0]])
    constant(learner.critics[0].target, [[5.0], [2.0]])
    moves = moments(env, 1, rewards=torch.tensor([[-1.0]]), discounts=torch.tensor([[0.8]]))
    (target,) = learner.targets(moves, noise(7))
    drawn = torch.empty(1, 1, 1).normal_(generator=noise(7)).item()
    slope = 1 - math.tanh(0.4 + drawn * math.exp(-1.0)) ** 2
    logp = -0.5 * drawn**2 + 1.0 - 0.5 * math.log(2 * math.pi) - math.log(slope)
    torch.testing.assert_close(target, torch.tensor([[-1 + 0.8 * (2 - 0.3 * logp)]]))


@pytest.mark.parametrize(("space", "value"), [(Discrete(3), 7.0), (LINE, 3.0)])
def test_central_critic_sees_a_default_action_for_inactive_seats(space, value):
    """For discrete actions that is the first; it has no entropy."""
    env = Countdown(space=space, turns=True)
    learner = made(SAC(alpha=10.0, critic="central"), env)
    constant(learner.stacks[0].net, [[0.0] * (3 if value == 7 else 2)])
    constant(learner.critics[0].target, [[7.0, 20.0, 30.0], [8.0, 20.0, 30.0]] if value == 7 else [[3.0], [4.0]])
    resting = torch.tensor([[False, False]])
    moves = moments(env, 1, discounts=torch.tensor([[0.5, 0.5]]), next_agent_mask=resting)
    (target,) = learner.targets(moves, noise())
    torch.testing.assert_close(target, torch.tensor([[value / 2, value / 2]]))
    (target,) = learner.targets(moments(env, 1, discounts=torch.tensor([[0.5, 0.5]])), noise())
    assert (target - value / 2).abs().min() > 1


def test_shared_policy_sums_its_seats_and_skips_zero_weights():
    """Critics return 0; seat 0 earned 2 and 4, seat 1 earned 6 in its only row of nonzero weight."""
    env = Countdown()
    learner = made(SAC(), env)
    constant(learner.critics[0].net, [[0.0] * 3, [0.0] * 3])
    rewards, weight = torch.tensor([[2.0, 6.0], [4.0, 99.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    (figures,) = learner.train_step(moments(env, 2, rewards=rewards, weight=weight), noise(), 0.0)
    expected = 2 * (0.5 * (4 + 16) / 2 + 0.5 * 36)  # two critics
    torch.testing.assert_close(figures["critic_loss"], torch.tensor([expected]))


def test_policy_has_no_gradient_where_its_seat_does_not_act():
    """The critic has one: it must learn the value of not acting."""
    env = Countdown()
    learner = made(SAC(critic="central", learn_alpha=False), env)
    before = copy.deepcopy(learner.stacks[0].net), copy.deepcopy(learner.critics[0].net)
    resting = torch.zeros(4, 2, dtype=torch.bool)
    (figures,) = learner.train_step(moments(env, 4, rewards=torch.ones(4, 2), agent_mask=resting), noise(), 0.0)
    same = [_same(*pair) for pair in zip(before, (learner.stacks[0].net, learner.critics[0].net), strict=True)]
    assert same == [True, False]
    assert figures["policy_loss"].item() == 0 and figures["critic_loss"].item() > 0


def _same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_temperature_moves_entropy_towards_its_target():
    env = Countdown(seats=1)
    policy = [[math.log(2.0), 0.0, 0.0]]  # 1/2, 1/4, 1/4: 1.04 nats, of log 3 = 1.10
    for share, rises in ((0.99, True), (0.9, False)):
        learner = made(SAC(alpha=0.5, target_entropy=share), env)
        constant(learner.stacks[0].net, policy)
        (figures,) = learner.train_step(moments(env, 4), noise(), 0.0)
        assert (figures["alpha"].item() > 0.5) is rises
        assert figures["entropy"].item() == pytest.approx(1.5 * math.log(2))
    kept = made(SAC(alpha=0.5, learn_alpha=False), env)
    (figures,) = kept.train_step(moments(env, 4), noise(), 0.0)
    assert figures["alpha"].item() == pytest.approx(0.5)


# ---- exploration, state, refused settings


def test_actions_are_uniform_and_legal_before_learning_starts():
    env = Countdown(64, space=LINE)
    learner = made(SAC(learning_starts=10_000), env)
    batch = VectorRollout(env, np.arange(64)).collect(learner.rollout_policies(0.0), 40, 0)
    counts, _ = np.histogram(batch.actions, bins=4, range=(-2, 2))
    assert (np.abs(counts / batch.actions.size - 0.25) < 0.03).all()
    assert batch.logp == pytest.approx(-math.log(2))
    assert learner.update(batch, 0.0) == {"p": {}}
    env = Countdown(64)
    batch = VectorRollout(env, np.arange(64)).collect(made(SAC(), env).rollout_policies(0.0), 40, 0)
    action_mask = np.take_along_axis(batch.action_mask[:-1], batch.actions[..., None], -1)
    assert action_mask.all() and not batch.action_mask.all()
    assert batch.logp == pytest.approx(-np.log(batch.action_mask[:-1].sum(-1)), abs=1e-5)


@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.parametrize("space", [LINE, Discrete(3)])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.few(2)
def test_resume_is_bit_identical(space, critic, turns, tmp_path):
    env = Countdown(8, space=space, turns=turns)
    config = SAC(learning_starts=64, batch_size=16, rollout_length=5, gradient_steps=2, critic=critic, buffer_size=150)
    policy, seats = NetPolicyConfig(hidden=[16], normalize_observations=True), {"a": [0], "b": [1]}
    learner, sweeper = made(config, env, policy, seats), VectorRollout(env, np.arange(8))
    batches = [copy.deepcopy(sweeper.collect(learner.rollout_policies(0.0), 5, k)) for k in range(6)]
    for batch in batches[:4]:
        learner.update(batch, 0.1)
    assert learner.steps > 0
    learner.write_state(tmp_path)
    expected = [learner.update(batch, 0.5) for batch in batches[4:]]
    other = made(config, env, policy, seats)
    other.read_state(tmp_path)
    assert [other.update(batch, 0.5) for batch in batches[4:]] == expected
    played = [
        VectorRollout(env, np.arange(8)).collect(x.rollout_policies(0.5), 5, 9).actions.copy() for x in (learner, other)
    ]
    assert np.array_equal(*played)


def test_unsupported_settings_are_refused():
    with pytest.raises(ValueError, match="leave gru_units"):
        made(SAC(), Track(), NetPolicyConfig(gru_units=8))
    with pytest.raises(ValueError, match="several choices"):
        made(SAC(), Countdown(space=MultiDiscrete((2, 3))))
    env = Track()
    env.observation_shapes = ((40, 40, 3),)
    with pytest.raises(ValueError, match="pixels"):
        made(SAC(), env)
    with pytest.raises(ValueError, match="share of the maximum entropy"):
        made(SAC(target_entropy=-1.0), Countdown())
    with pytest.raises(ValueError, match="learning_starts is 1000, but the replay buffer holds only 10"):
        SAC(buffer_size=10, learning_starts=1000)


def test_pixels_are_supported_with_discrete_actions():
    env = Countdown(seats=1)
    env.observation_shapes = ((36, 36, 1),)
    learner = made(SAC(), env)
    obs = torch.randint(0, 255, (2, 1, 36, 36, 1), dtype=torch.uint8)
    (figures,) = learner.train_step(moments(env, 2, obs=obs, next_obs=obs), noise(), 0.0)
    assert figures["critic_loss"].item() > 0


# ---- learning


def test_cart_control_is_learned(check_score):
    """Mean loss per game: 30 at random, 6 without control, 0.15 with good control."""
    learner = made(
        SAC(**FAST), Track(16), NetPolicyConfig(lr=3e-3, max_grad_norm=10, activation="relu", hidden=[32, 32])
    )
    figures = train(learner, VectorRollout(Track(16), np.arange(16)), 4, 60)
    env = Track(256)
    check_score(mean_return(env, learner.greedy_policies(), 20)[0])
    assert mean_return(env, [UniformVectorPolicy(env, [0])], 20)[0] < -15
    assert set(figures["p"]) == {"critic_loss", "q", "policy_loss", "grad_norm", "entropy", "alpha"}


@pytest.mark.parametrize("seats", [{"p": [0, 1]}, {"a": [0], "b": [1]}])
@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.few(2)
def test_every_seat_learns_its_cues(critic, seats, check_score):
    """Chance is 1/3; central critics learn from the team reward."""
    env, policy = (
        Cues(16, team=critic == "central"),
        NetPolicyConfig(lr=3e-3, max_grad_norm=10, hidden=[32], seat_one_hot=True),
    )
    # with less entropy at first, seats that share a policy may stop trying answers before they know the right one
    learner = made(SAC(**FAST, alpha=1.0, target_entropy=0.3, critic=critic), env, policy, seats)
    train(learner, VectorRollout(env, np.arange(16)), 4, 80)
    check_score(mean_return(Cues(256), learner.greedy_policies(), 20).min())
