"""Builds runs of language agents whose episodes are played by workers and, on Ray, whose weights are trained in
actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from transformers import AutoTokenizer

from palestra import setup
from palestra.backends.desk import Desk
from palestra.backends.places import LoopConfig, must_have_ray, open_backend
from palestra.backends.slices import Sliced, SlicedExam, Troupe, size_of
from palestra.backends.weights import Bench, Distant, Holder, Shop
from palestra.engine.models import resolve_base
from palestra.engine.sampler import Request, Sampled
from palestra.engines import Engines
from palestra.learners.lm import FullPolicyConfig, LanguageLearner, LoraPolicyConfig, Resident
from palestra.oracles.play import PlayWorker
from palestra.policies.lm import ChatEncoder, LanguagePolicy
from palestra.populations.tasks import Backend, MakeWorker
from palestra.recipe import Config, FrozenConfig
from palestra.rollouts.sources import Games
from palestra.train import Exam, Setup, Stage

Players = Callable[[LoopConfig, MakeWorker], Backend]
"""Opens the backend that plays episodes, given its config and the function that builds a worker."""


def build(config: Config, players: Players | None = None) -> Setup:
    """Builds all parts that `config` describes. Other processes start when `place` of the result is entered.

    `players` opens the backend that plays episodes (default: as `config.backend` says). Raises ValueError if the parts
    of the config do not fit together.
    """
    backend = config.backend
    if backend.type == "inline":
        return setup.build(config)
    engines = Actors(config) if backend.type == "ray" else Drivers(config.device, config.max_rows)
    made = setup.build(config, engines)
    desk = Desk(partial(players or open_players, backend, partial(PlayWorker, config)))
    troupe = Troupe(cast(Mapping[str, LanguageLearner], made.learners), desk)
    slices = backend.slices or 2 * workers_of(backend)
    return replace(
        made,
        stages=[_stage(stage, number, troupe, slices) for number, stage in enumerate(made.stages)],
        exams=[_exam(exam, troupe, slices) for exam in made.exams],
        place=Place(desk, engines.benches, engines.cluster) if isinstance(engines, Actors) else Place(desk, [], None),
        apart=isinstance(engines, Actors),
    )


def workers_of(backend: LoopConfig) -> int:
    """Number of workers that play episodes."""
    return int(backend.placement["play"].get("workers", 1)) if "play" in backend.placement else backend.count


def open_players(backend: LoopConfig, make_worker: MakeWorker) -> Backend:
    """Opens the backend that plays episodes: only the `play` workers if `placement` reserves some, else all."""
    apart = {kind: needs for kind, needs in backend.placement.items() if kind == "play"}
    return open_backend(backend.model_copy(update={"placement": apart}), make_worker, 0 if apart else None)


def _stage(stage: Stage, number: int, troupe: Troupe, slices: int) -> Stage:
    if not isinstance(stage.source, Games):
        return stage
    return replace(stage, source=Sliced(stage.source, troupe, number, size_of(stage.episodes, slices)))


def _exam(exam: Exam, troupe: Troupe, slices: int) -> Exam:
    return SlicedExam(**vars(exam), troupe=troupe, size=size_of(exam.episodes, slices))


class Place:
    """The other processes of a run, as a context manager: started on entry, ended on exit. With `cluster`, this process
    joins it first."""

    def __init__(self, desk: Desk, benches: Sequence[Bench], cluster: Membership | None) -> None:
        self.desk, self.benches, self.cluster = desk, benches, cluster
        self._open = ExitStack()

    def __enter__(self) -> Place:
        with ExitStack() as opened:
            if self.cluster:
                opened.callback(self.cluster.leave)
                self.cluster.join()
            for bench in self.benches:
                opened.callback(bench.close)
                bench.start()
            opened.callback(self.desk.close)
            self.desk.start()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class Membership:
    """This process's membership in a Ray cluster, with resources for all actors that train and play."""

    def __init__(self, backend: LoopConfig) -> None:
        must_have_ray()
        from palestra.backends.ray.cluster import needs_of

        self.address, self.train = backend.address, needs_of("train", backend.placement.get("train", {}))
        play = needs_of("play", backend.placement.get("play", {}))
        self.play = play._replace(actors=workers_of(backend))
        self._joined = False  # by this process, which must then leave

    def join(self) -> None:
        """Joins or starts the cluster; does nothing if this process is in one already."""
        from palestra.backends.ray.cluster import join

        self._joined = join(self.address, [self.train, self.play]) or self._joined

    def leave(self) -> None:
        """Leaves the cluster if this object joined it."""
        from palestra.backends.ray.cluster import leave

        if self._joined:
            leave()
        self._joined = False


# ---- replacements for bases and samplers in the driver


class Nobody:
    """Stub sampler for the driver, which never samples: workers play."""

    async def sample(self, request: Request) -> list[Sampled]:
        """Raises ValueError: only workers sample."""
        raise ValueError("this run's workers sample, and not this process")

    def forget(self) -> None:
        """Does nothing: there is no cache."""


class Drivers(Engines):
    """Engines of a process that trains but does not play: a frozen policy is only a name and a tokenizer."""

    def frozen(self, name: str, config: FrozenConfig) -> LanguagePolicy:
        encoder = ChatEncoder(tokenizer_of(config.base), config.template)
        return LanguagePolicy(name, Nobody(), encoder, config.sampling, system=config.system, memory=config.memory)


class Spec(NamedTuple):
    """Arguments of `Engines.learner`, to build the learner in another process."""

    config: LoraPolicyConfig | FullPolicyConfig
    seed: int
    critic: bool


class Actors(Drivers):
    """Engines without any base: weights are trained in Ray actors, with one or more learners in each."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.device, config.max_rows)
        self.cluster = Membership(config.backend)
        self.specs: list[dict[str, Spec]] = [{} for _ in range(self.cluster.train.actors)]
        self.benches = [Bench(partial(self._holder, specs), config.backend.copy_every) for specs in self.specs]
        self._learners = 0

    def learner(
        self, name: str, config: LoraPolicyConfig | FullPolicyConfig, seed: int, *, critic: bool = False
    ) -> LanguageLearner:
        place = self._learners % len(self.benches)
        self._learners += 1
        self.specs[place][name] = Spec(config, seed, critic)
        return LanguageLearner(name, config, Distant(self.benches[place], name), Nobody(), tokenizer_of(config.base))

    def _holder(self, specs: Mapping[str, Spec]) -> Holder:
        from palestra.backends.ray.holders import RayHolder

        self.cluster.join()
        make = partial(open_shop, self.device, self.max_rows, dict(specs))
        return RayHolder(make, self.cluster.train, f"the training of {', '.join(specs)}")


def open_shop(device: str, max_rows: int, specs: Mapping[str, Spec]) -> Shop:
    """Builds the weights of these learners in the current process, which is to train them."""
    engines = Engines(device, max_rows)
    weights = {}
    for name, spec in specs.items():
        made = engines.learner(name, spec.config, spec.seed, critic=spec.critic).weights
        assert isinstance(made, Resident)
        weights[name] = made
    return Shop(weights)


def tokenizer_of(base: str) -> Any:
    """Returns the tokenizer of a base that is on this machine or can be downloaded."""
    return AutoTokenizer.from_pretrained(resolve_base(base))
