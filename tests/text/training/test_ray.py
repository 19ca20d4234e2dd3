"""The whole training loop on Ray: lost workers and learners do not change the run."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_loops import actor_of, assert_same, ray_config, run_inline, run_of

from palestra.core.types import Episode
from palestra.runs.loop import Callback
from palestra.text.build.distributed import build
from palestra.text.training.trainer import TextTrainer

ray = pytest.importorskip("ray")

from helpers import ray_cluster  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from palestra.parallel.ray.workers import traffic  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node."""
    with ray_cluster.cluster({"num_cpus": 4}) as nodes:
        yield nodes


class KillLearner(Callback):
    """Kills a learner's actor in the middle of the second step's play, and again after that step."""

    def __init__(self, made: TextTrainer) -> None:
        self.made, self.episodes = made, 0

    def on_episode(self, episode: Episode) -> None:
        self.episodes += 1
        if self.episodes == 8:
            ray.kill(actor_of(self.made, "guide"))

    def on_step(self, step: int, metrics: Any) -> None:
        if step == 1:
            ray.kill(actor_of(self.made, "walker"))


@pytest.mark.parametrize("actors", [1, 2])
def test_run_survives_killed_workers_and_learners(cluster: Cluster, base: Path, tmp_path: Path, actors: int) -> None:
    """All learners in one actor, or each in its own; a worker dies too."""
    env = {"type": "helpers.toys_mortal:Mortal", "turns": 2, "fatal": 8, "mark": str(tmp_path / "mark")}
    placement = {"train": {"workers": actors}, "play": {"workers": 2, "num_cpus": 0.5}}
    asked = ray_config(base, {"placement": placement, "copy_every": 2}, env=env)
    made = build(asked)
    run = run_of(made, tmp_path, asked, KillLearner(made))
    assert (tmp_path / "mark").exists()
    benches = {made.learners[name].weights.remote for name in ("guide", "walker")}  # type: ignore[attr-defined]
    assert [bench.num_losses for bench in benches] == ([2] if actors == 1 else [1, 1])
    assert_same(run, run_inline(tmp_path, asked))
    assert ray.available_resources()["CPU"] == 4  # no process is left


class PutBytes(Callback):
    """The bytes put into the object store for workers, at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []

    def on_step(self, step: int, metrics: Any) -> None:
        self.ends.append((traffic["puts"], traffic["put_bytes"]))


def test_adapter_passes_the_object_store_once_a_version(cluster: Cluster, base: Path, tmp_path: Path) -> None:
    """A step on three slices and two workers sends each of the two new adapters once, and nothing else."""
    asked = ray_config(base, steps=4, evals={})
    steps = PutBytes()
    run = run_of(build(asked), tmp_path, asked, steps)
    (checkpoint,) = (run / "checkpoints").glob("step-*3")
    adapters = sum((checkpoint / name / "adapter_model.safetensors").stat().st_size for name in ("guide", "walker"))
    for (puts, sent), (puts_after, sent_after) in pairwise(steps.ends):
        assert puts_after - puts == 2
        assert adapters <= sent_after - sent < adapters + 4096  # and the description from which the adapters are built


def test_async_rollouts_and_stages_are_the_same_on_ray(cluster: Cluster, base: Path, tmp_path: Path) -> None:
    stages = [
        {"steps": 2},
        {"steps": 2, "algorithm": {"type": "ppo", "group_size": 2}, "policies": {"guide": {"lr": 1e-4}}},
    ]
    asked = ray_config(base, staleness=1, stages=stages)
    assert_same(run_of(build(asked), tmp_path, asked), run_inline(tmp_path, asked))


def test_full_model_trains_on_ray(cluster: Cluster, base: Path, tmp_path: Path) -> None:
    full = {"type": "full", "base": str(base), "sampling": {"max_tokens": 2}}
    asked = ray_config(base, policies={"default": full}, steps=2)
    assert_same(run_of(build(asked), tmp_path, asked), run_inline(tmp_path, asked))
