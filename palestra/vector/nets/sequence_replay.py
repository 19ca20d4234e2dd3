"""Sequence replay buffer, for recurrent networks.

Each sequence is one game's part of one batch and starts with the recurrent states of its players (the stored state of
R2D2, Kapturowski et al., 2019). These were computed by older networks. So the first `burn_in` steps only update the
recurrent state and are not trained on, except steps after the start of a game within the sequence. Credit is computed
as in `palestra.vector.nets.replay`, within the sequence.

Shapes: `T` steps, `B` parallel games, `N` seats, `M` sequences sampled, `P` members, `S` seats of a member, `H` units
of the recurrent state, `F` truncated games.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import RolloutBatch
from palestra.vector.nets.replay import (
    CreditColumns,
    CreditedReplay,
    ReplayBatch,
    assign_credit,
    next_values,
    rollout_arrays,
    rows_as_tensor,
    write_next,
)

NEXT_COLUMNS = {"agent_mask": "next_agent_mask", "action_mask": "next_action_mask", "state": "next_state"}


@dataclass
class SequenceBatch(ReplayBatch):
    """M sequences sampled from `SequenceReplay`. Fields of `ReplayBatch` are `[T, M, ...]` here instead of `[M, ...]`,
    except `index`.

    `obs [T+1, M, N, *view]` and `is_first [T+1, M]` (bool) have one more step. `step_index [T, M, N]` (int64) is the
    step of each seat's own next decision; T + 1 + t is the final observation of a game that step t ended. `final_obs
    [F, N, *view]` are the final observations of truncated games, at steps `truncations[0]` of sequences
    `truncations[1]`. `recurrent_states` are the initial states of each player [P, M*S, H].
    """

    obs: Tensor
    is_first: Tensor
    step_index: Tensor
    truncations: tuple[Tensor, Tensor]
    final_obs: Tensor
    recurrent_states: dict[str, Tensor]


class SequenceReplay(CreditedReplay):
    """Replay buffer of the last `capacity` sequences, all of one length. `recurrent_players` are
    the players whose recurrent states are stored, `burn_in` the number of steps that only update
    them; the other arguments are those of `CreditedReplay`."""

    def __init__(
        self, capacity: int, *, burn_in: int = 0, recurrent_players: Sequence[str] = (), **credit: Any
    ) -> None:
        super().__init__(capacity, **credit)
        self.burn_in = burn_in
        self.recurrent_players = recurrent_players

    def add(self, batch: RolloutBatch) -> None:
        """Adds a batch: one sequence of each of its games."""
        B, N = batch.agent_mask.shape[1:]
        if not len(self.masks):
            self.masks = np.ones((B, N, 0 if batch.action_mask is None else batch.action_mask.shape[-1]), bool)
        cut = batch.truncated & ~batch.terminated
        seen: dict[str, Any] = {"obs": batch.obs, "is_first": batch.is_first, "cut": cut, "actions": batch.actions}
        seen |= {name: x[:-1] for name in NEXT_COLUMNS if (x := getattr(batch, name)) is not None} | self._credit(batch)
        rows = {name: x.swapaxes(0, 1) for name, x in seen.items()}
        for name in self.recurrent_players:
            by_game = batch.recurrent_state[name].unflatten(1, (B, -1)).movedim(1, 0)  # [P, B*S, H] -> [B, P, S, H]
            rows[f"memory.{name}"] = by_game.cpu().numpy()
        number = self.ring.total + np.arange(B)
        if "final_obs" not in self.ring.columns:
            shape = (self.ring.capacity, len(batch.rewards), *batch.obs.shape[2:])
            self.ring.columns["final_obs"] = np.zeros(shape, batch.obs.dtype)
        places = self.ring.write(number, rows)
        self._write_cuts(batch, cut)
        self.ring.set_max_priority(places)

    def _credit(self, batch: RolloutBatch) -> dict[str, np.ndarray]:
        """Returns the credit of each decision, [T, B, ...] per column."""
        T, B, N = batch.rewards.shape
        after, self.masks = next_values(batch, self.masks)
        ends = np.broadcast_to((T + 1 + batch.end_index[0])[:, None], (len(batch.end_index[0]), N))
        after["step_index"] = np.broadcast_to(np.arange(T + 1)[:, None, None], (T + 1, B, N)), ends
        rows = {name: np.zeros((T * B, *moments.shape[2:]), moments.dtype) for name, (moments, _) in after.items()}
        credit = {
            "rewards": np.zeros((T * B, N), np.float32),
            "discounts": np.zeros((T * B, N), np.float32),
            "known": np.zeros((T * B, N), bool),
        }
        open_rows = np.full((B, N, len(self.powers) - 1), -1, np.int64)
        when = np.full(T * B, -1, np.int64)
        book = CreditColumns(open_rows=open_rows, when=when, **credit)
        rollout = rollout_arrays(batch, np.arange(T * B).reshape(T, B), self.count_env_steps, self.team)
        write_next(rows, after, assign_credit(book, rollout, self.powers, 0, 0), batch)
        return {name: x.reshape(T, B, *x.shape[1:]) for name, x in (rows | credit).items()}

    def _write_cuts(self, batch: RolloutBatch, cut: np.ndarray) -> None:
        """Writes the final observations of truncated games; other entries of that column are unused."""
        B = batch.rewards.shape[1]
        times, games = batch.end_index
        chosen = cut[times, games] & (games >= B - self.ring.capacity)
        place = (self.ring.total - B + games[chosen]) % self.ring.capacity
        self.ring.columns["final_obs"][place, times[chosen]] = batch.final_obs[chosen]

    def sample(self, count: int, generator: np.random.Generator, beta: float = 1.0) -> SequenceBatch:
        """Returns `count` sequences sampled with replacement. `beta` is the exponent of the importance weights in
        `weight`; 1 corrects prioritised sampling fully. Raises ValueError if nothing can be sampled yet."""
        places, importance = self.ring.sample(count, generator, beta)
        columns = dict(self.ring.columns)
        memory = {}
        for name in self.recurrent_players:
            state = torch.from_numpy(columns.pop(f"memory.{name}")[places])  # [M, P, S, H]
            memory[name] = state.movedim(0, 1).flatten(1, 2)
        finals = columns.pop("final_obs")
        cut = columns.pop("cut")[places]
        sequence, time = np.nonzero(cut)
        tensors: dict[str, Any] = dict.fromkeys(("action_mask", "next_action_mask", "state", "next_state"))
        tensors |= {name: rows_as_tensor(column, places).movedim(1, 0) for name, column in columns.items()}
        known = tensors.pop("known") & self._training_mask(tensors["is_first"])
        return SequenceBatch(
            **tensors,
            weight=known.float() * torch.from_numpy(importance).float()[:, None],
            index=torch.from_numpy(places),
            truncations=(torch.from_numpy(time), torch.from_numpy(sequence)),
            final_obs=torch.from_numpy(finals[places[sequence], time]),
            recurrent_states=memory,
        )

    def _training_mask(self, is_first: Tensor) -> Tensor:
        """Returns a mask [T, M, 1] of the steps to train on: after `burn_in`, or after the start of a game."""
        steps = torch.arange(len(is_first) - 1)[:, None, None]
        begun = is_first[:-1].int().cummax(0).values.bool()
        return (steps >= self.burn_in) | begun[..., None]
