"""The whole loop on Ray: workers, learners and nodes are lost, and the run is the one that nobody disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_loops import assert_same, config, here, killed, run_of

from palestra.recipe import Config
from palestra.setup_backends import build
from palestra.train import Setup, Watcher
from palestra.types import Episode

ray = pytest.importorskip("ray")

import ray_cluster  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node."""
    with ray_cluster.cluster({"num_cpus": 6}) as nodes:
        yield nodes


def on_ray(base: Path, backend: dict[str, Any] | None = None, **changes: Any) -> Config:
    return config(base, backend={"type": "ray", "workers": 2, "slices": 3} | (backend or {}), **changes)


def whole(root: Path, asked: Config) -> Path:
    """The same run, whose slices one worker in this process plays."""
    alone = asked.model_copy(update={"backend": asked.backend.model_copy(update={"type": "local", "placement": {}})})
    return run_of(build(alone, here), root, alone)


def actor_of(made: Setup, learner: str) -> Any:
    return made.learners[learner].weights.bench._holder._actor  # type: ignore[attr-defined]


class Murder(Watcher):
    """Kills the actor of a learner in the middle of the second step's play, and once more after that step."""

    def __init__(self, made: Setup) -> None:
        self.made, self.episodes = made, 0

    def played(self, episode: Episode) -> None:
        self.episodes += 1
        if self.episodes == 8:
            ray.kill(actor_of(self.made, "guide"))

    def step(self, step: int, metrics: Any) -> None:
        if step == 1:
            ray.kill(actor_of(self.made, "walker"))


@pytest.mark.parametrize("actors", [1, 2])
def test_a_run_outlives_its_workers_and_its_learners(cluster: Cluster, base: Path, tmp_path: Path, actors: int) -> None:
    """All learners in one actor, or each in its own; a worker dies too."""
    env = {"type": "toys_mortal:Mortal", "turns": 2, "fatal": 8, "mark": str(tmp_path / "mark")}
    placement = {"train": {"workers": actors}, "play": {"workers": 2, "num_cpus": 0.5}}
    asked = on_ray(base, {"placement": placement, "copy_every": 2}, env=env)
    made = build(asked)
    run = run_of(made, tmp_path, asked, Murder(made))
    assert (tmp_path / "mark").exists()
    benches = {made.learners[name].weights.bench for name in ("guide", "walker")}  # type: ignore[attr-defined]
    assert [bench.losses for bench in benches] == ([2] if actors == 1 else [1, 1])
    assert_same(run, whole(tmp_path, asked))
    assert ray.available_resources()["CPU"] == 6  # nobody is left


def test_play_ahead_and_stages_are_the_same_on_ray(cluster: Cluster, base: Path, tmp_path: Path) -> None:
    stages = [{"steps": 2}, {"steps": 2, "algorithm": {"type": "ppo", "k": 2}, "policies": {"guide": {"lr": 1e-4}}}]
    asked = on_ray(base, staleness=1, stages=stages)
    assert_same(run_of(build(asked), tmp_path, asked), whole(tmp_path, asked))


def test_a_full_model_is_trained_and_travels(cluster: Cluster, base: Path, tmp_path: Path) -> None:
    full = {"type": "full", "base": str(base), "sampling": {"max_tokens": 2}}
    asked = on_ray(base, policies={"default": full}, steps=2)
    assert_same(run_of(build(asked), tmp_path, asked), whole(tmp_path, asked))


class LoseNode(Watcher):
    """Takes the node of a learner from the cluster, by killing its processes, after the first step."""

    def __init__(self, made: Setup, nodes: Cluster) -> None:
        self.made, self.nodes, self.lost = made, nodes, ""

    def step(self, step: int, metrics: Any) -> None:
        if step == 0:
            actor = actor_of(self.made, "guide")
            self.lost = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            node = next(node for node in self.nodes.list_all_nodes() if node.node_id == self.lost)
            self.nodes.remove_node(node, allow_graceful=False)


def test_a_run_outlives_the_node_that_trains_and_plays(base: Path, tmp_path: Path) -> None:
    """The learners and half of the workers go with a node; another has room for them."""
    home, away = {"num_cpus": 1}, {"num_cpus": 3, "resources": {"strong": 1}}
    asked = on_ray(base, {"placement": {"train": {"resources": {"strong": 1}}}}, steps=4)
    with ray_cluster.cluster(home, away, away) as nodes:
        made = build(asked)
        watcher = LoseNode(made, nodes)
        run = run_of(made, tmp_path, asked, watcher)
        assert [node["Alive"] for node in ray.nodes() if node["NodeID"] == watcher.lost] == [False]
    assert_same(run, whole(tmp_path, asked))


def test_a_learner_that_has_no_place_is_explained(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palestra.backends.ray import cluster as clusters

    monkeypatch.setattr(clusters, "PATIENCE", 3.0)
    asked = on_ray(base, {"placement": {"train": {"resources": {"moon": 1}}}})
    with (
        ray_cluster.cluster({"num_cpus": 3}),
        pytest.raises(ValueError, match=r"no worker for the training of guide, walker in 3 s: one needs .*moon"),
    ):
        run_of(build(asked), tmp_path, asked)


def test_a_driver_killed_and_resumed_ends_as_if_it_never_was(base: Path, tmp_path: Path) -> None:
    """A cluster of its own goes with it, and the next driver starts another."""
    asked = on_ray(base, steps=6)
    assert_same(killed(tmp_path, asked, 10), whole(tmp_path, asked))
