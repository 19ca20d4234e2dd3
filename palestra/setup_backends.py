"""A run of language agents whose episodes workers play and, on Ray, whose weights are trained in actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from transformers import AutoTokenizer

from palestra import setup
from palestra.backends.desk import Desk
from palestra.backends.places import BackendConfig, LoopConfig, must_have_ray, open_backend
from palestra.backends.slices import Sliced, SlicedExam, Troupe, size_of
from palestra.backends.weights import Bench, Distant, Shop
from palestra.engine.models import resolve_base
from palestra.engine.sampler import Request, Sampled
from palestra.learners.lm import FullPolicyConfig, LanguageLearner, LoraPolicyConfig, Resident
from palestra.oracles.play import PlayWorker
from palestra.policies.lm import ChatEncoder, LanguagePolicy
from palestra.populations.tasks import Backend, MakeWorker
from palestra.recipe import Config, FrozenConfig
from palestra.rollouts.sources import Games
from palestra.setup import Engines
from palestra.train import Exam, Setup, Stage

if TYPE_CHECKING:
    from palestra.backends.ray.cluster import Needs


def build(config: Config, opened: Callable[[BackendConfig, MakeWorker], Backend] = open_backend) -> Setup:
    """Everything that `config` describes, ready for training; other processes begin where it does. Raises ValueError
    where its parts do not fit."""
    backend = config.backend
    if backend.type == "inline":
        return setup.build(config)
    engines = Actors(config) if backend.type == "ray" else Drivers(config.device, config.max_rows)
    made = setup.build(config, engines)
    desk = Desk(partial(opened, played_by(backend), partial(PlayWorker, config)))
    troupe = Troupe(cast(Mapping[str, LanguageLearner], made.learners), desk)
    slices = backend.slices or 2 * workers_of(backend)
    return replace(
        made,
        stages=[_stage(stage, number, troupe, slices) for number, stage in enumerate(made.stages)],
        exams=[_exam(exam, troupe, slices) for exam in made.exams],
        place=Place(backend, desk, engines.benches if isinstance(engines, Actors) else []),
        apart=isinstance(engines, Actors),
    )


def workers_of(backend: LoopConfig) -> int:
    """How many workers play."""
    return int(backend.placement["play"].get("workers", 1)) if "play" in backend.placement else backend.count


def played_by(backend: LoopConfig) -> LoopConfig:
    """The part of `backend` that plays. Those who are set apart to play are all who do."""
    play = {kind: needs for kind, needs in backend.placement.items() if kind == "play"}
    return backend.model_copy(update={"placement": play, "workers": backend.count if not play else 0})


def _stage(stage: Stage, number: int, troupe: Troupe, slices: int) -> Stage:
    if not isinstance(stage.source, Games):
        return stage
    return replace(stage, source=Sliced(stage.source, troupe, number, size_of(stage.episodes, slices)))


def _exam(exam: Exam, troupe: Troupe, slices: int) -> Exam:
    return SlicedExam(**vars(exam), troupe=troupe, size=size_of(exam.episodes, slices))


class Place:
    """The other processes of a run, there within a `with` block."""

    def __init__(self, backend: LoopConfig, desk: Desk, benches: Sequence[Bench]) -> None:
        self.backend, self.desk, self.benches = backend, desk, benches
        self._joined = False

    def __enter__(self) -> Place:
        if self.backend.type == "ray":
            self._joined = join(self.backend)
        for bench in self.benches:
            bench.start()
        self.desk.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.desk.close()
        for bench in self.benches:
            bench.close()
        if self._joined:
            from palestra.backends.ray.cluster import leave

            leave()


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
        must_have_ray()
        from palestra.backends.ray.cluster import needs_of

        self.needs = needs_of("train", config.backend.placement.get("train", {}))
        self.specs: list[dict[str, Spec]] = [{} for _ in range(self.needs.actors)]
        holders = [partial(_holder, config, specs, self.needs) for specs in self.specs]
        self.benches = [Bench(holder, config.backend.copy_every) for holder in holders]
        self._learners = 0

    def learner(
        self, name: str, config: LoraPolicyConfig | FullPolicyConfig, seed: int, *, critic: bool = False
    ) -> LanguageLearner:
        place = self._learners % len(self.benches)
        self._learners += 1
        self.specs[place][name] = Spec(config, seed, critic)
        return LanguageLearner(name, config, Distant(self.benches[place], name), Nobody(), tokenizer_of(config.base))


def _holder(config: Config, specs: Mapping[str, Spec], needs: Needs) -> Any:
    from palestra.backends.ray.holders import RayHolder

    join(config.backend)
    make: Callable[[], Shop] = partial(open_shop, config.device, config.max_rows, dict(specs))
    return RayHolder(make, needs, f"the training of {', '.join(specs)}")


def join(backend: LoopConfig) -> bool:
    """Joins Ray, or starts one here that has room for all who train and play; see `cluster.join`."""
    from palestra.backends.ray.cluster import Needs, needs_of
    from palestra.backends.ray.cluster import join as joined

    train = needs_of("train", backend.placement.get("train", {}))
    play = backend.placement.get("play")
    return joined(
        backend.address, [train, Needs(backend.count, {"num_cpus": 1}) if play is None else needs_of("play", play)]
    )


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
