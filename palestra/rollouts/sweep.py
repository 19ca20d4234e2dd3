"""Lock-step rollouts of B parallel games on arrays, without Python objects per step and with one copy, into the
batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.envs.vector.base import Arrays, Continuous, Frame, MultiDiscrete, VectorEnv
from palestra.policies.vector import Player
from palestra.rollouts.failures import RunFailed, fault_of
from palestra.rollouts.play import derive
from palestra.types import Batch

LARGE = 1e6  # rewards above this are a likely cause of non-finite losses


class Sweeper:
    """Collects rollouts in one vector env: each `sweep` continues where the last one stopped. The returned batch is
    valid until the next sweep."""

    def __init__(self, env: VectorEnv, seeds: np.ndarray) -> None:
        self.env = env
        self.memory: dict[str, Any] = {}
        self.restart(seeds)
        self._batch: Batch | None = None

    def restart(self, seeds: np.ndarray) -> None:
        """Starts all games anew from `seeds` [B]."""
        self.frame = self.env.reset(seeds)
        self.fresh = np.ones(self.env.games, bool)
        self.scores = Scores(self.env.games, len(self.env.seats))
        self.memory.clear()

    def sweep(self, players: Sequence[Player], steps: int, seed: int) -> Batch:
        """Returns a batch of `steps` joint steps of every game, a deterministic function of `seed` and the games'
        current states. Raises RunFailed if the env raises, or returns a reward that is not finite."""
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
            self.frame = self._step(batch.actions[t])
            batch.rewards[t] = self.frame.rewards
            batch.terminated[t], batch.truncated[t] = self.frame.terminated, self.frame.truncated
            if batch.seat_terminated is not None:
                batch.seat_terminated[t] = self.frame.seat_terminated
            self.fresh = self.frame.over
            self.scores.add(self.frame, self.fresh)
            if self.fresh.any():
                endings.add(t, self.frame, self.fresh)
        self._note(batch, steps)
        endings.write(batch)
        batch.games = self.scores.take()
        check_rewards(self.env, batch.rewards)
        return batch

    def _step(self, actions: np.ndarray) -> Frame:
        """Returns the env's next step. Raises RunFailed with the traceback if the env raises."""
        try:
            return self.env.step(actions)
        except Exception as error:
            message, trace = fault_of(error)
            raise RunFailed.caused(f'env "{_name(self.env)}" failed in step: {message}', trace) from error

    def _note(self, batch: Batch, t: int) -> None:
        frame = self.frame
        batch.obs[t], batch.acting[t], batch.fresh[t] = frame.obs, frame.acting, self.fresh
        if batch.legal is not None:
            batch.legal[t] = frame.legal
        if batch.state is not None:
            batch.state[t] = frame.state

    def _act(self, player: Player, batch: Batch, t: int) -> None:
        actions, logp, self.memory[player.name] = player.act(self.frame, self.memory[player.name], self.fresh)
        if actions.ndim == 3:  # may be shorter than other seats' actions
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
        """Closes the env."""
        self.env.close()

    def save(self) -> Arrays | None:
        """Returns the state of the games as arrays, or None if the env cannot save it."""
        games = self.env.save()
        if games is None:
            return None
        own = {"sweep/fresh": self.fresh, "sweep/returns": self.scores.returns, "sweep/lengths": self.scores.lengths}
        memory = {f"remembered/{name}": kept.numpy() for name, kept in self.memory.items() if kept is not None}
        return {name: array.copy() for name, array in (games | own | memory).items()}

    def load(self, saved: Arrays, players: Sequence[Player]) -> None:
        """Restores what `save` returned."""
        self.frame = self.env.load(saved)
        self.fresh = saved["sweep/fresh"].copy()
        self.scores.returns[:], self.scores.lengths[:] = saved["sweep/returns"], saved["sweep/lengths"]
        for player in players:
            kept, empty = saved.get(f"remembered/{player.name}"), player.empty(self.env.games)
            self.memory[player.name] = empty if kept is None else empty.new_tensor(kept)


class Scores:
    """Returns and lengths of the running games, and results of the games that ended since `take`."""

    def __init__(self, games: int, seats: int) -> None:
        self.returns = np.zeros((games, seats))
        self.lengths = np.zeros(games, np.int64)
        self._ended: list[tuple[np.ndarray, ...]] = []

    def add(self, frame: Frame, over: np.ndarray) -> None:
        """Adds a step; `over` [B] (bool) marks the games that it ended."""
        self.returns += frame.rewards
        self.lengths += 1
        if over.any():
            success = np.zeros(0, bool) if frame.success is None else frame.success[over]
            self._ended.append((np.flatnonzero(over), self.returns[over], self.lengths[over], success))
            self.returns[over], self.lengths[over] = 0, 0

    def take(self) -> dict[str, np.ndarray]:
        """Returns, and clears, the results of ended games: `game [G]` int64, `returns [G, N]` float64, `lengths [G]`
        int64 and `success [G]` bool (empty if the env reports none), oldest first."""
        seats = self.returns.shape[1]
        nothing = (np.zeros(0, np.int64), np.zeros((0, seats)), np.zeros(0, np.int64), np.zeros(0, bool))
        parts = [np.concatenate(column) for column in zip(nothing, *self._ended, strict=True)]
        self._ended.clear()
        return dict(zip(("game", "returns", "lengths", "success"), parts, strict=True))


class Endings:
    """Final observations and states of the games that ended in a batch."""

    def __init__(self) -> None:
        self.times: list[np.ndarray] = []
        self.games: list[np.ndarray] = []
        self.obs: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    def add(self, t: int, frame: Frame, over: np.ndarray) -> None:
        """Adds the final observations of the games marked in `over` [B] (bool) at step `t`."""
        games = np.flatnonzero(over)
        self.times.append(np.full(len(games), t))
        self.games.append(games)
        self.obs.append(frame.final_obs[games])
        if frame.final_state is not None:
            self.states.append(frame.final_state[games])

    def write(self, batch: Batch) -> None:
        """Writes the final observations and their indices to the batch."""
        empty = np.zeros(0, np.int64)
        batch.ends = (np.concatenate([empty, *self.times]), np.concatenate([empty, *self.games]))
        batch.final_obs = np.concatenate([batch.obs[0, :0], *self.obs])
        if batch.state is not None:
            batch.final_state = np.concatenate([batch.state[0, :0], *self.states])


def check_rewards(env: VectorEnv, rewards: np.ndarray) -> None:
    """Raises RunFailed, with seat and game, if one of `rewards` [T, B, N] is not finite."""
    if not np.isfinite(rewards).all():
        t, game, seat = np.argwhere(~np.isfinite(rewards))[0]
        raise RunFailed(
            f'env "{_name(env)}" pays seat "{env.seats[seat]}" {rewards[t, game, seat]} in game {game}: rewards must '
            "be finite numbers (in float32). Mend the env; palestra.envs.check_env tests it"
        )


def remedy(env: VectorEnv, batch: Batch) -> str:
    """Returns advice for a loss of this batch that is not finite; observations or rewards may be its cause."""
    if not np.isfinite(batch.obs).all():
        seat = env.seats[np.argwhere(~np.isfinite(batch.obs))[0][2]]
        return f'Env "{_name(env)}" shows seat "{seat}" observations that are not finite numbers: mend the env'
    if (largest := float(np.abs(batch.rewards).max(initial=0.0))) > LARGE:
        return f"Rewards are as large as {largest:.3g}: scale them down in the env"
    return "A smaller learning rate, or a lower bound on the gradient (clip), may help"


def _name(env: VectorEnv) -> str:
    return env.name or type(env).__name__


def empty_batch(env: VectorEnv, frame: Frame, steps: int) -> Batch:
    """Returns a batch of zeros for a rollout of `steps`, with actions in int32 or float32."""
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
        seat_terminated=None if frame.seat_terminated is None else np.zeros((steps, B, N), bool),
    )
