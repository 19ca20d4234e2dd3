"""Mixtures: a game's members are drawn once, fixed until its end, and known afterwards."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from helpers.remembered import constant
from helpers.vector_toys import Countdown

from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector_base import Continuous, Discrete, Space, VectorEnv
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.layers import Net, NetConfig, make_generators
from palestra.vector.nets.seat_mapping import SeatMapping
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.policies.frozen import FrozenMember, NetMember, UniformMember
from palestra.vector.policies.mixture import (
    IndependentSampler,
    JointSampler,
    LineupSchedule,
    Mixture,
    OpponentSampler,
    SelfPlaySampler,
    cumulative_bounds,
)
from palestra.vector.rollouts.rollout import VectorRollout

SMALL = NetConfig(hidden=[4])


def always(action: int, seats: int = 2, config: NetConfig = SMALL) -> NetMember:
    """A network that always takes one of three actions."""
    net = Net((4,), 3, config, make_generators([action]))
    constant(net, [[5.0 * (action == a) for a in range(3)]])
    return NetMember(SeatMapping(("m",), ((0,),), seats, (4,), Discrete(3)), net, make_head(Discrete(3)), greedy=True)


def three_members(seats: int = 2) -> dict[str, FrozenMember]:
    """Members with different fixed actions; the second has another shape."""
    other = NetConfig(hidden=[4], activation="relu")
    return {"zero": always(0, seats), "one": always(1, seats, other), "two": always(2, seats)}


class Open(Countdown):
    """Every action is legal in every game."""

    def show(self, obs: np.ndarray, state: np.ndarray) -> None:
        super().show(obs, state)
        assert self.vector_step.action_mask is not None
        self.vector_step.action_mask[:] = True


def swept(env: VectorEnv, players: Sequence, steps: int) -> tuple:  # type: ignore[type-arg]
    sweeper = VectorRollout(env, np.arange(env.num_envs))
    return sweeper, sweeper.collect(players, steps, 3)


def test_members_are_fixed_within_a_game() -> None:
    env = Open(200, seats=3)
    mixture = Mixture(env, [1, 2], three_members(3), IndependentSampler([{0: 0.2, 1: 0.8}, {1: 0.5, 2: 0.5}]))
    _, batch = swept(env, [UniformVectorPolicy(env, [0]), mixture], 40)
    begun = np.cumsum(batch.is_first[:-1], 0)
    for game in range(5):
        for number in np.unique(begun[:, game]):
            played = batch.actions[begun[:, game] == number, game, 1:]
            assert (played == played[0]).all()
    tags, members = mixture.played_members(batch)
    times, games = batch.end_index
    np.testing.assert_array_equal(members, batch.actions[times, games][:, 1:])
    assert len(tags) == len(batch.episode_stats["returns"]) > 1000
    share = [(members[:, 0] == 1).mean(), (members[:, 1] == 2).mean()]
    np.testing.assert_allclose(share, [0.8, 0.5], atol=0.06)
    assert abs(np.corrcoef(members.T)[0, 1]) < 0.12  # seats draw independently


def test_sampling_is_not_biased_by_game_length() -> None:
    """Members are drawn by game, whatever its length."""
    env = Open(500)
    mixture = Mixture(env, [1], three_members(), IndependentSampler([{0: 1.0, 2: 1.0}]))
    sweeper, first = swept(env, [UniformVectorPolicy(env, [0]), mixture], 1)
    assert len(first.end_index[0]) == 0
    now = sweeper.recurrent_states["mixture"][:, 1].numpy()
    assert abs((now == 0).mean() - 0.5) < 0.1


def test_joint_lineups_are_sampled_together() -> None:
    env = Open(200, seats=3)
    mixture = Mixture(env, [0, 2], three_members(3), JointSampler([[0, 1], [1, 0], [2, 2]], [0.5, 0.25, 0.25]))
    _, batch = swept(env, [UniformVectorPolicy(env, [1]), mixture], 30)
    tags, members = mixture.played_members(batch)
    np.testing.assert_array_equal(members, np.array([[0, 1], [1, 0], [2, 2]])[tags])
    np.testing.assert_allclose(np.bincount(tags) / len(tags), [0.5, 0.25, 0.25], atol=0.06)


def test_self_play_share_is_respected() -> None:
    env = Open(200)
    lots = SelfPlaySampler(IndependentSampler([{0: 1.0}]), 0.3, 2)
    _, batch = swept(env, [UniformVectorPolicy(env, [0]), mixture := Mixture(env, [1], three_members(), lots)], 30)
    tags, members = mixture.played_members(batch)
    np.testing.assert_array_equal(tags == -1, members[:, 0] == 2)
    assert abs((tags == -1).mean() - 0.3) < 0.06


def test_scheduled_lineups_are_played_the_given_number_of_times() -> None:
    env = Open(7)
    lineups, times = np.array([[0, 1], [1, 2], [2, 0]]), np.array([5, 0, 9])
    mixture = Mixture(env, [0, 1], three_members(), LineupSchedule(lineups, times))
    _, batch = swept(env, [mixture], 60)
    tags, members = mixture.played_members(batch)
    counted = tags[tags >= 0]
    np.testing.assert_array_equal(np.bincount(counted), times)
    np.testing.assert_array_equal(members[tags >= 0], lineups[counted])


@pytest.mark.parametrize("memory", [0, 5])
def test_members_are_restored_after_load(memory: int) -> None:
    def cast(env: VectorEnv) -> Mapping[str, FrozenMember]:
        config, head = NetConfig(hidden=[4], gru_units=memory), make_head(env.action_spaces[0])
        seating = SeatMapping(("m",), ((1,),), 2, env.observation_shapes[1], env.action_spaces[1])
        nets = [Net(env.observation_shapes[1], 2, config, make_generators([i]), 3.0) for i in range(3)]
        return {"u": UniformMember()} | {str(i): NetMember(seating, n, head) for i, n in enumerate(nets)}

    def players(env: VectorEnv) -> list:  # type: ignore[type-arg]
        return [
            UniformVectorPolicy(env, [0]),
            Mixture(env, [1], cast(env), IndependentSampler([dict.fromkeys(range(4), 0.25)])),
        ]

    env, other = KuhnPoker(30), KuhnPoker(30)
    sweeper, playing = VectorRollout(env, np.arange(30)), players(env)
    sweeper.collect(playing, 7, 1)
    saved = sweeper.save()
    assert saved is not None
    gone_on = sweeper.collect(playing, 9, 2)
    loaded, others = VectorRollout(other, np.arange(30)), players(other)
    loaded.load(saved, others)
    again = loaded.collect(others, 9, 2)
    np.testing.assert_array_equal(again.actions, gone_on.actions)
    for mine, theirs in zip(others[1].played_members(again), playing[1].played_members(gone_on), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_batch_holds_the_initial_recurrent_state() -> None:
    env = Open(4)
    mixture = Mixture(env, [1], three_members(), IndependentSampler([{0: 0.5, 1: 0.5}]))
    sweeper, _ = swept(env, [UniformVectorPolicy(env, [0]), mixture], 3)
    before = sweeper.recurrent_states["mixture"].clone()
    batch = sweeper.collect([UniformVectorPolicy(env, [0]), mixture], 20, 4)
    assert torch.equal(batch.recurrent_state["mixture"], before)
    assert not torch.equal(sweeper.recurrent_states["mixture"], before)


def test_continuous_actions_are_supported() -> None:
    space: Space = Continuous((-1.0, -1.0), (1.0, 1.0))
    env = Countdown(5, space=space)
    head = make_head(space)
    seating = SeatMapping(("m",), ((0,),), 2, (4,), space)
    nets = [Net((4,), head.outputs, SMALL, make_generators([i])) for i in range(2)]
    for number, net in enumerate(nets):
        constant(net, [[0.25 + number / 2, -0.5, -5.0, -5.0]])
    cast = {str(i): NetMember(seating, n, head, greedy=True) for i, n in enumerate(nets)}
    mixture = Mixture(env, [1], cast, IndependentSampler([{0: 0.5, 1: 0.5}]))
    _, batch = swept(env, [UniformVectorPolicy(env, [0]), mixture], 12)
    members = mixture.played_members(batch)[1][:, 0]
    np.testing.assert_allclose(batch.actions[batch.end_index][:, 1, 0], 0.25 + members / 2)
    np.testing.assert_allclose(batch.actions[:, :, 1, 1], -0.5)


def test_equal_seeds_give_equal_play() -> None:
    def once() -> np.ndarray:
        env = KuhnPoker(20)
        lots: OpponentSampler = IndependentSampler([{0: 1.0}, {0: 1.0}])
        return swept(env, [Mixture(env, [0, 1], {"uniform": UniformMember()}, lots)], 20)[1].actions.copy()

    np.testing.assert_array_equal(once(), once())


@pytest.mark.parametrize("given", [[], [0.0, 0.0], [0.5, -0.1], [float("nan"), 1.0]])
def test_invalid_probabilities_are_refused(given: list[float]) -> None:
    with pytest.raises(ValueError, match="are not probabilities"):
        cumulative_bounds(given)
