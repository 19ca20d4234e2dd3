"""PettingZoo's envs equal PettingZoo's own, and exported envs of palestra pass PettingZoo's tests."""

import importlib
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers.toy_games import Counting

from palestra.envs.adapters.pettingzoo.export import to_aec, to_parallel
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv, load_game, strip_check_wrappers
from palestra.envs.batch.sync_vector import SingleStep, SyncVectorEnv, VectorEnvSpec, episode_seed
from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.matrix import MatrixGame
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, VectorEnv
from palestra.envs.vector_check import check_vector_env, random_actions

# the package imports itself under its old name
with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test
    from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, TerminateIllegalWrapper

SPREAD = "mpe2.simple_spread_v3:parallel_env"
TALK = "mpe2.simple_speaker_listener_v4:parallel_env"
TAG = "mpe2.simple_tag_v3:env"
FOUR = "pettingzoo.classic.connect_four.connect_four:env"
ROCK = "pettingzoo.classic.rps.rps:env"
KNIGHTS = "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies:parallel_env"
PONG = "pettingzoo.butterfly.cooperative_pong.cooperative_pong:parallel_env"


class Strict(AssertOutOfBoundsWrapper):
    pass


def make_pettingzoo(path: str, options: dict[str, Any] | None = None) -> Any:
    module, _, factory = path.partition(":")
    return getattr(importlib.import_module(module), factory)(**(options or {}))


@pytest.mark.parametrize(
    ("env", "options", "steps"),
    [
        (SPREAD, {"max_cycles": 20}, 60),
        (SPREAD, {"max_cycles": 20, "continuous_actions": True}, 60),
        (TALK, {"max_cycles": 20}, 60),
        (TAG, {"max_cycles": 5}, 60),
        (FOUR, {}, 100),
        (ROCK, {"max_cycles": 15}, 60),
    ],
)
@pytest.mark.few(3)
def test_envs_pass_the_vector_env_check(env: str, options: dict[str, Any], steps: int) -> None:
    check_vector_env(lambda games: PettingZooEnv(games, env=env, options=options), num_envs=3, steps=steps)


def test_subprocess_games_are_the_same() -> None:
    here, there = PettingZooEnv(3, env=FOUR), PettingZooEnv(3, env=FOUR, num_processes=2)
    rng, frame = np.random.default_rng(0), here.reset(np.arange(3))
    there.reset(np.arange(3))
    for _ in range(60):
        actions = random_actions(here, frame, rng)
        frame, other = here.step(actions), there.step(actions)
        assert np.array_equal(frame.obs, other.obs) and np.array_equal(frame.rewards, other.rewards)
        assert np.array_equal(frame.done, other.done)
    here.close()
    there.close()


@pytest.mark.parametrize(("path", "options"), [(TALK, {"max_cycles": 25}), (KNIGHTS, {"max_cycles": 500})])
def test_parallel_envs_equal_pettingzoo(path: str, options: dict[str, Any]) -> None:
    """Agents that end (knights die) no longer act; state, observations and rewards equal PettingZoo's."""
    env = PettingZooEnv(1, env=path, options=options, state=path == TALK)  # the other's state is a picture
    other = make_pettingzoo(path, options)
    assert env.seats == tuple(other.possible_agents)
    rng, played, deaths = np.random.default_rng(0), 0, 0
    frame, (seen, _) = env.reset(np.array([5])), other.reset(seed=5)
    for _ in range(700):
        actions = random_actions(env, frame, rng)
        live = list(other.agents)
        deaths += len(live) < len(env.seats)
        assert frame.agent_mask[0].tolist() == [seat in live for seat in env.seats]
        given = {seat: int(actions[0, n]) for n, seat in enumerate(env.seats) if seat in live}
        seen, rewards, _, truncated, _ = other.step(given)
        frame = env.step(actions)
        assert frame.rewards[0].tolist() == [np.float32(rewards.get(seat, 0)) for seat in env.seats]
        over = not other.agents
        assert frame.done[0] == over
        shown = frame.final_obs if over else frame.obs
        for n, seat in enumerate(env.seats):
            if seat in seen:
                assert np.array_equal(shown[0, n, : env.observation_shapes[n][0]], np.float32(seen[seat]).reshape(-1))
        if env.state_size:
            state = frame.final_state if over else frame.state
            assert state is not None and np.array_equal(state[0], np.float32(other.state()))
        if over:
            assert frame.truncated[0] == any(truncated.values()) != frame.terminated[0]
            played += 1
            other.reset(seed=episode_seed(5, played))
    assert played > 1 and (deaths > 0) == (path == KNIGHTS)


@pytest.mark.parametrize(
    ("path", "options", "seeds"),
    [
        (FOUR, {}, range(5)),
        (ROCK, {"max_cycles": 15}, range(3)),
        (TAG, {"max_cycles": 10}, range(3)),
        (KNIGHTS.replace("parallel_", ""), {"max_cycles": 400}, [1]),
    ],
)
def test_turn_based_returns_equal_pettingzoo(path: str, options: dict[str, Any], seeds: Any) -> None:
    """Games played by PettingZoo's own loop (agent_iter and last), compared with the adapter with the same actions; in
    knights an archer dies long before the game ends."""
    for seed in seeds:
        other, rng = make_pettingzoo(path, options), np.random.default_rng(seed)
        other.reset(seed=seed)
        moves: list[tuple[str, int]] = []
        expected = dict.fromkeys(other.possible_agents, 0.0)
        for agent in other.agent_iter():
            seen, reward, terminated, truncated, _ = other.last()
            expected[agent] += reward
            over = terminated or truncated
            mask = seen["action_mask"] if isinstance(seen, dict) else np.ones(other.action_space(agent).n)
            move = None if over else int(rng.choice(np.flatnonzero(mask)))
            moves += [] if move is None else [(agent, move)]
            other.step(move)
        env = PettingZooEnv(1, env=path, options=options)
        frame, returns = env.reset(np.array([seed])), np.zeros(len(env.seats))
        for number, (agent, move) in enumerate(moves, 1):
            assert frame.agent_mask[0].tolist() == [seat == agent for seat in env.seats]
            frame = env.step(np.full((1, len(env.seats)), move, np.int32))
            returns += frame.rewards[0]
            assert frame.done[0] == (number == len(moves))
        assert np.allclose(returns, [expected[seat] for seat in env.seats], rtol=1e-5)
        turns = Counter(agent for agent, _ in moves)
        assert (min(turns.values()) < max(turns.values()) - 10) == path.startswith(KNIGHTS[:20])


@pytest.mark.parametrize("factory", ["parting", "parting_turns"])
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("flags", ["terminated", "truncated", "terminated truncated"])
def test_agents_terminate_separately(factory: str, dies: bool, flags: str) -> None:
    """Agent "early" ends with its first action, "late" 4 steps later; an agent that is both terminated and truncated
    has terminated."""
    options = {"flags": flags, "dies": dies, "length": 4}
    env, died = PettingZooEnv(2, env=f"helpers.mortal_games:{factory}", options=options), "terminated" in flags
    steps = 4 + (factory == "parting_turns")
    for _ in range(2):  # the second time after the end of a game
        env.reset(np.arange(2))
        for time in range(1, 2 * steps + 1):
            frame, last = env.step(np.zeros((2, 2), np.int32)), time % steps == 0
            assert frame.rewards.tolist() == [[float(time % steps == 1), 0]] * 2
            assert frame.done.tolist() == [last] * 2 and (last or frame.agent_mask.tolist() == [[False, True]] * 2)
            assert frame.terminated.tolist() == [last and died and dies] * 2
            assert frame.truncated.tolist() == [last and not (died and dies)] * 2
            assert frame.seat_terminated is not None
            assert frame.seat_terminated.tolist() == [[died, last and dies]] * 2
    env.close()


def test_unsupported_action_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="gives an action_mask, which is only used for one Discrete action of a seat"):
        PettingZooEnv(1, env="helpers.mortal_games:parting", options={"box": True, "masks": True})


def test_illegal_move_terminates_the_game() -> None:
    """PettingZoo's `TerminateIllegalWrapper` sets both flags of every agent."""
    env = PettingZooEnv(1, env=FOUR)
    env.reset(np.array([0]))
    game = env.inner.single_envs[0]  # type: ignore[union-attr]
    for _ in range(6):
        game.step(np.zeros(2, np.int32))
    moment = game.step(np.zeros(2, np.int32))  # a full column
    assert moment.terminated and not moment.truncated and moment.rewards == [-1, 0]


def test_connect_four_win_by_hand() -> None:
    """The first player puts four in column 0, the second in column 1; a full column is illegal."""
    env = PettingZooEnv(1, env=FOUR)
    frame = env.reset(np.array([0]))
    assert env.observation_shapes == ((84,), (84,)) and env.action_spaces == (Discrete(7), Discrete(7))
    for turn in range(7):
        assert frame.agent_mask[0].tolist() == [turn % 2 == 0, turn % 2 == 1] and frame.action_mask is not None
        assert frame.action_mask[0, turn % 2].all() and not frame.rewards.any()
        frame = env.step(np.full((1, 2), turn % 2, np.int32))
    assert frame.rewards.tolist() == [[1, -1]] and frame.terminated[0] and not frame.truncated[0]
    mine = frame.final_obs[0, 0].reshape(6, 7, 2)
    assert mine[2:, 0, 0].all() and mine[:, :, 0].sum() == 4 and mine[3:, 1, 1].all() and mine[:, :, 1].sum() == 3
    assert frame.agent_mask[0].tolist() == [True, False] and not frame.obs.any()
    for _ in range(6):
        frame = env.step(np.full((1, 2), 3, np.int32))
    assert frame.action_mask is not None and frame.action_mask[0, 0].tolist() == [True] * 3 + [False] + [True] * 3
    frame = env.step(np.full((1, 2), 3, np.int32))  # illegal: the first legal action is used instead
    assert frame.obs[0, 1].reshape(6, 7, 2)[5, 0, 1] == 1


def test_image_observations_stay_images() -> None:
    env = PettingZooEnv(1, env=PONG, options={"max_cycles": 3, "render_mode": "rgb_array"})
    frame = env.reset(np.array([0]))
    assert env.observation_shapes == ((280, 480, 3),) * 2 and frame.obs.dtype == np.uint8 and frame.obs.max() > 100
    env.close()


def test_registered_envs_are_made_by_name() -> None:
    options = {"env_type": "parallel", "id": "classic/rps-v2", "max_cycles": 7}
    env = PettingZooEnv(1, env="pettingzoo:make", options=options)
    env.reset(np.array([0]))
    frame = env.step(np.array([[1, 2]], np.int32))  # paper against scissors
    assert frame.rewards.tolist() == [[-1, 1]] and frame.agent_mask.all()


def test_checking_wrappers_are_removed_and_others_kept() -> None:
    """Connect four is wrapped, from outside in, in OrderEnforcing, AssertOutOfBounds and TerminateIllegal."""
    assert type(load_game(FOUR).env) is TerminateIllegalWrapper
    turns = load_game(SPREAD).env.aec_env
    assert turns is turns.unwrapped and make_pettingzoo(SPREAD).aec_env is not make_pettingzoo(SPREAD).aec_env.unwrapped
    assert (
        strip_check_wrappers(Strict(make_pettingzoo(FOUR))).__class__ is Strict
    )  # a user's wrapper, derived from one that only checks


def test_observations_are_requested_once_per_step() -> None:
    """PettingZoo's own wrapper requests them twice."""
    asked = []
    for env in (load_game(SPREAD).env, make_pettingzoo(SPREAD)):
        env.reset(seed=0)
        world, count = env.unwrapped, Counter()
        look = world.observe
        world.observe = lambda agent, look=look, count=count: (count.update([agent]), look(agent))[1]
        env.step(dict.fromkeys(env.agents, 1))
        asked.append(set(count.values()))
    assert asked == [{1}, {2}]


def test_env_that_skips_turns_is_refused_as_parallel() -> None:
    env = load_game(SPREAD).env
    env.reset(seed=0)
    env.unwrapped.agent_selection = "agent_1"
    with pytest.raises(ValueError, match="continues with agent_1, not agent_0: play its turn-based form"):
        env.step(dict.fromkeys(env.agents, 1))


def failing_env() -> None:
    """A factory that itself fails."""
    1 / 0  # noqa: B018


def test_invalid_envs_are_refused() -> None:
    with pytest.raises(ValueError, match=r'"mpe2.simple_spread_v9:env" cannot be made.*No module'):
        PettingZooEnv(1, env="mpe2.simple_spread_v9:env")
    with pytest.raises(ValueError, match=r"cannot be made with {'agents': 2}.*unexpected keyword"):
        PettingZooEnv(1, env=SPREAD, options={"agents": 2})
    with pytest.raises(ValueError, match=r"cannot be made with no options: ZeroDivisionError: division by zero"):
        PettingZooEnv(1, env=f"{__name__}:failing_env")
    with pytest.raises(ValueError, match=r'is "module:function", such as "mpe2\.simple_spread_v3:parallel_env"'):
        PettingZooEnv(1, env="mpe2.simple_spread_v3")
    with pytest.raises(ValueError, match="neither a ParallelEnv nor an AECEnv"):
        PettingZooEnv(1, env="collections:OrderedDict")
    with pytest.raises(ValueError, match="possible_agents"):
        PettingZooEnv(1, env="pettingzoo.test.example_envs.generated_agents_env_v0:env")


# ---- export to PettingZoo


class Sizes(Counting):
    """All seats always act; the second seat has another number of choices or of values."""

    def __init__(self, spec: VectorEnvSpec) -> None:
        self.spec = spec

    def moment(self) -> SingleStep:
        return SingleStep([np.array([self.time, 1.0])] * 2)

    def step(self, actions: np.ndarray) -> SingleStep:
        self.actions = actions
        moment = super().step(actions[:, 0])
        moment.success = False
        return moment


def counting(games: int) -> VectorEnv:
    return SyncVectorEnv(Counting, games)


def four(games: int) -> VectorEnv:
    return PettingZooEnv(games, env=FOUR)


def spread(games: int) -> VectorEnv:
    return PettingZooEnv(games, env=SPREAD, options={"continuous_actions": True, "max_cycles": 20})


def matrix(games: int) -> VectorEnv:
    return MatrixGame(games, rounds=6)


ADVICE = [  # PettingZoo's advice about observations and names, which palestra's envs need not follow
    "ignore:Observations? .*:UserWarning",
    "ignore:.*recommend agents to be named:UserWarning",
    "ignore:Agents? .*:UserWarning",
    "ignore:Agent's (min|max)imum observation space:UserWarning",
    "ignore:Action mask numpy array is all zeros:UserWarning",
    "ignore:Environment has not defined a render:UserWarning",
]


def advised(test: Any) -> Any:
    for advice in ADVICE:
        test = pytest.mark.filterwarnings(advice)(test)
    return test


@advised
@pytest.mark.parametrize(
    "make", [counting, *(pytest.param(each, marks=pytest.mark.slow) for each in (four, spread, matrix)), KuhnPoker]
)
def test_exported_aec_envs_pass_pettingzoo_tests(make: Any) -> None:
    api_test(to_aec(make), num_cycles=50)
    seed_test(lambda: to_aec(make), num_cycles=20)


@advised
@pytest.mark.parametrize("make", [counting, spread, matrix])
def test_exported_parallel_envs_pass_pettingzoo_tests(make: Any) -> None:
    parallel_api_test(to_parallel(make), num_cycles=50)
    parallel_seed_test(lambda: to_parallel(make), num_cycles=20)


def test_exported_parallel_step_by_hand() -> None:
    env = to_parallel(counting)
    seen, _ = env.reset(seed=6)
    assert seen["wide"]["observation"].tolist() == [6, 0, 0] and seen["long"]["observation"].tolist() == [6, 0]
    assert seen["wide"]["action_mask"].tolist() == [1, 1, 1, 1] and env.state().tolist() == [0]
    for time in range(1, 7):
        seen, rewards, terminated, truncated, infos = env.step({"wide": 1, "long": 2})
        assert seen["wide"]["observation"].tolist() == [6, time, 3 * time]
        assert rewards == {"wide": 1, "long": 2 * (time <= 3)} and not any(truncated.values())
        assert list(terminated.values()) == [time == 6] * 2
    assert env.agents == [] and env.state().tolist() == [18] and infos["long"] == {"is_success": True}
    env.close()


def test_reset_without_seed_follows_from_the_last_seed() -> None:
    def firsts(seed: int) -> list[float]:
        env = to_parallel(counting)
        env.reset(seed=seed)
        return [env.reset()[0]["wide"]["observation"][0] for _ in range(3)]

    assert firsts(1) == firsts(1) and len(set(firsts(1))) == 3 and firsts(1) != firsts(2)


def test_exported_aec_env_selects_acting_seats() -> None:
    """Seat "long" drops out after 3 steps; the rewards of a joint step are paid after its last seat has acted."""
    env, asked = to_aec(counting), []
    env.reset(seed=6)
    returns = {"wide": 0.0, "long": 0.0}
    for agent in env.agent_iter():
        asked.append(agent)
        _, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        env.step(None if terminated or truncated else 2)
    assert asked[:9] == ["wide", "long"] * 3 + ["wide"] * 3 and sorted(asked[9:]) == ["long", "wide"]
    assert returns == {"wide": 12, "long": 6}


@pytest.mark.parametrize(
    ("space", "other", "actions", "expected"),
    [
        (MultiDiscrete((3, 4)), MultiDiscrete((2,)), ([2, 3], [1]), [[2, 3], [1, 0]]),
        (Continuous((-1.0,), (1.0,)), Continuous((0.0, 0.0), (1.0, 1.0)), ([0.5], [1, 0.25]), [[0.5, 0], [1, 0.25]]),
    ],
)
def test_action_spaces_of_different_sizes_are_exported(space: Any, other: Any, actions: Any, expected: Any) -> None:
    spec = VectorEnvSpec(("a", "b"), ((2,), (2,)), (space, other))
    loop: list[SyncVectorEnv] = []

    def make(games: int) -> VectorEnv:
        loop.append(SyncVectorEnv(lambda: Sizes(spec), games))
        return loop[0]

    env = to_parallel(make)
    env.reset(seed=0)
    assert all(env.action_space(agent).contains(env.action_space(agent).sample()) for agent in env.agents)
    env.step(dict(zip(("a", "b"), map(np.array, actions), strict=True)))
    game = loop[0].single_envs[0]
    assert isinstance(game, Sizes) and game.actions.tolist() == expected


def test_missing_global_state_is_reported() -> None:
    env = to_parallel(four)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="no global state"):
        env.state()


def test_observations_are_not_overwritten_by_later_steps() -> None:
    env = to_parallel(counting)
    seen, _ = env.reset(seed=1)
    env.step({"wide": 0, "long": 0})
    assert seen["wide"]["observation"].tolist() == [1, 0, 0]
