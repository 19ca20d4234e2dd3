"""The builder of vector runs closes every env that it makes, and keeps the checkpoints that the config asks for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import Counted

from palestra.core.config import dump, validate
from palestra.core.files import read_arrays, read_lines
from palestra.runs import Run, list_checkpoints
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

TREE: dict[str, Any] = {
    "env": {"type": "helpers.vector_toys:Counted", "num_envs": 8},
    "policies": {"agent": {"type": "net", "hidden": [4]}},
    "algorithm": {"type": "ppo", "rollout_length": 4, "epochs": 1, "minibatches": 1},
    "evals": {"short": {"episodes": 3}, "long": {"episodes": 20}},
    "env_steps": 8 * 4 * 12,
    "log_every": 1,
}


def trained(root: Path, **changes: Any) -> Path:
    config = validate(VectorConfig, TREE | changes)
    with Run.create(root, dump(config)) as run:
        trainer = build_vector_run(config)
        restore_checkpoint(trainer, run)
        assert run_training(trainer, run)
        return run.path


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_env_is_closed(tmp_path: Path, num_processes: int) -> None:
    """Also the env of an evaluation of fewer episodes than copies, and those that only check the config."""
    before = Counted.not_closed
    trained(tmp_path, num_processes=num_processes)
    assert Counted.not_closed == before


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    (file,) = (list_checkpoints(path)[-1].path / "training-0").rglob("learner.safetensors")
    return read_arrays(file)


@pytest.mark.parametrize("algorithm", [TREE["algorithm"], {"type": "qmix", "learning_starts": 1, "rollout_length": 4}])
def test_a_run_starts_from_the_networks_of_another(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Policies, critics, mixers and statistics; Adam and replay begin anew. The rate moves no policy."""
    env = {"type": "simple_spread", "num_envs": 4, "agents": 2}
    changes = {"env": env, "algorithm": algorithm, "evals": {}, "env_steps": 64}
    policy = {"type": "net", "hidden": [4], "normalize_observations": True}
    first = trained(tmp_path, **changes, policies={"agent": policy}, seed=1)
    still = {"agent": policy | {"lr": 1e-12}}
    second = trained(tmp_path, **changes, policies=still, seed=2, start_from=str(first))
    alone = trained(tmp_path, **changes, policies=still, seed=2)
    start, after, other = map(arrays_of, (first, second, alone))
    weights = [name for name in start if name.startswith(("net.", "critic.", "mixer/")) and "norm" not in name]
    assert len(weights) > 4
    for name in weights:
        np.testing.assert_allclose(after[name], start[name], atol=1e-5)
    assert any(not np.allclose(other[name], start[name], atol=1e-2) for name in weights)
    assert after["norm.0/count"] == 2 * start["norm.0/count"]
    assert after["adam.0/0.step"] == start["adam.0/0.step"]


def test_networks_of_another_kind_cannot_be_the_start(tmp_path: Path) -> None:
    first = trained(tmp_path, env_steps=32)
    for changes, message in (
        ({"hidden": [8]}, r"trained agent with hidden: \[4\], and this run has \[8\]"),
        ({"hidden": [4], "activation": "relu"}, "trained agent with activation: tanh, and this run has relu"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(tmp_path, policies={"agent": {"type": "net"} | changes}, start_from=str(first))
    with pytest.raises(ValueError, match=r"trained other networks.*size mismatch"):
        trained(tmp_path, env=TREE["env"] | {"type": "simple_spread"}, start_from=str(first))
    with pytest.raises(ValueError, match="has no checkpoint: name the folder of a run that trained networks"):
        trained(tmp_path, start_from=str(tmp_path))


def test_networks_are_not_taken_under_another_name(tmp_path: Path) -> None:
    """They are taken by the order of seats: other names, or the same at other seats, would be crossed."""
    policies = {name: {"type": "net", "hidden": [4]} for name in ("left", "right")}
    changes = {"env": {"type": "matrix", "game": "coordination", "num_envs": 4}, "evals": {}, "env_steps": 64}
    seats = {"player_0": "left", "player_1": "right"}
    first = trained(tmp_path, **changes, policies=policies, seats=seats)
    swapped = {"player_0": "right", "player_1": "left"}
    with pytest.raises(ValueError, match="trained left, right, and this run trains right, left, in the order of their"):
        trained(tmp_path, **changes, policies=policies, seats=swapped, start_from=str(first))


def test_a_policy_that_plays_no_seat_is_named(tmp_path: Path) -> None:
    policy = {"type": "net", "hidden": [4]}
    changes = {"policies": {"agent": policy, "other": policy}, "seats": {"*": "agent"}}
    trainer = build_vector_run(validate(VectorConfig, TREE | changes))
    assert "no seat is played by: other (policies)" in trainer.notes
    trainer.close()


@pytest.mark.parametrize(("checkpoint_every", "keep_every"), [(32, 64), (40, 80), (64, 96), (999, 100)])
def test_keep_every_is_met_after_rounding(tmp_path: Path, checkpoint_every: int, keep_every: int) -> None:
    path = trained(tmp_path, checkpoint_every=checkpoint_every, keep_every=keep_every, evals={})
    steps = -(-keep_every // 32)
    kept = [checkpoint.step + 1 for checkpoint in list_checkpoints(path) if checkpoint.entry["keep"]]
    assert kept == sorted({*range(steps, 13, steps), 12})


@pytest.mark.parametrize("limit", ["cuts", "ends"])
def test_nothing_comes_after_a_time_limit_that_ends_games(tmp_path: Path, limit: str) -> None:
    """Four steps of CartPole are paid 1 each, so a step is worth 2.5 in the mean; bootstrapped, far more."""
    wrappers = [{"type": "TimeLimit", "max_episode_steps": 4}]
    replay = {"rollout_length": 8, "gradient_steps": 8, "learning_starts": 1, "gamma": 0.99, "tau": 0.2}
    path = trained(
        tmp_path,
        env={"type": "gymnasium", "id": "CartPole-v1", "num_envs": 8, "wrappers": wrappers},
        policies={"agent": {"type": "net", "hidden": [16], "lr": 1e-2}},
        algorithm={"type": "dqn", "time_limit": limit} | replay,
        evals={},
        env_steps=8 * 8 * 40,
    )
    value = np.mean([line["q"] for line in read_lines(path / "metrics.jsonl") if "q" in line][-5:])
    assert 2 < value < 3 if limit == "ends" else value > 5
