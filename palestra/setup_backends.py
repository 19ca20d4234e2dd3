"""A run of language agents whose episodes workers play and, on Ray, whose weights are trained in actors."""

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


def build(config: Config, players: Players | None = None) -> Setup:
    """Everything that `config` describes, ready for training; other processes begin where it does, `players` (default:
    as `backend` says) among them. Raises ValueError where its parts do not fit."""
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
    """How many workers play."""
    return int(backend.placement["play"].get("workers", 1)) if "play" in backend.placement else backend.count


def open_players(backend: LoopConfig, make_worker: MakeWorker) -> Backend:
    """Those who play: where some are set apart to do so, they alone."""
    apart = {kind: needs for kind, needs in backend.placement.items() if kind == "play"}
    return open_backend(backend.model_copy(update={"placement": apart}), make_worker, 0 if apart else None)


def _stage(stage: Stage, number: int, troupe: Troupe, slices: int) -> Stage:
    if not isinstance(stage.source, Games):
        return stage
    return replace(stage, source=Sliced(stage.source, troupe, number, size_of(stage.episodes, slices)))


def _exam(exam: Exam, troupe: Troupe, slices: int) -> Exam:
    return SlicedExam(**vars(exam), troupe=troupe, size=size_of(exam.episodes, slices))


class Place:
    """The other processes of a run, there within a `with` block. On Ray this process is in their `cluster`."""

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
    """This process's part in a Ray cluster, or in one that it starts, with room for all who train and play."""

    def __init__(self, backend: LoopConfig) -> None:
        must_have_ray()
        from palestra.backends.ray.cluster import needs_of

        self.address, self.train = backend.address, needs_of("train", backend.placement.get("train", {}))
        play = needs_of("play", backend.placement.get("play", {}))
        self.play = play._replace(actors=workers_of(backend))
        self._joined = False  # by us, who then are to leave

    def join(self) -> None:
        from palestra.backends.ray.cluster import join

        self._joined = join(self.address, [self.train, self.play]) or self._joined

    def leave(self) -> None:
        from palestra.backends.ray.cluster import leave

        if self._joined:
            leave()
        self._joined = False


# ---- what the driver has in place of bases and samplers


class Nobody:
    """In place of a sampler where nobody is asked: workers play."""

    async def sample(self, request: Request) -> list[Sampled]:
        raise ValueError("this run's workers sample, and not this process")

    def forget(self) -> None:
        """Nothing is kept."""


class Drivers(Engines):
    """The bases of a process that trains and does not play: a policy that does not learn is a name with a tokenizer."""

    def frozen(self, name: str, config: FrozenConfig) -> LanguagePolicy:
        encoder = ChatEncoder(tokenizer_of(config.base), config.template)
        return LanguagePolicy(name, Nobody(), encoder, config.sampling, system=config.system, memory=config.memory)


class Spec(NamedTuple):
    """What `Engines.learner` is told of a learner."""

    config: LoraPolicyConfig | FullPolicyConfig
    seed: int
    critic: bool


class Actors(Drivers):
    """No base at all: weights are trained in Ray's actors, one or several learners in each."""

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
    """The weights of some learners, in the process that is to train them."""
    engines = Engines(device, max_rows)
    weights = {}
    for name, spec in specs.items():
        made = engines.learner(name, spec.config, spec.seed, critic=spec.critic).weights
        assert isinstance(made, Resident)
        weights[name] = made
    return Shop(weights)


def tokenizer_of(base: str) -> Any:
    """The tokenizer of a base that this machine has or can fetch."""
    return AutoTokenizer.from_pretrained(resolve_base(base))
