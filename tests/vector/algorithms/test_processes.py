"""Several processes that train the same networks: they start learning together, from different rows of the same
data."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.pretended_group import PretendedGroup
from helpers.processes import finish, start
from helpers.vector_toys import Cues

from palestra.core.files import read_arrays, write_arrays
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.parallel.shared_memory import start_processes, stop_processes
from palestra.runs import read_lines
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.experimental.cql import CQL
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.imitation import BC
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

OFFLINE: dict[str, Any] = {"iql": IQL, "cql": CQL, "bc": BC}


@pytest.mark.parametrize("config", [SAC, DDPG, TD3, FACMAC])
def test_learner_waits_until_all_processes_are_ready(config: Any) -> None:
    env = Cues(games=4)
    for ranks, steps in ((SINGLE_PROCESS, 2), (PretendedGroup(), 0)):
        policy = NetPolicyConfig(hidden=[8])
        settings = {"learning_starts": 4, "batch_size": 4, "gradient_steps": 2}
        learner = config(**settings).build_learner(env, {"one": [0, 1]}, {"one": policy}, {"one": 1}, ranks)
        batch = VectorRollout(env, np.arange(4)).collect(learner.rollout_policies(0.0), 2, 0)
        learner.update(batch, 0.0)
        assert learner.steps == steps


@pytest.mark.slow
def test_two_processes_in_a_game_of_turns_begin_to_learn_together(tmp_path: Path) -> None:
    """Their buffers fill at different speeds: a process that started to learn alone would wait for the other's
    gradients forever."""
    tree = {
        "name": "turns",
        "env_steps": 300,
        "seed": 3,
        "env": {"type": "leduc_poker", "num_envs": 2},
        "policies": {"learner": {"type": "net", "hidden": [8]}, "other": {"type": "random"}},
        "seats": {"player_0": "learner", "player_1": "other"},
        "algorithm": {"type": "sac", "rollout_length": 1, "learning_starts": 60, "gradient_steps": 1},
        "num_processes": 2,
        "evals": {},
    }
    (tmp_path / "turns.yaml").write_text(yaml.safe_dump(tree))
    finish(start(tmp_path, "turns.yaml"))
    assert read_lines(tmp_path / "runs" / "turns" / "metrics.jsonl")[-1]["env_steps"] == 300


def train_once(data: str, folder: Path, ranks: ProcessGroup = SINGLE_PROCESS) -> None:
    """Updates a learner of each kind once; writes their states to `folder`, in files of the process's rank."""
    env, policy = Cues(games=4), NetPolicyConfig(hidden=[8])
    for kind, config in OFFLINE.items():
        where = {"demonstrations" if kind == "bc" else "data": data}
        settings = config(**where, batch_size=8, gradient_steps=2)
        learner = settings.build_learner(env, {"one": [0, 1]}, {"one": policy}, {"one": 1}, ranks)
        batch = VectorRollout(env, np.arange(4)).collect(learner.rollout_policies(0.0), 2, 0)
        learner.update(batch, 0.0)
        write_arrays(
            folder / f"{kind}-{ranks.rank if ranks.world_size > 1 else 'alone'}.safetensors", learner.state_arrays()
        )
    ranks.all_ranks(True)  # all processes have written


@pytest.mark.timeout(150)
def test_processes_learn_from_different_rows_of_the_same_data(tmp_path: Path) -> None:
    """With the same rows in both the mean gradient, and so every weight, would be that of a single process."""
    env, data = Cues(games=8), str(tmp_path / "moves.parquet")
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1])], 20, data, seed=3)
    train_once(data, tmp_path)
    work = partial(train_once, data, tmp_path)
    try:
        work(start_processes(2, work))
    finally:
        stop_processes()
    for kind in OFFLINE:
        alone, first, second = (read_arrays(tmp_path / f"{kind}-{name}.safetensors") for name in ("alone", 0, 1))
        weights = [name for name in first if name.startswith("net.")]
        assert weights
        for name in weights:
            assert np.array_equal(first[name], second[name]), (kind, name)
            assert not np.array_equal(first[name], alone[name]), (kind, name)
