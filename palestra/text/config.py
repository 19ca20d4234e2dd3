"""Config schema of a language-agent training run. YAML files and `--set` overrides are validated against it.

The schema of each part stands beside the code that it configures; this module joins them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from palestra.core.config import StrictModel, is_changed, merge, validate
from palestra.core.config.own_types import OwnTypes
from palestra.core.types import TEAM
from palestra.engine.lora.config import LoraVariantsConfig
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.parallel.config import RolloutBackendConfig
from palestra.runs.config import EvalConfig, PolicyRunConfig
from palestra.text.algorithms.base import TextAlgorithm
from palestra.text.algorithms.distill import Distill
from palestra.text.algorithms.dpo import DPO
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.kto import KTO
from palestra.text.algorithms.ppo import PPO
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.algorithms.reward_model import RewardModel
from palestra.text.algorithms.sft import SFT
from palestra.text.conflicts import check_conflicts
from palestra.text.learners.lm_config import FullPolicyConfig, LMPolicyConfig, LoraPolicyConfig
from palestra.text.policy_configs import HumanConfig, PolicyConfig
from palestra.text.rollouts.dataset import Data
from palestra.text.rollouts.instance_pool import InstancePool
from palestra.text.rollouts.learned_reward import LearnedRewardConfig
from palestra.text.rollouts.reward_weights import FadingWeight
from palestra.text.rollouts.sources import Curriculum
from palestra.text.samplers.config import SamplerConfig

# Keys of a policy that are read once, when its weights and its trainer are made: a stage cannot change them.
WEIGHT_KEYS = {"type", "base", "rank", "alpha", "target_modules", "dtype", "quantize", "long_context", "seed", "path"}
WEIGHT_KEYS |= {"reference", *LoraVariantsConfig.model_fields}
TRAINER_KEYS = {"optimizer", "micro_batch_tokens", "precision", "gradient_checkpointing"}


TextAlgorithmConfig = Annotated[
    GRPO | Distill | DPO | KTO | PPO | RewardModel | SFT,
    Field(discriminator="type"),
    OwnTypes("algorithm", TextAlgorithm, presets=TEXT_PRESETS),
]


class TextEvalConfig(EvalConfig):
    """A held-out evaluation of language agents."""

    base_env: str | None = None
    """Name of the training env to evaluate in, if the run has several `envs`. Null: the first one."""
    env: dict[str, Any] | None = None
    """Env options that differ from training. Without `split` an env with splits is evaluated on `dev`, or on `test` if
    that is the evaluation's name."""
    samples: int = Field(1, ge=1, le=4096)
    """Times that each instance is played. Above 1 the evaluation also has pass@k and, in envs that report final
    answers, the majority vote; success is the mean over all samples."""


class EnvMixConfig(StrictModel):
    """Sampling weights of several `envs` in training."""

    weights: dict[str, float] = {}
    """Relative frequency of each env by name; 1 for an env that is not listed."""
    curriculum: Curriculum = "fixed"
    """`fixed`: draw by `weights` alone. `frontier`: multiply each weight by s(1 - s), where s is the env's running
    success rate, which favours envs of intermediate difficulty (Rutherford et al., 2024, eq. 1); each env must report
    success."""
    floor: float = Field(0.1, ge=0, le=1)
    """With `frontier`, the share of draws made by `weights` alone, from 0 to 1. Raise it if an env is hardly ever
    drawn."""
    rate: float = Field(0.2, gt=0, le=1)
    """With `frontier`, the step size of the running success rate; it averages over about 1 / `rate` training steps."""


class StageConfig(StrictModel):
    """A part of a run. Every key that is set replaces or changes the run's own value during this stage."""

    name: str = ""
    """Label of the stage. Empty: no label."""
    steps: int | None = Field(None, ge=1)
    """Training steps of the stage. Null: the run's `steps`."""
    episodes: int | None = Field(None, ge=1, le=1_000_000)
    """Episodes per step. Null: the run's `episodes`."""
    algorithm: TextAlgorithmConfig | None = None
    """Algorithm of the stage. Null: the run's `algorithm`."""
    data: Data | None = None
    """Data files of the stage. An empty list: play episodes instead. Null: the run's `data`."""
    env: dict[str, Any] = {}
    """Changes to the options of `env`, or of every env in `envs`."""
    policies: dict[str, dict[str, Any]] = {}
    """Changes to policies by name, such as the learning rate, the teacher, or single keys of `sampling`. Keys that
    decide which weights a policy has (such as type, base, rank, alpha, target_modules, dtype, quantize, path) or how
    its passes are made (optimizer, precision, micro_batch_tokens, gradient_checkpointing) cannot change."""


class TextConfig(PolicyRunConfig):
    """A training run of language agents.

    Each of `steps` steps plays `episodes` episodes in `env` (or in several `envs`), or reads them from `data`, and
    trains the policies on them with `algorithm`. Under torchrun the processes share one run; it can be resumed with
    another number of processes.
    """

    reserved_names = (TEAM, "base")  # "base": the base model without an adapter

    steps: int = Field(100, ge=1)
    """Number of training steps, per stage if there are stages."""
    episodes: int = Field(32, ge=1, le=1_000_000)
    """Episodes per training step."""
    env: dict[str, Any] = {}
    """The env to train in: `type` and its options. Give either `env` or `envs`. With `data` it is optional, and serves
    for evaluations and for the roles of the seats."""
    max_joint_steps: int = Field(1000, ge=1, le=1_000_000)
    """Largest number of joint steps of an episode, in training and in evaluations. A trajectory that has not ended then
    is failed: it is not trained on, and counts towards `max_failed`. To end it with a reward, use the env's limit."""
    envs: dict[str, dict[str, Any]] = {}
    """Several envs by name, each with `type` and options, drawn as `mix` describes."""
    mix: EnvMixConfig = EnvMixConfig()
    """Sampling weights of `envs`."""
    instance_pool: InstancePool | None = None
    """Instances that training returns to, drawn by their measured success (a prompt buffer). Null: every episode has a
    new instance."""
    reward_weights: dict[str, float | FadingWeight] = {}
    """Weights of named terms of the env's rewards in training (`reward/NAME` in the logs): a number, or `{start: 1.0,
    end: 0.0, steps: 50}`, which fades. Other terms have weight 1. Evaluations use the env's own rewards."""
    reward_model: LearnedRewardConfig | None = None
    """Reward model whose rewards replace the env's in training, or are added to them. Null: none."""
    data: Data = []
    """Files to train on instead of playing: a path, or a list of paths or entries. A step reads its episodes from
    them."""
    policies: dict[str, PolicyConfig]
    algorithm: TextAlgorithmConfig = GRPO()
    """Training algorithm: `type` is distill, grpo, dpo, kto, ppo, reward_model, sft, or "module:Class" for a subclass
    of TextAlgorithm."""
    stages: list[StageConfig] = []
    """Stages that the run goes through in order, training the same weights. Empty: one stage with the run's own
    settings."""
    evals: dict[str, TextEvalConfig] = {}
    eval_sampling: dict[str, Any] = {}
    """Changes to the sampling of language model policies in evaluations, for instance `temperature: 0`."""
    checkpoint_every: int = Field(10, ge=1)
    save_episodes_every: int = Field(1, ge=0)
    """Write the episodes of every so many training steps to the run's `episodes` folder. 0: write none, also none of
    evaluations (`eval_episodes`)."""
    staleness: int = Field(0, ge=0, le=10_000)
    """Maximum number of training steps that the rollout weights lag behind the trained weights. 0: play and training
    alternate. Above 0: episodes are played ahead during training, so neither waits for the other; the algorithm trains
    on older data."""
    in_flight_updates: Literal["none", "keep_kv", "recompute_kv"] = "none"
    """Whether running answers continue with the newest weights after each training step, with `staleness` above 0; each
    token records the version that sampled it. `recompute_kv` computes the keys and values of running answers again
    under the new weights (interruptible generation of AReaL); `keep_kv` keeps those of the old weights (in-flight
    weight updates of PipelineRL and Magistral), which costs nothing, but then answers are sampled from neither policy
    exactly. `none`: an episode is played to its end with the weights it began with."""
    max_failed: float = Field(0.5, ge=0, le=1)
    """Largest share of failed episodes in a step or evaluation, from 0 to 1; above it the run ends with an error. Of an
    episode with siblings, the share of its branches that failed counts. 1: never end."""
    failed_reward: float | None = Field(None, allow_inf_nan=False)
    """Team reward of an answer at which the env (or its reward function) fails in training: the trajectory ends there
    with it and counts as played. Null: the trajectory has no reward; it is left out of its group, and counts towards
    `max_failed`. Evaluations, and failures of policies, have no such reward."""
    engine: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    """URL of a server (`palestra serve`, Tinker, MinT) that trains and samples instead of this process. Null: this
    process."""
    sampler: SamplerConfig | None = None
    """Samplers in other processes or on servers that generate the answers, while training stays in this process. Null:
    this process samples."""
    backend: RolloutBackendConfig = RolloutBackendConfig(type="inline")
    """Processes that play episodes and, on Ray, train. `inline`: this process."""
    device: str = "auto"
    """Torch device of models: auto, cpu or cuda."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """Parallelism of the processes that torchrun starts. `ddp` (the default under torchrun): the episodes and training
    passes of a step. `fsdp`: weights, gradients and optimizer state too, for models that do not fit on one device."""
    max_num_seqs: int = Field(512, ge=1)
    """Largest number of sequences that the sampler generates at once."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory of the sampler's KV cache in GiB. Sequences beyond it wait, or pause and continue later. Null: half of the
    memory that is free when the model is loaded. Which sequences share a batch then depends on the machine, and so do
    the last bits of their log-probabilities; set it if a run near the memory limit must repeat exactly."""

    @property
    def named_envs(self) -> dict[str, dict[str, Any]]:
        """The envs by name. A single env is called "train"."""
        return self.envs or ({"train": self.env} if self.env else {})

    @property
    def env_label(self) -> str:
        """Name of the envs or data files, for display."""
        played = [str(env["type"]) for env in self.named_envs.values()]
        return " and ".join(dict.fromkeys(played or [entry.path for entry in self.data])) or "data"

    def env_config(self, name: str | None = None) -> dict[str, Any]:
        """Returns the env called `name`, or the first one. Raises ValueError if there is none."""
        if name is not None and name not in self.named_envs:
            raise ValueError(f'there is no env called "{name}": envs: names {", ".join(self.envs) or "none"}')
        if not self.named_envs:
            raise ValueError("this config names no env, and the run needs one: add env: {type: sokoban, ...}")
        return self.named_envs[name] if name else next(iter(self.named_envs.values()))

    def stage_configs(self) -> Iterator[TextConfig]:
        """Yields the config of each stage: the run's config with the changes of the stage applied.

        Raises ValueError if a stage changes an unknown policy, or a key in `WEIGHT_KEYS` or `TRAINER_KEYS`.
        """
        whole = self.model_dump(mode="json", exclude={"stages"})
        for stage in self.stages or [StageConfig()]:
            changes = stage.model_dump(mode="json", exclude={"name", "env", "policies"}, exclude_none=True)
            if unknown := sorted(set(stage.policies) - set(self.policies)):
                raise ValueError(
                    f'a stage changes policy "{unknown[0]}", but policies: names {", ".join(self.policies)}'
                )
            changed_keys = set(chain.from_iterable(stage.policies.values()))
            if fixed := sorted((WEIGHT_KEYS | TRAINER_KEYS) & changed_keys):
                raise ValueError(
                    f'a stage cannot change what a policy or its trainer is made of ("{fixed[0]}"): set it for the '
                    "whole run"
                )
            policies = {name: merge(one, stage.policies.get(name, {})) for name, one in whole["policies"].items()}
            games = {name: env | stage.env for name, env in self.named_envs.items()}
            changes |= {"envs": games} if self.envs else {"env": self.env | stage.env}
            yield validate(TextConfig, whole | changes | {"policies": policies})

    def features_in_use(self) -> dict[str, str]:
        """Returns the features that the run uses and that exclude others, each as its config writes it."""
        found = {
            "parallel": self.parallel and f"parallel: {self.parallel}",
            "fsdp": self.parallel == "fsdp" and "parallel: fsdp",
            "engine": self.engine and f"engine: {self.engine}",
            "sampler": self.sampler and "sampler:",
            "backend": self.backend.type != "inline" and f"backend: {self.backend.type}",
            "staleness": self.staleness and f"staleness: {self.staleness}",
            "in_flight_updates": self.in_flight_updates != "none" and f"in_flight_updates: {self.in_flight_updates}",
            "refill": self.algorithm.max_redraws and "flat_groups: refill",
        }
        for name, policy in self.policies.items():
            if isinstance(policy, FullPolicyConfig):
                found.setdefault("full model", f"policies.{name}.type: full")
                if policy.reference != "none":
                    found.setdefault("stored reference", f"policies.{name}.reference: {policy.reference}")
            if isinstance(policy, LMPolicyConfig) and policy.quantize:
                found.setdefault("quantize", f"policies.{name}.quantize: {policy.quantize}")
            if isinstance(policy, LoraPolicyConfig):
                whole = {"use_dora", "modules_to_save", "target_parameters"} & policy.variants.keys()
                if whole:
                    found.setdefault("whole weights", ", ".join(f"policies.{name}.{key}" for key in sorted(whole)))
            if isinstance(policy, HumanConfig):
                found.setdefault("person", f"policies.{name}.type: human")
        return {feature: written for feature, written in found.items() if written}

    def notes_on_settings(self, world_size: int) -> list[str]:
        """Returns lines on settings that have no effect where the run trains: on a server, or in `world_size`
        processes."""
        if self.parallel and world_size == 1:
            return [f"parallel: {self.parallel} has no effect in one process: start the run with torchrun"]
        if self.engine is None:
            return []
        idle = [key for key in ("max_num_seqs", "kv_cache_gib") if is_changed(self, key)]
        for name, policy in self.policies.items():
            keys = ("dtype", "precision", "micro_batch_tokens", "gradient_checkpointing")
            idle += [f"policies.{name}.{key}" for key in keys if is_changed(policy, key)]
        return [f"{', '.join(idle)}: without effect with engine, the server's own options count"] if idle else []

    def policies_at(self, step: int) -> dict[str, PolicyConfig]:
        """Returns the policies in training step `step`, counted from 0: with the changes of its stage."""
        policies = self.policies
        for part in self.stage_configs() if self.stages else ():
            policies = part.policies
            if step < part.steps:
                break
            step -= part.steps
        return policies

    @field_validator("eval_sampling")
    @classmethod
    def _check_sampling(cls, changes: dict[str, Any]) -> dict[str, Any]:
        validate(SamplingConfig, changes)
        return changes

    @model_validator(mode="after")
    def _check_envs(self) -> Self:
        recorded = bool(self.data) or bool(self.stages and all(stage.data for stage in self.stages))
        absent = recorded and not self.env and not self.envs
        if bool(self.env.get("type")) == bool(self.envs) and not absent:
            raise ValueError(
                "a run plays one env or several: write env: {type: sokoban, ...}, or envs: with a name for each; "
                "`palestra info` lists the envs"
            )
        for name in [*self.mix.weights, *(evaluation.base_env for evaluation in self.evals.values())]:
            self.env_config(name)
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.stages:
            list(self.stage_configs())
        return self

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        if not self.algorithm.needs_reference or self.stages:
            return self
        for name, policy in self.policies.items():
            if isinstance(policy, FullPolicyConfig) and policy.reference == "none":
                raise ValueError(
                    f"the algorithm needs a reference policy (kl_coef, or DPO without reference_free), and {name} is a "
                    f"full model, whose training changes its base: set policies.{name}.reference: copy (or disk), or "
                    "leave the reference out of the algorithm"
                )
        return self

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        if self.in_flight_updates != "none" and not self.staleness:
            raise ValueError(
                f"in_flight_updates: {self.in_flight_updates} needs answers that are sampled during training, and "
                "with staleness: 0 none are: set staleness: 1 or more"
            )
        check_conflicts(self.features_in_use())
        return self

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        for name, policy in self.policies.items():
            teacher = getattr(policy, "teacher", None)
            if teacher is None:
                continue
            scores = self.algorithm.needs_teacher and not self.stages  # a teacher that only scores may be taught too
            if scores and teacher == name and not getattr(self.algorithm, "teacher_seats", True):
                raise ValueError(
                    f"policies.{name}.teacher is {name} itself and would read the same prompts as its student: set "
                    "algorithm.teacher_seats, or take another teacher"
                )
            if teacher not in self.policies or (not scores and getattr(self.policies[teacher], "teacher", None)):
                raise ValueError(
                    f'policies.{name}.teacher is "{teacher}", which must be one of policies: and have no teacher itself'
                )
            if self.algorithm.type != "sft" and not self.algorithm.needs_teacher and not self.stages:
                raise ValueError(
                    f"policies.{name} has a teacher, whose answers are for imitation: set algorithm: {{type: sft}} (or "
                    "distill, to be scored by it), or leave the teacher out"
                )
        return self
