"""An algorithm for each policy of a run: each is trained as if it were alone with the other as a part of the env."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import Countdown

from palestra.core.config import validate
from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.runs.headline import algorithm_label
from palestra.vector.build.build import build_players
from palestra.vector.config import VectorConfig
from palestra.vector.learners.teams import JointLearner
from palestra.vector.rollouts.rollout import VectorRollout

NET = {"type": "net", "hidden": [8], "lr": 1e-2}
DQN = {"type": "dqn", "gradient_steps": 2, "batch_size": 16, "learning_starts": 0, "buffer_size": 500}
OTHERS = {
    "dqn": DQN,
    "sac": DQN | {"type": "sac", "learning_starts": 1},
    "vdn": DQN | {"type": "vdn"},
    "a2c": {"type": "a2c"},
    "nfsp": {"type": "nfsp"},
}
PPO = {"type": "ppo", "rollout_length": 8, "epochs": 2, "minibatches": 2}


def config(red: dict[str, Any] | None, blue: dict[str, Any] | None, **changes: Any) -> VectorConfig:
    """Two policies of two seats each; None: a policy that plays at random."""
    own = {"red": red, "blue": blue}
    policies = {name: NET | {"algorithm": one} if one else {"type": "random"} for name, one in own.items()}
    seats = {"seat[01]": "red", "seat[23]": "blue"}
    tree = {"name": "both", "env": {"type": "two_step"}, "policies": policies, "seats": seats, "algorithm": PPO}
    if red is None and "policies" not in changes:
        tree["algorithm"] = {"type": "ppo", "rollout_length": 8}  # trains no policy
    return validate(VectorConfig, tree | changes)


def build(settings: VectorConfig) -> tuple[Any, VectorRollout]:
    env = Countdown(4, seats=4)
    return build_players(settings, env, SINGLE_PROCESS)[0], VectorRollout(env, np.arange(4))


def arrays(learner: Any) -> dict[str, np.ndarray]:
    parts = learner.learners if isinstance(learner, JointLearner) else [learner]
    return {f"{i}/{key}": value.copy() for i, part in enumerate(parts) for key, value in part.state_arrays().items()}


@pytest.mark.parametrize("name", OTHERS)
def test_a_policy_is_trained_as_if_the_other_were_a_part_of_the_env(name: str) -> None:
    """Bit for bit, on either side: PPO beside another algorithm, and each alone against the other's players."""
    other = OTHERS[name]
    for side, alone_config in enumerate([config(PPO, None), config(None, other)]):
        both, rollout = build(config(PPO, other))
        alone, _ = build(alone_config)
        assert isinstance(both, JointLearner) and both.names == ["red", "blue"]
        for step in range(4):
            batch = rollout.collect(both.rollout_policies(0.0), 8, step)
            both.update(batch, 0.0)
            alone.update(batch, 0.0)
        found, expected = arrays(both.learners[side]), arrays(alone)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_policies_of_one_algorithm_share_a_learner() -> None:
    """Whether the run's or their own: then critics and minibatches are those of a run without keys of its policies."""
    assert not isinstance(build(config(PPO, PPO))[0], JointLearner)
    plain = {name: {"type": "net", "hidden": [8], "lr": 1e-2} for name in ("red", "blue")}
    assert config(None, PPO, policies=plain).algorithms == [config(PPO, PPO).algorithm]


def test_rollouts_have_one_length() -> None:
    settings = config(PPO, DQN)
    assert settings.policies["blue"].algorithm.rollout_length == 8
    again = validate(VectorConfig, json.loads(settings.model_dump_json()))
    assert again == settings and algorithm_label(settings.model_dump()) == "ppo and dqn"
    with pytest.raises(ValueError, match=r"policies\.blue\.algorithm\.rollout_length: 4 differs from the run's 8"):
        config(PPO, DQN | {"rollout_length": 4})
    with pytest.raises(ValueError, match=r"policies\.blue\.algorithm\.time_limit: ends differs from the run's cuts"):
        config(PPO, DQN | {"time_limit": "ends"})


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="vdn trains team all as a whole, and another algorithm trains its seat seat0"):
        build(config(PPO, OTHERS["vdn"], teams={"*": "all"}))
    with pytest.raises(ValueError, match=r"set algorithm\.off_policy_correction: vtrace"):
        vtrace = PPO | {"off_policy_correction": "vtrace"}
        config(vtrace, DQN, algorithm=vtrace, num_actors=1)
    seated = {"red": NET | {"algorithm": DQN}, "blue": {"type": "random"}}
    with pytest.raises(ValueError, match="no trained policy plays a seat"):
        build(config(None, None, policies=seated, seats={"*": "blue"}, algorithm={"type": "ppo", "rollout_length": 8}))
    with pytest.raises(ValueError, match="algorithm: a2c trains no policy, since each has an algorithm of its own"):
        config(DQN, DQN, algorithm={"type": "a2c"})
    with pytest.raises(ValueError, match=r"policies\.blue\.algorithm"):
        config(PPO, {"type": "dqm"})
