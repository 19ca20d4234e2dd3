"""Seats of one env with different kinds of actions and observations."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from helpers.mixed_envs import SIDE, Band, Hunt

from palestra.envs.adapters.gymnasium import games_of as gymnasium_games
from palestra.envs.adapters.pettingzoo.export import to_aec, to_parallel
from palestra.envs.adapters.pettingzoo.games import games_of
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import VectorEnvSpec, clip_actions
from palestra.envs.vector_base import Continuous, Discrete, Entities, MultiDiscrete, zero_actions
from palestra.envs.vector_check import check_vector_env, random_actions
from palestra.vector.build.envs import make_vector_env
from palestra.vector.nets.entities import entity_layout
from palestra.vector.rollouts.replay_recorder import ReplayRecorder

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the package's tests import its old envs
    from pettingzoo.test import parallel_api_test

KINDS: dict[str, dict[str, Any]] = {
    "choices beside numbers": {},
    "choices beside several choices": {"velocity": "multi", "sizes": True},
    "masked choices beside numbers": {"masks": True, "sizes": True},
    "an image beside rows": {"seen": "picture"},
    "dictionaries of an image and a row": {"seen": "dict", "masks": True},
    "images of two shapes and dtypes": {"seen": "pictures"},
    "rows of two sizes": {"seen": "sizes"},
}


def hunts(num_envs: int, **options: Any) -> PackageVectorEnv:
    return games_of(lambda: Hunt(**options), num_envs, "hunt")


@pytest.mark.parametrize("name", KINDS)
def test_env_passes_the_vector_env_check(name: str) -> None:
    check_vector_env(lambda num_envs: hunts(num_envs, **KINDS[name]), num_envs=3, steps=30)


def test_a_turn_based_env_passes_the_vector_env_check() -> None:
    def turns() -> pettingzoo.AECEnv:
        return to_aec(lambda num_envs: hunts(num_envs, masks=True))

    check_vector_env(lambda num_envs: games_of(turns, num_envs, "hunt"), num_envs=2, steps=60)


def test_choices_that_floats_would_round_are_refused() -> None:
    number = Continuous((0.0,), (1.0,))
    VectorEnvSpec(("a", "b"), ((1,), (1,)), (Discrete(2**24), number))
    with pytest.raises(ValueError, match=r"a seat has 16,777,217 choices and another gives numbers: .* MultiDiscrete"):
        VectorEnvSpec(("a", "b"), ((1,), (1,)), (Discrete(2**24 + 1), number))


def test_entities_beside_images_are_refused() -> None:
    env = Band(1)
    env.observation_entities = ((Entities.in_a_row(0, 1, 2),),) * 3
    with pytest.raises(ValueError, match='in env "band" they begin with images: use encoder: flat'):
        entity_layout(env, [2])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (((), (), ((40, 40, 1),)), r"of seat slide are \(\(40, 40, 1\),\), and its observations \(1297,\): give"),
        (((), (), ((-36, 36, 1),)), "of seat slide are"),
        (((), (), ((36, 36),)), "of seat slide are"),
        (((), (), (36, 36, 1)), "of seat slide are"),
        ([[], [], [[36, 36, 1]]], "of seat drum are"),
        ((((36, 36, 1),), (), ()), "of seat drum are"),
        (((), ((36, 36, 1),)), "are of 2 seats, and observation_shapes of 3: give each seat a tuple"),
    ],
    ids=str,
)
def test_images_that_observations_do_not_begin_with_are_refused(
    monkeypatch: pytest.MonkeyPatch, images: Any, message: str
) -> None:
    monkeypatch.setattr(Band, "observation_images", images)
    with pytest.raises(ValueError, match=f"env band: observation_images {message}"):
        make_vector_env({"type": "helpers.mixed_envs:Band"})
    with pytest.raises(ValueError, match=message):
        check_vector_env(Band, num_envs=3, steps=20)


def test_images_beside_rows_of_ones_own_env_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Band, "observation_shapes", ((2,), (2,), (SIDE, SIDE, 1)))
    monkeypatch.setattr(Band, "__init__", lambda self, num_envs=1: None)
    with pytest.raises(ValueError, match=r"env band: observations of shapes .* do not fit in one array"):
        make_vector_env({"type": "helpers.mixed_envs:Band"})


def test_an_env_of_ones_own_passes_the_vector_env_check() -> None:
    check_vector_env(Band, num_envs=3, steps=20)


def test_actions_of_several_kinds_share_one_array() -> None:
    choices = (Discrete(5), Discrete(3))
    numbers = Continuous((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
    for action_spaces, shape, dtype in (
        (choices, (4, 2), np.int32),
        ((*choices, numbers), (4, 3, 3), np.float32),
        ((Discrete(5), MultiDiscrete((2, 3))), (4, 2, 2), np.int32),
        ((Discrete(5), Continuous((0.0,), (1.0,))), (4, 2, 1), np.float32),
    ):
        actions = zero_actions(action_spaces, (4,))
        assert actions.shape == shape and actions.dtype == dtype


def test_actions_of_several_kinds_are_clipped_to_their_spaces() -> None:
    action_spaces = (Discrete(3), Continuous((-1.0, -1.0), (1.0, 1.0)), Discrete(2))
    actions = np.array([[[7, 0], [0.5, -4], [0, 0]], [[1, 0], [np.nan, 2], [1, 0]]], np.float32)
    clipped = clip_actions(action_spaces, actions)
    assert clipped.tolist() == [[[2, 0], [0.5, -1], [0, 0]], [[1, 0], [0, 1], [1, 0]]] and clipped.dtype == np.float32
    action_mask = np.ones((2, 3, 3), bool)
    action_mask[:, 0] = [[True, True, False], [False, False, True]]
    action_mask[:, 2] = [False, True, False]
    legal = clip_actions(action_spaces, actions, action_mask)
    assert legal.tolist() == [[[0, 0], [0.5, -1], [1, 0]], [[2, 0], [0, 1], [1, 0]]]


def test_random_actions_of_several_kinds_are_legal() -> None:
    """`Hunt` and `Band` refuse an action outside its space; masks are those of the hunters."""
    env = hunts(4, masks=True, sizes=True)
    step = env.reset(np.arange(4))
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(40):
        assert step.action_mask is not None
        assert step.action_mask[:, 2].all() and not step.action_mask[:, 1, 3:].any()
        actions = random_actions(env, step, rng)
        for seat in (0, 1):
            chosen = actions[:, seat, 0].astype(int)
            assert step.action_mask[np.arange(4), seat, chosen].all() and not actions[:, seat, 1:].any()
        drawn.append(actions)
        step = env.step(actions)
    played = np.concatenate(drawn)
    assert set(played[:, 0, 0]) == set(range(5)) and set(played[:, 1, 0]) == set(range(3))
    assert played[:, 2].min() < -0.9 and played[:, 2].max() > 0.9


def test_images_come_first_in_rows() -> None:
    """Bytes divided by 255, floats as they are, channels last; then the other numbers of a dictionary."""
    game = Hunt(seen="dict")
    seen = game.reset(seed=3)[0]
    env = hunts(1, seen="dict")
    size = SIDE * SIDE * 3
    assert env.observation_images == (((SIDE, SIDE, 3),),) * 3 and env.observation_shapes == ((size + 2,),) * 3
    obs = env.reset(np.array([3])).obs
    assert obs.dtype == np.float32
    for seat, agent in enumerate(game.possible_agents):
        assert np.allclose(obs[0, seat, :size].reshape(SIDE, SIDE, 3), seen[agent]["camera"] / 255, atol=1e-6)
        assert np.array_equal(obs[0, seat, size:], seen[agent]["where"])
    game = Hunt(seen="pictures")
    seen = game.reset(seed=3)[0]
    env = hunts(1, seen="pictures")
    assert env.observation_images == (((SIDE + 4, SIDE, 2),),) * 2 + (((SIDE, SIDE, 3),),)
    obs = env.reset(np.array([3])).obs[0]
    hunter = obs[0, : (SIDE + 4) * SIDE * 2].reshape(SIDE + 4, SIDE, 2)
    assert np.array_equal(hunter, seen["hunter_0"].transpose(1, 2, 0))
    assert np.allclose(obs[2, :size].reshape(SIDE, SIDE, 3), seen["prey"] / 255, atol=1e-6) and not obs[2, size:].any()


def test_images_of_one_shape_stay_images() -> None:
    env = gymnasium_games(TwoCameras, 1, "cameras")
    assert env.observation_shapes == ((SIDE, SIDE, 3),) * 2 and env.observation_images == ()
    assert env.reset(np.zeros(1, np.int64)).obs.dtype == np.uint8


def test_images_of_bytes_and_of_floats_have_one_scale() -> None:
    """Of one shape they fit in one array, but bytes would be 255 times as large."""
    env = gymnasium_games(lambda: TwoCameras(floats=True), 1, "cameras")
    obs = env.reset(np.zeros(1, np.int64)).obs[0]
    assert env.observation_shapes == ((SIDE * SIDE * 3,),) * 2
    assert obs[0].max() == obs[1].max() == 1


class TwoCameras(gymnasium.Env[Any, Any]):
    """The first seat chooses, the second gives a number; both see white images."""

    def __init__(self, floats: bool = False, wrong: bool = False) -> None:
        shape = (SIDE, SIDE, 3)
        bytes_ = spaces.Box(0, 255, shape, np.uint8)
        second = spaces.Box(0, 1, shape, np.float32) if floats else bytes_
        self.observation_space = spaces.Tuple([bytes_, second])
        self.action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-2, 2, (1,))])
        self.images = (
            np.full(shape, 300 if wrong else 255, np.int16 if wrong else np.uint8),
            np.full(shape, 255, np.uint8),
        )
        if floats:
            self.images = self.images[0], np.ones(shape, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.images, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.images, [float(action[0]), float(action[1][0])], False, self.steps == 3, {}


def test_parts_of_a_tuple_of_actions_may_be_of_several_kinds() -> None:
    env = gymnasium_games(TwoCameras, 2, "cameras")
    env.reset(np.arange(2))
    rewards = env.step(np.array([[[2], [0.5]], [[0], [9]]], np.float32)).rewards
    assert rewards.tolist() == [[3, 0.5], [1, 2]]


def test_pixels_that_are_no_bytes_are_refused_beside_other_images() -> None:
    env = gymnasium_games(lambda: TwoCameras(floats=True, wrong=True), 1, "cameras")
    with pytest.raises(ValueError, match=r'seat "agent_0" sees pixels from 300 to 300 of int16, .* says bytes'):
        env.reset(np.zeros(1, np.int64))


def test_a_mask_of_numbers_is_refused() -> None:
    class Masked(Hunt):
        def observation_space(self, agent: str) -> spaces.Space[Any]:
            plain = self._plain_space(agent)
            return spaces.Dict({"observation": plain, "action_mask": spaces.Box(0, 1, (5,), np.int8)})

    with pytest.raises(ValueError, match="gives an action_mask, which is only used for one Discrete action of a seat"):
        games_of(Masked, 1, "masked")


@pytest.mark.parametrize("options", [{}, {"masks": True}, {"velocity": "multi"}, {"seen": "dict"}])
def test_a_mixed_env_is_exported_to_pettingzoo(options: dict[str, Any]) -> None:
    """The game that comes back is the one that went in."""
    exported = to_parallel(lambda num_envs: hunts(num_envs, **options))
    parallel_api_test(exported, num_cycles=30)
    game = Hunt(**options)
    game.reset(seed=5)
    seen = exported.reset(seed=5)[0]
    rng = np.random.default_rng(5)
    for agent in game.possible_agents:
        assert exported.action_space(agent) == game.action_space(agent)
        exported.action_space(agent).seed(int(rng.integers(99)))
    for _ in range(12):
        actions = {}
        for agent, observation in seen.items():
            mask = observation["action_mask"] if isinstance(observation, dict) else None
            actions[agent] = exported.action_space(agent).sample(mask)
        seen, rewards, *_ = exported.step(actions)
        assert rewards == pytest.approx(game.step(actions)[1], abs=1e-6)


def test_replays_have_the_actions_of_each_seat_without_padding() -> None:
    env = ReplayRecorder(hunts(2, masks=True), 1)
    step = env.reset(np.arange(2))
    env.step(random_actions(env, step, np.random.default_rng(1)))
    assert [len(action) for action in env.games[0].frames[0].actions] == [1, 1, 2]


@pytest.mark.slow
def test_games_of_several_kinds_in_processes_equal_those_in_one() -> None:
    config = {"type": "pettingzoo", "env": "helpers.mixed_envs:hunt", "options": {"masks": True}, "num_envs": 3}
    alone = make_vector_env(config)
    spread = make_vector_env(config | {"num_processes": 2})
    try:
        step = alone.reset(np.arange(3))
        other = spread.reset(np.arange(3))
        rng = np.random.default_rng(2)
        for _ in range(15):
            actions = random_actions(alone, step, rng)
            step = alone.step(actions)
            other = spread.step(actions)
            assert np.array_equal(step.obs, other.obs) and np.array_equal(step.rewards, other.rewards)
    finally:
        alone.close()
        spread.close()
