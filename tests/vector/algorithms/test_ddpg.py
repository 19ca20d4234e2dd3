"""DDPG, TD3 and MADDPG: targets and steps worked by hand, with the others' next actions; exact resumption; learning."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers.remembered import SMALL, constant, linear, made, moments, noise
from helpers.vector_toys import Countdown, Cues, Track, mean_return, train

from palestra.envs.vector.mpe import SimpleSpeakerListener, SimpleTag
from palestra.envs.vector_base import Continuous, Discrete
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

LINE = Continuous((-2.0,), (2.0,))
FAST = dict(learning_starts=500, batch_size=64, tau=0.02, rollout_length=4, gradient_steps=4, gamma=0.9)
BOTH = {"a": [0], "b": [1]}


# ---- targets


def test_targets_of_ddpg_by_hand():
    """Target policy and target critic give the value of the next step; observations have 4 numbers, followed by the
    action."""
    learner = made(DDPG(), Countdown(space=LINE, seats=1))
    constant(learner.copies[0], [[math.atanh(0.3)]])
    linear(learner.critics[0].target, [{0: 2.0, 4: 10.0}])
    obs = torch.tensor([[[1.5, 9.0, 9.0, 9.0]]]).expand(2, 1, 4)
    rewards, discounts = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[0.8], [0.0]])
    moves = moments(learner.env, 2, rewards=rewards, discounts=discounts, next_obs=obs)
    (target,) = learner.targets(moves, noise())
    torch.testing.assert_close(target, torch.tensor([[-1 + 0.8 * (3 + 3), -1.0]]), atol=1e-4, rtol=0)


def test_td3_targets_use_the_smaller_critic_and_smoothing():
    """The noise is so large that it is always clipped: the next action is 0.3 plus or minus the bound, or the end of
    the space."""
    learner = made(TD3(target_noise=1e6, target_noise_clip=0.5), Countdown(space=LINE, seats=1))
    constant(learner.copies[0], [[math.atanh(0.7)]])
    linear(learner.critics[0].target, [{4: 10.0}, {4: 4.0}])
    (target,) = learner.targets(moments(learner.env, 200, discounts=torch.ones(200, 1)), noise())
    assert sorted({round(value, 2) for value in target[0].tolist()}) == [0.8, 4.0]  # of 2 and 0.8, of 10 and 4
    share = (target[0] > 1).float().mean().item()
    assert 0.35 < share < 0.65


def test_maddpg_targets_see_the_others_target_actions():
    """Columns: state 2, agent mask 2, seat one-hot 2, actions of the others 2, own action 1. A policy's own action is
    masked among the others'."""
    learner = made(DDPG(critic="central"), Countdown(space=LINE), seats=BOTH)
    assert learner.critics[0].net.observation_shape == (9,)
    constant(learner.copies[0], [[math.atanh(0.3)], [math.atanh(-0.5)]])
    linear(learner.critics[0].target, [{0: 1.0, 2: 7.0, 5: 1000.0, 6: 10.0, 7: 100.0, 8: 0.5}] * 2)
    state, discounts = torch.tensor([[4.0, 9.0]]), torch.tensor([[1.0, 0.5]])
    (target,) = learner.targets(moments(learner.env, 1, next_state=state, discounts=discounts), noise())
    first, second = 4 + 7 + 100 * -0.5 + 0.5 * 0.3, 4 + 7 + 1000 + 10 * 0.3 + 0.5 * -0.5
    torch.testing.assert_close(target, torch.tensor([[first], [0.5 * second]]), atol=5e-2, rtol=0)
    agent_mask = torch.tensor([[True, False]])
    (target,) = learner.targets(moments(learner.env, 1, discounts=discounts, next_agent_mask=agent_mask), noise())
    torch.testing.assert_close(target, torch.tensor([[7 + 0.5 * 0.3], [0.5 * (7 + 1000 + 3)]]), atol=5e-2, rtol=0)


def test_central_critic_sees_the_others_actions():
    learner = made(DDPG(critic="central"), Countdown(space=LINE), seats=BOTH)
    linear(learner.critics[0].net, [{6: 1.0, 7: 2.0, 8: 4.0}] * 2)
    actions = torch.tensor([[[1.0], [-2.0]]])  # units 0.5 and -1
    (figures,) = learner.train_step(moments(learner.env, 1, actions=actions), noise(), 0.0)
    expected = torch.tensor([4 * 0.5 + 2 * -1.0, 1 * 0.5 + 4 * -1.0])
    torch.testing.assert_close(figures["q"], expected, atol=1e-3, rtol=0)


def test_central_critic_ignores_seats_without_learner():
    env = Countdown(space=LINE, seats=3)
    learner = made(DDPG(critic="central"), env, seats={"a": [0], "b": [2]})
    assert learner.critics[0].net.observation_shape == (2 + 3 + 3 + 2 + 1,)
    sweeper, other = VectorRollout(env, np.arange(4)), UniformVectorPolicy(env, [1])
    learner = made(
        DDPG(critic="central", learning_starts=16, batch_size=8, rollout_length=8), env, seats={"a": [0], "b": [2]}
    )
    figures = train(learner, sweeper, 8, 2, [other])
    assert figures["b"]["critic_loss"] > 0


def test_discrete_targets_are_drawn_from_legal_actions():
    env = Countdown(seats=1)
    learner = made(DDPG(), env)
    constant(learner.copies[0], [[math.log(3.0), 0.0, 9.0]])
    linear(learner.critics[0].target, [{4: 1.0, 5: 2.0, 6: 1000.0}])
    action_mask = torch.tensor([True, True, False]).expand(4000, 1, 3)
    (target,) = learner.targets(
        moments(env, 4000, discounts=torch.ones(4000, 1), next_action_mask=action_mask), noise()
    )
    assert target[0].round().unique().tolist() == [1, 2]
    assert target.mean().item() == pytest.approx(1.25, abs=0.03)


# ---- steps


@pytest.mark.parametrize(
    "config", [DDPG(action_l2_coef=0.1, critic_lr=1e-30), TD3(action_l2_coef=0.1, policy_delay=1, critic_lr=1e-30)]
)
def test_policy_follows_the_gradient_of_the_first_critic(config):
    """Gradients of a value of 3 per unit of action; TD3's second critic has the opposite sign. Only the last bias has a
    gradient."""
    learner = made(config, Countdown(space=LINE, seats=1), SMALL.model_copy(update={"max_grad_norm": 1e9}))
    constant(learner.stacks[0].net, [[0.4]])
    slopes = [{4: 3.0}, {4: -50.0}][: learner.num_critics]
    linear(learner.critics[0].net, slopes)
    (figures,) = learner.train_step(moments(learner.env, 5), noise(), 0.0)
    assert figures["policy_loss"].item() == pytest.approx(-3 * math.tanh(0.4) + 0.1 * 0.4**2, abs=1e-4)
    slope = -3 * (1 - math.tanh(0.4) ** 2) + 0.1 * 2 * 0.4
    assert figures["grad_norm"].item() == pytest.approx(abs(slope), abs=1e-3)
    assert learner.stacks[0].net.head.bias.item() > 0.4


def test_td3_delays_policy_and_target_updates():
    learner = made(TD3(tau=0.25), Countdown(space=LINE, seats=1))
    critic, stack = learner.critics[0], learner.stacks[0]
    start = {n: copy.deepcopy(net) for n, net in (("critic", critic.net), ("policy", stack.net))}
    moves = moments(learner.env, 4, rewards=torch.ones(4, 1), obs=torch.randn(4, 1, 4, generator=noise()))
    (figures,) = learner.train_step(moves, noise(), 0.0)
    assert "policy_loss" not in figures and stack.version == 0
    for net, same in ((stack.net, start["policy"]), (critic.target, start["critic"])):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters(), strict=True))
    assert not torch.equal(critic.net.body.layers[0].weight, start["critic"].body.layers[0].weight)
    (figures,) = learner.train_step(moves, noise(), 0.0)
    assert "policy_loss" in figures and stack.version == 1
    moved = [(start["critic"], critic.net, critic.target), (start["policy"], stack.net, learner.copies[0])]
    for old, new, slow in moved:
        for a, b, c in zip(old.parameters(), new.parameters(), slow.parameters(), strict=True):
            torch.testing.assert_close(c, 0.75 * a + 0.25 * b)


def test_exploration_noise_is_annealed():
    config = DDPG(exploration_noise=0.5, exploration_noise_end=0.1, exploration_noise_share=0.5)
    assert [config.noise_at(progress) for progress in (0, 0.25, 0.5, 1)] == pytest.approx([0.5, 0.3, 0.1, 0.1])
    assert DDPG(exploration_noise=0.2, exploration_noise_end=None).noise_at(0.7) == pytest.approx(0.2)


def test_rollout_actions_add_the_current_exploration_noise():
    env = Countdown(64, space=LINE, seats=1)
    learner = made(DDPG(exploration_noise=0.2, exploration_noise_end=0.05, learning_starts=1), env)
    constant(learner.stacks[0].net, [[math.atanh(0.25)]])
    sweeper = VectorRollout(env, np.arange(64))
    learner.replay.add(sweeper.collect(learner.rollout_policies(0.0), 1, 0))
    for progress, deviation in ((0.0, 0.2), (1.0, 0.05)):
        actions = sweeper.collect(learner.rollout_policies(progress), 30, 1).actions
        assert actions.mean() == pytest.approx(0.5, abs=0.05)
        assert actions.std() == pytest.approx(2 * deviation, rel=0.1)
    assert np.ptp(sweeper.collect(learner.greedy_policies(), 3, 1).actions) == 0


# ---- state, shapes


@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.parametrize("space", [LINE, Discrete(3)])
@pytest.mark.parametrize("config", [DDPG, TD3])
@pytest.mark.few(2)
def test_resume_is_bit_identical(config, space, critic):
    env = Countdown(8, space=space)
    config = config(
        learning_starts=64, batch_size=16, rollout_length=5, gradient_steps=3, critic=critic, buffer_size=150
    )
    policy = NetPolicyConfig(hidden=[16], normalize_observations=True)
    learner, sweeper = made(config, env, policy, BOTH), VectorRollout(env, np.arange(8))
    batches = [copy.deepcopy(sweeper.collect(learner.rollout_policies(0.0), 5, k)) for k in range(6)]
    for batch in batches[:4]:
        learner.update(batch, 0.1)
    assert learner.steps > 0
    kept = {name: array.copy() for name, array in learner.state_arrays().items()}
    expected = [learner.update(batch, 0.5) for batch in batches[4:]]
    other = made(config, env, policy, BOTH)
    other.load_arrays(kept)
    assert [other.update(batch, 0.5) for batch in batches[4:]] == expected


@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("game", [SimpleTag, SimpleSpeakerListener])
@pytest.mark.few(3)
def test_seats_may_differ_in_observations_and_actions(game, continuous, critic):
    """Each seat's update equals that of the seat alone: padding reaches no network."""
    env = game(4, continuous_actions=continuous)
    learner = made(
        TD3(critic=critic, learning_starts=16, batch_size=8), env, seats={seat: [i] for i, seat in enumerate(env.seats)}
    )
    figures = train(learner, VectorRollout(env, np.arange(4)), 30, 2)  # the first rollout is random
    assert set(figures) == set(env.seats)
    assert all(np.isfinite(list(line.values())).all() for line in figures.values())
    widths = [space.n if isinstance(space, Discrete) else len(space.low) for space in env.action_spaces]
    for stack, judge in zip(learner.stacks, learner.critics, strict=True):
        seat = stack.seat_mapping.all_seats[0]
        seen = env.observation_shapes[seat][0] if critic == "own" else env.state_size + 2 * len(env.seats) + sum(widths)
        assert judge.net.observation_shape == (seen + widths[seat],)


def test_recurrent_networks_are_refused():
    with pytest.raises(ValueError, match="td3 learns from single transitions"):
        made(TD3(), Track(), NetPolicyConfig(gru_units=8))


# ---- learning


@pytest.mark.parametrize("config", [DDPG, TD3])
@pytest.mark.few(1)
def test_cart_control_is_learned(config, check_score):
    """Mean loss per game: 30 at random, 6 without control, 0.15 with good control."""
    policy = NetPolicyConfig(lr=3e-3, max_grad_norm=10, activation="relu", hidden=[32, 32])
    learner = made(config(**FAST), Track(16), policy)
    train(learner, VectorRollout(Track(16), np.arange(16)), 4, 60)
    env = Track(256)
    check_score(mean_return(env, learner.greedy_policies(), 20)[0])
    assert mean_return(env, [UniformVectorPolicy(env, [0])], 20)[0] < -15


@pytest.mark.parametrize("critic", ["own", "central"])
@pytest.mark.few(1)
def test_every_seat_learns_its_cues(critic, check_score):
    """Chance is 1/3; central critics learn from the team reward."""
    env, policy = Cues(16, team=critic == "central"), NetPolicyConfig(lr=3e-3, max_grad_norm=10, hidden=[32])
    learner = made(TD3(**FAST, action_l2_coef=0.03, critic=critic), env, policy, BOTH)
    train(learner, VectorRollout(env, np.arange(16)), 4, 80)
    check_score(mean_return(Cues(256), learner.greedy_policies(), 20).min())


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute on an idle machine
def test_simple_speaker_listener_is_learned():
    """MADDPG in simple_speaker_listener: a loss of 41 per game at random, about 15 for a listener that stays in the
    middle of all landmarks, 8 once messages name the landmarks."""
    config = DDPG(critic="central", learning_starts=5000, batch_size=512, gamma=0.95, tau=0.01, gradient_steps=4)
    env = SimpleSpeakerListener(64)
    learner = made(config, env, NetPolicyConfig(lr=2e-3, activation="relu"), {"speaker": [0], "listener": [1]})
    train(learner, VectorRollout(env, np.arange(64)), 8, 600)
    env = SimpleSpeakerListener(512)
    assert mean_return(env, [UniformVectorPolicy(env, [0, 1])], 25).max() < -35
    assert mean_return(env, learner.greedy_policies(), 25).min() > -11
