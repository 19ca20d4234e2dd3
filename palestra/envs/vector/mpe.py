"""Four games of MPE, the multi-agent particle environments (Lowe et al., 2017), with the numbers of `mpe2` 1.1.

Seats, observations, rewards and random numbers are those of `simple_spread_v3`, `simple_adversary_v3`, `simple_tag_v3`
and `simple_speaker_listener_v4`: the same seed and actions give the same games. Not implemented: their curricula, ends
before the last step, and observations of only the nearest entities. A game is truncated after `max_cycles` steps.

Discrete actions: nothing, or a push left, right, down or up (0 to 4; any other number does nothing). Continuous
actions: the strength of the push in each of these directions, 0 to 1 (the first number has no effect).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from palestra.core.types import Seat
from palestra.envs.batch.canvas import GREEN, GREY, LIGHT_GREY, Canvas, seat_colour
from palestra.envs.batch.native import NativeEnv
from palestra.envs.batch.rng import RNG_WORDS
from palestra.envs.support.options import check_at_least
from palestra.envs.vector import mpe_rules as rules
from palestra.envs.vector.mpe_physics import MPEStepArrays, World, begin_games
from palestra.envs.vector_base import Continuous, Discrete, Entities, Space, empty_step

MOVES = ("nothing", "left", "right", "down", "up")
NUM_MOVES = len(MOVES)
PLACE = (0, 1)  # the numbers of an entity that are its position relative to the seat
# as drawn, of those that do not collide
LANDMARK_RADIUS = 0.05
AGENT_RADIUS = 0.06


@dataclass(frozen=True)
class WorldSpec:
    """Seats and entities of one game; tuples are by seat, except `radius` (see `World`)."""

    seats: tuple[Seat, ...]
    observation_sizes: tuple[int, ...]
    num_landmarks: int
    accel: tuple[float, ...]
    num_actions: tuple[int, ...]
    radius: tuple[float, ...] = ()
    max_speed: tuple[float, ...] = ()
    landmark_range: float = 1.0
    has_goal: bool = False
    num_words: int = 0


class _Particles(NativeEnv):
    """Base class of the four games: seats, arrays, and actions in one shape. `observe` and `advance` are a game's
    kernels, and `observe_options` and `advance_options` what they take beyond the arguments of all games."""

    observe: Callable[..., None]
    advance: Callable[..., None]
    observe_options: tuple[Any, ...] = ()
    advance_options: tuple[Any, ...] = ()

    def __init__(self, num_envs: int, spec: WorldSpec, max_cycles: int, continuous: bool) -> None:
        check_at_least("max_cycles", max_cycles, 1, "a game takes a step")
        self.num_envs = num_envs
        self.max_cycles = max_cycles
        self.continuous = continuous
        self.seats = spec.seats
        self.observation_shapes = tuple((width,) for width in spec.observation_sizes)
        self.action_spaces = tuple(_space(n, continuous) for n in spec.num_actions)
        self.state_size = sum(spec.observation_sizes)
        agents = len(spec.seats)
        self.vector_step = empty_step(num_envs, agents, (max(spec.observation_sizes),), state_size=self.state_size)
        self.internal_state = {
            "rng": np.zeros((num_envs, RNG_WORDS), np.uint64),
            "pos": np.zeros((num_envs, agents + spec.num_landmarks, 2)),
            "vel": np.zeros((num_envs, agents, 2)),
            "goal": np.zeros(num_envs, np.int64),
            "word": np.zeros((num_envs, spec.num_words), np.float32),
            "age": np.zeros(num_envs, np.int64),
        }
        self._world = self.build_table(
            World,
            force=np.zeros((agents, 2)),
            radius=np.array(spec.radius, float),
            accel=np.array(spec.accel),
            max_speed=np.array(spec.max_speed or [math.inf] * agents),
            landmark_range=spec.landmark_range,
            has_goal=spec.has_goal,
        )
        self._view = self.build_table(MPEStepArrays, observation_sizes=np.array(spec.observation_sizes, np.int64))
        self.seat_colours = tuple(map(seat_colour, range(agents)))
        if set(spec.num_actions) == {NUM_MOVES} and not continuous:
            self.action_names = MOVES
        self._all = np.ones(num_envs, bool)

    def _begin(self) -> None:
        begin_games(self._world, self._all)
        self.observe(self._world, self._view, self._all, *self.observe_options)

    def _advance(self, actions: np.ndarray) -> None:
        actions_BND = actions.astype(self.action_spaces[0].dtype, copy=False).reshape(*actions.shape[:2], -1)
        game = (self._world, self._view, self._all, actions_BND, self.continuous, self.max_cycles)
        self.advance(*game, *self.advance_options)

    def render(self, game: int) -> np.ndarray:
        """Draws the agents in the colours of their seats, landmarks in grey, the goal in green."""
        places = self.internal_state["pos"][game]
        agents = len(self.seats)
        edge = max(1.3, math.ceil(2 * np.abs(places).max()) / 2 + 0.2)  # grows in half steps to include distant agents
        canvas = Canvas(-edge, edge)
        radius = dict(enumerate(self._world.radius.tolist()))
        for e in range(agents, len(places)):
            is_goal = self._world.has_goal and self.internal_state["goal"][game] == e - agents
            x, y = places[e]
            canvas.disc(x, y, radius.get(e, LANDMARK_RADIUS), GREEN if is_goal else GREY)
        for n, (x, y) in enumerate(places[:agents]):
            size = radius.get(n, AGENT_RADIUS)
            canvas.disc(x, y, size, self.seat_colours[n], 0.75)
            canvas.ring(x, y, size, self.seat_colours[n])
        for wall in (-1, 1):
            canvas.line((wall, -1), (wall, 1), LIGHT_GREY)
            canvas.line((-1, wall), (1, wall), LIGHT_GREY)
        return canvas.picture()


class SimpleSpread(_Particles):
    """As many agents as landmarks: together they must cover all landmarks without touching each other.

    The team reward is minus the distance from each landmark to the nearest agent, summed; an agent's own reward is -1
    for each other agent that it touches. `local_ratio` is the weight of the own reward; the team reward has the rest.

    Raises ValueError if `agents` is below 1 or `local_ratio` is not from 0 to 1.
    """

    name: ClassVar[str] = "simple_spread"
    observe = staticmethod(rules.observe_spread)
    advance = staticmethod(rules.advance_spread)

    def __init__(
        self,
        num_envs: int = 64,
        *,
        agents: int = 3,
        local_ratio: float = 0.5,
        max_cycles: int = 25,
        continuous_actions: bool = False,
    ) -> None:
        check_at_least("agents", agents, 1, "somebody must play")
        if not 0 <= local_ratio <= 1:
            raise ValueError(
                f"local_ratio is {local_ratio}, but it is the share of an agent's own reward in what it gets: "
                "give a number from 0 (only the team's) to 1 (only its own)"
            )
        self.advance_options = (float(local_ratio),)
        spec = WorldSpec(
            seats=_seat_names("agent", agents),
            observation_sizes=(6 * agents,) * agents,
            num_landmarks=agents,
            accel=(5.0,) * agents,
            num_actions=(NUM_MOVES,) * agents,
            radius=(0.15,) * agents,
        )
        super().__init__(num_envs, spec, max_cycles, continuous_actions)
        # of the first other agent and of its message
        places = 4 + 2 * agents
        words = 4 * agents + 2
        others = tuple((places + i, places + i + 1, words + i, words + i + 1) for i in range(0, 2 * agents - 2, 2))
        self.observation_entities = ((Entities.in_a_row(4, agents, 2, PLACE), Entities(4, others, PLACE)),) * agents


class SimpleAdversary(_Particles):
    """`agents` cooperating agents see which of as many landmarks is the goal; one adversary sees only the agents and
    landmarks and must find the goal.

    The adversary's reward is minus its distance from the goal; each agent gets the adversary's distance minus the
    nearest agent's.
    """

    name: ClassVar[str] = "simple_adversary"
    observe = staticmethod(rules.observe_adversary)
    advance = staticmethod(rules.advance_adversary)

    def __init__(
        self, num_envs: int = 64, *, agents: int = 2, max_cycles: int = 25, continuous_actions: bool = False
    ) -> None:
        check_at_least("agents", agents, 1, "somebody must play")
        spec = WorldSpec(
            seats=("adversary_0", *_seat_names("agent", agents)),
            observation_sizes=(4 * agents,) + (4 * agents + 2,) * agents,
            num_landmarks=agents,
            accel=(5.0,) * (agents + 1),
            num_actions=(NUM_MOVES,) * (agents + 1),
            has_goal=True,
        )
        super().__init__(num_envs, spec, max_cycles, continuous_actions)


class SimpleTag(_Particles):
    """`num_adversaries` adversaries chase `num_good` agents, which are faster, between `num_obstacles` obstacles.

    Every adversary gets 10 for each contact of an adversary with a good agent; a good agent loses 10 for each adversary
    that touches it, and an increasing penalty outside the square from -0.9 to 0.9 (at most 10 per axis).
    """

    name: ClassVar[str] = "simple_tag"
    observe = staticmethod(rules.observe_tag)
    advance = staticmethod(rules.advance_tag)

    def __init__(
        self,
        num_envs: int = 64,
        *,
        num_good: int = 1,
        num_adversaries: int = 3,
        num_obstacles: int = 2,
        max_cycles: int = 25,
        continuous_actions: bool = False,
    ) -> None:
        check_at_least("num_good", num_good, 1, "the adversaries chase at least one")
        check_at_least("num_adversaries", num_adversaries, 1, "somebody must chase")
        check_at_least("num_obstacles", num_obstacles, 0, "obstacles are counted")
        width = 4 + 2 * num_obstacles + 2 * (num_adversaries + num_good - 1)
        spec = WorldSpec(
            seats=_seat_names("adversary", num_adversaries) + _seat_names("agent", num_good),
            observation_sizes=(width + 2 * num_good,) * num_adversaries + (width + 2 * num_good - 2,) * num_good,
            num_landmarks=num_obstacles,
            accel=(3.0,) * num_adversaries + (4.0,) * num_good,
            num_actions=(NUM_MOVES,) * (num_adversaries + num_good),
            radius=(0.075,) * num_adversaries + (0.05,) * num_good + (0.2,) * num_obstacles,
            max_speed=(1.0,) * num_adversaries + (1.3,) * num_good,
            landmark_range=0.9,
        )
        self.observe_options = self.advance_options = (num_adversaries,)
        super().__init__(num_envs, spec, max_cycles, continuous_actions)
        seats = [(num_adversaries - 1, num_good)] * num_adversaries + [(num_adversaries, num_good - 1)] * num_good
        self.observation_entities = tuple(_tag_entities(num_obstacles, *others) for others in seats)


class SimpleSpeakerListener(_Particles):
    """The speaker sees which of three landmarks is the goal and cannot move; the listener receives its message and
    moves.

    Both lose the squared distance of the listener from the goal. The speaker sends one of three words (out of range:
    the first). With `continuous_actions` it sends a strength from 0 to 1 for each word, and the last two numbers of its
    row of actions are ignored.
    """

    name: ClassVar[str] = "simple_speaker_listener"
    observe = staticmethod(rules.observe_speaker_listener)
    advance = staticmethod(rules.advance_speaker_listener)

    def __init__(self, num_envs: int = 64, *, max_cycles: int = 25, continuous_actions: bool = False) -> None:
        spec = WorldSpec(
            seats=("speaker_0", "listener_0"),
            observation_sizes=(3, 11),
            num_landmarks=3,
            accel=(0.0, 5.0),
            num_actions=(3, NUM_MOVES),
            has_goal=True,
            num_words=3,
        )
        super().__init__(num_envs, spec, max_cycles, continuous_actions)


def _tag_entities(obstacles: int, hunters: int, good: int) -> tuple[Entities, ...]:
    """Returns the entities that a seat of simple_tag sees: obstacles, adversaries, and good agents with velocities."""
    first = 4 + 2 * obstacles
    places = first + 2 * hunters
    seen = tuple((at, at + 1, at + 2 * good, at + 2 * good + 1) for at in range(places, places + 2 * good, 2))
    return (
        Entities.in_a_row(4, obstacles, 2, PLACE),
        Entities.in_a_row(first, hunters, 2, PLACE),
        Entities(4, seen, PLACE),
    )


def _seat_names(role: str, count: int) -> tuple[Seat, ...]:
    return tuple(f"{role}_{i}" for i in range(count))


def _space(choices: int, continuous: bool) -> Space:
    if continuous:
        return Continuous((0.0,) * choices, (1.0,) * choices)
    return Discrete(choices)
