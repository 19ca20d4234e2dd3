"""MPE's four games: equal to the `mpe2` package, and cases by hand."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from palestra.envs.vector.mpe import SimpleAdversary, SimpleSpeakerListener, SimpleSpread, SimpleTag
from palestra.envs.vector_base import VectorEnv, VectorStep
from palestra.envs.vector_check import check_vector_env, random_actions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pygame, which mpe2 draws with
    from mpe2 import (  # type: ignore[import-untyped]
        simple_adversary_v3,
        simple_speaker_listener_v4,
        simple_spread_v3,
        simple_tag_v3,
    )

SEEDS = np.arange(4) * 31 + 5
GAMES = [SimpleSpread, SimpleAdversary, SimpleTag, SimpleSpeakerListener]
PAIRS = [
    pytest.param(SimpleSpread, {}, simple_spread_v3, {}, id="spread"),
    pytest.param(
        SimpleSpread,
        {"agents": 5, "local_ratio": 0.3, "max_cycles": 13},
        simple_spread_v3,
        {"N": 5, "local_ratio": 0.3, "max_cycles": 13},
        id="spread-5",
    ),
    pytest.param(
        SimpleSpread, {"agents": 1, "max_cycles": 4}, simple_spread_v3, {"N": 1, "max_cycles": 4}, id="spread-1"
    ),
    pytest.param(SimpleAdversary, {}, simple_adversary_v3, {}, id="adversary"),
    pytest.param(
        SimpleAdversary,
        {"agents": 4, "max_cycles": 11},
        simple_adversary_v3,
        {"N": 4, "max_cycles": 11},
        id="adversary-4",
    ),
    pytest.param(SimpleTag, {}, simple_tag_v3, {}, id="tag"),
    pytest.param(
        SimpleTag,
        {"num_good": 3, "num_adversaries": 2, "num_obstacles": 3, "max_cycles": 12},
        simple_tag_v3,
        {"num_good": 3, "num_adversaries": 2, "num_obstacles": 3, "max_cycles": 12},
        id="tag-5",
    ),
    pytest.param(SimpleSpeakerListener, {}, simple_speaker_listener_v4, {}, id="speaker"),
    pytest.param(
        SimpleSpeakerListener, {"max_cycles": 9}, simple_speaker_listener_v4, {"max_cycles": 9}, id="speaker-short"
    ),
]


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.few(4)
def test_env_passes_the_vector_env_check(game: type[VectorEnv], continuous: bool) -> None:
    check_vector_env(lambda games: game(games, max_cycles=10, continuous_actions=continuous), steps=45)  # type: ignore[call-arg]


class Mpe2Game:
    """One game of mpe2 that resets itself after its end, as palestra's does."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self.env = module.parallel_env(**options)
        self.seats = list(self.env.possible_agents)

    def reset(self, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        return self.now(self.env.reset(None if seed is None else int(seed))[0])

    def now(self, views: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        width = max(len(view) for view in views.values())
        return np.stack([np.pad(views[s], (0, width - len(views[s]))) for s in self.seats]), self.env.state()

    def step(self, actions: list[Any]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, bool]:
        views, rewards, ends, cuts, _ = self.env.step(dict(zip(self.seats, actions, strict=True)))
        assert not any(ends.values()) and len(set(cuts.values())) == 1
        return self.now(views), np.array([rewards[s] for s in self.seats], np.float32), cuts[self.seats[0]]


def play_random(env: VectorEnv, steps: int) -> tuple[list[np.ndarray], list[VectorStep]]:
    """Random actions, each repeated for some steps so that agents move fast and far; all vector steps, the reset's
    first."""
    rng = np.random.default_rng(0)
    frames = [env.reset(SEEDS).copy()]
    actions: list[np.ndarray] = []
    for _ in range(steps):
        drawn = random_actions(env, frames[-1], rng)
        if actions:
            kept = rng.random(drawn.shape[:2]) < 0.7
            drawn[kept] = actions[-1][kept]
        actions.append(drawn)
        frames.append(env.step(drawn).copy())
    return actions, frames


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("game", "ours", "module", "options"), PAIRS)
@pytest.mark.few(8)
def test_games_equal_mpe2(
    game: Any, ours: dict[str, Any], module: Any, options: dict[str, Any], continuous: bool
) -> None:
    env = game(len(SEEDS), continuous_actions=continuous, **ours)
    theirs = Mpe2Game(module, {**options, "continuous_actions": continuous})
    assert list(env.seats) == theirs.seats
    for i, seat in enumerate(env.seats):
        assert env.observation_shapes[i] == theirs.env.observation_space(seat).shape
        space = theirs.env.action_space(seat)
        assert (len(env.action_spaces[i].low),) == space.shape if continuous else env.action_spaces[i].n == space.n
    actions, frames = play_random(env, 2 * env.max_cycles + 5)
    for b, seed in enumerate(SEEDS.tolist()):
        assert_equal_step(frames[0], b, *theirs.reset(seed), f"game {b}")
        for step, (action, frame) in enumerate(zip(actions, frames[1:], strict=True), 1):
            spaces = enumerate(env.action_spaces)
            given = [action[b, i, : len(s.low)] if continuous else action[b, i] for i, s in spaces]
            (views, state), rewards, cut = theirs.step(given)
            where = f"game {b}, step {step}"
            np.testing.assert_array_equal(frame.rewards[b], rewards, err_msg=where)
            assert frame.truncated[b] == cut == (step % env.max_cycles == 0) and not frame.terminated[b]
            if cut:
                assert frame.final_state is not None
                np.testing.assert_array_equal(frame.final_obs[b], views, err_msg=where)
                np.testing.assert_array_equal(frame.final_state[b], state, err_msg=where)
                views, state = theirs.reset(None)
            assert_equal_step(frame, b, views, state, where)


def assert_equal_step(frame: VectorStep, b: int, views: np.ndarray, state: np.ndarray, where: str) -> None:
    assert frame.state is not None
    np.testing.assert_array_equal(frame.obs[b], views, err_msg=where)
    np.testing.assert_array_equal(frame.state[b], state, err_msg=where)


def place_entities(env: Any, entities: list[tuple[float, float]], goal: int = 0) -> Any:
    """The env after a reset, with its agents and then its landmarks at these positions in every game."""
    env.reset(np.arange(env.num_envs))
    env.internal_state["pos"][:] = entities
    env.internal_state["goal"][:] = goal
    return env


def test_spread_rewards_distance_and_collisions() -> None:
    env = place_entities(SimpleSpread(2, agents=2, local_ratio=0.25), [(0, 0), (1, 0), (0, 1), (1, 2)])
    # 1 from (0, 0) to the first landmark, 2 from (1, 0) to the second; no agent moves in the first step.
    np.testing.assert_array_equal(env.step(np.zeros((2, 2), int)).rewards, np.full((2, 2), 0.75 * -3))
    env.internal_state["pos"][1] = [(0, 0), (0.25, 0), (0, 1), (0.25, 2)]
    env.internal_state["vel"][:] = 0
    np.testing.assert_array_equal(env.step(np.zeros((2, 2), int)).rewards[1], [0.75 * -3 - 0.25] * 2)


def test_overlapping_discs_repel() -> None:
    env = place_entities(SimpleSpread(1, agents=2), [(0, 0), (0.2, 0), (5, 5), (5, 5)])
    # Radii 0.15 overlap by 0.1: force 100 * 0.1 for 0.1 s, to the left and to the right.
    obs = env.step(np.zeros((1, 2), int)).obs[0]
    np.testing.assert_allclose(obs[:, :4], [[-1.0, 0, 0, 0], [1, 0, 0.2, 0]], atol=1e-6)
    # Forces act before motion: in the second step the discs still overlap, in the third they are 0.4 apart.
    obs = env.step(np.zeros((1, 2), int)).obs[0]
    np.testing.assert_allclose(obs[:, :4], [[-1.75, 0, -0.1, 0], [1.75, 0, 0.3, 0]], atol=1e-6)
    obs = env.step(np.zeros((1, 2), int)).obs[0]
    np.testing.assert_allclose(obs[:, :4], [[-1.3125, 0, -0.275, 0], [1.3125, 0, 0.475, 0]], atol=1e-6)


@pytest.mark.parametrize(("action", "velocity"), [(0, (0, 0)), (1, (-1, 0)), (2, (1, 0)), (3, (0, -1)), (4, (0, 1))])
def test_actions_accelerate_in_their_direction(action: int, velocity: tuple[float, float]) -> None:
    env = place_entities(SimpleSpread(1, agents=1), [(0, 0), (0, 0)])
    np.testing.assert_allclose(env.step(np.array([[action]])).obs[0, 0, :2], np.multiply(velocity, 0.5))
    env = place_entities(SimpleSpread(1, agents=1, continuous_actions=True), [(0, 0), (0, 0)])
    strength = np.eye(5)[[[action]]] * 0.5
    np.testing.assert_allclose(env.step(strength).obs[0, 0, :2], np.multiply(velocity, 0.25))


def test_adversary_rewards_depend_on_goal_distance() -> None:
    env = place_entities(SimpleAdversary(1), [(3, 4), (1, 0), (0, 2), (7, 7), (0, 0)], goal=1)
    frame = env.step(np.zeros((1, 3), int))
    np.testing.assert_array_equal(frame.rewards[0], [-5, 5 - 1, 5 - 1])
    np.testing.assert_array_equal(frame.obs[0, 0], [4, 3, -3, -4, -2, -4, -3, -2, 0, 0])
    np.testing.assert_array_equal(frame.obs[0, 1], [-1, 0, 6, 7, -1, 0, 2, 4, -1, 2])


def test_tag_rewards_touches_and_penalises_leaving() -> None:
    env = place_entities(SimpleTag(1, num_obstacles=0), [(0.5, 0.5), (0.5, 0.6), (-0.5, 0), (0.5, 0.55)])
    np.testing.assert_array_equal(env.step(np.zeros((1, 4), int)).rewards[0], [20, 20, 20, -20])
    for place, fine in [((0.89, 0), 0), ((0.95, 0), 0.5), ((0, -1.5), math.e), ((3, 3), 20)]:
        env = place_entities(SimpleTag(1, num_obstacles=0), [(9, 9), (-9, 9), (9, -9), place])
        np.testing.assert_allclose(env.step(np.zeros((1, 4), int)).rewards[0, 3], -fine, rtol=1e-6)


def test_tag_has_speed_limits() -> None:
    env = place_entities(SimpleTag(1, num_obstacles=0), [(0, 0), (0, 3), (0, 6), (0, 9)])
    for _ in range(20):
        obs = env.step(np.full((1, 4), 2)).obs
    np.testing.assert_allclose(obs[0, :, 0], [1, 1, 1, 1.3], rtol=1e-6)


def test_listener_observes_the_message_and_both_share_the_cost() -> None:
    env = place_entities(SimpleSpeakerListener(1), [(9, 9), (0, 0), (1, 1), (2, 2), (3, 4)], goal=2)
    frame = env.step(np.array([[1, 0]]))
    np.testing.assert_array_equal(frame.rewards[0], [-25, -25])
    np.testing.assert_array_equal(frame.obs[0, 0, :3], np.array([0.15, 0.15, 0.65], np.float32))
    np.testing.assert_array_equal(frame.obs[0, 1], [0, 0, 1, 1, 2, 2, 3, 4, 0, 1, 0])
    assert not env.reset(np.arange(1)).obs[0, 1, -3:].any()


def test_out_of_range_actions_are_clipped_or_ignored() -> None:
    env = place_entities(SimpleSpeakerListener(1), [(9, 9), (0, 0), (1, 1), (2, 2), (3, 4)])
    for action in (-1, 5, 2**31 - 1, -(2**31)):
        obs = env.step(np.full((1, 2), action)).obs[0, 1]
        np.testing.assert_array_equal(obs[[0, 1, 8, 9, 10]], [0, 0, 1, 0, 0])
    env = place_entities(SimpleSpeakerListener(1, continuous_actions=True), [(9, 9), (0, 0), (1, 1), (2, 2), (3, 4)])
    strange = np.array([[[7, -7, np.nan, 0, 0], [0, np.nan, 9, -3, np.inf]]])
    np.testing.assert_array_equal(env.step(strange).obs[0, 1, [0, 1, 8, 9, 10]], [0.5, 0.5, 1, 0, 0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SimpleSpread(agents=0), "agents: 0 is too small"),
        (lambda: SimpleSpread(local_ratio=1.5), "local_ratio is 1.5"),
        (lambda: SimpleSpread(0), "num_envs: 0 is too small"),
        (lambda: SimpleAdversary(agents=0), "agents: 0 is too small"),
        (lambda: SimpleTag(num_good=0), "num_good: 0 is too small"),
        (lambda: SimpleTag(num_adversaries=0), "num_adversaries: 0 is too small"),
        (lambda: SimpleTag(num_obstacles=-1), "num_obstacles: -1 is too small"),
        (lambda: SimpleSpeakerListener(max_cycles=0), "max_cycles: 0 is too small"),
    ],
)
def test_invalid_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
