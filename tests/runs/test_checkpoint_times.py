"""When checkpoints are written: after a tenth of a run, and by the clock, which changes no result."""

from pathlib import Path
from typing import Any

import pytest

from palestra.core.config import dump, validate
from palestra.runs import Run, list_checkpoints
from palestra.runs.checkpoints import list_all_checkpoints
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

NETS: dict[str, Any] = {
    "env": {"type": "simple_spread", "num_envs": 4, "max_cycles": 7},
    "policies": {"agent": {"type": "net", "hidden": [8]}},
    "algorithm": {"type": "ppo", "rollout_length": 5, "epochs": 1, "minibatches": 1},
    "evals": {"held_out": {"episodes": 4, "every": 40}},
    "env_steps": 160,
    "log_every": 1,
}
QMIX = {"type": "qmix", "rollout_length": 5, "buffer_size": 64, "batch_size": 8, "learning_starts": 16}


def train(root: Path, tree: dict[str, Any], checkpoint_interval_s: float) -> Path:
    """Trains a run in this process and returns its folder."""
    is_text = "steps" in tree
    config = validate(TextConfig if is_text else VectorConfig, tree)
    trainer: Any = build(config) if is_text else build_vector_run(config)
    with Run.create(root, dump(config)) as run:
        assert run_training(trainer, run, checkpoint_interval_s=checkpoint_interval_s)
        return run.path


def results(path: Path) -> dict[str, bytes]:
    """The files of a finished run that its seed determines."""
    last = list_checkpoints(path)[-1].path
    files = [path / "metrics.jsonl", path / "evals.jsonl", *sorted((path / "episodes").glob("*"))]
    files += [file for file in last.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("kind", ["ppo", "gru", "qmix", "text", "async"])
@pytest.mark.few(2)
def test_checkpoints_by_the_clock_change_no_result(base: Path, tmp_path: Path, kind: str) -> None:
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    talk = {
        "steps": 4,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 2},
        "evals": {"dev": {"episodes": 4, "every": 2}},
    }
    tree = {
        "ppo": NETS | {"checkpoint_every": 160},
        "gru": NETS | {"policies": {"agent": {"type": "net", "hidden": [8], "gru_units": 4}}},
        "qmix": NETS | {"algorithm": QMIX},
        "text": talk,
        "async": talk | {"staleness": 1},
    }[kind]
    often, seldom = train(tmp_path / "often", tree, 0.0), train(tmp_path / "seldom", tree, 1e9)
    steps = 4 if kind in ("text", "async") else 8
    assert [each.step for each in list_all_checkpoints(often)] == list(range(steps))
    assert results(often) == results(seldom)


def test_an_env_that_cannot_be_saved_has_no_checkpoints_by_the_clock(tmp_path: Path) -> None:
    """Its games start over at each checkpoint, so that the clock would decide what is trained on."""
    tree = NETS | {"env": {"type": "helpers.vector_toys:Unsaved", "num_envs": 4}, "evals": {}, "env_steps": 400}
    path = train(tmp_path, tree, 0.0)
    assert [each.step + 1 for each in list_all_checkpoints(path)] == list(range(2, 21, 2))


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 2), ({"checkpoint_every": 20}, 1), ({"checkpoint_every": 999}, 20)]
)
def test_checkpoints_of_networks_are_as_the_config_says_or_a_tenth_of_the_run_apart(
    tmp_path: Path, given: dict[str, int], expected: int
) -> None:
    path = train(tmp_path, NETS | {"env_steps": 400} | given, 1e9)
    assert [each.step + 1 for each in list_all_checkpoints(path)] == list(range(expected, 21, expected))
