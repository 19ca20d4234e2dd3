"""Lock-step play of B games on arrays: no Python object per step, no copy but the one into the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.envs.vector.base import Arrays, Continuous, Frame, MultiDiscrete, VectorEnv
from palestra.policies.vector import Player
from palestra.rollouts.play import derive
from palestra.types import Batch


class Sweeper:
    """Plays on and on in one env: each `sweep` goes on where the last one stopped. The batch it returns is valid until
    the next sweep."""

    def __init__(self, env: VectorEnv, seeds: np.ndarray) -> None:
        self.env = env
        self.memory: dict[str, Any] = {}
        self.restart(seeds)
        self._batch: Batch | None = None

    def restart(self, seeds: np.ndarray) -> None:
        """Begins all games anew."""
        self.frame = self.env.reset(seeds)
        self.fresh = np.ones(self.env.games, bool)
        self.scores = Scores(self.env.games, len(self.env.seats))
        self.memory.clear()

    def sweep(self, players: Sequence[Player], steps: int, seed: int) -> Batch:
        """`steps` joint steps of every game. All that is random in it follows from `seed` and the games as they
        stand."""
        batch, endings = self._buffers(steps), Endings()
        for player in players:
            player.begin(derive(seed, player.name))
            if player.name not in self.memory:
                self.memory[player.name] = player.empty(self.env.games)
        batch.memory = dict(self.memory)
        for t in range(steps):
            self._note(batch, t)
            for player in players:
                self._act(player, batch, t)
            self.frame = self.env.step(batch.actions[t])
            batch.rewards[t] = self.frame.rewards
            batch.terminated[t], batch.truncated[t] = self.frame.terminated, self.frame.truncated
            self.fresh = self.frame.over
            self.scores.add(self.frame, self.fresh)
            if self.fresh.any():
                endings.add(t, self.frame, self.fresh)
        self._note(batch, steps)
        endings.write(batch)
        batch.games = self.scores.take()
        return batch

    def _note(self, batch: Batch, t: int) -> None:
        frame = self.frame
        batch.obs[t], batch.acting[t], batch.fresh[t] = frame.obs, frame.acting, self.fresh
        if batch.legal is not None:
            batch.legal[t] = frame.legal
        if batch.state is not None:
            batch.state[t] = frame.state

    def _act(self, player: Player, batch: Batch, t: int) -> None:
        actions, logp, self.memory[player.name] = player.act(self.frame, self.memory[player.name], self.fresh)
        if actions.ndim == 3:  # shorter than those of other seats, perhaps
            batch.actions[t][:, player.seats, : actions.shape[2]] = actions
        else:
            batch.actions[t][:, player.seats] = actions
        if logp is not None:
            batch.logp[t][:, player.seats] = logp

    def _buffers(self, steps: int) -> Batch:
        if self._batch is None or len(self._batch.rewards) != steps:
            self._batch = empty_batch(self.env, self.frame, steps)
        return self._batch

    def close(self) -> None:
        """Ends the games."""
        self.env.close()

    def save(self) -> Arrays | None:
        """The games as they stand, or None where the env cannot tell."""
        games = self.env.save()
        if games is None:
            return None
        own = {"sweep/fresh": self.fresh, "sweep/returns": self.scores.returns, "sweep/lengths": self.scores.lengths}
        memory = {f"remembered/{name}": kept.numpy() for name, kept in self.memory.items() if kept is not None}
        return {name: array.copy() for name, array in (games | own | memory).items()}

    def load(self, saved: Arrays, players: Sequence[Player]) -> None:
        """Goes on from what `save` gave."""
        self.frame = self.env.load(saved)
        self.fresh = saved["sweep/fresh"].copy()
        self.scores.returns[:], self.scores.lengths[:] = saved["sweep/returns"], saved["sweep/lengths"]
        for player in players:
            kept, empty = saved.get(f"remembered/{player.name}"), player.empty(self.env.games)
            self.memory[player.name] = empty if kept is None else empty.new_tensor(kept)


class Scores:
    """Returns and lengths of the games in play, and the figures of those that ended since `take`."""

    def __init__(self, games: int, seats: int) -> None:
        self.returns = np.zeros((games, seats))
        self.lengths = np.zeros(games, np.int64)
        self._ended: list[tuple[np.ndarray, ...]] = []

    def add(self, frame: Frame, over: np.ndarray) -> None:
        self.returns += frame.rewards
        self.lengths += 1
        if over.any():
            success = np.zeros(0, bool) if frame.success is None else frame.success[over]
            self._ended.append((np.flatnonzero(over), self.returns[over], self.lengths[over], success))
            self.returns[over], self.lengths[over] = 0, 0

    def take(self) -> dict[str, np.ndarray]:
        """`game [G]`, `returns [G, N]`, `lengths [G]` and, where the env knows it, `success [G]`, oldest first."""
        seats = self.returns.shape[1]
        nothing = (np.zeros(0, np.int64), np.zeros((0, seats)), np.zeros(0, np.int64), np.zeros(0, bool))
        parts = [np.concatenate(column) for column in zip(nothing, *self._ended, strict=True)]
        self._ended.clear()
        return dict(zip(("game", "returns", "lengths", "success"), parts, strict=True))


class Endings:
    """The last views of games that ended."""

    def __init__(self) -> None:
        self.times: list[np.ndarray] = []
        self.games: list[np.ndarray] = []
        self.obs: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    def add(self, t: int, frame: Frame, over: np.ndarray) -> None:
        games = np.flatnonzero(over)
        self.times.append(np.full(len(games), t))
        self.games.append(games)
        self.obs.append(frame.final_obs[games])
        if frame.final_state is not None:
            self.states.append(frame.final_state[games])

    def write(self, batch: Batch) -> None:
        empty = np.zeros(0, np.int64)
        batch.ends = (np.concatenate([empty, *self.times]), np.concatenate([empty, *self.games]))
        batch.final_obs = np.concatenate([batch.obs[0, :0], *self.obs])
        if batch.state is not None:
            batch.final_state = np.concatenate([batch.state[0, :0], *self.states])


def empty_batch(env: VectorEnv, frame: Frame, steps: int) -> Batch:
    """Arrays for a sweep of `steps`."""
    B, N = env.games, len(env.seats)
    first = env.actions[0]
    if isinstance(first, Continuous):
        actions = np.zeros((steps, B, N, max(len(s.low) for s in env.actions if isinstance(s, Continuous))), np.float32)
    elif isinstance(first, MultiDiscrete):
        width = max(len(s.sizes) for s in env.actions if isinstance(s, MultiDiscrete))
        actions = np.zeros((steps, B, N, width), np.int32)
    else:
        actions = np.zeros((steps, B, N), np.int32)

    def moments(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.zeros((steps + 1, *array.shape), array.dtype)

    return Batch(
        obs=np.zeros((steps + 1, *frame.obs.shape), frame.obs.dtype),
        acting=np.zeros((steps + 1, B, N), bool),
        actions=actions,
        logp=np.zeros((steps, B, N), np.float32),
        rewards=np.zeros((steps, B, N), np.float32),
        terminated=np.zeros((steps, B), bool),
        truncated=np.zeros((steps, B), bool),
        fresh=np.zeros((steps + 1, B), bool),
        ends=(np.zeros(0, np.int64), np.zeros(0, np.int64)),
        final_obs=frame.obs[:0],
        legal=moments(frame.legal),
        state=moments(frame.state),
    )
