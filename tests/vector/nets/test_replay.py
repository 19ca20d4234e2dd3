"""Replay buffer of transitions: credit by hand and by definition, prioritised sampling, ring buffer."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown

from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Discrete
from palestra.vector.nets.replay import ReplayBuffer, TransitionBatch
from palestra.vector.nets.ring_buffer import MIN_PRIORITY, RingBuffer, SumTree
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout


def everything(replay: ReplayBuffer) -> TransitionBatch:
    """All rows in the order of their indices, each once."""
    places = np.arange(len(replay))
    replay.ring.sample = lambda count, rng, beta: (places, np.ones(len(places)))  # type: ignore[method-assign]
    found = replay.sample(0, np.random.default_rng(0))
    del replay.ring.sample
    return found


def game(
    rewards: list[Any], agent_mask: list[Any] | None = None, ends: dict[int, str] | None = None, first: int = 0
) -> RolloutBatch:
    """A batch of one game: `rewards` has a list for each step, of one number for each seat. The observation at step t
    is t (from `first` on) plus a tenth of the seat; the last observation of a game that ends with step t is 100 + t
    plus the same; the state has the same integers. Action a = t % 3; at step t action t % 3 is not legal."""
    T, N = len(rewards), len(rewards[0])
    ends = ends or {}
    time = np.arange(first, first + T + 1)
    views = (time[:, None] + np.arange(N) / 10).astype(np.float32)[:, None, :, None]
    over = sorted(ends)
    final = np.array([[[100 + first + t + n / 10] for n in range(N)] for t in over], np.float32).reshape(-1, N, 1)
    return RolloutBatch(
        obs=views,
        agent_mask=np.array(agent_mask or [[True] * N] * (T + 1), bool)[:, None],
        actions=np.broadcast_to((time[:-1] % 3)[:, None, None], (T, 1, N)).astype(np.int32),
        logp=np.zeros((T, 1, N), np.float32),
        rewards=np.array(rewards, np.float32)[:, None],
        terminated=np.array([[ends.get(t) == "terminated"] for t in range(T)]),
        truncated=np.array([[ends.get(t) == "truncated"] for t in range(T)]),
        is_first=np.array([[first + t == 0 or t - 1 in ends] for t in range(T + 1)]),
        end_index=(np.array(over, np.int64), np.zeros(len(over), np.int64)),
        final_obs=final,
        action_mask=np.broadcast_to(np.arange(3) != (time % 3)[:, None, None, None], (T + 1, 1, N, 3)).copy(),
        state=time.astype(np.float32)[:, None, None],
        final_state=np.array([[100 + first + t] for t in over], np.float32).reshape(-1, 1),
    )


def column(x: torch.Tensor, seat: int = 0) -> list[float]:
    return [round(number, 5) for number in x[:, seat].flatten().tolist()]


# ---- worked by hand, where every seat acts at every step


def test_one_step_transitions() -> None:
    replay = ReplayBuffer(10, gamma=0.5)
    replay.add(game([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], ends={1: "terminated"}))
    moves = everything(replay)
    assert column(moves.rewards) == [1, 2, 3] and column(moves.rewards, 1) == [10, 20, 30]
    assert column(moves.discounts) == [0.5, 0, 0.5]
    assert column(moves.obs) == [0, 1, 2] and column(moves.obs, 1) == pytest.approx([0.1, 1.1, 2.1])
    assert column(moves.next_obs) == [1, 101, 3] and column(moves.next_obs, 1) == pytest.approx([1.1, 101.1, 3.1])
    assert moves.weight.tolist() == [[1, 1]] * 3
    assert moves.actions.tolist() == [[0, 0], [1, 1], [2, 2]] and moves.actions.dtype == torch.int64
    assert moves.state is not None and moves.next_state is not None
    assert column(moves.state) == [0, 1, 2] and column(moves.next_state) == [1, 101, 3]


def test_truncated_episode_bootstraps_from_its_final_observation_and_mask() -> None:
    replay = ReplayBuffer(10, gamma=0.5)
    replay.add(game([[1.0], [2.0], [3.0]], ends={1: "truncated"}))
    moves = everything(replay)
    assert column(moves.discounts) == [0.5, 0.5, 0.5] and column(moves.next_obs) == [1, 101, 3]
    assert moves.next_action_mask is not None and moves.action_mask is not None
    assert moves.action_mask[:, 0].tolist() == [[False, True, True], [True, False, True], [True, True, False]]
    # moment 1's, that of the last decision (step 1), moment 3's
    assert moves.next_action_mask[:, 0].tolist() == [[True, False, True], [True, False, True], [False, True, True]]
    assert moves.next_agent_mask.all()


def test_terminated_and_truncated_counts_as_terminated() -> None:
    batch = game([[1.0], [2.0]], ends={1: "truncated"})
    batch.terminated[:] = batch.truncated
    replay = ReplayBuffer(10)
    replay.add(batch)
    assert column(everything(replay).discounts)[1] == 0


def test_three_step_transitions() -> None:
    # rows 0 and 1 look three ahead; the game is truncated after step 4, so rows 2, 3 and 4 use its last observation
    replay = ReplayBuffer(10, n_step=3, gamma=0.5)
    replay.add(game([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]], ends={4: "truncated"}))
    moves = everything(replay)
    assert column(moves.rewards)[:5] == [1 + 1 + 1, 2 + 2 + 2, 4 + 4 + 4, 8 + 8, 16]
    assert column(moves.discounts) == [0.125, 0.125, 0.125, 0.25, 0.5, 0]
    assert column(moves.next_obs)[:5] == [3, 4, 104, 104, 104]
    assert column(moves.weight) == [1, 1, 1, 1, 1, 0]  # of the last row too little is known


def test_three_step_transitions_of_a_terminated_episode() -> None:
    replay = ReplayBuffer(10, n_step=3, gamma=0.5)
    replay.add(game([[1.0], [2.0], [4.0], [8.0]], ends={2: "terminated"}))
    moves = everything(replay)
    assert column(moves.rewards)[:3] == [3, 4, 4]
    assert column(moves.discounts) == [0, 0, 0, 0]
    assert column(moves.weight) == [1, 1, 1, 0]


# ---- worked by hand, where seats take turns


def turns() -> RolloutBatch:
    """Seats 0 and 1 move in turn; the game ends with step 3, after it seat 0 moves first again."""
    agent_mask = [[True, False], [False, True], [True, False], [False, True], [True, False]]
    return game([[0.0, 0.5], [0.25, 0.0], [0.0, 0.125], [1.0, -1.0]], agent_mask, ends={3: "terminated"})


def test_turn_based_time_counts_own_decisions() -> None:
    replay = ReplayBuffer(10, gamma=0.5)
    replay.add(turns())
    moves = everything(replay)
    # seat 0 moved at 0 and 2: .25 was paid with the other's move; its last move is paid with the other's last
    assert column(moves.rewards) == [0.25, 0, 1, 0]
    assert column(moves.discounts) == [0.5, 0, 0, 0]
    assert column(moves.weight) == [1, 0, 1, 0]
    assert column(moves.next_obs)[0] == 2 and column(moves.next_obs)[2] == 103
    # seat 1 moved at 1 and 3; the .5 before its first move is ignored
    assert column(moves.rewards, 1) == [0, 0.125, 0, -1]
    assert column(moves.discounts, 1) == [0, 0.5, 0, 0]
    assert column(moves.weight, 1) == [0, 1, 0, 1]
    assert column(moves.next_obs, 1)[1] == pytest.approx(3.1)
    assert moves.next_state is not None and column(moves.next_state) == [2, 3, 103, 103]
    assert moves.agent_mask.tolist() == [[True, False], [False, True]] * 2


def test_two_step_transitions_count_own_decisions() -> None:
    replay = ReplayBuffer(10, n_step=2, gamma=0.5)
    replay.add(turns())
    moves = everything(replay)
    assert column(moves.rewards) == [0.25 + 0.5 * 1, 0, 1, 0]
    assert column(moves.rewards, 1) == [0, 0.125 + 0.5 * -1, 0, -1]
    assert moves.discounts.abs().sum() == 0


def test_eliminated_seat_is_credited_to_the_end_without_delaying_others() -> None:
    agent_mask = [[True, True], [True, False], [True, False], [True, True]]
    batch = game([[1.0, 0.0], [1.0, 2.0], [1.0, 3.0]], agent_mask, ends={2: "truncated"})
    replay = ReplayBuffer(10, gamma=0.5)
    replay.add(batch)
    moves = everything(replay)
    assert column(moves.rewards) == [1, 1, 1] and column(moves.rewards, 1) == [5, 0, 0]
    assert column(moves.discounts, 1)[0] == 0.5
    assert column(moves.weight, 1) == [1, 0, 0]
    assert moves.next_obs[0, :, 0].tolist() == pytest.approx([1, 102.1])
    assert moves.next_state is not None and column(moves.next_state) == [1, 2, 102]
    assert moves.next_action_mask is not None
    assert moves.next_action_mask[0].tolist() == [
        [True, False, True],
        [False, True, True],
    ]  # of step 1; of its decision at 0
    assert moves.next_agent_mask.tolist() == [[True, False], [True, False], [True, False]]


def test_team_credit_counts_team_time() -> None:
    replay = ReplayBuffer(10, n_step=2, gamma=0.5, count_env_steps=True)
    replay.add(turns())
    moves = everything(replay)
    assert column(moves.rewards) == [0.125, 0.25, 0.5, 1]
    assert column(moves.rewards, 1) == [0.5, 0.0625, -0.375, -1]
    assert column(moves.discounts) == [0.25, 0.25, 0, 0]
    assert column(moves.next_obs) == [2, 3, 103, 103]
    assert moves.weight.tolist() == [[1, 1]] * 4
    assert moves.agent_mask.tolist() == [[True, False], [False, True]] * 2
    # the game ends
    assert moves.next_agent_mask.tolist() == [[True, False], [False, True], [False, False], [False, False]]


def test_only_transitions_of_learning_seats_are_stored() -> None:
    replay = ReplayBuffer(10, gamma=0.5, seats=[1])
    replay.add(turns())
    moves = everything(replay)
    assert len(replay) == 2
    assert column(moves.obs, 1) == pytest.approx([1.1, 3.1])
    assert column(moves.rewards, 1) == [0.125, -1]
    assert moves.weight.tolist() == [[0, 1], [0, 1]]


# ---- across batches


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("horizon", [1, 4])
def test_short_batches_equal_one_long_batch(turns: bool, n: int, joint: bool, horizon: int) -> None:
    """The env truncates every third game; masks and lengths vary from game to game."""

    def played(length: int) -> TransitionBatch:
        env = Countdown(games=3, turns=turns)
        sweeper, replay = (
            VectorRollout(env, np.arange(3)),
            ReplayBuffer(1000, n_step=n, gamma=0.9, count_env_steps=joint),
        )
        actions = np.random.default_rng(5).integers(0, 2, (40, 3, 2)).astype(np.int32)
        time = [0]

        class Recorded(UniformVectorPolicy):
            def act(self, frame: Any, memory: Any, is_first: Any) -> Any:
                time[0] += 1
                return actions[time[0] - 1], None, None

        for i in range(40 // length):
            replay.add(sweeper.collect([Recorded(env, [0, 1])], length, i))
        return everything(replay)

    long, short = played(40), played(horizon)
    assert long.weight.sum() > 40
    for part in fields(TransitionBatch):
        a, b = getattr(long, part.name), getattr(short, part.name)
        known = long.weight.bool() if part.name in ("discounts", "next_obs", "next_legal") else slice(None)
        assert torch.equal(a[known], b[known]), part.name


def definition(batch: RolloutBatch, t: int, b: int, s: int, n: int, gamma: float) -> tuple[float, float, Any] | None:
    """A decision's reward, discount and next observation, computed plainly; None if they are not known."""
    total, made = 0.0, 0
    for u in range(t, len(batch.rewards)):
        total += gamma**made * float(batch.rewards[u, b, s])
        if batch.done[u, b]:
            (end,) = np.flatnonzero((batch.end_index[0] == u) & (batch.end_index[1] == b))
            return total, 0.0 if batch.terminated[u, b] else gamma ** (made + 1), batch.final_obs[end, s]
        made += int(batch.agent_mask[u + 1, b, s])
        if made == n:
            return total, gamma**n, batch.obs[u + 1, b, s]
    return None


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_step_credit_equals_its_definition(turns: bool, n: int) -> None:
    env = Countdown(games=4, turns=turns, seats=3)
    batch = VectorRollout(env, np.arange(4)).collect([UniformVectorPolicy(env, [0, 1, 2])], 30, 1)
    replay = ReplayBuffer(1000, n_step=n, gamma=0.8)
    replay.add(batch)
    moves, seen = everything(replay), 0
    for t in range(30):
        for b in range(4):
            for s in range(3):
                row, expected = t * 4 + b, definition(batch, t, b, s, n, 0.8)
                known = batch.agent_mask[t, b, s] and expected is not None
                assert moves.weight[row, s] == float(known)
                if known and expected:
                    seen += 1
                    assert moves.rewards[row, s].item() == pytest.approx(expected[0], abs=1e-5)
                    assert moves.discounts[row, s].item() == pytest.approx(expected[1])
                    assert moves.next_obs[row, s].tolist() == expected[2].tolist()
    assert seen > 80


def test_abandoned_episode_is_not_joined_to_the_next() -> None:
    """Games that cannot be saved start again after a checkpoint."""
    replay = ReplayBuffer(10, n_step=2, gamma=0.5)
    replay.add(game([[1.0], [2.0]]))
    replay.add(game([[4.0], [8.0], [16.0]]))
    assert column(everything(replay).rewards)[:3] == [1 + 1, 2, 4 + 4]
    assert column(everything(replay).weight) == [1, 0, 1, 1, 0]


# ---- ring buffer


def test_newest_rows_overwrite_the_oldest() -> None:
    replay = ReplayBuffer(4, gamma=0.5)
    replay.add(game([[1.0], [2.0], [3.0]]))
    assert len(replay) == 3
    replay.add(game([[4.0], [5.0]], first=3))
    assert len(replay) == 4
    moves = everything(replay)
    assert column(moves.rewards) == [5, 2, 3, 4]
    assert column(moves.obs) == [4, 1, 2, 3] and column(moves.next_obs) == [5, 2, 3, 4]


def test_overwritten_row_gets_no_credit() -> None:
    """Row 0 becomes known only at the end, when its index belongs to another row."""
    agent_mask = [[True, False]] + [[False, True]] * 3 + [[True, True]]
    replay = ReplayBuffer(3, gamma=0.5)
    replay.add(game([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [7.0, 4.0]], agent_mask, ends={3: "terminated"}))
    moves = everything(replay)
    assert column(moves.rewards) == [0, 0, 0] and column(moves.weight) == [0, 0, 0]
    assert column(moves.rewards, 1) == [4, 2, 3] and column(moves.weight, 1) == [1, 1, 1]


def test_batch_may_exceed_the_capacity() -> None:
    replay = ReplayBuffer(3, n_step=2, gamma=1.0)
    replay.add(game([[float(2**t)] for t in range(8)]))
    assert column(everything(replay).rewards) == [64 + 128, 128, 32 + 64]
    assert column(everything(replay).weight) == [1, 0, 1]


def test_byte_observations_stay_bytes() -> None:
    batch = game([[1.0], [2.0]], ends={1: "terminated"})
    replay = ReplayBuffer(4)
    replay.add(replace(batch, obs=batch.obs.astype(np.uint8), final_obs=batch.final_obs.astype(np.uint8)))
    moves = everything(replay)
    assert moves.obs.dtype == moves.next_obs.dtype == torch.uint8
    assert column(moves.next_obs) == [1, 101]


def test_optional_columns_are_absent_if_unused() -> None:
    replay = ReplayBuffer(4)
    replay.add(replace(game([[1.0], [2.0]]), action_mask=None, state=None, final_state=None))
    moves = everything(replay)
    assert moves.action_mask is moves.next_action_mask is moves.state is moves.next_state is None
    assert column(moves.rewards) == [1, 2]


@pytest.mark.parametrize(
    "options", [{"priority": 0.6}, {"n_step": 3}, {"count_env_steps": True, "n_step": 2}, {"seats": [1]}]
)
def test_resume_is_bit_identical(options: dict[str, Any]) -> None:
    env = Countdown(games=3, turns=True, space=Discrete(3))
    sweeper, replay, other = VectorRollout(env, np.arange(3)), ReplayBuffer(50, **options), ReplayBuffer(50, **options)
    for i in range(10):
        replay.add(sweeper.collect([UniformVectorPolicy(env, [0, 1])], 3, i))
        if i == 6:
            drawn = replay.sample(5, np.random.default_rng(1))
            replay.update_priorities(drawn.index, torch.arange(5.0))
            other.load({name: array.copy() for name, array in replay.arrays().items()})
        if i > 6:
            other.add(sweeper._batch)  # type: ignore[arg-type]
    assert len(replay) == 50 or options.get("seats")
    a, b = (r.sample(40, np.random.default_rng(2), 0.5) for r in (replay, other))
    for part in fields(TransitionBatch):
        assert torch.equal(getattr(a, part.name), getattr(b, part.name)), part.name
    assert all(np.array_equal(x, other.arrays()[name]) for name, x in replay.arrays().items())


def test_empty_buffer_state_can_be_loaded() -> None:
    replay = ReplayBuffer(4)
    replay.add(game([[9.0]]))
    replay.load(ReplayBuffer(4).arrays())
    assert len(replay) == 0
    replay.add(game([[1.0], [2.0]]))
    assert column(everything(replay).rewards) == [1, 2]


def test_invalid_settings_are_explained() -> None:
    with pytest.raises(ValueError, match="capacity: 0 rows"):
        ReplayBuffer(0)
    with pytest.raises(ValueError, match="n_step: a return over 0 decisions"):
        ReplayBuffer(5, n_step=0)
    with pytest.raises(ValueError, match=r"priority: -0.5"):
        ReplayBuffer(5, priority=-0.5)
    with pytest.raises(ValueError, match="replay buffer is empty"):
        ReplayBuffer(5).sample(1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="same capacity"):
        ReplayBuffer(5).load(ReplayBuffer(6).arrays())
    replay = ReplayBuffer(5, n_step=3, priority=1.0)
    replay.add(game([[1.0], [2.0]]))
    with pytest.raises(ValueError, match="none is complete"):
        replay.sample(1, np.random.default_rng(0))


# ---- priorities


def test_sum_tree_finds_prefix_sums() -> None:
    tree = SumTree(5)
    tree.set_values(np.arange(5), np.array([1.0, 0.0, 2.0, 3.0, 4.0]))
    assert tree.total == 10
    assert tree.find_prefix_sums(np.array([0.0, 0.99, 1.0, 2.99, 3.0, 5.99, 6.0, 9.99])).tolist() == [
        0,
        0,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    tree.set_values(np.array([3, 1, 3]), np.array([9.0, 5.0, 0.0]))  # the last of two for one index holds
    assert tree.of(np.arange(5)).tolist() == [1, 5, 2, 0, 4] and tree.total == 12
    assert tree.find_prefix_sums(np.array([1.0, 5.99, 6.0, 8.0])).tolist() == [1, 1, 2, 4]


def test_sum_tree_with_one_leaf() -> None:
    tree = SumTree(1)
    tree.set_values(np.array([0]), np.array([0.5]))
    assert tree.total == 0.5 and tree.find_prefix_sums(np.array([0.0, 0.4])).tolist() == [0, 0]


def test_sum_tree_agrees_with_cumulative_sums() -> None:
    rng = np.random.default_rng(0)
    numbers, tree = np.zeros(37), SumTree(37)
    for _ in range(50):
        places, values = rng.choice(37, 10, replace=False), rng.random(10) * rng.integers(0, 2, 10)
        numbers[places] = values
        tree.set_values(places, values)
    upto = rng.random(200) * numbers.sum() * 0.999999
    assert tree.find_prefix_sums(upto).tolist() == np.searchsorted(np.cumsum(numbers), upto, side="right").tolist()


def test_sum_tree_never_returns_an_empty_leaf() -> None:
    tree = SumTree(4)
    tree.set_values(np.arange(4), np.array([0.1, 0.2, 0.3, 0.0]))
    assert tree.find_prefix_sums(np.array([np.nextafter(tree.total, 1), 5.0])).tolist() == [2, 2]


def prioritised(errors: list[float], alpha: float) -> ReplayBuffer:
    replay = ReplayBuffer(8, priority=alpha)
    replay.add(game([[1.0]] * len(errors)))
    replay.update_priorities(torch.arange(len(errors)), torch.tensor(errors))
    return replay


def test_sampling_is_proportional_to_priority() -> None:
    # errors 1, 4, 16 to the power of a half: 1, 2 and 4 of 7; the sign does not matter
    moves = prioritised([1.0, -4.0, 16.0], 0.5).sample(70_000, np.random.default_rng(0))
    shares = np.bincount(moves.index.numpy(), minlength=3) / 70_000
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=1e-3)


def test_importance_weights_correct_the_sampling() -> None:
    # probabilities 1/7, 2/7, 4/7; (1 / (3 * p)) ** beta, over the largest: 1, 1/2 ** beta, 1/4 ** beta
    replay = prioritised([1.0, 4.0, 16.0], 0.5)
    for beta, expected in ((1.0, [1, 0.5, 0.25]), (0.5, [1, 0.5**0.5, 0.5]), (0.0, [1, 1, 1])):
        moves = replay.sample(100, np.random.default_rng(0), beta)
        assert set(moves.index.tolist()) == {0, 1, 2}
        for place, weight in zip(moves.index.tolist(), moves.weight[:, 0].tolist(), strict=True):
            assert weight == pytest.approx(expected[place], rel=1e-4)


def test_weighted_samples_are_unbiased() -> None:
    """The sum over rows of f / (N p) * p is the mean of f, whatever the priorities."""
    replay = prioritised([0.5, 2.0, 8.0, 1.0], 1.0)
    moves = replay.sample(50_000, np.random.default_rng(0), 1.0)
    weight, f = moves.weight[:, 0].double(), moves.index.double() ** 2
    assert ((weight * f).sum() / weight.sum()).item() == pytest.approx(14 / 4, rel=0.02)


def test_new_rows_have_the_maximum_priority() -> None:
    replay = ReplayBuffer(8, priority=0.5)
    replay.add(game([[1.0]]))
    assert replay.ring.tree is not None
    assert replay.ring.tree.of(np.arange(8)).tolist() == [1.0] + [0.0] * 7
    replay.update_priorities(torch.tensor([0]), torch.tensor([9.0]))
    replay.add(game([[1.0]], first=1))
    assert replay.ring.tree.of(np.arange(2)) == pytest.approx([3, 3])
    replay.update_priorities(torch.tensor([0, 1]), torch.tensor([0.0, 1.0]))
    assert replay.ring.tree.of(np.arange(2)) == pytest.approx([MIN_PRIORITY**0.5, 1], rel=1e-4)


def test_incomplete_rows_are_not_sampled() -> None:
    replay = ReplayBuffer(8, n_step=2, priority=1.0)
    replay.add(game([[1.0], [2.0], [3.0]]))
    assert set(replay.sample(50, np.random.default_rng(0)).index.tolist()) == {0, 1}
    replay.add(game([[4.0]], first=3))
    assert set(replay.sample(50, np.random.default_rng(0)).index.tolist()) == {0, 1, 2}


def test_overwritten_row_loses_its_priority() -> None:
    replay = ReplayBuffer(2, n_step=2, priority=1.0)
    replay.add(game([[1.0], [2.0], [3.0]]))
    assert replay.ring.tree is not None
    assert replay.ring.tree.of(np.arange(2)).tolist() == [0, 1]  # row 2, not yet known, at the index of row 0


def test_sampling_is_uniform_without_priorities() -> None:
    ring = RingBuffer(4)
    ring.write(np.arange(4), {"x": np.arange(4)})
    places, worth = ring.sample(40_000, np.random.default_rng(0))
    assert np.bincount(places) / 40_000 == pytest.approx([0.25] * 4, abs=0.01)
    assert (worth == 1).all()
