"""Agents of PettingZoo's envs that return, join late, or are rewarded after truncation; observations of several parts;
global states."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.mortal_games import Parting, PartingTurns

from palestra.envs.adapters.pettingzoo.games import AECGame, ParallelGame
from palestra.envs.batch.sync_vector import SyncVectorEnv


class Returns(Parting):
    """Agent "early" ends with the first step and acts again from step 3 on; it is paid 1 in every step."""

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        result = super().step(actions)
        if self.time != 2:
            return result
        self.agents = list(self.possible_agents)
        return self.seen(), *(part | {"early": part["late"]} for part in result[1:])


class ReturnsInTurns(PartingTurns):
    """The same in a turn-based env."""

    def step(self, action: Any) -> None:
        super().step(action)
        if "early" not in self.agents:
            self.agents.append("early")
            self.terminations["early"] = self.truncations["early"] = False
            self.rewards["early"], self.infos["early"] = 1.0, {}
            self.agent_selection = "early"


@pytest.mark.parametrize("flags", ["terminated", "truncated"])
@pytest.mark.parametrize(("adapter", "env", "steps"), [(ParallelGame, Returns, 2), (AECGame, ReturnsInTurns, 1)])
def test_agent_that_acts_after_its_end_is_refused(adapter: Any, env: Any, steps: int, flags: str) -> None:
    game = adapter(env(flags))
    game.reset(0)
    for _ in range(steps - 1):
        assert not game.step(np.zeros(2, np.int32)).terminated
    with pytest.raises(ValueError, match="lets agent early act again after it ended, which PettingZoo forbids"):
        game.step(np.zeros(2, np.int32))
    game.reset(1)  # all agents act in the next game


class PaysOn(Parting):
    """Pays "early" 1 in every step, also after its end."""

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        seen, rewards, *rest = super().step(actions)
        return seen, rewards | {"early": 1.0}, *rest


def rewards_of_four_steps(flags: str) -> list[float]:
    env = SyncVectorEnv(lambda: ParallelGame(PaysOn(flags, length=4)), 1)
    env.reset(np.array([0]))
    rewards = [env.step(np.zeros((1, 2), np.int32)).rewards[0].copy() for _ in range(4)]
    return np.sum(rewards, 0).tolist()


def test_rewards_after_the_end_count_for_truncated_agents() -> None:
    assert rewards_of_four_steps("truncated") == [4, 0]


@pytest.mark.parametrize("flags", ["terminated", "terminated truncated"])
def test_rewards_of_agents_that_have_terminated_are_refused(flags: str) -> None:
    with pytest.raises(ValueError, match=r"pays agent early 1\.0 after it has terminated: pay it with its last step"):
        rewards_of_four_steps(flags)


class Joins(PartingTurns):
    """Agent "late" joins with the first move of "early", which continues."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.agents = ["early"]
        for values in (self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos):
            del values["late"]

    def observe(self, agent: str) -> np.ndarray:
        assert agent in self.agents
        return super().observe(agent)

    def step(self, action: Any) -> None:
        self.agents, self.time = list(self.possible_agents), self.time + 1
        self.rewards = dict.fromkeys(self.agents, 1.0)
        self.infos = {agent: {} for agent in self.agents}
        self.terminations = dict.fromkeys(self.agents, self.time >= 4)
        self.truncations = dict.fromkeys(self.agents, False)
        self.agent_selection = self.agents[self.time % 2]


def test_agent_that_joins_a_turn_based_game_later() -> None:
    env = SyncVectorEnv(lambda: AECGame(Joins()), 1)
    frame = env.reset(np.array([0]))
    assert frame.agent_mask.tolist() == [[True, False]] and frame.obs.tolist() == [[[1, 0], [0, 0]]]
    frame = env.step(np.zeros((1, 2), np.int32))
    assert frame.agent_mask.tolist() == [[False, True]] and frame.obs.tolist() == [[[1, 0], [0, 1]]]
    assert frame.rewards.tolist() == [[1, 1]]
    done = [bool(env.step(np.zeros((1, 2), np.int32)).terminated[0]) for _ in range(3)]
    assert done == [False, False, True]


class Duel(PartingTurns):
    """Agent "late" terminates "early" with its first move, without removing it, and has two more moves. Each of its
    moves costs "early" 1 and pays "late" 2."""

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            return super().step(action)
        self._cumulative_rewards[agent] = 0
        self._clear_rewards()
        self.time += agent == "late"
        if agent == "late":
            self.rewards |= {one: {"early": -1.0, "late": 2.0}[one] for one in self.agents}
            self.terminations |= {one: one == "early" or self.time == 3 for one in self.agents}
        self.agent_selection = "late" if self.time < 2 or self.time == 3 or "early" not in self.agents else "early"
        return self._accumulate_rewards()


def returns_by_last(env: Any) -> dict[str, float]:
    """The return of each agent as PettingZoo counts it: all rewards that `last` reports to it."""
    env.reset(seed=0)
    returns = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        _, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        env.step(None if terminated or truncated else 0)
    return returns


def test_agent_that_was_terminated_is_paid_until_it_is_removed() -> None:
    game = AECGame(Duel())
    game.reset(0)
    steps = [game.step(np.zeros(2, np.int32)) for _ in range(4)]
    assert [step.agent_mask for step in steps[:3]] == [[False, True]] * 3 and steps[3].terminated
    assert [step.rewards for step in steps] == [[0, 0], [-1, 2], [-1, 2], [0, 2]]
    assert returns_by_last(Duel()) == {"early": -2, "late": 6}
    # a seat that has terminated gets no reward: it terminates when its agent is removed
    assert [step.seat_terminated for step in steps] == [None, [False, False], [True, False], [True, True]]


class Parts(Parting):
    """Observations have two parts beside the action mask, neither called "observation"; action 1 is illegal."""

    def observation_space(self, agent: str) -> spaces.Space:
        mask = spaces.Box(0, 1, (2,), np.int8)
        return spaces.Dict({"action_mask": mask, "place": spaces.Discrete(2), "time": spaces.Box(0, 9, (1,))})

    def seen(self) -> dict[str, Any]:
        shown = {"action_mask": np.array([1, 0], np.int8), "time": np.array([self.time], np.float32)}
        return {agent: shown | {"place": self.possible_agents.index(agent)} for agent in self.agents}


def test_all_parts_beside_an_action_mask_are_observed() -> None:
    env = SyncVectorEnv(lambda: ParallelGame(Parts()), 1)
    frame = env.reset(np.array([0]))
    assert env.observation_shapes == ((3,), (3,)) and frame.action_mask is not None
    assert frame.action_mask.tolist() == [[[True, False]] * 2]
    assert frame.obs.tolist() == [[[1, 0, 0], [0, 1, 0]]]


class Goal(Parts):
    """A part called "observation", and another one beside it and the mask."""

    def observation_space(self, agent: str) -> spaces.Space:
        parts = super().observation_space(agent).spaces
        return spaces.Dict({"action_mask": parts["action_mask"], "observation": parts["time"], "goal": parts["place"]})

    def seen(self) -> dict[str, Any]:
        return {
            agent: {"action_mask": parts["action_mask"], "observation": parts["time"], "goal": parts["place"]}
            for agent, parts in super().seen().items()
        }


def test_parts_beside_the_observation_are_observed_too() -> None:
    env = SyncVectorEnv(lambda: ParallelGame(Goal()), 1)
    assert env.observation_shapes == ((3,), (3,))
    assert env.reset(np.array([0])).obs.tolist() == [[[1, 0, 0], [0, 1, 0]]]


class Unpaid(Parting):
    """Gives "late" no reward."""

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        seen, rewards, *rest = super().step(actions)
        return seen, {"early": rewards["early"]}, *rest


def test_an_agent_that_acted_and_gets_no_reward_is_refused() -> None:
    games = SyncVectorEnv(lambda: ParallelGame(Unpaid()), 1)
    games.reset(np.array([0]))
    with pytest.raises(ValueError, match="gives agent late, which acted, no reward: give it one, which may be 0"):
        games.step(np.zeros((1, 2), np.int32))


class WithoutInfos(Parting):
    """Gives None instead of infos."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        return super().reset(seed, options)[0], dict.fromkeys(self.agents)


def test_infos_may_be_none() -> None:
    assert SyncVectorEnv(lambda: ParallelGame(WithoutInfos()), 1).reset(np.array([0])).agent_mask.all()


class FailsToClose(Parting):
    """Raises an error when it is closed."""

    def close(self) -> None:
        raise OSError("no display")


def test_an_env_that_cannot_be_closed_is_named() -> None:
    env = SyncVectorEnv(lambda: ParallelGame(FailsToClose()), 2)
    with pytest.warns(UserWarning, match="an env could not be closed: OSError: no display"):
        env.close()


class GainsMasks(Parting):
    """Gives action masks in the infos of steps only."""

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        *result, infos = super().step(actions)
        return *result, {agent: {"action_mask": np.array([1, 0], np.int8)} for agent in infos}


class GainsMasksInTurns(PartingTurns):
    """The same in a turn-based env."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.infos = {agent: {"action_mask": np.array([1, 0], np.int8)} for agent in self.agents}


@pytest.mark.parametrize(("adapter", "env"), [(ParallelGame, GainsMasks), (AECGame, GainsMasksInTurns)])
def test_action_masks_that_come_after_the_reset_are_refused(adapter: Any, env: Any) -> None:
    """They were ignored, so that illegal actions were played."""
    game = adapter(env())
    game.reset(0)
    with pytest.raises(ValueError, match="in the info of a step and gave none in that of its first reset"):
        game.step(np.zeros(2, np.int32))


class Stated(Parting):
    """The global state is the time and its square, without a `state_space`."""

    def state(self) -> np.ndarray:
        return np.array([self.time, self.time**2], np.float64)


def test_global_state_without_a_space_is_read() -> None:
    env = SyncVectorEnv(lambda: ParallelGame(Stated(length=3), state=True), 1)
    assert env.state_size == 2 and env.reset(np.array([0])).state.tolist() == [[0, 0]]
    states = [env.step(np.zeros((1, 2), np.int32)).copy() for _ in range(3)]
    assert [frame.state.tolist() for frame in states] == [[[1, 1]], [[2, 4]], [[0, 0]]]
    assert states[2].final_state is not None and states[2].final_state.tolist() == [[3, 9]]
    assert ParallelGame(Stated()).spec.state_size == 0


class Pictured(Parting):
    """The global state is a picture."""

    state_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)


@pytest.mark.parametrize("env", [Parting, Pictured])
def test_global_state_that_is_no_row_is_refused(env: Any) -> None:
    """Central critics saw all observations instead, without a message."""
    with pytest.raises(ValueError, match="has no global state that is a row of numbers"):
        ParallelGame(env(), state=True)
