"""Recorded episodes of vector envs as Parquet files, for imitation and offline learning: one row per episode, step and
seat, readable by any tool and restored without loss.

A row holds one seat's observation at one step, its action, and what followed. An episode that ended has one more row
per seat, with the final observation and neither action nor reward; the last episode of every game may be unfinished and
then has no such row. Rows are in the order of episode, step and seat, so whole episodes may be filtered and files
concatenated.

Shapes: `T` steps, `B` games, `N` seats, `R` joint steps with those of final observations, `F` ended games.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BeforeValidator, Field

from palestra.core.files import replacing_file
from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Discrete, VectorEnv, zero_actions
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

COLUMNS = (
    "env",
    "episode",  # index within the file
    "step",  # index within the episode
    "seat",
    "policy",
    "acts",  # whether the seat acts in this step
    "observation",  # padded to the largest shape of any seat, flattened
    "action",  # null where the seat does not act
    "logprob",
    "reward",  # between this step and the next; null in the row of a final observation
    "terminated",  # of the seat, by this step or an earlier one
    "truncated",
    "action_mask",  # null if the env has none
    "state",  # of the whole env; null if the env has none
)
FIX = "record the episodes again with palestra collect"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


EpisodeFiles = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]  # in a config: a path or several


def record_vector_episodes(
    env: VectorEnv, players: Sequence[VectorPolicy], steps: int, path: str | Path, *, seed: int = 0
) -> None:
    """Plays `steps` joint steps of games of seeds from `seed` on, and writes them as episodes."""
    batch = VectorRollout(env, seed + np.arange(env.num_envs)).collect(players, steps, seed)
    policies: dict[int, str] = {}
    for player in players:
        names = player.names
        policies |= {seat: names[i * len(names) // len(player.seats)] for i, seat in enumerate(player.seats)}
    with replacing_file(Path(path)) as file:
        pq.write_table(to_table(batch, env, [policies[seat] for seat in range(len(env.seats))]), file)


# ---- writing


def to_table(batch: RolloutBatch, env: VectorEnv, policies: Sequence[str]) -> pa.Table:
    """Returns the rows of a batch; `policies` are the names of the policies at the seats, in order."""
    order, final = _row_order(batch)
    T, B, N = batch.rewards.shape

    def joint(moments: np.ndarray, ends: np.ndarray | None) -> np.ndarray:
        """Returns the rows [R, ...] of values per step [T, B, ...] and of the ended games [F, ...] (None: zeros)."""
        rows = moments.swapaxes(0, 1).reshape(T * B, *moments.shape[2:])
        last = np.zeros((len(batch.end_index[0]), *rows.shape[1:]), rows.dtype) if ends is None else ends
        joined: np.ndarray = np.concatenate([rows, last])[order]
        return joined

    first = joint(batch.is_first[:-1], None)
    first[np.flatnonzero(order < T * B)[::T]] = True  # the first step of each game begins an episode in any case
    starts = np.flatnonzero(first)
    episode = np.cumsum(first) - 1
    acts = joint(batch.agent_mask[:-1], None).ravel()
    played = np.repeat(~final, N)
    over = batch.seats_terminated
    columns: dict[str, pa.Array] = {
        "env": _names([env.name] * len(order) * N),
        "episode": pa.array(np.repeat(episode, N).astype(np.int32)),
        "step": pa.array(np.repeat(np.arange(len(order)) - starts[episode], N).astype(np.int32)),
        "seat": _names(list(env.seats) * len(order)),
        "policy": _names(list(policies) * len(order)),
        "acts": pa.array(acts),
        "observation": _lists(joint(batch.obs[:-1], batch.final_obs).reshape(len(played), -1)),
        "action": _values(joint(batch.actions, None), acts),
        "logprob": _values(joint(batch.logp, None), acts),
        "reward": _values(joint(batch.rewards, None), played),
        "terminated": _values(joint(over, None), played),
        "truncated": _values(joint(batch.done[..., None] & ~over, None), played),
    }
    masks = batch.action_mask
    state = batch.state
    columns["action_mask"] = pa.nulls(len(played)) if masks is None else _values(joint(masks[:-1], None), played)
    columns["state"] = pa.nulls(len(played))
    if state is not None:
        columns["state"] = _lists(np.repeat(joint(state[:-1], batch.final_state), N, 0))
    return pa.table(columns)


def _row_order(batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of the joint rows [R], game after game, as indices of B * T steps (b * T +
    t) followed by the final observations, and whether a row is a final observation [R] bool."""
    T, B = batch.rewards.shape[:2]
    times, games = batch.end_index
    key = np.concatenate([2 * np.arange(B * T), 2 * (games * T + times) + 1])
    order = np.argsort(key)
    return order, order >= B * T


def _names(values: list[str]) -> pa.Array:
    return pa.array(values).dictionary_encode()


def _values(values: np.ndarray, known: np.ndarray) -> pa.Array:
    """Returns a column from values [R, N] or [R, N, ...]; null where `known` [R * N] is False."""
    flat = values.reshape(len(known), *values.shape[2:])
    return pa.array(flat, mask=~known) if flat.ndim == 1 else _lists(flat, known)


def _lists(values: np.ndarray, known: np.ndarray | None = None) -> pa.Array:
    """Returns a column of lists from rows [M, W]; null where `known` [M] is False."""
    rows = len(values)
    known = np.ones(rows, bool) if known is None else known
    ends = np.concatenate([[0], np.cumsum(known) * values.shape[1]]).astype(np.int32)
    offsets = pa.array(ends, mask=np.append(~known, False))
    return pa.ListArray.from_arrays(offsets, pa.array(values[known].ravel()))


# ---- reading


def read_vector_episodes(paths: Sequence[str | Path], env: VectorEnv) -> RolloutBatch:
    """Returns the episodes of all files, one after another, as a batch of one game: [T, 1, N, ...].
    The last step of an unfinished episode is followed by the first step of the next episode. Raises
    ValueError if a file does not hold episodes, or those of another env."""
    named: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in named:
            raise ValueError(f"data names {path} twice: its episodes would count double. Name it once")
        named.add(Path(path).resolve())
    return _join([_read(Path(path), env) for path in paths])


def digest(paths: Sequence[str | Path]) -> np.ndarray:
    """Returns the SHA-256 of the files' contents, uint8 [32]."""
    sha256 = hashlib.sha256()
    for path in paths:
        sha256.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return np.frombuffer(sha256.digest(), np.uint8).copy()


def _read(path: Path, env: VectorEnv) -> RolloutBatch:
    try:
        table = pq.read_table(path, page_checksum_verification=True).combine_chunks()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} does not hold episodes ({error}): {FIX}") from error
    if missing := sorted(set(COLUMNS) - set(table.column_names)):
        raise ValueError(f"{path} does not hold episodes of a vector env: it has no columns {missing}; {FIX}")
    _check_seats(path, table, env)
    unpaid = table.column("reward").is_null().to_numpy().reshape(-1, len(env.seats))
    final = unpaid[:, 0]
    if (unpaid != final[:, None]).any():
        raise ValueError(f"{path} has steps in which some seats have a reward and others none: give each one; {FIX}")
    step = table.column("step").to_numpy().reshape(-1, len(env.seats))[:, 0]
    return _to_batch(_Rows(path, table, env), final, step)


def _check_seats(path: Path, table: pa.Table, env: VectorEnv) -> None:
    N = len(env.seats)
    seats = table.column("seat").to_pylist()
    if not seats:
        raise ValueError(f"{path} holds no step: {FIX}")
    if sorted(set(seats)) != sorted(env.seats):
        raise ValueError(
            f'the episodes in {path} are of another env: their seats are {sorted(set(seats))}, and in env "{env.name}" '
            f"{sorted(env.seats)}; {FIX}"
        )
    if env.name and (others := sorted(set(table.column("env").to_pylist()) - {env.name, ""})):
        raise ValueError(
            f'the episodes in {path} are of env "{others[0]}", and this run\'s env is "{env.name}": {FIX}, or, if the '
            "two are the same game, correct the column env"
        )
    episode, step = (table.column(name).to_numpy() for name in ("episode", "step"))
    is_whole = len(seats) % N == 0 and seats == list(env.seats) * (len(seats) // N)
    if is_whole:
        episode = episode.reshape(-1, N)
        step = step.reshape(-1, N)
        is_whole = bool((episode == episode[:, :1]).all() and (step == step[:, :1]).all())
        new = np.append(True, np.diff(episode[:, 0]) != 0)
        is_whole = is_whole and bool((step[new, 0] == 0).all() and (np.diff(step[:, 0])[~new[1:]] == 1).all())
    if not is_whole:
        raise ValueError(
            f"the rows of {path} are not in the order of episode, step and seat, or some are missing: keep or drop "
            "whole episodes, and keep their order"
        )


class _Rows:
    """Columns of a file as arrays [R, N, ...], checked against the env."""

    def __init__(self, path: Path, table: pa.Table, env: VectorEnv) -> None:
        self.path = path
        self.table = table
        self.env = env

    def scalars(self, name: str, dtype: Any) -> np.ndarray:
        column = self.table.column(name)
        values: np.ndarray = column.fill_null(False if dtype is bool else 0).to_numpy().astype(dtype, copy=False)
        return values.reshape(-1, len(self.env.seats))

    def lists(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Returns a column of lists; zeros where it is null. Raises ValueError if they are not of the shape's size."""
        column = self.table.column(name)
        size = int(np.prod(shape))
        widths = [] if not pa.types.is_list(column.type) else pc.unique(pc.list_value_length(column)).drop_null()
        if [int(width.as_py()) for width in widths] not in ([size], []) or not pa.types.is_list(column.type):
            have = f"of {[width.as_py() for width in widths]} numbers" if len(widths) else "no list"
            raise ValueError(
                f"the episodes in {self.path} are of another env: {name} is {have}, and in env "
                f'"{self.env.name}" of {size} ({[int(n) for n in shape]}); {FIX}'
            )
        chunk = column.chunk(0)
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        rows = np.zeros((len(chunk), size), values.dtype)
        rows[chunk.is_valid().to_numpy(zero_copy_only=False)] = values.reshape(-1, size)
        return rows.reshape(-1, len(self.env.seats), *shape)


def _to_batch(rows: _Rows, final: np.ndarray, step: np.ndarray) -> RolloutBatch:
    """Returns the batch of one file; `final` [R] marks final observations, `step` [R] is the step of the episode."""
    env = rows.env
    played = ~final
    T = int(played.sum())
    ends = np.flatnonzero(final[1:] & played[:-1])  # steps that a final observation follows
    at = (np.cumsum(played) - 1)[ends]

    def moments(array: np.ndarray) -> np.ndarray:
        """Returns [T+1, 1, ...] from rows [R, ...]; the entry after the last step is zeros."""
        values = array[played][:, None]
        padded: np.ndarray = np.concatenate([values, np.zeros_like(values[:1])])
        return padded

    obs = rows.lists("observation", np.max(env.observation_shapes, axis=0))
    _check_finite(rows, obs, played)
    terminated = rows.scalars("terminated", bool)[played]
    over = np.zeros(T, bool)
    over[at] = True
    first = moments(step == 0)
    first[-1] = True
    batch = RolloutBatch(
        obs=moments(obs),
        agent_mask=moments(rows.scalars("acts", bool)),
        actions=_actions(rows)[played][:, None],
        logp=rows.scalars("logprob", np.float32)[played][:, None],
        rewards=rows.scalars("reward", np.float32)[played][:, None],
        terminated=(over & terminated.all(1))[:, None],
        truncated=(over & ~terminated.all(1))[:, None],
        is_first=first,
        end_index=(at, np.zeros(len(at), np.int64)),
        final_obs=obs[final],
        seat_terminated=terminated[:, None],
    )
    if not pa.types.is_null(rows.table.schema.field("action_mask").type):
        most = max(space.n if isinstance(space, Discrete) else 0 for space in env.action_spaces)
        batch.action_mask = moments(rows.lists("action_mask", (most,)).astype(bool))
    if env.state_size:
        state = rows.lists("state", (env.state_size,))[:, 0]
        batch.state = moments(state)
        batch.final_state = state[final]
    return batch


def _check_finite(rows: _Rows, obs: np.ndarray, played: np.ndarray) -> None:
    """Raises ValueError for rewards, and for observations of seats that act, that are not finite numbers."""
    if not np.isfinite(rows.scalars("reward", np.float32)[played]).all():
        raise ValueError(f"{rows.path} has rewards that are not finite numbers: correct or drop those episodes")
    if not np.isfinite(obs[rows.scalars("acts", bool)]).all():
        raise ValueError(
            f"{rows.path} shows seats that act observations that are not finite numbers: correct or drop those episodes"
        )


def _actions(rows: _Rows) -> np.ndarray:
    """Returns the actions [R, N, ...], int32 or float32. Raises ValueError for one that the env does not have."""
    env = rows.env
    sizes = [space.width for space in rows.env.action_spaces]
    scalar = not pa.types.is_list(rows.table.schema.field("action").type)
    if scalar != (not any(sizes)):
        have, want = ("one number" if one else "several" for one in (scalar, not any(sizes)))
        raise ValueError(
            f"the episodes in {rows.path} are of another env: an action is {have}, and in env "
            f'"{env.name}" {want}; {FIX}'
        )
    dtype = zero_actions(env.action_spaces, ()).dtype
    actions = rows.scalars("action", dtype) if scalar else rows.lists("action", (max(sizes),))
    acts = rows.scalars("acts", bool)
    column = rows.table.column("action")
    if (column.is_null().to_numpy().reshape(acts.shape) & acts).any():
        raise ValueError(f"{rows.path} has seats that act and no action of theirs: correct or drop those episodes")
    if dtype == np.int32 and scalar and not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise ValueError(f"{rows.path} has actions of type {column.type}, and those of a choice are integers; {FIX}")
    for seat, space in enumerate(env.action_spaces):
        done = actions[:, seat][acts[:, seat]]
        if isinstance(space, Discrete) and done.size and (done.max() >= space.n or done.min() < 0):
            odd = done.min() if done.min() < 0 else done.max()
            raise ValueError(
                f"the episodes in {rows.path} are of another env: action {odd} of seat {env.seats[seat]}, which "
                f'has {space.n} in "{env.name}"; {FIX}'
            )
    return actions.astype(dtype, copy=False)


def _join(batches: list[RolloutBatch]) -> RolloutBatch:
    """Concatenates batches of one game each along time."""
    if len(batches) == 1:
        return batches[0]
    shift = np.cumsum([0, *(len(batch.rewards) for batch in batches[:-1])])

    def join(name: str, last: bool) -> Any:
        arrays = [getattr(batch, name) for batch in batches]
        if arrays[0] is None:
            return None
        return np.concatenate([*(array[:-1] for array in arrays[:-1]), arrays[-1]] if last else arrays)

    with_last = ("obs", "agent_mask", "is_first", "action_mask", "state")
    without = ("actions", "logp", "rewards", "terminated", "truncated", "seat_terminated", "final_obs", "final_state")
    fields = {name: join(name, True) for name in with_last} | {name: join(name, False) for name in without}
    times = np.concatenate([batch.end_index[0] + first for batch, first in zip(batches, shift, strict=True)])
    return RolloutBatch(**fields, end_index=(times, np.zeros(len(times), np.int64)))
