"""Arrays of a user's vector env that are not as its spec says are refused by name, in training as by the check."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import Countdown

from palestra.core.failures import RunFailed
from palestra.envs.step_layout import StepLayout, check_spec
from palestra.envs.vector_base import Discrete, VectorStep
from palestra.envs.vector_check import check_vector_env
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

ONES = np.ones((4, 2), np.float32)


class Spoiled(Countdown):
    """Countdown whose steps (not its resets) have other arrays."""

    changes: dict[str, Any] = {}

    def step(self, actions: np.ndarray) -> VectorStep:
        return replace(super().step(actions), **self.changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ONES[0]}, r"has rewards as float32 \[2\] and not float32 \[4, 2\]"),
        ({"rewards": ONES[:, :1]}, r"rewards as float32 \[4, 1\]"),
        ({"rewards": 1.0}, r"rewards as float64 \[\]"),
        ({"rewards": ONES.astype(np.float64)}, r"rewards as float64 \[4, 2\] and not float32"),
        ({"rewards": None}, "rewards as none"),
        ({"rewards": ONES.tolist()}, "has rewards as"),
        ({"obs": np.ones((4, 2, 4), np.int64)}, r"obs as int64 \[4, 2, 4\] and not float32 \[4, 2, 4\]"),
        ({"obs": np.ones((4, 2, 4), np.uint8)}, r"obs as uint8 \[4, 2, 4\] and not float32 \[4, 2, 4\]"),
        ({"obs": np.ones((4, 2, 5), np.float32)}, r"obs as float32 \[4, 2, 5\]"),
        ({"final_obs": None}, "final_obs as none"),
        ({"terminated": False}, r"terminated as bool \[\] and not bool \[4\]"),
        ({"terminated": np.full(4, 2)}, r"terminated as int64 \[4\] and not bool"),
        ({"agent_mask": None}, "agent_mask as none"),
        ({"agent_mask": np.ones(2, bool)}, r"agent_mask as bool \[2\] and not bool \[4, 2\]"),
        ({"action_mask": None}, r"has action_mask as none and not bool \[4, 2, 3\]"),
        ({"action_mask": np.ones((4, 2, 3))}, "action_mask as float64"),
        ({"state": np.ones((4, 5), np.float32)}, r"state as float32 \[4, 5\] and not float32 \[4, 2\]"),
        ({"state": None}, r"has state as none and not float32 \[4, 2\]"),
        (
            {"seat_terminated": np.zeros((4, 2), bool)},
            r"seat_terminated as bool \[4, 2\] and not none, as in the first",
        ),
        ({"success": [True] * 4}, "has success as"),
        ({"success": ONES}, r"has success as float32 \[4, 2\] and not bool \[4\]"),
    ],
)
def test_arrays_of_another_layout_are_refused(changes: dict[str, Any], message: str) -> None:

    def make(games: int) -> Spoiled:
        env = Spoiled(games)
        env.changes = changes
        return env

    env = make(4)
    rollout = VectorRollout(env, np.arange(4))
    with pytest.raises(RunFailed, match=rf'env "countdown".* {message}.*\(in step\)'):
        rollout.collect([UniformVectorPolicy(env, [0, 1])], 3, 0)
    with pytest.raises(ValueError, match=f"env countdown.*{message}"):
        check_vector_env(make, num_envs=4)


def test_a_success_above_1_is_refused() -> None:
    env = Countdown()
    step = replace(env.reset(np.arange(4)), success=2 * ONES)
    with pytest.raises(ValueError, match="success that is not from 0 to 1"):
        StepLayout(env).check(step)


def test_a_result_that_is_no_step_is_refused() -> None:
    class Tuples(Countdown):
        def reset(self, seeds: np.ndarray) -> Any:
            return super().reset(seeds).obs, {}

    with pytest.raises(RunFailed, match="returns tuple: return a VectorStep"):
        VectorRollout(Tuples(), np.arange(4))


def test_a_call_of_exit_is_an_error() -> None:
    class Quits(Countdown):
        def step(self, actions: np.ndarray) -> VectorStep:
            raise SystemExit(0)

    env = Quits()
    rollout = VectorRollout(env, np.arange(4))
    with pytest.raises(RunFailed, match=r"failed in step: RuntimeError: it called sys\.exit\(0\)"):
        rollout.collect([UniformVectorPolicy(env, [0, 1])], 1, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seats", ("a", "a"), "seats are a, a: give each a name of its own"),
        ("observation_shapes", ((4,),), "there are 2 seats: give a tuple with one entry for each"),
        ("observation_shapes", (3, 3), r"has 3: give each seat a tuple, such as \(8,\)"),
        ("action_spaces", (Discrete(3), 3), "action_spaces has 3: give each seat palestra's Discrete"),
        ("action_spaces", None, "there are 2 seats"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(name: str, value: Any, message: str) -> None:
    env = Countdown()
    setattr(env, name, value)
    with pytest.raises(ValueError, match=message):
        check_spec(env)
