"""The tasks of docs/results-peers.md, and the packages that learn them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.peers.learning import LearningSpec

PACKAGES = {"palestra": "ours_learning", "BenchMARL": "benchmarl_learning", "plain PyTorch": "plain_mappo"}
WITHOUT_PLAIN = ("palestra", "BenchMARL")


@dataclass(frozen=True)
class Task:
    """A task of `packages`; `spec` is that of seed 0."""

    name: str
    title: str
    spec: LearningSpec
    packages: tuple[str, ...] = tuple(PACKAGES)
    seeds: int = 5


NAVIGATION = LearningSpec(
    algorithm="mappo",
    scenario="navigation",
    options={"n_agents": 3, "collisions": False, "shared_rew": True},
    horizon=100,
    games=60,
    rollout_length=50,
    env_steps=48_000,
    eval_every=6_000,
    seed=0,
)
NAVIGATION_QMIX = replace(
    NAVIGATION,
    algorithm="qmix",
    games=30,
    rollout_length=20,
    env_steps=24_000,
    eval_every=2_400,
    gradient_steps=30,
    tau=0.01,
)


def random_task(spec: LearningSpec) -> Task:
    """Returns the task of uniform actions in the scenario of `spec`."""
    played = replace(spec, algorithm="random", eval_games=4_000)
    return Task(f"{spec.scenario}_random", spec.scenario, played, seeds=1)


TASKS = [
    random_task(NAVIGATION),
    Task("navigation_mappo", "navigation, MAPPO", NAVIGATION),
    Task("navigation_qmix", "navigation, QMIX", NAVIGATION_QMIX, WITHOUT_PLAIN),
]
