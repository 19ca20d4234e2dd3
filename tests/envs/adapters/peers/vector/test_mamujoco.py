"""Multi-agent MuJoCo of Gymnasium-Robotics through the PettingZoo adapter: every step equals the package's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    from gymnasium_robotics import mamujoco_v1

    from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
    from palestra.envs.batch.sync_vector import episode_seed
    from palestra.envs.vector_base import Continuous
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

FACTORY = "gymnasium_robotics.envs.multiagent_mujoco.mamujoco_v1:parallel_env"
# The multi-agent scenarios, each with its factorisation into the fewest agents.
SCENARIOS = {
    "Ant": "2x4",
    "HalfCheetah": "2x3",
    "Hopper": "3x1",
    "Humanoid": "9|8",
    "HumanoidStandup": "9|8",
    "ManySegmentAnt": "2x1",
    "ManySegmentSwimmer": "2x1",
    "Pusher": "3p",
    "Reacher": "2x1",
    "Swimmer": "2x1",
    "Walker2d": "2x3",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo writes its warnings to a file in the working directory."""
    monkeypatch.chdir(tmp_path)


def options(scenario: str, steps: int) -> dict[str, Any]:
    return {"scenario": scenario, "agent_conf": SCENARIOS[scenario], "agent_obsk": 1, "max_episode_steps": steps}


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_every_step_equals_the_package(scenario: str) -> None:
    """Two games beside two of the package, into their second episodes; the state equals its `state()`."""
    given = options(scenario, 20)
    env, others = PettingZooEnv(2, env=FACTORY, options=given, state=True), [parallel(given) for _ in range(2)]
    assert env.seats == tuple(others[0].possible_agents) and isinstance(env.action_spaces[0], Continuous)
    frame, rng = env.reset(np.array([3, 4])), np.random.default_rng(0)
    seen, played = [other.reset(seed=3 + b)[0] for b, other in enumerate(others)], [0, 0]
    for _ in range(30):
        for b, other in enumerate(others):
            assert frame.state is not None and np.array_equal(frame.state[b], np.float32(other.state()))
            assert np.array_equal(ordered(scenario, frame.obs[b]), ordered(scenario, rows(env, seen[b])))
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        for b, other in enumerate(others):
            sizes = {seat: other.action_space(seat).shape[0] for seat in env.seats}
            moves = {seat: actions[b, n, : sizes[seat]] for n, seat in enumerate(env.seats)}
            seen[b], rewards, terminated, truncated, _ = other.step(moves)
            assert frame.rewards[b].tolist() == [np.float32(rewards[seat]) for seat in env.seats]
            ends = any(terminated.values()), any(truncated.values()) and not any(terminated.values())
            assert (bool(frame.terminated[b]), bool(frame.truncated[b])) == ends
            if any(ends):
                played[b] += 1
                assert np.array_equal(ordered(scenario, frame.final_obs[b]), ordered(scenario, rows(env, seen[b])))
                seen[b] = other.reset(seed=episode_seed(3 + b, played[b]))[0]
    assert min(played) >= 1


def parallel(given: dict[str, Any]) -> Any:
    return mamujoco_v1.parallel_env(**given)


def rows(env: PettingZooEnv, seen: dict[str, np.ndarray]) -> np.ndarray:
    """The observations of all agents [N, size], padded with zeros."""
    size = max(shape[0] for shape in env.observation_shapes)
    return np.stack([np.pad(np.float32(seen[seat]), (0, size - len(seen[seat]))) for seat in env.seats])


def ordered(scenario: str, obs: np.ndarray) -> np.ndarray:
    """Observations, sorted for Pusher: the package orders joints by name, and three joints of Pusher have the same
    name, so the order differs between instances."""
    return np.sort(obs) if scenario == "Pusher" else obs


def test_coupled_half_cheetah_fails_in_the_package() -> None:
    """It reads MuJoCo's `ten_J` as a dense matrix, which it no longer is."""
    with pytest.raises(IndexError, match="invalid index to scalar variable"):
        parallel({"scenario": "CoupledHalfCheetah", "agent_conf": "1p1", "agent_obsk": 1})


def test_half_cheetah_passes_the_vector_env_check() -> None:
    given = options("HalfCheetah", 12)
    check_vector_env(lambda games: PettingZooEnv(games, env=FACTORY, options=given), num_envs=2, steps=25)
