"""The builder of vector runs closes every env that it makes, and keeps the checkpoints that the config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vector_toys import Counted

from palestra.builders.text_config import TextConfig
from palestra.builders.vector import build_vector_run
from palestra.builders.vector_config import VectorConfig
from palestra.config import dump, validate
from palestra.runs import Run, list_checkpoints
from palestra.training.loop import restore_checkpoint, run_training

TREE: dict[str, Any] = {
    "env": {"type": "vector_toys:Counted", "num_envs": 8},
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


@pytest.mark.parametrize("checkpoint_every", [32, 40, 64])
def test_keep_every_is_met_after_rounding(tmp_path: Path, checkpoint_every: int) -> None:
    path = trained(tmp_path, checkpoint_every=checkpoint_every, keep_every=2 * checkpoint_every, evals={})
    steps = -(-checkpoint_every // 32)
    kept = [checkpoint.step + 1 for checkpoint in list_checkpoints(path) if checkpoint.entry["keep"]]
    assert kept == list(range(2 * steps, 13, 2 * steps))


@pytest.mark.parametrize("model", [VectorConfig, TextConfig])
def test_keep_every_must_be_a_multiple_of_checkpoint_every(model: Any) -> None:
    text = {"env": {"type": "sokoban"}, "policies": {"default": {"type": "lora"}}}
    tree = (TREE if model is VectorConfig else text) | {"checkpoint_every": 40, "keep_every": 60}
    with pytest.raises(ValueError, match="keep_every: 60 is not a multiple of checkpoint_every: 40"):
        validate(model, tree)
    assert validate(model, tree | {"keep_every": 80}).keep_every == 80
