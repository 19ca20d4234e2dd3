"""The builder of vector runs closes every env that it makes, and keeps the checkpoints that the config asks for."""

from pathlib import Path
from typing import Any

import pytest
from helpers.vector_toys import Counted

from palestra.core.config import dump, validate
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


@pytest.mark.parametrize(("checkpoint_every", "keep_every"), [(32, 64), (40, 80), (64, 96), (999, 100)])
def test_keep_every_is_met_after_rounding(tmp_path: Path, checkpoint_every: int, keep_every: int) -> None:
    path = trained(tmp_path, checkpoint_every=checkpoint_every, keep_every=keep_every, evals={})
    steps = -(-keep_every // 32)
    kept = [checkpoint.step + 1 for checkpoint in list_checkpoints(path) if checkpoint.entry["keep"]]
    assert kept == sorted({*range(steps, 13, steps), 12})
