"""Transition replay buffer with n-step returns, counted in each seat's own decisions.

As in `palestra.vector.nets.advantages`, the steps of others between two of a seat's actions cost no discount, and
rewards in
between belong to the earlier action. A row is added to the ring buffer at once. A seat's part of it gets weight once
its next own decision, or the end of the game, is known, which may be many batches later. So no transition is lost at
the end of a batch, however short batches are.

Shapes: `T` steps, `B` parallel games, `N` seats, `A` actions, `S` numbers of state, `M` transitions sampled, `C` rows
of the ring buffer, `F` ended games, `E` events, `n_step` decisions of lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from palestra.core.accel.jit import jit
from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Arrays
from palestra.vector.nets.ring_buffer import RingBuffer

ALL_SEATS = -1  # as a seat number: all seats


@dataclass
class ReplayBatch:
    """Fields shared by sampled transitions and sequences; one entry per decision.

    `rewards [M, N]` is the discounted sum over the next n decisions, `discounts [M, N]` the factor of the value after
    them: gamma ** n, with a smaller exponent if the game was truncated earlier, 0 if it terminated. `weight [M, N]` is
    0 for a seat that did not act or whose credit is not known yet, otherwise its importance weight (1 without
    priorities). `agent_mask [M, N]` and `action_mask [M, N, A]` are bool.

    `next_agent_mask` and `next_action_mask` belong to each seat's own next decision. For a seat that did not act they
    belong to the earliest next decision of any seat, as `next_state [M, S]` does. Where a game was truncated,
    `next_action_mask` is that of the seat's last decision, and `next_agent_mask` marks the seats that acted in the last
    step and have not terminated. `index [M]` (int64) is for `update_priorities`. Floats are float32.
    """

    actions: Tensor  # int64 or float32
    rewards: Tensor
    discounts: Tensor
    weight: Tensor
    agent_mask: Tensor
    next_agent_mask: Tensor
    action_mask: Tensor | None
    next_action_mask: Tensor | None
    state: Tensor | None
    next_state: Tensor | None
    index: Tensor

    def to(self, device: torch.device) -> Self:
        """Returns the batch on a device, except `index`, which the buffer reads."""
        if device.type == "cpu":
            return self
        return self.map(lambda x: x.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns the batch with all tensors changed, except `index`."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "index"}
        return replace(self, **{name: _map(value, change) for name, value in values.items()})


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a tensor, or a tuple or dict of tensors, changed; None stays None."""
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return None if value is None else change(value)


@dataclass
class TransitionBatch(ReplayBatch):
    """M joint transitions sampled from a `ReplayBuffer`: `obs [M, N, *view]`, and `next_obs [M, N,
    *view]` of each seat's own next decision, or the final observation of its game."""

    obs: Tensor
    next_obs: Tensor


class CreditedReplay:
    """Base class of the replay buffers: a ring of `capacity` rows whose credit looks `n_step` decisions ahead.
    `priority` is the exponent of TD errors in prioritised sampling, 0 for uniform sampling.

    With `count_env_steps` every step of the env counts as a decision of every seat, for algorithms that evaluate all
    seats at once. The seats of a `team` share one future, whose value is 0 only once all of them have terminated.
    Raises ValueError for `n_step` or `capacity` below 1 or a negative `priority`.
    """

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        priority: float = 0.0,
        count_env_steps: bool = False,
        team: Sequence[int] = (),
    ) -> None:
        self.ring = RingBuffer(capacity, priority)
        self.count_env_steps = count_env_steps
        self.team = team
        self.powers = powers(gamma, n_step)
        self.masks = np.zeros((0, 0, 0), bool)  # [B, N, A] at each seat's last decision

    def __len__(self) -> int:
        return len(self.ring)

    def update_priorities(self, index: Tensor, td_errors: Tensor) -> None:
        """Sets the priorities of sampled rows from their TD errors [M], of any sign."""
        if self.ring.tree is not None:
            self.ring.update_priorities(index.numpy(), td_errors.detach().cpu().numpy())

    def arrays(self) -> Arrays:
        """Returns everything that `load` needs to continue exactly. The arrays are views that
        change with `add`: copy them to keep them."""
        return self.ring.arrays() | {"masks": self.masks}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned. Raises ValueError if the capacity differs."""
        self.ring.load(arrays)
        self.masks = arrays["masks"].copy()


class ReplayBuffer(CreditedReplay):
    """Buffer of the last `capacity` joint transitions in which one of `seats` acts (None: all
    transitions); the other arguments are those of `CreditedReplay`."""

    def __init__(self, capacity: int, *, seats: Sequence[int] | None = None, **credit: Any) -> None:
        super().__init__(capacity, **credit)
        self.seats = seats
        self.clock = 0  # env steps added
        n_step = len(self.powers) - 1
        self.open = np.zeros((0, 0, n_step), np.int64)  # [B, N, n] numbers of rows with incomplete credit, newest first

    def add(self, batch: RolloutBatch) -> None:
        """Adds a batch that continues the previous one or starts with reset games."""
        if not self.clock:
            B, N = batch.agent_mask.shape[1:]
            self.open = np.full((B, N, len(self.powers) - 1), -1, np.int64)
            self.masks = np.ones((B, N, 0 if batch.action_mask is None else batch.action_mask.shape[-1]), bool)
        number = self._numbers(batch)
        self._write(batch, number)
        after, self.masks = next_values(batch, self.masks)
        after["next_obs"] = (batch.obs, batch.final_obs)
        book = CreditColumns(self.open, *(self.ring.columns[name] for name in CreditColumns._fields[1:]))
        rollout = rollout_arrays(batch, number, self.count_env_steps, self.team)
        events = assign_credit(book, rollout, self.powers, max(0, self.ring.total - self.ring.capacity), self.clock)
        write_next(self.ring.columns, after, events, batch)
        self.ring.set_max_priority(events.row[events.seat == ALL_SEATS])
        self.clock += len(batch.rewards)

    def _numbers(self, batch: RolloutBatch) -> np.ndarray:
        """Returns the row number of each step [T, B], -1 where no row is stored."""
        T, B = batch.rewards.shape[:2]
        is_stored: np.ndarray = np.ones((T, B), bool)
        if self.seats is not None and not self.count_env_steps:
            is_stored[:] = batch.agent_mask[:-1][..., list(self.seats)].any(-1)
        return np.where(is_stored, self.ring.total + np.cumsum(is_stored).reshape(T, B) - 1, -1)

    def _write(self, batch: RolloutBatch, number: np.ndarray) -> None:
        """Writes the columns that are known without the next step."""
        is_stored = number >= 0
        seen = {
            "obs": batch.obs,
            "agent_mask": batch.agent_mask,
            "action_mask": batch.action_mask,
            "state": batch.state,
        }
        values = {name: array[:-1][is_stored] for name, array in seen.items() if array is not None}
        rows = int(is_stored.sum())
        N = batch.agent_mask.shape[2]
        empty = {
            "actions": batch.actions[is_stored],
            "rewards": np.zeros((rows, N), np.float32),
            "discounts": np.zeros((rows, N), np.float32),
            "known": np.zeros((rows, N), bool),
            "when": np.full(rows, -1, np.int64),
        }
        first = not self.ring.columns
        self.ring.write(number[is_stored], values | empty)
        if first:
            for name in values:
                self.ring.columns[f"next_{name}"] = np.zeros_like(self.ring.columns[name])

    def sample(self, count: int, generator: np.random.Generator, beta: float = 1.0) -> TransitionBatch:
        """Returns `count` transitions sampled with replacement. `beta` is the exponent of the importance weights in
        `weight`; 1 corrects prioritised sampling fully. Raises ValueError if nothing can be sampled yet."""
        places, importance = self.ring.sample(count, generator, beta)
        tensors: dict[str, Any] = dict.fromkeys(("action_mask", "next_action_mask", "state", "next_state"))
        tensors |= {
            name: rows_as_tensor(column, places) for name, column in self.ring.columns.items() if name != "when"
        }
        weight = tensors.pop("known").float() * torch.from_numpy(importance).float()[:, None]
        return TransitionBatch(**tensors, weight=weight, index=torch.from_numpy(places))

    def arrays(self) -> Arrays:
        return super().arrays() | {"clock": np.array([self.clock]), "open": self.open}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load(arrays)
        self.clock = int(arrays["clock"][0])
        self.open = arrays["open"].copy()


def rows_as_tensor(column: np.ndarray, places: np.ndarray) -> Tensor:
    """Returns rows of a column as a tensor; int32 actions become int64, as torch indexing needs."""
    rows = torch.from_numpy(column[places])
    if rows.dtype == torch.int32:
        rows = rows.long()
    return rows


def powers(gamma: float, n: int) -> np.ndarray:
    """Returns gamma ** k for k from 0 to n, float64 [n+1]. Raises ValueError for `n` below 1."""
    if n < 1:
        raise ValueError(f"n_step: a return over {n} decisions contains no reward: use 1 or more")
    return gamma ** np.arange(n + 1)


# ---- credit


class CreditColumns(NamedTuple):
    """Arrays that credit is written to: the numbers of open rows [B, N, n] int64, and columns of the ring buffer.
    `when` is the first time at which a part of a row's credit was known, as 2 * env steps (odd: the end of a game);
    -1: none is known yet."""

    open_rows: np.ndarray
    rewards: np.ndarray  # [C, N]
    discounts: np.ndarray  # [C, N]
    known: np.ndarray  # [C, N]
    when: np.ndarray  # [C] int64


class RolloutArrays(NamedTuple):
    """Arrays of a batch that credit is computed from. `number [T, B]` is the row of each step or
    -1, `deciding [T+1, B, N]` marks decisions that count, `terminated [T, B, N]` seats whose future
    has value 0, `done [T, B]` the last steps of games, `is_first [T+1, B]` the first steps."""

    number: np.ndarray
    deciding: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    done: np.ndarray
    is_first: np.ndarray


class CreditEvents(NamedTuple):
    """Next steps that have become known, [E] int64 each: row of the columns, seat (or ALL_SEATS),
    time in the batch (T + 1 + t: the final observation of the game that step t ended), and game."""

    row: np.ndarray
    seat: np.ndarray
    time: np.ndarray
    game: np.ndarray


def rollout_arrays(
    batch: RolloutBatch, number: np.ndarray, count_env_steps: bool, team: Sequence[int] = ()
) -> RolloutArrays:
    """Returns what credit is computed from. The future of a `team` ends with its last seat."""
    deciding = batch.agent_mask
    if count_env_steps:
        deciding = np.ones_like(deciding)
    terminated = batch.seats_terminated
    if len(team):
        terminated = np.repeat(terminated[..., list(team)].all(-1, keepdims=True), terminated.shape[2], 2)
    return RolloutArrays(number, deciding, batch.rewards, terminated, batch.done, batch.is_first)


def assign_credit(
    book: CreditColumns, rollout: RolloutArrays, power: np.ndarray, oldest: int, clock: int
) -> CreditEvents:
    """Writes the credit of a batch to `book`; returns the next steps that have become known. Rows numbered below
    `oldest` have been overwritten; `clock` is the number of env steps before the batch."""
    T, B, N = rollout.rewards.shape
    most = T * B * N + book.open_rows.size  # each seat's part of a row becomes known at most once
    events = CreditEvents(*(np.empty(most, np.int64) for _ in CreditEvents._fields))
    count = _assign_credit(book, rollout, events, power, oldest, clock)
    return CreditEvents(*(array[:count] for array in events))


@jit
def _close_slot(
    book: CreditColumns,
    events: CreditEvents,
    count: int,
    where: tuple[int, int, int],
    discount: float,
    at: tuple[int, int, int],
) -> int:
    """Closes slot k of seat s in game b, `where` = (b, s, k): its credit is complete. Returns the new number of events.
    `at` is the time as in `CreditColumns.when`, the time as in `CreditEvents`, and the oldest stored row."""
    b, s, k = where
    when, moment, oldest = at
    number = book.open_rows[b, s, k]
    book.open_rows[b, s, k] = -1
    if number < oldest:
        return count
    row = number % len(book.when)
    book.discounts[row, s], book.known[row, s] = discount, True
    if book.when[row] == when:  # another seat has recorded the same next step
        return count
    events.row[count], events.time[count], events.game[count] = row, moment, b
    events.seat[count] = s
    if book.when[row] < 0:
        book.when[row] = when
        events.seat[count] = -1
    return count + 1


@jit
def _assign_credit(  # noqa: C901 - compiled as functions of their own, its parts take half as long again
    book: CreditColumns, rollout: RolloutArrays, events: CreditEvents, power: np.ndarray, oldest: int, clock: int
) -> int:
    steps, games, seats = rollout.rewards.shape
    n = len(power) - 1
    capacity = len(book.when)
    count = 0
    for b in range(games):
        for t in range(steps + 1):
            now = 2 * (clock + t)
            for s in range(seats):
                for k in range(n):
                    if rollout.is_first[t, b]:  # rows still open belong to an abandoned game
                        book.open_rows[b, s, k] = -1
                if rollout.deciding[t, b, s]:
                    count = _close_slot(book, events, count, (b, s, n - 1), power[n], (now, t, oldest))
                    if t < steps:  # step T is the first step of the next batch, which opens its row
                        for k in range(n - 1, 0, -1):
                            book.open_rows[b, s, k] = book.open_rows[b, s, k - 1]
                        book.open_rows[b, s, 0] = rollout.number[t, b]
            if t == steps:
                continue
            over = rollout.done[t, b]
            at = (now + 1, steps + 1 + t, oldest) if over else (now + 2, t + 1, oldest)
            for s in range(seats):
                dead = rollout.terminated[t, b, s]
                for k in range(n):
                    number = book.open_rows[b, s, k]
                    if number >= oldest:
                        book.rewards[number % capacity, s] += power[k] * rollout.rewards[t, b, s]
                    if over or dead:
                        count = _close_slot(book, events, count, (b, s, k), 0.0 if dead else power[k + 1], at)
    return count


# ---- next observations, masks and states

# by column: values at every step [T+1, B, ...] and at ends of games [F, ...]
NextValues = dict[str, tuple[np.ndarray, np.ndarray]]


def next_values(batch: RolloutBatch, masks: np.ndarray) -> tuple[NextValues, np.ndarray]:
    """Returns next agent masks, action masks and states, at every step and at the ends of games; and the action masks
    [B, N, A] of each seat's last decision. `masks` [B, N, A] are those of the last decisions before the batch."""
    times, games = batch.end_index
    after: NextValues = {
        "next_agent_mask": (batch.agent_mask, batch.agent_mask[times, games] & ~batch.seats_terminated[times, games])
    }
    if batch.state is not None and batch.final_state is not None:
        after["next_state"] = (batch.state, batch.final_state)
    if batch.action_mask is not None:
        T, B, N = batch.rewards.shape
        last = np.maximum.accumulate(np.where(batch.agent_mask[:-1], np.arange(T)[:, None, None], -1), 0)  # [T, B, N]

        def of(time: np.ndarray, game: np.ndarray) -> np.ndarray:
            """Returns the action masks [F, N, A] of the seats' last decisions up to given steps of given games."""
            assert batch.action_mask is not None
            at = last[time, game]
            masks_then = batch.action_mask[at, game[:, None], np.arange(N)]
            return np.where((at < 0)[..., None], masks[game], masks_then)

        after["next_action_mask"] = (batch.action_mask, of(times, games))
        masks = of(np.full(B, T - 1), np.arange(B))
    return after, masks


def write_next(columns: Mapping[str, np.ndarray], after: NextValues, events: CreditEvents, batch: RolloutBatch) -> None:
    """Writes next values to columns [C, ...]: first events of all seats, then events of single
    seats, which come later."""
    T, B = batch.rewards.shape[:2]
    end = np.zeros((T, B), np.int64)
    end[batch.end_index] = np.arange(len(batch.end_index[0]))
    for everyone in (True, False):
        for over in (False, True):
            chosen = ((events.seat == ALL_SEATS) == everyone) & ((events.time > T) == over)
            if not chosen.any():
                continue
            row, seat, moment, game = (array[chosen] for array in events)
            for name, (moments, ends) in after.items():
                values = moments
                place: tuple[np.ndarray, ...] = (moment, game)
                if over:
                    values = ends
                    place = (end[moment - T - 1, game],)
                if everyone:
                    columns[name][row] = values[place]
                elif name != "next_state":
                    columns[name][row, seat] = values[(*place, seat)]
