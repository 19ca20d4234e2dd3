"""Vector env with seats permuted at random in every game, for populations whose members play every seat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from palestra.compiled import kernel
from palestra.envs.vector.base import Arrays, Frame, VectorEnv
from palestra.envs.vector.rng import WORDS, below, seeded

APART = 0x5EA75  # makes the seeds of the permutations differ from those of the games


class Rotated(VectorEnv):
    """The same env, with a random permutation of the seats in each game: seat n plays the env's seat `places[b, n]`
    (int64 [B, N]), each permutation equally likely. A learner at one seat thus learns all seats. The global state is
    not permuted.

    Raises ValueError if seats differ in observation shape or action space.
    """

    name: ClassVar[str] = "rotated"

    def __init__(self, env: VectorEnv) -> None:
        if len(set(env.views)) > 1 or len(set(env.actions)) > 1:
            raise ValueError(
                f'seats of env "{env.name}" differ in what they see or may do, so they cannot change places: give each '
                "a population of its own"
            )
        self.env, self.games, self.seats, self.scripts = env, env.games, env.seats, env.scripts
        self.views, self.actions, self.state_size = env.views, env.actions, env.state_size
        self.rng = np.zeros((env.games, WORDS), np.uint64)
        self.places = np.tile(np.arange(len(env.seats)), (env.games, 1))

    def reset(self, seeds: np.ndarray) -> Frame:
        self.rng[:] = seeded(np.asarray(seeds) ^ APART)
        self.places[:] = np.arange(len(self.seats))
        self.before = self.places.copy()
        _shuffle(self.rng, self.places, np.ones(self.games, bool))
        return self._seen(self.env.reset(seeds))

    def step(self, actions: np.ndarray) -> Frame:
        placed = np.empty_like(actions)
        placed[self._rows, self.places] = actions
        frame = self.env.step(placed)
        self.before = self.places.copy()
        _shuffle(self.rng, self.places, frame.over)
        return self._seen(frame)

    @property
    def _rows(self) -> np.ndarray:
        return np.arange(self.games)[:, None]

    def _seen(self, frame: Frame) -> Frame:
        """Returns the frame by seat: rewards and final observations by the permutation of the game that they belong
        to."""

        def by(places: np.ndarray, array: np.ndarray) -> np.ndarray:
            found: np.ndarray = array[self._rows, places]
            return found

        return Frame(
            obs=by(self.places, frame.obs),
            final_obs=by(self.before, frame.final_obs),
            acting=by(self.places, frame.acting),
            rewards=by(self.before, frame.rewards),
            terminated=frame.terminated,
            truncated=frame.truncated,
            legal=None if frame.legal is None else by(self.places, frame.legal),
            state=frame.state,
            final_state=frame.final_state,
            success=frame.success,
            seat_terminated=None if frame.seat_terminated is None else by(self.before, frame.seat_terminated),
        )

    def script(self, name: str, seat: int) -> np.ndarray:
        by_place = np.stack([self.env.script(name, place) for place in range(len(self.seats))], 1)
        moves: np.ndarray = by_place[np.arange(self.games), self.places[:, seat]]
        return moves

    def save(self) -> Arrays | None:
        inner = self.env.save()
        own = {"rotated/rng": self.rng, "rotated/places": self.places, "rotated/before": self.before}
        return None if inner is None else inner | {name: array.copy() for name, array in own.items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        self.rng[:], self.places[:] = saved["rotated/rng"], saved["rotated/places"]
        self.before = saved["rotated/before"].copy()
        return self._seen(self.env.load(saved))

    def close(self) -> None:
        self.env.close()


@kernel
def _shuffle(rng: np.ndarray, places: np.ndarray, chosen: np.ndarray) -> None:
    """Draws new permutations for the chosen games (Fisher-Yates)."""
    for b in range(len(places)):
        if chosen[b]:
            for last in range(places.shape[1] - 1, 0, -1):
                other = below(rng[b], last + 1)
                places[b, last], places[b, other] = places[b, other], places[b, last]
