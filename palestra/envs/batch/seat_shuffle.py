"""Vector env with sides permuted at random in every game, for populations whose members play every side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from palestra.core.accel.jit import jit
from palestra.envs.batch.rng import RNG_WORDS, random_below, seed_streams
from palestra.envs.vector_base import Arrays, RenderFrame, VectorEnv, VectorStep

PERMUTATION_SEED_XOR = 0x5EA75  # makes the seeds of the permutations differ from those of the games
NEXT_ARRAYS = {"obs", "agent_mask", "action_mask"}  # arrays by seat of the game that goes on
LAST_ARRAYS = {"final_obs", "rewards", "success", "seat_terminated"}  # of the game before this step


class SeatShuffledEnv(VectorEnv):
    """The same env, with a random permutation of its `sides` in each game: seat n plays the env's seat `env_seats[b,
    n]` (int64 [B, N]), each permutation equally likely. A learner at one side thus learns all of them. A side is one
    seat (default), or several, whose order is kept. The global state is not permuted.

    Raises ValueError if the sides differ in size, observation shapes or action spaces.
    """

    name: ClassVar[str] = "rotated"

    def __init__(self, env: VectorEnv, sides: Sequence[Sequence[int]] = ()) -> None:
        sides = sides or [[seat] for seat in range(len(env.seats))]
        kinds = set()
        for side in sides:
            seats = [(env.observation_shapes[seat], env.images_of(seat), env.action_spaces[seat]) for seat in side]
            kinds.add(tuple(seats))
        if len(kinds) > 1:
            raise ValueError(
                f'sides of env "{env.name}" differ in observation shape or action space, so they cannot be permuted: '
                "give each a population of its own"
            )
        self.env = env
        self.sides = np.array(sides)
        self.place_of_seat = np.argsort(self.sides.ravel())  # in the sides one after the other
        self.num_envs = env.num_envs
        self.adopt_spaces(env)
        self.scripted_policies = env.scripted_policies
        if len(set(env.observation_entities)) == 1:  # else their columns would be those of another seat
            self.observation_entities = env.observation_entities
        self.rng = np.zeros((env.num_envs, RNG_WORDS), np.uint64)
        self.env_sides = np.tile(np.arange(len(sides)), (env.num_envs, 1))

    @property
    def label(self) -> str:
        return self.env.label

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.rng[:] = seed_streams(np.asarray(seeds) ^ PERMUTATION_SEED_XOR)
        self.env_sides[:] = np.arange(len(self.sides))
        self.previous_env_sides = self.env_sides.copy()
        _shuffle(self.rng, self.env_sides, np.ones(self.num_envs, bool))
        return self._by_seat(self.env.reset(seeds))

    def step(self, actions: np.ndarray) -> VectorStep:
        placed = np.empty_like(actions)
        placed[self._rows, self.env_seats] = actions
        vector_step = self.env.step(placed)
        self.previous_env_sides = self.env_sides.copy()
        _shuffle(self.rng, self.env_sides, vector_step.done)
        return self._by_seat(vector_step)

    @property
    def env_seats(self) -> np.ndarray:
        """The env's seat that each seat plays, int64 [B, N]."""
        return self._seats_of(self.env_sides)

    def _seats_of(self, env_sides: np.ndarray) -> np.ndarray:
        seats: np.ndarray = self.sides[env_sides].reshape(self.num_envs, -1)[:, self.place_of_seat]
        return seats

    @property
    def _rows(self) -> np.ndarray:
        return np.arange(self.num_envs)[:, None]

    def _by_seat(self, vector_step: VectorStep) -> VectorStep:
        """Returns the frame by seat: rewards and final observations by the permutation of the game
        that they belong to."""
        arrays = vector_step.arrays()
        before = self._seats_of(self.previous_env_sides)
        for names, seats in ((NEXT_ARRAYS, self.env_seats), (LAST_ARRAYS, before)):
            for name in names & arrays.keys():
                if arrays[name].ndim > 1:  # else one success for all seats
                    arrays[name] = arrays[name][self._rows, seats]
        return VectorStep(**arrays)

    def scripted_actions(self, name: str, seat: int) -> np.ndarray:
        by_place = np.stack([self.env.scripted_actions(name, place) for place in range(len(self.seats))], 1)
        moves: np.ndarray = by_place[np.arange(self.num_envs), self.env_seats[:, seat]]
        return moves

    def render(self, game: int) -> RenderFrame | None:
        return self.env.render(game)

    def save(self) -> Arrays | None:
        inner = self.env.save()
        if inner is None:
            return None
        own = {"rotated/rng": self.rng, "rotated/places": self.env_sides, "rotated/before": self.previous_env_sides}
        return inner | {name: array.copy() for name, array in own.items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        self.rng[:] = saved["rotated/rng"]
        self.env_sides[:] = saved["rotated/places"]
        self.previous_env_sides = saved["rotated/before"].copy()
        return self._by_seat(self.env.load(saved))

    def close(self) -> None:
        self.env.close()


@jit
def _shuffle(rng: np.ndarray, places: np.ndarray, chosen: np.ndarray) -> None:
    """Draws new permutations for the chosen games (Fisher-Yates)."""
    for b in range(len(places)):
        if chosen[b]:
            for last in range(places.shape[1] - 1, 0, -1):
                other = random_below(rng[b], last + 1)
                places[b, last], places[b, other] = places[b, other], places[b, last]
