"""Multi-player games of the Arcade Learning Environment, through PettingZoo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ale_py
import numpy as np

from palestra.envs.adapters.pettingzoo.games import load_game
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import SingleStep, VectorEnvSpec
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import zero_actions

SCREEN_SIZE = 84


def area_resize_weights(source_size: int, target_size: int) -> np.ndarray:
    """Returns averaging weights float32 [target_size, source_size] that resize a row of
    `source_size` pixels to `target_size` (area interpolation)."""
    edges = np.linspace(0, source_size, target_size + 1)
    low = np.maximum(edges[:-1, None], np.arange(source_size))
    high = np.minimum(edges[1:, None], np.arange(1, source_size + 1))
    return (np.clip(high - low, 0, None) * (target_size / source_size)).astype(np.float32)


class AtariGame:
    """One game with the preprocessing of Mnih et al. (2015). An action is repeated for `frame_skip` frames; the
    pixelwise maximum of the last two is turned to grey and resized to 84 x 84, and the last `frame_stack` such pictures
    are the observation uint8 [84, 84, frame_stack], newest last. An episode begins with 0 to `noop_max` no-op frames,
    drawn from its seed. All seats see the same picture; `agent_indicator` adds a channel with the seat number (0 for
    the first seat, 255 for the last).

    Raises ValueError if the ROM is missing or PettingZoo cannot make the game.
    """

    def __init__(
        self,
        game: str,
        options: dict[str, Any],
        *,
        frame_skip: int,
        frame_stack: int,
        noop_max: int,
        agent_indicator: bool,
    ) -> None:
        roms = str(Path(ale_py.__file__).parent)
        options = {"obs_type": "grayscale_image", "auto_rom_install_path": roms} | options
        try:
            self.inner = load_game(f"pettingzoo.atari.{game}.{game}:parallel_env", options)
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise ValueError(f'there is no ROM for "{game}": {error.__cause__}') from error
            raise
        self.frame_skip = frame_skip
        self.noop_max = noop_max
        self.agent_indicator = agent_indicator
        seats, (height, width, _) = len(self.inner.spec.seats), self.inner.spec.observation_shapes[0]
        self.rows = area_resize_weights(height, SCREEN_SIZE)
        self.columns = area_resize_weights(width, SCREEN_SIZE).T
        self.pictures = np.zeros((SCREEN_SIZE, SCREEN_SIZE, frame_stack), np.uint8)
        self.frames = [np.zeros((height, width), np.uint8)] * 2
        self.spec: VectorEnvSpec = replace(
            self.inner.spec, observation_shapes=((SCREEN_SIZE, SCREEN_SIZE, frame_stack + agent_indicator),) * seats
        )

    def reset(self, seed: int) -> SingleStep:
        step = self.inner.reset(seed)
        rng = np.random.default_rng(seed)
        nothing = zero_actions(self.spec.action_spaces, (1,))[0]
        for _ in range(rng.integers(self.noop_max + 1)):
            step = self.inner.step(nothing)
            if step.terminated or step.truncated:
                step = self.inner.reset(seed)
        self.frames = [self._screen(step)] * 2
        self.pictures[:] = self._picture()[..., None]
        return self._with_pictures(step, [0.0] * len(self.spec.seats))

    def step(self, actions: np.ndarray) -> SingleStep:
        rewards = np.zeros(len(self.spec.seats))
        for _ in range(self.frame_skip):
            step = self.inner.step(actions)
            rewards += np.asarray(step.rewards)
            self.frames = [self.frames[1], self._screen(step)]
            if step.terminated or step.truncated:
                break
        self.pictures[..., :-1] = self.pictures[..., 1:]
        self.pictures[..., -1] = self._picture()
        return self._with_pictures(step, rewards)

    def close(self) -> None:
        self.inner.close()

    def _screen(self, step: SingleStep) -> np.ndarray:
        """Returns the screen as any seat sees it; the previous screen if no seat sees one."""
        return next(
            (observation[..., 0] for observation in step.observations if observation is not None), self.frames[1]
        )

    def _picture(self) -> np.ndarray:
        return np.rint(self.rows @ np.maximum(*self.frames) @ self.columns).astype(np.uint8)

    def _with_pictures(self, step: SingleStep, rewards: Any) -> SingleStep:
        seats = len(self.spec.seats)
        observations: list[np.ndarray | None] = [self.pictures] * seats
        if self.agent_indicator:
            blank = np.ones((SCREEN_SIZE, SCREEN_SIZE, 1), np.uint8)
            observations = [
                np.concatenate([self.pictures, blank * (255 * n // max(seats - 1, 1))], 2) for n in range(seats)
            ]
        return replace(step, observations=observations, rewards=rewards)


class AtariEnv(PackageVectorEnv):
    """The multi-player Atari game `game` ("pong", "boxing", "tennis", "space_invaders", ...), made
    by PettingZoo with `options` ("max_cycles": frames until a game is truncated), with the ROMs of
    ale-py. `frame_skip`, `frame_stack`, `noop_max` and `agent_indicator` set the preprocessing (see
    `AtariGame`). Raises ValueError if `frame_skip` or `frame_stack` is below 1."""

    name: ClassVar[str] = "atari"

    def __init__(
        self,
        num_envs: int = 16,
        *,
        game: str = "pong",
        frame_skip: int = 4,
        frame_stack: int = 4,
        noop_max: int = 30,
        agent_indicator: bool = False,
        options: dict[str, Any] | None = None,
        num_processes: int = 0,
    ) -> None:
        check_at_least("frame_skip", frame_skip, 1, "nothing is played in fewer")
        check_at_least("frame_stack", frame_stack, 1, "nothing is played in fewer")
        make = partial(
            AtariGame,
            game,
            options or {},
            frame_skip=frame_skip,
            frame_stack=frame_stack,
            noop_max=noop_max,
            agent_indicator=agent_indicator,
        )
        super().__init__(make, num_envs, num_processes, game)
