"""Lock-step rollouts of B parallel games on arrays. Steps make no Python objects per game and are
copied once, into the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from palestra.core.failures import RunFailed, describe_error, exit_as_error
from palestra.core.seeding import derive_seed
from palestra.core.types import RolloutBatch
from palestra.envs.step_layout import StepLayout
from palestra.envs.vector_base import Arrays, VectorEnv, VectorStep, zero_actions
from palestra.vector.policies.base import VectorPolicy

TimeLimit = Literal["cuts", "ends"]  # what it does to a game, for training
Played = TypeVar("Played", VectorStep, RolloutBatch)
MakeZeros = Callable[[tuple[int, ...], Any], np.ndarray]  # of a shape and a dtype
MAX_EPISODE_STEPS = 100_000  # joint steps after which what waits for the end of an episode gives up
LARGE_REWARD = 1e6  # rewards above this are a likely cause of non-finite losses


class VectorRollout:
    """Collects rollouts in one vector env: each `collect` continues where the last one stopped. The returned batch is
    valid until the next call; `zeros` makes its arrays. With `time_limit: ends` truncated games count as terminated."""

    def __init__(
        self, env: VectorEnv, seeds: np.ndarray, zeros: MakeZeros = np.zeros, *, time_limit: TimeLimit = "cuts"
    ) -> None:
        self.env = env
        self.time_limit = time_limit
        self.zeros = zeros
        self.recurrent_states: dict[str, Any] = {}
        self._layout = StepLayout(env)
        self.restart(seeds)
        self._batch: RolloutBatch | None = None

    def restart(self, seeds: np.ndarray) -> None:
        """Resets all games to `seeds` [B]."""
        self.vector_step = self._call("reset", seeds)
        self.is_first = np.ones(self.env.num_envs, bool)
        self.episode_stats = EpisodeStats(self.vector_step)
        self.recurrent_states.clear()

    def collect(self, players: Sequence[VectorPolicy], steps: int, seed: int) -> RolloutBatch:
        """Returns a batch of `steps` joint steps of every game, a deterministic function of `seed` and the games'
        current states. Raises RunFailed if the env raises, if a reward or the observation of a seat that acts is not
        finite, or if a seat acts that has no legal action; the observation of a seat that has terminated may be NaN
        (`without_absent_views`).

        Actions are recorded as the policies chose them, not as the env clips them to its spaces: log-probabilities are
        those of the chosen actions. Critics and discriminators, which evaluate the action that the env took, clip it
        (`palestra.vector.nets.heads.encode_actions`, `palestra.vector.nets.continuous_heads.encode_action`)."""
        batch = self._buffers(steps)
        endings = FinalObservations()
        for player in players:
            player.reset_rng(derive_seed(seed, player.name))
            if player.name not in self.recurrent_states:
                self.recurrent_states[player.name] = player.initial_state(self.env.num_envs)
        batch.recurrent_state = dict(self.recurrent_states)
        for t in range(steps):
            self._note(batch, t)
            seen = self.vector_step if self.zeros is np.zeros else seen_in_batch(self.vector_step, batch, t)
            for player in players:
                self._act(player, seen, batch, t)
            self.vector_step = self._call("step", batch.actions[t])
            batch.rewards[t] = self.vector_step.rewards
            batch.terminated[t], batch.truncated[t] = self.vector_step.terminated, self.vector_step.truncated
            if batch.seat_terminated is not None:
                batch.seat_terminated[t] = self.vector_step.seat_terminated
            self.is_first = self.vector_step.done
            self.episode_stats.add(self.vector_step, self.is_first)
            if self.is_first.any():
                endings.add(t, self.vector_step, self.is_first)
        self._note(batch, steps)
        endings.write(batch)
        batch.episode_stats = self.episode_stats.pop_ended()
        check_rewards(self.env, batch.rewards)
        check_observations(self.env, batch)
        check_legal_actions(self.env, batch)
        return batch

    def check_episodes_end(self) -> None:
        """Raises RunFailed if a game has run for more than `MAX_EPISODE_STEPS` steps."""
        if self.episode_stats.lengths.max() > MAX_EPISODE_STEPS:
            game = int(self.episode_stats.lengths.argmax())
            raise RunFailed(
                f'env "{self.env.label}" has not ended after {MAX_EPISODE_STEPS:,} steps in game {game}, and its end '
                "is waited for: give the env a limit of steps after which it truncates an episode (Gymnasium: "
                "options: {max_episode_steps: 1000})"
            )

    def _call(self, method: Literal["reset", "step"], argument: np.ndarray) -> VectorStep:
        """Returns the result of the env's `reset` or `step`. Raises RunFailed with the traceback if the env raises, and
        for arrays of another layout than its spec says."""
        try:
            with exit_as_error():
                vector_step: VectorStep = getattr(self.env, method)(argument)
        except Exception as error:
            message, trace = describe_error(error)
            raise RunFailed.from_traceback(f'env "{self.env.label}" failed in {method}: {message}', trace) from error
        try:
            self._layout.check(vector_step)
        except ValueError as error:
            raise RunFailed(f'env "{self.env.label}" {error} (in {method})') from None
        vector_step = without_absent_views(vector_step)
        return terminate_truncated(vector_step) if self.time_limit == "ends" else vector_step

    def _note(self, batch: RolloutBatch, t: int) -> None:
        vector_step = self.vector_step
        batch.obs[t], batch.agent_mask[t], batch.is_first[t] = vector_step.obs, vector_step.agent_mask, self.is_first
        if batch.action_mask is not None:
            batch.action_mask[t] = vector_step.action_mask
        if batch.state is not None:
            batch.state[t] = vector_step.state

    def _act(self, player: VectorPolicy, seen: VectorStep, batch: RolloutBatch, t: int) -> None:
        actions, logp, self.recurrent_states[player.name] = player.act(
            seen, self.recurrent_states[player.name], self.is_first
        )
        joint = batch.actions[t]
        if joint.ndim == 2:
            joint[:, player.seats] = actions
        else:  # may be shorter than other seats' actions: one number if it is discrete
            rows = actions if actions.ndim == 3 else actions[..., None]
            joint[:, player.seats, : rows.shape[2]] = rows
        if logp is not None:
            batch.logp[t][:, player.seats] = logp

    def _buffers(self, steps: int) -> RolloutBatch:
        if self._batch is None or len(self._batch.rewards) != steps:
            self._batch = empty_batch(self.env, self.vector_step, steps, self.zeros)
        return self._batch

    def close(self) -> None:
        self.env.close()

    def save(self) -> Arrays | None:
        """Returns the state of the games as arrays, or None if the env cannot save it."""
        games = self.env.save()
        if games is None:
            return None
        episodes = {
            "rollout/is_first": self.is_first,
            "rollout/returns": self.episode_stats.returns,
            "rollout/lengths": self.episode_stats.lengths,
        }
        memory = {f"remembered/{name}": h.cpu().numpy() for name, h in self.recurrent_states.items() if h is not None}
        return {name: array.copy() for name, array in (games | episodes | memory).items()}

    def load(self, saved: Arrays, players: Sequence[VectorPolicy]) -> None:
        """Restores what `save` returned."""
        self.vector_step = without_absent_views(self.env.load(saved))
        self.is_first = saved["rollout/is_first"].copy()
        self.episode_stats.returns[:] = saved["rollout/returns"]
        self.episode_stats.lengths[:] = saved["rollout/lengths"]
        for player in players:
            state = saved.get(f"remembered/{player.name}")
            empty = player.initial_state(self.env.num_envs)
            self.recurrent_states[player.name] = empty if state is None else empty.new_tensor(state)


class EpisodeStats:
    """Returns and lengths of the running games, and results of the games that ended since `pop_ended`."""

    def __init__(self, vector_step: VectorStep) -> None:
        games, seats = vector_step.rewards.shape
        self.returns = np.zeros((games, seats))
        self.lengths = np.zeros(games, np.int64)
        no_success = _success_columns(vector_step, np.zeros(games, bool))
        self._none = (np.zeros(0, np.int64), np.zeros((0, seats)), np.zeros(0, np.int64), no_success)
        self._ended: list[tuple[np.ndarray, ...]] = []

    def add(self, vector_step: VectorStep, done: np.ndarray) -> None:
        """Adds a step; `done` [B] (bool) marks the games that it ended."""
        self.returns += vector_step.rewards
        self.lengths += 1
        if done.any():
            success = _success_columns(vector_step, done)
            self._ended.append((np.flatnonzero(done), self.returns[done], self.lengths[done], success))
            self.returns[done], self.lengths[done] = 0, 0

    def pop_ended(self) -> dict[str, np.ndarray]:
        """Returns, and clears, the results of ended games: `game [G]` int64, `returns [G, N]`
        float64, `lengths [G]` int64 and `success [G, C]` float32, oldest first. C is 0 if the env
        reports no success, 1 for that of the game, N for those of the seats (NaN: not reported)."""
        columns = [np.concatenate(column) for column in zip(self._none, *self._ended, strict=True)]
        self._ended.clear()
        return dict(zip(("game", "returns", "lengths", "success"), columns, strict=True))


def _success_columns(vector_step: VectorStep, games: np.ndarray) -> np.ndarray:
    """Returns the success of the games marked in `games` [B] (bool), [G, C] as in `EpisodeStats.pop_ended`."""
    success = vector_step.success
    if success is None:
        return np.zeros((int(games.sum()), 0), np.float32)
    return success[games].reshape(-1, 1 if success.ndim == 1 else success.shape[1]).astype(np.float32)


class FinalObservations:
    """Final observations and states of the games that ended in a batch."""

    def __init__(self) -> None:
        self.times: list[np.ndarray] = []
        self.games: list[np.ndarray] = []
        self.obs: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    def add(self, t: int, vector_step: VectorStep, done: np.ndarray) -> None:
        """Adds the final observations of the games marked in `done` [B] (bool) at step `t`."""
        games = np.flatnonzero(done)
        self.times.append(np.full(len(games), t))
        self.games.append(games)
        self.obs.append(vector_step.final_obs[games])
        if vector_step.final_state is not None:
            self.states.append(vector_step.final_state[games])

    def write(self, batch: RolloutBatch) -> None:
        """Writes the final observations and their indices to the batch."""
        empty = np.zeros(0, np.int64)
        batch.end_index = (np.concatenate([empty, *self.times]), np.concatenate([empty, *self.games]))
        batch.final_obs = np.concatenate([batch.obs[0, :0], *self.obs])
        if batch.state is not None:
            batch.final_state = np.concatenate([batch.state[0, :0], *self.states])


def seen_in_batch(vector_step: VectorStep, batch: RolloutBatch, t: int) -> VectorStep:
    """Returns the step with its observations and action masks taken from the batch at `t`: the same
    numbers, in arrays that are copied to another device faster."""
    action_mask = None if batch.action_mask is None else batch.action_mask[t]
    return replace(vector_step, obs=batch.obs[t], action_mask=action_mask)


def terminate_truncated(played: Played) -> Played:
    """Returns a step or a batch in which truncated games are terminated, for all seats."""
    cut = played.truncated
    if not cut.any():
        return played
    gone = played.seat_terminated
    return replace(
        played,
        terminated=played.terminated | cut,
        truncated=np.zeros_like(cut),
        seat_terminated=None if gone is None else gone | cut[..., None],
    )


def without_absent_views(vector_step: VectorStep) -> VectorStep:
    """Returns a step in which the observation of a seat that has terminated, while the game continued or was truncated
    for the others, is zeros if it has a number that is not finite; `vector_step` itself if there is none.

    Envs may return NaN for a seat that has terminated, but the inputs of central critics, mixers and networks that play
    several seats contain the observations of all seats."""
    gone = vector_step.seat_terminated
    if gone is None or vector_step.obs.dtype.kind != "f" or not gone.any():
        return vector_step
    obs = _zeros_where_not_finite(vector_step.obs, gone & ~vector_step.done[:, None])
    final_obs = _zeros_where_not_finite(vector_step.final_obs, gone & vector_step.truncated[:, None])
    return replace(vector_step, obs=obs, final_obs=final_obs)


def _zeros_where_not_finite(obs: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """Returns observations [B, N, ...] with zeros for those `absent` [B, N] that are not finite."""
    games, seats = np.nonzero(absent)
    bad = ~np.isfinite(obs[games, seats]).all(axis=tuple(range(1, obs.ndim - 1)))
    if not bad.any():
        return obs
    obs = obs.copy()  # the array is the env's
    obs[games[bad], seats[bad]] = 0
    return obs


def check_observations(env: VectorEnv, batch: RolloutBatch) -> None:
    """Raises RunFailed, with seat and game, if a seat that acts has an observation that is not finite."""
    with np.errstate(all="ignore"):
        if batch.obs.dtype.kind != "f" or np.isfinite(batch.obs.sum()):  # a sum is quicker, and may overflow
            return
    wrong = ~np.isfinite(batch.obs).reshape(*batch.agent_mask.shape, -1).all(-1) & batch.agent_mask
    if wrong.any():
        _, game, seat = np.argwhere(wrong)[0]
        raise RunFailed(
            f'env "{env.label}" shows seat "{env.seats[seat]}" observations that are not finite numbers in game '
            f"{game}, in which the seat acts: fix the env; only a seat that has terminated may see NaN. "
            "palestra.envs.check_env tests it"
        )


def check_legal_actions(env: VectorEnv, batch: RolloutBatch) -> None:
    """Raises RunFailed, with seat and game, if a seat acts that has no legal action."""
    if batch.action_mask is None:
        return
    width = batch.action_mask.shape[-1]
    acts = batch.agent_mask[:-1].ravel()
    actions = batch.actions
    if actions.ndim == 4:  # of several kinds; all is legal for seats whose actions are not discrete
        actions = actions[..., 0].astype(np.int64)
    place = np.arange(len(acts)) * width + actions.ravel().clip(0, width - 1)
    if (batch.action_mask[:-1].ravel()[place] | ~acts).all():  # a policy takes a legal action if there is one
        return
    stuck = batch.agent_mask[:-1] & ~batch.action_mask[:-1].any(-1)
    if stuck.any():
        _, game, seat = np.argwhere(stuck)[0]
        raise RunFailed(
            f'env "{env.label}" lets seat "{env.seats[seat]}" act in game {game} and gives it no legal action: its '
            "action_mask must allow at least one action, or the seat must not act. palestra.envs.check_env tests it"
        )


def check_rewards(env: VectorEnv, rewards: np.ndarray) -> None:
    """Raises RunFailed, with seat and game, if one of `rewards` [T, B, N] is not finite."""
    if not np.isfinite(rewards).all():
        t, game, seat = np.argwhere(~np.isfinite(rewards))[0]
        raise RunFailed(
            f'env "{env.label}" gives seat "{env.seats[seat]}" a reward of {rewards[t, game, seat]} in game {game}: '
            "rewards must be finite numbers (in float32). Fix the env; palestra.envs.check_env tests it"
        )


def nonfinite_loss_advice(env: VectorEnv, batch: RolloutBatch) -> str:
    """Returns advice for a loss of this batch that is not finite; observations or rewards may be its cause.

    Final observations of games that terminated for all seats are not checked, since no value is computed from them."""
    valued = batch.final_obs[~batch.seats_terminated[batch.end_index].all(-1)]
    for shown, seat_axis, when in ((batch.obs, 2, ""), (valued, 1, " at the end of a truncated game")):
        if not np.isfinite(shown).all():
            seat = env.seats[np.argwhere(~np.isfinite(shown))[0][seat_axis]]
            return f'Env "{env.label}" shows seat "{seat}" observations{when} that are not finite numbers: fix the env'
    if (largest := float(np.abs(batch.rewards).max(initial=0.0))) > LARGE_REWARD:
        return f"Rewards are as large as {largest:.3g}: scale them down in the env"
    return "A smaller learning rate or a smaller max_grad_norm may help"


def empty_batch(env: VectorEnv, vector_step: VectorStep, steps: int, zeros: MakeZeros = np.zeros) -> RolloutBatch:
    """Returns a batch of zeros, made by `zeros`, for a rollout of `steps`, with actions in int32 or float32."""
    B = env.num_envs
    N = len(env.seats)

    def moments(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else zeros((steps + 1, *array.shape), array.dtype)

    return RolloutBatch(
        obs=zeros((steps + 1, *vector_step.obs.shape), vector_step.obs.dtype),
        agent_mask=zeros((steps + 1, B, N), bool),
        actions=zero_actions(env.action_spaces, (steps, B), zeros),
        logp=zeros((steps, B, N), np.float32),
        rewards=zeros((steps, B, N), np.float32),
        terminated=np.zeros((steps, B), bool),
        truncated=np.zeros((steps, B), bool),
        is_first=np.zeros((steps + 1, B), bool),
        end_index=(np.zeros(0, np.int64), np.zeros(0, np.int64)),
        final_obs=vector_step.obs[:0],
        action_mask=moments(vector_step.action_mask),
        state=moments(vector_step.state),
        seat_terminated=None if vector_step.seat_terminated is None else np.zeros((steps, B, N), bool),
    )
