"""Small runs that several backends execute, and their comparison."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from helpers.processes import finish, start

from palestra.core.config import dump, validate
from palestra.parallel.config import RolloutBackendConfig
from palestra.parallel.inline import InlineBackend
from palestra.parallel.tasks import Backend, WorkerFactory
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, restore_checkpoint, run_training
from palestra.text.build.distributed import build
from palestra.text.config import TextConfig
from palestra.text.training.trainer import TextTrainer

SAME = ("metrics.jsonl", "evals.jsonl")


def config(base: Path, **changes: Any) -> TextConfig:
    """Two adapters, one of which has memory, and an evaluation; a step takes some hundredths of a second."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 3}, "lr": 1e-3}
    tree = {
        "steps": 3,
        "episodes": 6,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech | {"history": "conversation"}, "walker": speech | {"batch_size": 10}},
        "algorithm": {"type": "grpo", "group_size": 4},
        "evals": {"dev": {"episodes": 4, "every": 2}},
        "eval_sampling": {"temperature": 0.5},
        "checkpoint_every": 2,
        "backend": {"type": "local", "workers": 2, "slices": 3},
    }
    return validate(TextConfig, tree | changes)


def inline_backend(_: RolloutBackendConfig, make: WorkerFactory) -> Backend:
    """A backend whose worker is this process."""
    return InlineBackend(make)


def run_of(made: TextTrainer, root: Path, config: TextConfig, watcher: Callback | None = None) -> Path:
    with Run.create(root, dump(config)) as run:
        restore_checkpoint(made, run)
        assert run_training(made, run, watcher)
        return run.path


def assert_same(run: Path, other: Path) -> None:
    for log in SAME:
        assert (run / log).read_bytes() == (other / log).read_bytes(), log
    ours, theirs = (
        {file.relative_to(one): file for part in ("checkpoints", "episodes") for file in (one / part).rglob("*.*")}
        for one in (run, other)
    )
    assert ours.keys() == theirs.keys()
    for name, file in ours.items():
        assert file.is_dir() or file.read_bytes() == theirs[name].read_bytes(), name


def run_with_kill(folder: Path, asked: TextConfig, lines: int) -> Path:
    """A run of the command line that is killed once it has logged `lines` lines, and resumed to its end."""
    (folder / "run.yaml").write_text(dump(asked))
    process, run = start(folder, "run.yaml"), folder / "runs" / "run"
    while not (run / "metrics.jsonl").exists() or len(read_lines(run / "metrics.jsonl")) < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start(folder, "--resume", run))
    return run


def ray_config(base: Path, backend: dict[str, Any] | None = None, **changes: Any) -> TextConfig:
    return config(base, backend={"type": "ray", "workers": 2, "slices": 3} | (backend or {}), **changes)


def run_inline(root: Path, asked: TextConfig) -> Path:
    """The same run, with slices played by one worker in this process."""
    alone = asked.model_copy(update={"backend": asked.backend.model_copy(update={"type": "local", "placement": {}})})
    return run_of(build(alone, inline_backend), root, alone)


def actor_of(made: TextTrainer, learner: str) -> Any:
    return made.learners[learner].weights.remote._holder._actor  # type: ignore[attr-defined]
