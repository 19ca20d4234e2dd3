"""Recorded episodes of vector envs: they are read back bit for bit, and learned from like played ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from helpers.vector_toys import Countdown, Cues, Push, Track

from palestra.core.types import RolloutBatch
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.vector.nets.replay import ReplayBuffer
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import digest, read_vector_episodes, record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

MORTAL: dict[str, Any] = {"flags": "terminated", "length": 4}


def uniform(env: VectorEnv) -> list[UniformVectorPolicy]:
    return [UniformVectorPolicy(env, [seat], f"random{seat}") for seat in range(len(env.seats))]


def record_uniform_play(env: VectorEnv, steps: int, path: Path) -> RolloutBatch:
    """Writes episodes to a file; returns them as they were played."""
    record_vector_episodes(env, uniform(env), steps, path, seed=3)
    return VectorRollout(env, 3 + np.arange(env.num_envs)).collect(uniform(env), steps, 3)


def in_game_order(moments: np.ndarray) -> np.ndarray:
    """[T, B, ...] -> [B * T, 1, ...]."""
    return moments.swapaxes(0, 1).reshape(-1, 1, *moments.shape[2:])


ENVS = {
    "turns": lambda: Countdown(4, turns=True),
    "masks": lambda: Countdown(3, seats=3),
    "continuous": lambda: Track(3, steps=4),
    "vectors of choices": lambda: Push(2, (MultiDiscrete((2,)), MultiDiscrete((2, 3)))),
    "mortal": lambda: PettingZooEnv(2, env="helpers.mortal_games:parting", options=MORTAL),
}


@pytest.mark.parametrize("kind", ENVS)
def test_episodes_survive_a_write_and_read(kind: str, tmp_path: Path) -> None:
    env = ENVS[kind]()
    played = record_uniform_play(env, 11, tmp_path / "moves.parquet")
    found = read_vector_episodes([tmp_path / "moves.parquet"], env)
    assert len(list(tmp_path.iterdir())) == 1 and found.obs.dtype == played.obs.dtype
    acts = in_game_order(played.agent_mask[:-1])
    for name in ("obs", "agent_mask", "is_first"):
        np.testing.assert_array_equal(getattr(found, name)[:-1], in_game_order(getattr(played, name)[:-1]))
    for name in ("rewards", "seats_terminated", "done"):
        np.testing.assert_array_equal(getattr(found, name), in_game_order(getattr(played, name)))
    actions = in_game_order(played.actions)
    assert found.actions.dtype == played.actions.dtype
    np.testing.assert_array_equal(found.actions[acts], actions[acts])
    np.testing.assert_array_equal(found.logp[acts], in_game_order(played.logp)[acts])
    order = np.lexsort(played.end_index)  # game after game
    np.testing.assert_array_equal(found.final_obs, played.final_obs[order])
    np.testing.assert_array_equal(found.end_index[0], (played.end_index[1] * 11 + played.end_index[0])[order])
    if played.action_mask is None or played.state is None or played.final_state is None:
        return
    assert found.action_mask is not None and found.state is not None and found.final_state is not None
    np.testing.assert_array_equal(found.action_mask[:-1], in_game_order(played.action_mask[:-1]))
    np.testing.assert_array_equal(found.state[:-1], in_game_order(played.state[:-1]))
    np.testing.assert_array_equal(found.final_state, played.final_state[order])


@pytest.mark.parametrize("count_env_steps", [False, True])
@pytest.mark.parametrize("kind", ["turns", "masks", "mortal"])
def test_replay_of_a_file_equals_replay_of_the_rollout(kind: str, count_env_steps: bool, tmp_path: Path) -> None:
    """Two-step returns, ends of games and of single seats. Only the rollout knows the result of the last step of an
    unfinished game."""
    env = ENVS[kind]()
    played = record_uniform_play(env, 11, tmp_path / "moves.parquet")
    T, B = played.terminated.shape
    here, there = (
        ReplayBuffer(T * B, n_step=2, gamma=0.9, count_env_steps=count_env_steps or kind == "turns") for _ in "ab"
    )
    here.add(played)
    there.add(read_vector_episodes([tmp_path / "moves.parquet"], env))
    rows = np.arange(T * B).reshape(T, B).T.ravel()  # the rollout's rows, in the order of the file
    assert here.ring.columns.keys() == there.ring.columns.keys()
    known = there.ring.columns["known"]
    assert known.sum() >= (T - 3) * known.shape[1] and (here.ring.columns["known"][rows] >= known).all()
    ahead = known & (there.ring.columns["discounts"] > 0)  # observations after the end of a seat do not matter
    for name in ("obs", "rewards", "discounts", "agent_mask", "next_obs", "next_agent_mask"):
        where = ahead if name.startswith("next_") else known
        np.testing.assert_array_equal(here.ring.columns[name][rows][where], there.ring.columns[name][where])


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    env = Countdown(3)
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for number, path in enumerate(paths):
        record_vector_episodes(env, uniform(env), 7 + number, path, seed=number)
    both, alone = read_vector_episodes(paths, env), [read_vector_episodes([path], env) for path in paths]
    assert len(both.rewards) == 3 * 7 + 3 * 8
    for name in ("rewards", "actions", "terminated", "truncated", "final_obs", "final_state"):
        np.testing.assert_array_equal(getattr(both, name), np.concatenate([getattr(part, name) for part in alone]))
    for name in ("obs", "is_first", "action_mask", "state"):
        parts = [getattr(part, name) for part in alone]
        np.testing.assert_array_equal(getattr(both, name), np.concatenate([parts[0][:-1], parts[1]]))
    assert both.end_index[0].tolist() == [*alone[0].end_index[0], *(21 + alone[1].end_index[0])]
    assert digest(paths).tolist() != digest(paths[::-1]).tolist() and len(digest(paths)) == 32


def test_files_can_be_queried_and_filtered(tmp_path: Path) -> None:
    """Returns by episode and seat from a query equal those of the games; episodes without a final observation are
    unfinished; a file of the better half of the episodes is valid too."""
    env = Countdown(4)
    played = record_uniform_play(env, 12, tmp_path / "moves.parquet")
    table = pq.read_table(tmp_path / "moves.parquet")
    assert table.column("policy").unique().to_pylist() == ["random0", "random1"]
    assert set(table.column("env").unique().to_pylist()) == {"countdown"}
    final = table.filter(pc.is_null(table.column("reward")))
    ended = pc.unique(final.column("episode"))
    assert len(ended) == len(played.final_obs) and final.column("action").null_count == len(final)
    finished = table.filter(pc.is_in(table.column("episode"), ended))
    sums = finished.group_by(["episode", "seat"]).aggregate([("reward", "sum")]).to_pylist()
    by_seat = {(row["episode"], row["seat"]): row["reward_sum"] for row in sums}
    returns = np.array([[by_seat[number, seat] for seat in env.seats] for number in ended.to_pylist()])
    np.testing.assert_array_equal(np.sort(returns, 0), np.sort(played.episode_stats["returns"], 0))
    good = pa.array([number for number, own in zip(ended.to_pylist(), returns, strict=True) if own.sum() > 6])
    pq.write_table(table.filter(pc.is_in(table.column("episode"), good)), tmp_path / "good.parquet")
    found = read_vector_episodes([tmp_path / "good.parquet"], env)
    assert found.rewards.sum() == returns[returns.sum(1) > 6].sum() and found.done.sum() == len(good)


# ---- refusals


def test_files_without_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.parquet does not hold episodes \(.*none"):
        read_vector_episodes([tmp_path / "none.parquet"], Cues(2))
    (tmp_path / "text.parquet").write_text("obs")
    pq.write_table(pa.table({"obs": [1]}), tmp_path / "other.parquet")
    record_vector_episodes(Cues(2), uniform(Cues(2)), 3, tmp_path / "moves.parquet")
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "moves.parquet").read_bytes()[:-30])
    pq.write_table(pq.read_table(tmp_path / "moves.parquet").slice(0, 0), tmp_path / "empty.parquet")
    for name, message in (
        ("text", "does not hold episodes .* record the episodes again with palestra collect"),
        ("broken", "does not hold episodes "),
        ("other", r"does not hold episodes of a vector env: it has no columns \['action', "),
        ("empty", "holds no step"),
    ):
        with pytest.raises(ValueError, match=message):
            read_vector_episodes([tmp_path / f"{name}.parquet"], Cues(2))


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    env, path = Cues(2, steps=3), tmp_path / "moves.parquet"
    record_vector_episodes(env, uniform(env), 6, path)
    table = pq.read_table(path)
    for changed in (table.slice(1), table.slice(2), table.take(list(range(len(table)))[::-1]), table.slice(0, 5)):
        pq.write_table(changed, path)
        with pytest.raises(ValueError, match="not in the order of episode, step and seat, or some are missing"):
            read_vector_episodes([path], env)


def changed(table: pa.Table, column: str, values: Callable[[np.ndarray, np.ndarray], list[Any]]) -> pa.Table:
    """A table with other values in a column, made of the old ones and of which rows act."""
    old = table.column(column)
    acts = table.column("acts").fill_null(False).to_numpy()
    new = pa.array(values(np.array(old.to_pylist(), object), acts), old.type)
    return table.set_column(table.column_names.index(column), column, new)


def first_of(where: np.ndarray, values: np.ndarray, new: Any) -> list[Any]:
    copy = values.copy()
    copy[np.flatnonzero(where)[0]] = new
    return list(copy)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("action", lambda old, acts: first_of(acts, old, None), "has seats that act and no action of theirs"),
        ("action", lambda old, acts: first_of(acts, old, -1), "another env: action -1 of seat seat0, which has 3"),
        ("reward", lambda old, acts: first_of(acts, old, None), "some seats have a reward and others none"),
        ("reward", lambda old, acts: first_of(acts, old, float("nan")), "has rewards that are not finite numbers"),
        (
            "observation",
            lambda old, acts: first_of(acts, old, [float("nan")] * len(old[0])),
            "observations that are not",
        ),
    ],
)
def test_damaged_values_are_refused(column: str, values: Any, message: str, tmp_path: Path) -> None:
    env, path = Countdown(2, seats=2), tmp_path / "moves.parquet"
    record_vector_episodes(env, uniform(env), 6, path)
    read_vector_episodes([path], env)
    pq.write_table(changed(pq.read_table(path), column, values), path)
    with pytest.raises(ValueError, match=message):
        read_vector_episodes([path], env)


def test_choices_that_are_no_integers_and_files_named_twice_are_refused(tmp_path: Path) -> None:
    env, path = Countdown(2, seats=2), tmp_path / "moves.parquet"
    record_vector_episodes(env, uniform(env), 6, path)
    with pytest.raises(ValueError, match=r"names .*moves.parquet twice: its episodes would count double"):
        read_vector_episodes([path, tmp_path / "." / "moves.parquet"], env)
    table = pq.read_table(path)
    floats = table.column("action").cast(pa.float32())
    pq.write_table(table.set_column(table.column_names.index("action"), "action", floats), path)
    with pytest.raises(ValueError, match="has actions of type float, and those of a choice are integers"):
        read_vector_episodes([path], env)


def test_episodes_of_another_env_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "moves.parquet"
    record_vector_episodes(Track(2), uniform(Track(2)), 4, path)
    with pytest.raises(ValueError, match=r"of another env: their seats are \['cart'\], and in env \"cues\" \['seat0',"):
        read_vector_episodes([path], Cues(2))
    namesake = type("Namesake", (Track,), {"name": "circuit"})
    with pytest.raises(ValueError, match=r'are of env "track", and this run.s env is "circuit": record .* correct the'):
        read_vector_episodes([path], namesake(2))
    other: VectorEnv = Track(2)
    other.action_spaces = (Discrete(3),)
    with pytest.raises(ValueError, match=r"another env: an action is several, and in env .* one number"):
        read_vector_episodes([path], other)
    other.action_spaces = (Continuous((-1.0,) * 2, (1.0,) * 2),)
    with pytest.raises(ValueError, match=r'action is of \[1\] numbers, and in env "track" of 2'):
        read_vector_episodes([path], other)
    other.observation_shapes = ((3,),)
    with pytest.raises(ValueError, match=r'observation is of \[2\] numbers, and in env "track" of 3 \(\[3\]\)'):
        read_vector_episodes([path], other)
    three = Countdown(4, space=Discrete(3))
    record_vector_episodes(three, uniform(three), 20, path)
    with pytest.raises(ValueError, match=r'action 2 of seat seat0, which has 2 in "countdown"'):
        read_vector_episodes([path], Countdown(4, space=Discrete(2)))
