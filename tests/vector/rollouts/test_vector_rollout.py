"""Rollouts of vector envs, compared with a loop over single games."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, Track

from palestra.core.types import RolloutBatch
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS, uniform
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv, empty_step
from palestra.envs.vector_check import check_vector_env
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.layers import Net, NetConfig, make_generators
from palestra.vector.nets.seat_mapping import group_into_stacks
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy, VectorPolicy
from palestra.vector.policies.nets import NetVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout


class Mute(Countdown):
    """Countdown without saved state."""

    def save(self) -> Any:
        return None


SEEDS = np.array([0, 3, 5, 9])
KEPT_COPY = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def by_view(env: VectorEnv, seat: int) -> np.ndarray:
    """Actions that depend on a seat's observation."""
    view = env.vector_step.obs[:, seat]  # type: ignore[attr-defined]
    return ((view[:, 1] + 2 * seat + view[:, 0]) % 2).astype(np.int32)


def recurrent(env: VectorEnv, seats: dict[str, list[int]]) -> list[NetVectorPolicy]:
    """Recurrent policies, one for each shape."""
    config = NetConfig(hidden=[8], gru_units=6)
    players = []
    for seating in group_into_stacks(env, seats, dict.fromkeys(seats, config)):
        head = make_head(seating.action_space)
        net = Net(seating.input_shape, head.outputs, config, make_generators(range(len(seating.names))))
        players.append(NetVectorPolicy(seating, net, head.sample))
    return players


def arrays_of(batch: RolloutBatch) -> dict[str, np.ndarray]:
    flat = {key: value for key, value in vars(batch).items() if isinstance(value, np.ndarray)}
    flat |= {"ends.0": batch.end_index[0], "ends.1": batch.end_index[1]}
    flat |= {f"games.{key}": value for key, value in batch.episode_stats.items()}
    flat |= {f"memory.{key}": value.numpy() for key, value in batch.recurrent_state.items() if value is not None}
    return {key: value.copy() for key, value in flat.items()}


def assert_equal_batches(
    first: RolloutBatch | dict[str, np.ndarray], second: RolloutBatch | dict[str, np.ndarray]
) -> None:
    one, two = (x if isinstance(x, dict) else arrays_of(x) for x in (first, second))
    assert set(one) == set(two)
    for key, value in one.items():
        np.testing.assert_array_equal(value, two[key], err_msg=key)


@pytest.mark.parametrize(
    "make",
    [
        Countdown,
        lambda games: Countdown(games, turns=True, seats=3),
        Cues,
        lambda games: Cues(games, turns=True, steps=2),
        Track,
    ],
)
def test_toy_envs_pass_the_env_check(make: Any) -> None:
    check_vector_env(make, steps=60)


# ---- against a plain loop


@pytest.mark.parametrize("turns", [False, True])
def test_rollout_equals_a_loop_over_single_envs(turns: bool) -> None:
    env = Countdown(4, turns=turns)
    batch = VectorRollout(env, SEEDS).collect([ScriptedVectorPolicy(env, [0, 1], by_view)], 12, seed=0)
    final, ended = [], []
    for b, seed in enumerate(SEEDS):
        one = Countdown(1, turns=turns)
        frame, first, score, steps = one.reset(np.array([seed])), True, np.zeros(2), 0
        for t in range(12):
            assert np.array_equal(batch.obs[t, b], frame.obs[0])
            assert np.array_equal(batch.agent_mask[t, b], frame.agent_mask[0])
            assert np.array_equal(batch.action_mask[t, b], frame.action_mask[0])
            assert np.array_equal(batch.state[t, b], frame.state[0])
            assert batch.is_first[t, b] == first
            actions = np.stack([by_view(one, 0), by_view(one, 1)], 1)
            assert np.array_equal(batch.actions[t, b], actions[0])
            frame = one.step(actions)
            assert np.array_equal(batch.rewards[t, b], frame.rewards[0])
            assert (batch.terminated[t, b], batch.truncated[t, b]) == (frame.terminated[0], frame.truncated[0])
            score, steps, first = score + frame.rewards[0], steps + 1, bool(frame.done[0])
            if first:
                final.append((t, b, frame.final_obs[0].copy(), frame.final_state[0].copy()))
                ended.append((t, b, score, steps, frame.success[0]))
                score, steps = np.zeros(2), 0
        assert np.array_equal(batch.obs[12, b], frame.obs[0]) and batch.is_first[12, b] == first
    final.sort(key=lambda end: end[:2])
    ended.sort(key=lambda end: end[:2])
    assert list(zip(*batch.end_index, strict=True)) == [(t, b) for t, b, *_ in final]
    np.testing.assert_array_equal(batch.final_obs, [obs for *_, obs, _ in final])
    np.testing.assert_array_equal(batch.final_state, [state for *_, state in final])
    np.testing.assert_array_equal(batch.episode_stats["game"], [b for _, b, *_ in ended])
    np.testing.assert_array_equal(batch.episode_stats["returns"], [score for *_, score, _, _ in ended])
    np.testing.assert_array_equal(batch.episode_stats["lengths"], [steps for *_, steps, _ in ended])
    np.testing.assert_array_equal(batch.episode_stats["success"][:, 0], [success for *_, success in ended])
    assert batch.truncated.any() and batch.terminated.any() and not batch.logp.any()


def test_time_limit_that_ends_games_changes_only_how_they_end() -> None:
    rollouts = []
    for limit in ("cuts", "ends"):
        env = Countdown(4)
        rollout = VectorRollout(env, SEEDS, time_limit=limit)
        rollouts.append(arrays_of(rollout.collect([ScriptedVectorPolicy(env, [0, 1], by_view)], 12, seed=0)))
    cuts, ends = rollouts
    assert cuts["truncated"].any() and not ends["truncated"].any()
    np.testing.assert_array_equal(ends.pop("terminated"), cuts["terminated"] | cuts["truncated"])
    for key in ends.keys() - {"truncated"}:
        np.testing.assert_array_equal(ends[key], cuts[key], err_msg=key)


@pytest.mark.parametrize("limit", ["cuts", "ends"])
def test_time_limit_that_ends_games_ends_them_for_every_seat(limit: Any) -> None:
    env = PettingZooEnv(2, env="helpers.mortal_games:parting")
    players: list[VectorPolicy] = [UniformVectorPolicy(env, [0, 1])]
    batch = VectorRollout(env, np.arange(2), time_limit=limit).collect(players, 10, seed=0)
    assert batch.seat_terminated is not None
    assert batch.is_first[-1].all()
    np.testing.assert_array_equal(batch.seat_terminated[-1].all(1), [limit == "ends"] * 2)


def test_rollouts_continue_from_the_last_state() -> None:
    env, other = Countdown(4), Countdown(4)
    whole = arrays_of(VectorRollout(env, SEEDS).collect([ScriptedVectorPolicy(env, [0, 1], by_view)], 12, seed=0))
    sweeper = VectorRollout(other, SEEDS)
    parts = [arrays_of(sweeper.collect([ScriptedVectorPolicy(other, [0, 1], by_view)], 4, seed=s)) for s in range(3)]
    for key in ("actions", "rewards", "terminated", "truncated", "games.returns", "games.lengths", "final_obs"):
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), whole[key], err_msg=key)
    for key in ("obs", "agent_mask", "action_mask", "state", "is_first"):
        np.testing.assert_array_equal(np.concatenate([part[key][:4] for part in parts]), whole[key][:12], err_msg=key)
        np.testing.assert_array_equal(parts[0][key][4], parts[1][key][0], err_msg=key)


def test_restart_resets_all_envs() -> None:
    env = Countdown(4)
    sweeper, player = VectorRollout(env, SEEDS), recurrent(env, {"a": [0, 1]})
    first = arrays_of(sweeper.collect(player, 7, seed=1))
    sweeper.restart(SEEDS)
    assert_equal_batches(sweeper.collect(player, 7, seed=1), first)


def test_rollout_length_may_change() -> None:
    env = Countdown(4)
    sweeper = VectorRollout(env, SEEDS)
    for steps in (3, 1, 5):
        batch = sweeper.collect([UniformVectorPolicy(env, [0, 1])], steps, seed=0)
        assert batch.obs.shape == (steps + 1, 4, 2, 4) and batch.rewards.shape == (steps, 4, 2)


# ---- players


def test_players_act_at_their_own_seats() -> None:
    env = Countdown(4, seats=3)
    constant = [
        ScriptedVectorPolicy(env, [s], lambda env, seat: np.full(env.num_envs, seat, np.int32), f"c{s}") for s in (2, 0)
    ]
    batch = VectorRollout(env, SEEDS).collect([*constant, UniformVectorPolicy(env, [1])], 20, seed=0)
    assert (batch.actions[:, :, 0] == 0).all() and (batch.actions[:, :, 2] == 2).all()
    assert set(np.unique(batch.actions[:, :, 1])) == {0, 1, 2}


def test_uniform_policies_choose_legal_actions() -> None:
    env = Countdown(4)
    batch = VectorRollout(env, SEEDS).collect([UniformVectorPolicy(env, [0, 1])], 300, seed=0)
    chosen = np.take_along_axis(batch.action_mask[:-1], batch.actions[..., None].astype(np.int64), -1)
    assert chosen.all()
    third = (batch.actions == 2)[batch.action_mask[:-1, ..., 2]].mean()
    assert third == pytest.approx(1 / 3, abs=0.05)


def test_rollouts_are_reproducible_from_the_seed() -> None:
    def played(seed: int) -> dict[str, np.ndarray]:
        env = Countdown(4)
        return arrays_of(
            VectorRollout(env, SEEDS).collect(
                [*recurrent(env, {"a": [0]}), UniformVectorPolicy(env, [1], "uniform")], 9, seed
            )
        )

    assert_equal_batches(played(1), played(1))
    assert not np.array_equal(played(1)["actions"], played(2)["actions"])


def test_players_have_independent_random_streams() -> None:
    env = Countdown(64)
    seats = [UniformVectorPolicy(env, [s], f"player{s}") for s in (0, 1)]
    actions = VectorRollout(env, np.arange(64)).collect(seats, 5, seed=0).actions
    assert not np.array_equal(actions[..., 0], actions[..., 1])


def test_unknown_script_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match='"countdown" has no scripted player "clever"'):
        ScriptedVectorPolicy(Countdown(), [0], "clever")


@pytest.mark.parametrize("space", [MultiDiscrete((2, 3)), Continuous((-1.0, 0.0), (1.0, 4.0))])
def test_actions_of_every_kind_are_recorded(space: Space) -> None:
    env = Countdown(4, space=space)
    for players in ([UniformVectorPolicy(env, [0, 1])], recurrent(env, {"a": [0], "b": [1]})):
        batch = VectorRollout(env, SEEDS).collect(players, 6, seed=0)
        assert batch.actions.shape == (6, 4, 2, 2) and batch.action_mask is None
        paid = batch.actions.sum(3) * np.array([1, 2])
        np.testing.assert_allclose(batch.rewards, paid, rtol=1e-6)
        assert (batch.actions.dtype == np.float32) == isinstance(space, Continuous)


# ---- recurrent state and saved state


def test_initial_recurrent_state_is_recorded() -> None:
    """Log-probabilities recomputed from the batch alone equal those of the players."""
    env = Countdown(4, turns=True)
    sweeper, (player,) = VectorRollout(env, SEEDS), recurrent(env, {"a": [0], "b": [1]})
    first = sweeper.collect([player], 3, seed=0)
    assert not first.recurrent_state["a+b"].any()
    batch = sweeper.collect([player], 6, seed=1)
    assert batch.recurrent_state["a+b"].any()
    obs = player.seat_mapping.network_inputs(batch.obs, 2).flatten(2, 3)[:, :-1]
    is_first = torch.from_numpy(batch.is_first[:-1]).expand(2, 6, 4)
    assert is_first.any() and not is_first.all(1).any()
    out, _ = player.net.unroll(obs, batch.recurrent_state["a+b"], is_first)
    actions = player.seat_mapping.select_seats(batch.actions, 2).flatten(2, 3).long()
    action_mask = player.seat_mapping.select_seats(batch.action_mask, 2).flatten(2, 3)[:, :-1]
    logp, _ = make_head(player.seat_mapping.action_space).evaluate_actions(out, actions, action_mask)
    np.testing.assert_allclose(
        logp.detach(), player.seat_mapping.select_seats(batch.logp, 2).flatten(2, 3), rtol=1e-4, atol=1e-5
    )


@KEPT_COPY
@pytest.mark.parametrize("turns", [False, True])
def test_resume_in_mid_episode_is_bit_identical(turns: bool) -> None:
    env = Countdown(4, turns=turns)
    sweeper, players = VectorRollout(env, SEEDS), recurrent(env, {"a": [0], "b": [1]})
    sweeper.collect(players, 7, seed=0)
    saved = sweeper.save()
    assert saved is not None
    kept = {key: value.copy() for key, value in saved.items()}
    expected = [arrays_of(sweeper.collect(players, 5, seed=s)) for s in (1, 2)]
    for key, value in kept.items():
        np.testing.assert_array_equal(saved[key], value, err_msg=key)  # it did not advance with the games
    other = Countdown(4, turns=turns)
    loaded, players = VectorRollout(other, np.zeros(4, np.int64)), recurrent(other, {"a": [0], "b": [1]})
    loaded.load(saved, players)
    for s, batch in zip((1, 2), expected, strict=True):
        assert_equal_batches(loaded.collect(players, 5, seed=s), batch)


def test_env_without_state_is_not_saved() -> None:
    env = Mute(4)
    sweeper = VectorRollout(env, SEEDS)
    sweeper.collect([UniformVectorPolicy(env, [0, 1])], 3, seed=0)
    assert sweeper.save() is None


def test_recurrent_state_is_saved_without_warning() -> None:
    env = Countdown(4)
    sweeper = VectorRollout(env, SEEDS)
    sweeper.collect(recurrent(env, {"a": [0, 1]}), 3, seed=0)
    assert sweeper.save() is not None


class Drift(NativeEnv):
    """Seats observe a random walk."""

    name = "drift"

    def __init__(self, games: int) -> None:
        self.num_envs, self.seats, self.observation_shapes, self.action_spaces = (
            games,
            ("a", "b"),
            ((1,), (1,)),
            (Discrete(2),) * 2,
        )
        self.vector_step, self.internal_state = (
            empty_step(games, 2, (1,)),
            {"rng": np.zeros((games, RNG_WORDS), np.uint64)},
        )

    def _begin(self) -> None:
        self.vector_step.obs[:] = 0

    def _advance(self, actions: np.ndarray) -> None:
        for b, row in enumerate(self.internal_state["rng"]):
            self.vector_step.obs[b] += uniform(row, -1.0, 1.0)
        self.vector_step.rewards[:] = actions * self.vector_step.obs[..., 0]


@KEPT_COPY
@pytest.mark.parametrize("remembers", [True, False])
def test_unused_policy_names_are_refused(remembers: bool) -> None:
    """A native env saves its random numbers as `memory.rng`, which must not collide with a policy called rng."""
    env = Drift(3)
    sweeper = VectorRollout(env, np.arange(3))
    players: list[VectorPolicy] = (
        [*recurrent(env, {"rng": [0, 1]})] if remembers else [UniformVectorPolicy(env, [0, 1], "rng")]
    )
    sweeper.collect(players, 6, seed=0)
    saved, expected = sweeper.save(), arrays_of(sweeper.collect(players, 6, seed=1))
    assert saved is not None
    other = VectorRollout(Drift(3), np.arange(3))
    other.load(saved, players)
    assert_equal_batches(other.collect(players, 6, seed=1), expected)
