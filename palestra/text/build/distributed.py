"""Builds runs of language agents whose episodes are played by workers and, on Ray, whose weights are trained in
actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from palestra.engine.bases.names import tokenizer_of
from palestra.engine.sampling.request import Completion, Request
from palestra.parallel.async_backend import AsyncBackend
from palestra.parallel.config import RolloutBackendConfig, open_backend, require_ray
from palestra.parallel.tasks import Backend, WorkerFactory
from palestra.parallel.torch_group import join_process_group
from palestra.text.build import build as text
from palestra.text.build.engines import Engines
from palestra.text.build.rollout_worker import RolloutWorker
from palestra.text.config import TextConfig
from palestra.text.learners.lm import CriticKind, LanguageLearner
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig
from palestra.text.policies.lm import LanguagePolicy, SamplerProtocol
from palestra.text.policy_configs import FrozenConfig
from palestra.text.rollouts.sources import EnvSource
from palestra.text.training.episode_tasks import (
    DistributedEval,
    DistributedSource,
    EpisodeDispatcher,
    episodes_per_slice,
)
from palestra.text.training.recoverable_weights import HostedWeights, ProcessHandle, RecoverableWeights, WeightHost
from palestra.text.training.trainer import Stage, TextTrainer

LearnerSpecs = dict[str, dict[str, Any]]  # arguments of `Engines.build_learner`, by name of the learner
RolloutBackendFactory = Callable[[RolloutBackendConfig, WorkerFactory], Backend]
"""Opens the backend that plays episodes, given its config and the function that builds a worker."""


def build(config: TextConfig, open_rollouts: RolloutBackendFactory | None = None) -> TextTrainer:
    """Builds all parts that `config` describes. Other processes start when the trainer is opened.

    `open_rollouts` opens the backend that plays episodes (default: as `config.backend` says). Raises ValueError if the
    parts of the config do not fit together.
    """
    backend = config.backend
    if backend.type == "inline":
        return text.build(config)
    if join_process_group().world_size > 1:
        raise ValueError(
            "torchrun divides each step among its processes, and backend: among its workers: start palestra train "
            "without torchrun, or leave backend: out"
        )
    engines = RayEngines(config) if backend.type == "ray" else DriverEngines(config.device, config.max_num_seqs)
    made = text.build(config, engines)
    async_backend = AsyncBackend(
        partial(open_rollouts or open_rollout_backend, backend, partial(RolloutWorker, config))
    )
    dispatcher = EpisodeDispatcher(cast(Mapping[str, LanguageLearner], made.learners), async_backend)
    slices = backend.slices or 2 * num_rollout_workers(backend)
    return replace(
        made,
        stages=[_stage(stage, number, dispatcher, slices) for number, stage in enumerate(made.stages)],
        evals=[
            DistributedEval(**vars(e), dispatcher=dispatcher, slice_size=episodes_per_slice(e.episodes, slices))
            for e in made.evals
        ],
        worker_context=partial(run_processes, async_backend, engines),
        learners_are_remote=bool(engines.trained_elsewhere),
    )


def num_rollout_workers(backend: RolloutBackendConfig) -> int:
    """Returns the number of workers that play episodes."""
    return int(backend.placement["play"].get("workers", 1)) if "play" in backend.placement else backend.num_workers


def open_rollout_backend(backend: RolloutBackendConfig, make_worker: WorkerFactory) -> Backend:
    """Opens the backend that plays episodes: only the `play` workers if `placement` reserves some, else all."""
    apart = {kind: needs for kind, needs in backend.placement.items() if kind == "play"}
    return open_backend(backend.model_copy(update={"placement": apart}), make_worker, 0 if apart else None)


def _stage(stage: Stage, number: int, dispatcher: EpisodeDispatcher, slices: int) -> Stage:
    if not isinstance(stage.source, EnvSource):
        return stage
    return replace(
        stage, source=DistributedSource(stage.source, dispatcher, number, episodes_per_slice(stage.episodes, slices))
    )


@contextmanager
def run_processes(async_backend: AsyncBackend, engines: DriverEngines) -> Iterator[None]:
    """Context with the other processes of a run. This process joins the cluster of `engines` first, if there is one."""
    with ExitStack() as opened:
        if engines.cluster:
            opened.callback(engines.cluster.leave)
            engines.cluster.join()
        for weights in engines.trained_elsewhere:
            opened.callback(weights.close)
            weights.start()
        opened.callback(async_backend.close)
        async_backend.start()
        yield


class RayMembership:
    """This process's membership in a Ray cluster, with resources for all actors that train and play."""

    def __init__(self, backend: RolloutBackendConfig) -> None:
        require_ray()
        from palestra.parallel.ray.cluster import parse_placement

        self.address = backend.address
        self.train = parse_placement("train", backend.placement.get("train", {}))
        play = parse_placement("play", backend.placement.get("play", {}))
        self.play = play._replace(num_actors=num_rollout_workers(backend))
        self._joined = False  # by this process, which must then leave

    def join(self) -> None:
        """Joins or starts the cluster; does nothing if this process is in one already."""
        from palestra.parallel.ray.cluster import join_cluster

        self._joined = join_cluster(self.address, [self.train, self.play]) or self._joined

    def leave(self) -> None:
        """Leaves the cluster if this object joined it."""
        from palestra.parallel.ray.cluster import leave_cluster

        if self._joined:
            leave_cluster()
        self._joined = False


# ---- replacements for bases and samplers in the driver


class NoSampler(SamplerProtocol):
    """Stub sampler for the driver, which never samples: workers play."""

    async def sample(self, request: Request) -> list[Completion]:
        """Raises ValueError: only workers sample."""
        raise ValueError("this process does not sample: the run's workers do")

    def clear_cache(self) -> None:
        """Does nothing: there is no cache."""


class DriverEngines(Engines):
    """Engines of a process that trains but does not play: a frozen policy has only a name and a tokenizer.

    `trained_elsewhere` are the weights that processes of `cluster` train.
    """

    cluster: RayMembership | None = None
    trained_elsewhere: Sequence[RecoverableWeights] = ()

    def build_frozen_policy(self, name: str, config: FrozenConfig) -> LanguagePolicy:
        encoder = config.encoder(tokenizer_of(config.base))
        return LanguagePolicy(name, NoSampler(), encoder, config.sampling, **config.prompt_options)


class RayEngines(DriverEngines):
    """Engines that load no base: weights are trained in Ray actors, each with one or more learners."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config.device, config.max_num_seqs)
        self.cluster = RayMembership(config.backend)
        self.specs: list[LearnerSpecs] = [{} for _ in range(self.cluster.train.num_actors)]
        self.trained_elsewhere = [
            RecoverableWeights(partial(self._holder, self.cluster, specs), config.backend.copy_every)
            for specs in self.specs
        ]
        self._learners = 0

    def build_learner(
        self,
        name: str,
        config: LoraPolicyConfig | FullPolicyConfig,
        seed: int,
        critic: CriticKind = "none",
    ) -> LanguageLearner:
        place = self._learners % len(self.trained_elsewhere)
        self._learners += 1
        self.specs[place][name] = {"config": config, "seed": seed, "critic": critic}
        return LanguageLearner(
            name, config, HostedWeights(self.trained_elsewhere[place], name), NoSampler(), tokenizer_of(config.base)
        )

    def _holder(self, cluster: RayMembership, specs: LearnerSpecs) -> ProcessHandle:
        from palestra.parallel.ray.actor import RayActorHandle

        cluster.join()
        make = partial(open_weight_host, self.device, self.max_num_seqs, dict(specs))
        return RayActorHandle(make, cluster.train, f"the training of {', '.join(specs)}")


def open_weight_host(device: str, max_num_seqs: int, specs: LearnerSpecs) -> WeightHost:
    """Builds the weights of these learners in the current process, which trains them."""
    engines = Engines(device, max_num_seqs)
    return WeightHost({name: engines.build_learner(name, **spec).weights for name, spec in specs.items()})
