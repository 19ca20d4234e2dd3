"""check_env accepts valid envs and names what is broken in others."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from palestra.core.types import Step
from palestra.envs.base import Env, check_env


class Countdown(Env):
    """A valid env of two seats that answer with numbers at the same time. Each env below breaks one thing."""

    name = "countdown"
    seats = ("a", "b")

    def reset(self, seed: int) -> Step:
        self.left, self.said, self.seed = 3, [], seed
        return self.show()

    def step(self, actions: dict[str, Any]) -> Step:
        self.left -= 1
        self.said.append(len(str(actions["a"])) + self.seed)
        return self.show()

    def show(self) -> Step:
        if self.left == 0:
            return Step({}, {"a": 1.0}, info={"success": True})
        seen = {seat: np.array([self.left, *self.said]) for seat in self.seats}
        return Step(seen, info={"success": False}, legal_actions={"a": ["1", "22"], "b": ["1"]})


class Slow(Countdown):
    async def reset(self, seed: int) -> Step:
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, actions: dict[str, Any]) -> Step:
        return super().step(actions)


class Replacing(Countdown):
    replaces_state = True

    def step(self, actions: dict[str, Any]) -> Step:
        self.said = [*self.said]
        return super().step(actions)


class Unseeded(Countdown):
    def show(self) -> Step:
        step = super().show()
        return Step(step.observations, info=step.info | {"luck": random.random()})


class SharedFork(Countdown):
    replaces_state = True  # but step appends to the same list in both


class Endless(Countdown):
    def step(self, actions: dict[str, Any]) -> Step:
        return self.show()


class Fragile(Countdown):
    def step(self, actions: dict[str, Any]) -> Step:
        int(actions["a"])
        return super().step(actions)


class RewardsUnknownSeat(Countdown):
    def show(self) -> Step:
        step = super().show()
        return Step(step.observations, {"c": 1.0}, info=step.info)


class Infinite(Countdown):
    def show(self) -> Step:
        return Step(super().show().observations, team_reward=float("inf"))


class EndsWithoutInfo(Countdown):
    def show(self) -> Step:
        step = super().show()
        return step if step.observations else Step({})


class Forgetful(Countdown):
    def __init__(self) -> None:
        self.said = []

    def reset(self, seed: int) -> Step:
        self.left, self.seed = 3, seed
        return self.show()


@pytest.mark.parametrize("sound", [Countdown, Slow, Replacing])
def test_valid_env_passes_the_check(sound):
    check_env(sound)


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (Unseeded, "differs in info after .*Fix: draw all randomness from the seed|second reset"),
        (SharedFork, "differs in observations after .*fork.*Fix: fork must copy"),
        (Endless, "did not end within 1000 steps"),
        (Fragile, "raised ValueError.*at the action ''"),
        (RewardsUnknownSeat, r"rewards unknown seats \['c'\]"),
        (Infinite, "gives the team a reward of inf"),
        (EndsWithoutInfo, 'reports "success" in a step but not in the last one'),
        (Forgetful, "second reset with the same seed"),
    ],
)
def test_broken_env_is_reported_by_the_check(broken, finding):
    with pytest.raises(ValueError, match=f"env {broken.__name__}, seed 0: .*({finding})"):
        check_env(broken)


class Drawing(Countdown):
    """Draws from a generator that has two names and has drawn the first half of a pair of Gaussian numbers."""

    def reset(self, seed: int) -> Step:
        self.rng = random.Random(seed)
        self.dealer = {"rng": self.rng}
        self.rng.gauss(0.0, 1.0)
        return super().reset(seed)


def test_fork_draws_as_its_original_from_a_generator_of_its_own():
    env = Drawing()
    env.reset(3)
    forks = [env.fork(), env.fork()]
    drawn = [[game.rng.gauss(0.0, 1.0), game.dealer["rng"].random()] for game in (*forks, env)]
    assert drawn[0] == drawn[1] == drawn[2] and forks[0].dealer["rng"] is forks[0].rng


class ReturnsTuple(Countdown):
    """Returns the tuples that Gymnasium's envs return."""

    def reset(self, seed: int) -> Any:
        return super().reset(seed).observations, {}


class Broken(Countdown):
    """Raises for an action that is not an invalid one."""

    def step(self, actions: dict[str, str]) -> Step:
        raise KeyError("boom")


def test_wrong_return_type_of_step_is_explained():
    message = r"reset must return a palestra.Step, and returned a tuple, as in Gymnasium: write return Step\("
    with pytest.raises(ValueError, match=message):
        check_env(ReturnsTuple)


def test_exception_of_an_env_is_located():
    with pytest.raises(ValueError, match=r"env Broken, seed 0: step raised KeyError\('boom'\)\. Fix: ") as caught:
        check_env(Broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_actions_may_be_supplied():
    drawn = []

    def act(seat: str, observation: Any, rng: random.Random) -> str:
        drawn.append(seat)
        return str(rng.randrange(100))

    check_env(Countdown, seeds=[7], act=act)
    assert set(drawn) == {"a", "b"}
