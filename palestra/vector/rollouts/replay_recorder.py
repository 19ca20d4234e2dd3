"""Records games of a vectorised env while it is played, for the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.core.types import Seat
from palestra.envs.batch.canvas import to_png
from palestra.envs.vector_base import RenderFrame, VectorEnv, VectorStep
from palestra.runs.replays import GameReplay, ReplayFrame, ReplayHeader

MAX_FRAMES = 600  # of a replay; a longer game is cut


class ReplayRecorder(VectorEnv):
    """Wraps `env` without changing its play, and records the first episode of each of the first `num_episodes` games
    (at most as many as the env has).

    Nothing is recorded if the env cannot be drawn: its `render` returns None and its observations are not pictures.
    """

    def __init__(self, env: VectorEnv, num_episodes: int) -> None:
        self.env = env
        self.num_episodes = min(num_episodes, env.num_envs)
        self.num_envs = env.num_envs
        self.adopt_spaces(env)
        self.scripted_policies = env.scripted_policies
        self.games: list[GameReplay] = []
        self._agent_mask = np.zeros((0, 0), bool)
        self._shown: dict[int, RenderFrame] = {}  # positions of the games that are recorded

    @property
    def label(self) -> str:
        return self.env.label

    def reset(self, seeds: np.ndarray) -> VectorStep:
        step = self.env.reset(seeds)
        self.games = [GameReplay(int(seed)) for seed in seeds[: self.num_episodes]]
        self._look(step, range(self.num_episodes))
        return step

    def step(self, actions: np.ndarray) -> VectorStep:
        if not self._shown:
            return self.env.step(actions)
        played = actions[: self.num_episodes].reshape(self.num_episodes, len(self.seats), -1).copy()
        step = self.env.step(actions)
        mask = self._agent_mask
        for game, shown in self._shown.items():
            actions_of_seats = self._own_actions(played[game])
            self.games[game].frames.append(_frame(shown, mask[game], actions_of_seats, step.rewards[game]))
            replay = self.games[game]
            if step.done[game]:
                replay.end = "terminated" if step.terminated[game] else "truncated"
                replay.success = _success_of_all(step, game)
            elif len(replay.frames) == MAX_FRAMES:
                replay.end = "cut"
        self._look(step, [game for game in self._shown if not self.games[game].end])
        return step

    def _own_actions(self, actions: np.ndarray) -> list[list[float]]:
        """Returns the actions [N, ...] of a game without padding; a discrete one is one number."""
        pairs = zip(actions, self.action_spaces, strict=True)
        return [action[: space.width or 1].tolist() for action, space in pairs]

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        return self.env.scripted_actions(name, seat)

    def header(self, players: Mapping[Seat, str]) -> ReplayHeader:
        """Returns the header that the replays share; `players` maps seats to the policies that play them."""
        return ReplayHeader(
            env=self.env.name or type(self.env).__name__,
            seats=self.seats,
            players=[players.get(seat, "") for seat in self.seats],
            action_names=self.env.action_names,
            seat_colours=self.env.seat_colours,
        )

    def replays(self) -> list[GameReplay]:
        """Returns the recorded games, except those without a frame."""
        return [replay for replay in self.games if replay.frames]

    def _look(self, step: VectorStep, games: Sequence[int] | range) -> None:
        self._agent_mask = step.agent_mask[: self.num_episodes].copy()
        frames = {game: _render(self.env, step, game) for game in games}
        self._shown = {game: frame for game, frame in frames.items() if frame is not None}


def _success_of_all(step: VectorStep, game: int) -> bool | None:
    """Returns the success of a game; None where none is reported or that of the seats differs."""
    values = np.zeros(0) if step.success is None else np.unique(step.success[game])
    return bool(values[0]) if len(values) == 1 and not np.isnan(values[0]) else None


def _render(env: VectorEnv, step: VectorStep, game: int) -> RenderFrame | None:
    """Returns the env's own picture or text. If it has none, returns the newest frame of the first seat's observation
    if that is a picture: uint8 [H, W, C] whose last channels are RGB, or stacked grey frames. Else returns None."""
    if (shown := env.render(game)) is not None:
        return shown
    if step.obs.dtype != np.uint8 or step.obs.ndim != 5:
        return None
    picture: np.ndarray = step.obs[game, 0]
    return (picture[..., -3:] if picture.shape[-1] % 3 == 0 else picture[..., -1]).copy()


def _frame(shown: RenderFrame, acts: np.ndarray, actions: list[list[float]], rewards: np.ndarray) -> ReplayFrame:
    picture, text = (None, shown) if isinstance(shown, str) else (to_png(shown), None)
    return ReplayFrame(picture=picture, text=text, acts=acts.tolist(), actions=actions, rewards=rewards.tolist())
