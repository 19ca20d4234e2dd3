"""What a training run of language agents may be told: the schema that YAML and overrides are checked against.

The schema of each part stands beside its code; this file joins them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from palestra.algorithms.text.base import TextAlgorithm
from palestra.algorithms.text.dpo import DPO
from palestra.algorithms.text.grpo import GRPO
from palestra.algorithms.text.ppo import PPO
from palestra.algorithms.text.sft import SFT
from palestra.backends.places import LoopConfig
from palestra.config import RunName, Strict, policy_names, validate
from palestra.engine.sampler import Sampling
from palestra.learners.lm import FullPolicyConfig, LoraPolicyConfig, SpeechConfig
from palestra.policies.endpoint import EndpointConfig
from palestra.remote.sampler_config import SamplerConfig
from palestra.rollouts.records import Data
from palestra.rollouts.sources import Curriculum
from palestra.sinks.base import Sinks
from palestra.types import TEAM, Seat

SHAPE = {"type", "base", "rank", "alpha", "targets", "dtype", "seed", "path"}  # of a policy's weights


class TaughtLora(LoraPolicyConfig):
    """A LoRA policy; with `teacher` the policy of that name acts and this one learns from what it says."""

    teacher: str | None = None


class FrozenConfig(SpeechConfig):
    """A language policy that does not learn: the bare base, or with `path` a saved adapter or full model."""

    type: Literal["frozen"] = "frozen"
    path: str | None = None


class RandomConfig(Strict):
    """Uniform over legal actions, or over `words`."""

    type: Literal["random"] = "random"
    words: list[str] = ["up", "down", "left", "right"]
    length: int = Field(3, ge=1, le=10_000)


class ScriptedConfig(Strict):
    """Fixed `answers`, one for each of a line's turns, again and again."""

    type: Literal["scripted"] = "scripted"
    answers: list[str] = Field(min_length=1)


class ExpertConfig(Strict):
    """The env's own expert, who knows the solution: for demonstrations."""

    type: Literal["expert"] = "expert"


class HumanConfig(Strict):
    """A person at the terminal."""

    type: Literal["human"] = "human"


PolicyConfig = Annotated[
    TaughtLora
    | FullPolicyConfig
    | FrozenConfig
    | EndpointConfig
    | RandomConfig
    | ScriptedConfig
    | ExpertConfig
    | HumanConfig,
    Field(discriminator="type"),
]


def _own_algorithm(tree: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """An algorithm of the user's, where `type` is "module:Class"; else one of ours."""
    named = str(tree.get("type", "")) if isinstance(tree, dict) else ""
    if ":" in named:
        return validate(_algorithm_class(named), tree)
    return tree if isinstance(tree, TextAlgorithm) else known(tree)


def _algorithm_class(path: str) -> type[TextAlgorithm]:
    module, _, name = path.partition(":")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the algorithm cannot be loaded from {path}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, TextAlgorithm)):
        raise ValueError(f"{path} is no subclass of palestra.algorithms.text.base.TextAlgorithm")
    return cls


AlgorithmConfig = Annotated[
    GRPO | DPO | PPO | SFT,
    Field(discriminator="type"),
    WrapValidator(_own_algorithm),
    PlainSerializer(lambda algorithm: algorithm.model_dump(mode="json"), return_type=dict),
]


class ExamConfig(Strict):
    """Held-out play: `env` changes options of the training env (default: `split: dev`, where the env has splits), with
    several envs of the one named `of`; `seats` puts other policies at some seats; `every` 0 is only before and
    after."""

    of: str | None = None
    seats: dict[Seat, str] = {}
    episodes: int = Field(100, ge=1, le=1_000_000)
    every: int = Field(0, ge=0)
    env: dict[str, Any] | None = None


class MixConfig(Strict):
    """How often each of several envs is played: by `weights` (1 where none is given), and with `curriculum: frontier`
    more where success is open, see `Games`."""

    weights: dict[str, float] = {}
    curriculum: Curriculum = "fixed"
    floor: float = Field(0.1, ge=0, le=1)
    rate: float = Field(0.2, gt=0, le=1)


class StageConfig(Strict):
    """A part of a run, where it differs from the whole: other lengths, another algorithm, other data (`[]`: play),
    changes to the env and to how policies learn, speak and are taught."""

    name: str = ""
    steps: int | None = Field(None, ge=1)
    episodes: int | None = Field(None, ge=1, le=1_000_000)
    algorithm: AlgorithmConfig | None = None
    data: Data | None = None
    env: dict[str, Any] = {}
    policies: dict[str, dict[str, Any]] = {}


class Config(Strict):
    """A training run. `episodes` are played in each of `steps`; `seats` maps seats to policies where the names differ
    (policy `default` takes every seat not named). In place of one `env` there may be several `envs`, mixed as `mix`
    says. With `data` nothing is played: a step's episodes are from files, and an env is for exams and for what it tells
    its seats. With `stages` the run goes through them in turn, over the same weights. `exam_sampling` changes how
    language policies sample in exams, for instance `temperature: 0`. `engine` is the URL of a server (`palestra serve`,
    Tinker, MinT) that trains and samples in place of this process; `sampler` says which samplers answer in its place,
    while training stays here; `backend` which other processes play, and on Ray train, in place of it. With `staleness`
    n above 0 training does not wait for play: episodes are played ahead, with weights at most n steps older than those
    they train. The run ends with an error where more than the share `max_failed` of the episodes of a step or an exam
    failed; 1 lets it go on whatever fails.

    `parallel` says what the processes that torchrun starts share: `ddp` (the default there) the episodes and passes of
    a step, `fsdp` the weights, gradients and optimizers too. A run goes on with any number of them."""

    name: RunName = "run"
    seed: int = 0
    steps: int = Field(100, ge=1)
    episodes: int = Field(32, ge=1, le=1_000_000)
    env: dict[str, Any] = {}
    envs: dict[str, dict[str, Any]] = {}
    mix: MixConfig = MixConfig()
    data: Data = []
    policies: dict[str, PolicyConfig]
    seats: dict[Seat, str] = {}
    algorithm: AlgorithmConfig = GRPO()
    stages: list[StageConfig] = []
    exams: dict[str, ExamConfig] = {}
    exam_sampling: dict[str, Any] = {}
    checkpoint_every: int = Field(10, ge=1)
    keep_every: int = Field(0, ge=0)
    record_every: int = Field(1, ge=0)
    staleness: int = Field(0, ge=0, le=10_000)
    max_failed: float = Field(0.5, ge=0, le=1)
    sinks: Sinks = []
    engine: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    sampler: SamplerConfig | None = None
    backend: LoopConfig = LoopConfig(type="inline")
    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] | None = None
    max_rows: int = Field(512, ge=1)

    @property
    def games(self) -> dict[str, dict[str, Any]]:
        """The envs by name; the only one is called "train"."""
        return self.envs or ({"train": self.env} if self.env else {})

    @property
    def plays(self) -> str:
        """What is played, for who watches."""
        played = [str(env["type"]) for env in self.games.values()]
        return " and ".join(dict.fromkeys(played or [entry.path for entry in self.data])) or "data"

    @property
    def learns(self) -> str:
        """How, for who watches."""
        return ", then ".join((stage.algorithm or self.algorithm).type for stage in self.stages) or self.algorithm.type

    def game(self, name: str | None = None) -> dict[str, Any]:
        """The env called `name`, or the first. Raises ValueError where there is none."""
        if name is not None and name not in self.games:
            raise ValueError(f'there is no env called "{name}": envs: names {", ".join(self.envs) or "none"}')
        if not self.games:
            raise ValueError("this config names no env, and one is to be played: add env: {type: sokoban, ...}")
        return self.games[name] if name else next(iter(self.games.values()))

    def parts(self) -> Iterator[Config]:
        """The config of each stage: the whole one, with the stage's changes."""
        whole = self.model_dump(mode="json", exclude={"stages"})
        for stage in self.stages or [StageConfig()]:
            changes = stage.model_dump(mode="json", exclude={"name", "env", "policies"}, exclude_none=True)
            if unknown := sorted(set(stage.policies) - set(self.policies)):
                raise ValueError(
                    f'a stage changes policy "{unknown[0]}", but policies: names {", ".join(self.policies)}'
                )
            if fixed := sorted(SHAPE & {key for changed in stage.policies.values() for key in changed}):
                raise ValueError(f'a stage cannot change what a policy is made of ("{fixed[0]}"): the run has it once')
            policies = {name: one | stage.policies.get(name, {}) for name, one in whole["policies"].items()}
            games = {name: env | stage.env for name, env in self.games.items()}
            changes |= {"envs": games} if self.envs else {"env": self.env | stage.env}
            yield validate(Config, whole | changes | {"policies": policies})

    @field_validator("policies")
    @classmethod
    def _named(cls, policies: dict[str, Any]) -> dict[str, Any]:
        policy_names(policies, TEAM, "base")  # the figures of all together, and the bare base model
        return policies

    @field_validator("exam_sampling")
    @classmethod
    def _sampled(cls, changes: dict[str, Any]) -> dict[str, Any]:
        validate(Sampling, changes)
        return changes

    @model_validator(mode="after")
    def _playable(self) -> Self:
        recorded = bool(self.data) or bool(self.stages and all(stage.data for stage in self.stages))
        absent = recorded and not self.env and not self.envs
        if bool(self.env.get("type")) == bool(self.envs) and not absent:
            raise ValueError(
                "a run plays one env or several: write env: {type: sokoban, ...}, or envs: with a name for each; "
                "`palestra info` lists the envs"
            )
        for name in [*self.mix.weights, *(exam.of for exam in self.exams.values())]:
            self.game(name)
        if unknown := {n for exam in self.exams.values() for n in exam.seats.values()} - set(self.policies):
            raise ValueError(f'an exam seats "{min(unknown)}", but policies: names {", ".join(self.policies)}')
        return self

    @model_validator(mode="after")
    def _staged(self) -> Self:
        if self.stages:
            list(self.parts())
        return self

    def _full(self) -> list[str]:
        """The policies that are full models."""
        return [name for name, policy in self.policies.items() if isinstance(policy, FullPolicyConfig)]

    @model_validator(mode="after")
    def _referred(self) -> Self:
        if (full := self._full()) and self.algorithm.refers and not self.stages:
            raise ValueError(
                f"the algorithm holds policies to a reference (kl, or DPO without reference_free), but {full[0]} is a "
                f"full model, which moves its base and keeps no copy: do without, or set policies.{full[0]}.type: lora"
            )
        return self

    @model_validator(mode="after")
    def _ahead(self) -> Self:
        if self.staleness and (full := self._full()):
            raise ValueError(
                f"staleness: {self.staleness} plays while weights are trained, but {full[0]} is a full model, which "
                f"has no second copy to play with: set staleness: 0, or policies.{full[0]}.type: lora"
            )
        return self

    @model_validator(mode="after")
    def _abreast(self) -> Self:
        others = {
            "staleness: plays ahead of training": self.staleness,
            "engine: trains on a server": self.engine,
            "sampler: has others answer": self.sampler,
            f"backend: {self.backend.type} has others play": self.backend.type != "inline",
        }
        if self.parallel and (other := [what for what, there in others.items() if there]):
            raise ValueError(
                f"parallel: {self.parallel} shares each step among processes, but {other[0]}: leave one out"
            )
        return self

    @model_validator(mode="after")
    def _sampled_there(self) -> Self:
        if self.sampler and self.engine:
            raise ValueError("engine: trains and samples on a server, so there is nothing for sampler: to do: drop one")
        return self

    @model_validator(mode="after")
    def _elsewhere(self) -> Self:
        if self.backend.type == "inline":
            return self
        if self.engine:
            raise ValueError(
                f"engine: {self.engine} trains and samples there, and backend: {self.backend.type} would elsewhere: "
                "leave one of them out"
            )
        if self.sampler:
            raise ValueError(
                f"sampler: has other processes answer, and backend: {self.backend.type} has them play whole episodes: "
                "leave one of them out"
            )
        if human := [name for name, policy in self.policies.items() if isinstance(policy, HumanConfig)]:
            raise ValueError(
                f"policies.{human[0]} is a person at this terminal, whom workers elsewhere cannot ask: play inline"
            )
        return self

    @model_validator(mode="after")
    def _taught(self) -> Self:
        for name, policy in self.policies.items():
            teacher = getattr(policy, "teacher", None)
            if teacher is None:
                continue
            if teacher not in self.policies or getattr(self.policies[teacher], "teacher", None):
                raise ValueError(
                    f'policies.{name}.teacher is "{teacher}", which must be one of policies: and have no teacher itself'
                )
            if self.algorithm.type != "sft" and not self.stages:
                raise ValueError(
                    f"policies.{name} has a teacher, whose answers are for imitation: set algorithm: {{type: sft}}, or "
                    "leave the teacher out"
                )
        return self
