"""Retention over the steps of an episode: the memory of `attention_type: retention` with a `retention_decay`.

Retention (Sun et al., 2023, eq. 5 to 7) in Sable (Mahjoub et al., 2024, section 4) spans the seats of a joint step and
the earlier joint steps of its episode. A head has a matrix as state. With the keys k and values v of the seats s that
act in step t, and 0 before the first step of an episode,

    state_t = kappa * state_{t-1} + sum_s k_{t,s}' v_{t,s},

so that all seats of a step share one step of decay. A query q of step t reads q (kappa * state_{t-1}) here, and in
`palestra.vector.nets.attention.Retention` the seats of its own step: all of them in an encoder, those up to its own
in a
decoder. Acting uses this recurrent form. Training computes the same numbers chunk by chunk: in a chunk of steps, whose
positions are products of queries and keys, the weight of step j for step i > j is kappa^(i-j) if no episode begins in
between; step i (from 0) reads the state before the chunk times kappa^(i+1) if none has begun so far; and gradients go
through the states between the chunks of a rollout, not into the state before it.

As in RetNet and Sable kappa is 1 - 2^-5 for the first head to 1 - 2^-9 for the last, times `retention_decay` (its
authors' `decay_scaling_factor`). Differences from Sable: seats that do not act do not change the state; there is no
positional encoding of the time step, so that only its decay tells how old a part of the state is; the layers around
retention are those of `palestra.vector.nets.transformer`, not RMSNorm and SwiGLU. As there a decoder's inputs are the
actions of the seats before each, so that the state never holds the action of a step's last seat.

Shapes: `N` teams (members times games), `T` steps, `S` seats, `D` units of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_POSITIONS = 128  # positions (steps times seats) of a chunk: as many products of queries and keys for each


def head_decays(decay: float, heads: int, like: Tensor) -> Tensor:
    """Returns what a step leaves of the state of each head [heads], with the dtype and device of `like`."""
    return decay * (1 - 2.0 ** -torch.linspace(5, 9, heads, dtype=like.dtype, device=like.device))


@dataclass
class StepMemory:
    """Memory of one layer for T steps: its `state` [N, heads, D, D] after the step before them, the
    decays of its heads `kappa` [heads], the seats that act in them `acts` [N, T, S] bool, and the
    first steps of episodes among them `is_first` [N, T] bool."""

    state: Tensor
    kappa: Tensor
    acts: Tensor
    is_first: Tensor

    def read(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Returns what queries read of earlier steps, [N*T, heads, S, D] like the queries, keys and
        values of all steps; sets the state to that after the last of them."""
        N, T = self.is_first.shape
        counted = keys * self.acts.reshape(N * T, 1, -1, 1)
        q, k, v = (x.unflatten(0, (N, T)).transpose(1, 2) for x in (queries, counted, values))
        size = max(1, CHUNK_POSITIONS // q.shape[3])
        chunks = []
        for i in range(0, T, size):
            part = slice(i, i + size)
            chunk = (q[:, :, i : i + size], k[:, :, i : i + size], v[:, :, i : i + size])
            retained, self.state = read_chunk(*chunk, self.is_first[:, part], self.kappa, self.state)
            chunks.append(retained)
        return torch.cat(chunks, 2).transpose(1, 2).flatten(0, 1)

    def before_seats(self) -> Tensor:
        """Returns what the first seat of a step (T = 1) reads of earlier steps [N, heads, D, D]."""
        return (self.state * self.kappa[:, None, None]).masked_fill(self.is_first[:, :, None, None], 0.0)

    def after_seats(self, before_last: Tensor, last: Tensor) -> None:
        """Sets the state after a step (T = 1) whose seats came one after another: the state before the last seat, and
        its product of key and value, which counts if it acts [N, heads, D, D]."""
        self.state = before_last + last * self.acts[:, :, -1, None, None]


def read_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, is_first: Tensor, kappa: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what queries of consecutive steps read of the steps before each, and the state after the last. Queries,
    keys (0 where a seat does not act), values and the result are [N, heads, T, S, D]; `is_first` [N, T], `kappa`
    [heads], and the state before the first step [N, heads, D, D]."""
    T, S = queries.shape[2:4]
    steps = torch.arange(T, device=queries.device)
    begun = is_first.cumsum(1)[:, None]
    from_state = kappa[:, None] ** (steps + 1) * (begun == 0)  # [N, heads, T]
    read = (queries * from_state[..., None, None]).flatten(2, 3) @ state
    if T > 1:
        age = steps[:, None] - steps
        earlier = (begun[..., None] == begun[:, :, None]) & (age > 0)
        weights = kappa[:, None, None] ** age.clamp(min=0) * earlier  # [N, heads, T, T]
        scores = (queries.flatten(2, 3) @ keys.flatten(2, 3).mT).unflatten(3, (T, S)).unflatten(2, (T, S))
        scores = scores * weights[:, :, :, None, :, None]
        read = read + scores.flatten(4, 5).flatten(2, 3) @ values.flatten(2, 3)
    left = kappa[:, None] ** (T - 1 - steps) * (begun == begun[..., -1:])  # what the last step finds of each
    added = (keys * left[..., None, None]).flatten(2, 3).mT @ values.flatten(2, 3)
    return read.unflatten(2, (T, S)), state * from_state[..., -1, None, None] + added
