"""Workload of a training step: rounds of prompts and answers, and the passes that train on them.

Facts about episodes that the config does not determine (`EpisodeShape`) are measured by capacity_probe.py, or given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palestra.builders.capacity import DecoderLoad, TrainingLoad
from palestra.builders.memory_plan import DTYPE_SIZES
from palestra.builders.text import seat_policies
from palestra.builders.text_config import TextConfig
from palestra.engine.lora import target_names
from palestra.engine.lora_config import LoraConfig
from palestra.engine.memory import ModelShape, adapter_params, model_shape
from palestra.learners.lm_config import FullPolicyConfig, LMLearnerConfig, LMPolicyConfig, LoraPolicyConfig
from palestra.rollouts.tree_rollout import Branching

MAX_CONCURRENT = 1024  # episodes of an `EpisodeRunner`


@dataclass(frozen=True)
class EpisodeShape:
    """Lengths and costs of episodes: joint steps of the longest episode, mean number of seats that act in a joint step,
    tokens of a prompt, seconds of an env step (computing and waiting), env steps that may wait at once, the share of
    trajectories that have not ended at each joint step (empty: 1), and mean tokens of an answer (None: the limit of the
    config)."""

    turns: int
    seats_per_turn: float
    prompt_tokens: int
    env_cpu_s: float = 0.0
    env_wait_s: float = 0.0
    concurrent: int = MAX_CONCURRENT
    going_on: tuple[float, ...] = ()
    answer_tokens: float | None = None


@dataclass(frozen=True)
class Round:
    """One joint step of all episodes of a training step: `prompts` prompts of `prompt_tokens` new tokens after
    `context` earlier ones, `group` answers to each, and `env_steps` steps of envs."""

    prompts: float
    group: int
    prompt_tokens: float
    context: float = 0.0
    env_steps: float = 0.0

    @property
    def answers(self) -> float:
        """Answers of the round."""
        return self.prompts * self.group


@dataclass(frozen=True)
class PolicyLoad:
    """A policy that is a language model: its name, the engine that samples it (equal for policies that share one), the
    sizes of its passes, its share of all answers, the mean and largest number of tokens of an answer, and its training:
    `updates` optimizer steps in `epochs` passes, and `scoring` forward passes (0 updates: it does not train)."""

    name: str
    engine: str
    load: DecoderLoad
    share: float
    answer_tokens: float
    max_tokens: int
    updates: int = 0
    epochs: int = 1
    scoring: int = 0
    micro_batch_tokens: int = 16384
    checkpointing: bool = False

    @property
    def trains_whole_model(self) -> bool:
        """True if the policy trains all weights, and not an adapter."""
        return bool(self.updates) and not self.load.adapter_params

    def training_load(self, rounds: Sequence[Round], trained: float = 1.0) -> TrainingLoad:
        """Returns the samples of one pass over the policy's answers, of which the share `trained` has a gradient."""
        batches = max(1, self.updates // self.epochs)  # siblings are spread over batches, each with its prompt
        prompts = trained * self.share * sum(each.prompts * min(batches, each.group) for each in rounds)
        answers = trained * self.share * sum(each.answers for each in rounds)
        tokens = sum(each.prompts * each.prompt_tokens for each in rounds) / max(1e-9, sum(r.prompts for r in rounds))
        whole = sum(each.answers * (each.prompt_tokens + each.context + self.answer_tokens) for each in rounds)
        passes = max(1, math.ceil(trained * self.share * whole / self.micro_batch_tokens))
        return TrainingLoad(prompts, answers, tokens, self.answer_tokens, max(passes, -(-self.updates // self.epochs)))


@dataclass(frozen=True)
class Workload:
    """A training step: its rounds, its policies, the shape of its episodes, the largest number of rows of a sampler,
    and the share of answers that have a gradient."""

    rounds: tuple[Round, ...]
    policies: tuple[PolicyLoad, ...]
    episode: EpisodeShape
    max_num_seqs: int = 512
    trained: float = 1.0

    @property
    def answer_tokens(self) -> float:
        """Mean tokens of an answer of a language model."""
        return mean_tokens(self.policies)

    @property
    def answers(self) -> float:
        """Answers of a step."""
        return sum(each.answers for each in self.rounds)

    @property
    def tokens(self) -> float:
        """Sampled tokens of a step."""
        return self.answers * self.answer_tokens

    @property
    def env_steps(self) -> float:
        """Steps of envs of a training step."""
        return sum(each.env_steps for each in self.rounds)

    @property
    def trained_policies(self) -> list[PolicyLoad]:
        """The policies that train."""
        return [policy for policy in self.policies if policy.updates]

    def slice(self, parts: float) -> Workload:
        """Returns the workload with the rollout of one of `parts` equal slices of the episodes."""
        rounds = tuple(replace(r, prompts=r.prompts / parts, env_steps=r.env_steps / parts) for r in self.rounds)
        return replace(self, rounds=rounds)


def build_workload(
    config: TextConfig,
    shape: EpisodeShape,
    *,
    device: str,
    cache_bytes: float = 0.0,
    answer_tokens: float | None = None,
    trained: float = 1.0,
) -> Workload:
    """Returns the work of a step of the run's first stage on `device`. `answer_tokens` is the mean length of an answer
    (None: the one in `shape`). Raises ValueError for a run without a language model."""
    part = next(iter(config.stage_configs()))
    models = {n: p for n, p in part.policies.items() if isinstance(p, LMPolicyConfig)}
    if not models:
        raise ValueError("this run has no language model: only the capacity of runs with one can be planned")
    mean = answer_tokens or shape.answer_tokens or math.inf
    lengths = {name: min(mean, policy.sampling.max_tokens) for name, policy in models.items()}
    talks = any(policy.history == "conversation" for policy in models.values())
    mean = sum(lengths.values()) / len(lengths)
    rounds = rounds_of(part.algorithm.branching, part.episodes, shape, answer_tokens=mean, conversation=talks)
    seats = list(seat_policies(part).values())
    policies = tuple(
        _policy_load(part, name, seats.count(name) / len(seats), lengths[name], rounds, device, cache_bytes)
        for name in models
        if name in seats
    )
    return Workload(rounds, policies, shape, part.max_num_seqs, trained)


def mean_tokens(policies: Sequence[PolicyLoad]) -> float:
    """Returns the mean number of tokens of the policies' answers."""
    return sum(p.share * p.answer_tokens for p in policies) / max(1e-9, sum(p.share for p in policies))


def full_trajectories(branching: Branching, episodes: int, turns: int) -> list[int]:
    """Returns the number of trajectories at the start of each joint step, for `episodes` trees in which no trajectory
    ends early."""
    found = [episodes]
    for turn in range(turns - 1):
        goes_on = branching.width(turn) if branching.branch_at == "root" or branching.continue_from == "all" else 1
        found.append(found[-1] * goes_on)
    return found[:turns]


def rounds_of(
    branching: Branching, episodes: int, shape: EpisodeShape, *, answer_tokens: float = 0.0, conversation: bool = False
) -> tuple[Round, ...]:
    """Returns the rounds of `episodes` episodes. With `branch_at: root` siblings branch in the first round only; with
    `branch_at: turn` each joint step has siblings, and play continues from one of them (with `continue_from: all` from
    every one)."""
    rounds, context = [], 0.0
    for turn, lines in enumerate(full_trajectories(branching, episodes, shape.turns)):
        width, alive = branching.width(turn), lines * (shape.going_on[turn] if shape.going_on else 1.0)
        rounds.append(Round(alive * shape.seats_per_turn, width, shape.prompt_tokens, context, alive * width))
        context += shape.prompt_tokens + answer_tokens if conversation else 0.0
    return tuple(rounds)


def _policy_load(
    config: TextConfig,
    name: str,
    share: float,
    tokens: float,
    rounds: Sequence[Round],
    device: str,
    cache_bytes: float,
) -> PolicyLoad:
    policy = config.policies[name]
    assert isinstance(policy, LMPolicyConfig)
    limit = policy.sampling.max_tokens
    size = DTYPE_SIZES["float32" if device == "cpu" else "bfloat16"]
    size = DTYPE_SIZES[policy.dtype] if policy.dtype != "auto" else size
    load = decoder_load(model_shape(policy.base), policy.lora if isinstance(policy, LoraPolicyConfig) else None, size)
    load = replace(load, cache_bytes=cache_bytes, graphs=device == "cuda")
    shared = (policy.base, policy.dtype, policy.quantize, policy.long_context)
    engine = name if isinstance(policy, FullPolicyConfig) else " ".join(map(str, shared))
    if not isinstance(policy, LMLearnerConfig):
        return PolicyLoad(name, engine, load, share, tokens, limit)
    samples = share * sum(each.answers for each in rounds)
    batches = math.ceil(samples / policy.batch_size) if policy.batch_size else 1
    return PolicyLoad(
        name,
        engine,
        load,
        share,
        tokens,
        limit,
        updates=batches * policy.epochs,
        epochs=policy.epochs,
        scoring=_scoring_passes(config, batches * policy.epochs),
        micro_batch_tokens=policy.micro_batch_tokens,
        checkpointing=policy.gradient_checkpointing,
    )


def _scoring_passes(config: TextConfig, updates: int) -> int:
    """Returns the forward passes over a step's samples: under the reference, the teacher, the critic, and the weights
    before an update of several optimizer steps."""
    algorithm = config.algorithm
    old = algorithm.needs_old_logprobs and getattr(algorithm, "old_logprobs", "") == "trainer" and updates > 1
    return sum((algorithm.needs_reference, algorithm.needs_teacher, algorithm.needs_critic, old))


def decoder_load(shape: ModelShape, lora: LoraConfig | None, size: int) -> DecoderLoad:
    """Returns the load of a base of `shape`, with an adapter if `lora` describes one."""
    if lora is None:
        return DecoderLoad(shape, size)
    names = target_names(shape.linears, lora.target_modules)
    merge = sum(2.0 * lora.rank_of(name) * shape.linears[name][0] * shape.linears[name][1] for name in names)
    return DecoderLoad(shape, size, adapter_params(shape, lora), merge, len(names))
