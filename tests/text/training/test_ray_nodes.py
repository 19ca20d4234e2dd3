"""The whole loop on Ray when nodes, placements and the driver itself are lost."""

import time
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_loops import actor_of, assert_same, ray_config, run_inline, run_of, run_with_kill

from palestra.runs.loop import Callback
from palestra.text.build.distributed import build
from palestra.text.training.trainer import TextTrainer

ray = pytest.importorskip("ray")

from helpers import ray_cluster  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class LoseNode(Callback):
    """Kills the processes of a learner's node after the first step."""

    def __init__(self, made: TextTrainer, nodes: Cluster) -> None:
        self.made, self.nodes, self.lost = made, nodes, ""

    def on_step(self, step: int, metrics: Any) -> None:
        if step == 0:
            actor = actor_of(self.made, "guide")
            self.lost = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            node = next(node for node in self.nodes.list_all_nodes() if node.node_id == self.lost)
            self.nodes.remove_node(node, allow_graceful=False)


def test_run_survives_the_loss_of_a_training_node(base: Path, tmp_path: Path) -> None:
    """The node has the learners and half of the workers; another node has room for them."""
    home, away = {"num_cpus": 1}, {"num_cpus": 3, "resources": {"strong": 1}}
    asked = ray_config(base, {"placement": {"train": {"resources": {"strong": 1}}}}, steps=4)
    with ray_cluster.cluster(home, away, away) as nodes:
        made = build(asked)
        watcher = LoseNode(made, nodes)
        run = run_of(made, tmp_path, asked, watcher)
        end = time.monotonic() + 60
        while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == watcher.lost):
            assert time.monotonic() < end, "the node was not lost"  # the run may end before Ray notices
            time.sleep(0.2)
    assert_same(run, run_inline(tmp_path, asked))


def test_unplaceable_learner_is_explained(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palestra.parallel.ray import cluster as clusters

    monkeypatch.setattr(clusters, "PLACEMENT_TIMEOUT_S", 3.0)
    asked = ray_config(base, {"placement": {"train": {"resources": {"moon": 1}}}})
    with (
        ray_cluster.cluster({"num_cpus": 3}),
        pytest.raises(ValueError, match=r"no worker for the training of guide, walker in 3 s: one needs .*moon"),
    ):
        run_of(build(asked), tmp_path, asked)


def test_resume_after_driver_kill_is_bit_identical(base: Path, tmp_path: Path) -> None:
    """The driver's own cluster ends with it, and the next driver starts another."""
    asked = ray_config(base, steps=6)
    assert_same(run_with_kill(tmp_path, asked, 10), run_inline(tmp_path, asked))
