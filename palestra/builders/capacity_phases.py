"""Seconds of the phases of a training step on a machine, for different ways to divide it among processes.

Sampling is assumed to be in lock-step: all episodes of a step start at once, so the answers of a joint step share the
passes of a sampler, and the envs step at once, too. The seconds of a phase are of one device, or CPU seconds; waiting
for envs adds to the wall-clock time only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from palestra.builders.capacity import (
    UNITS,
    Machine,
    Work,
    decode_work,
    optimizer_work,
    prefill_work,
    publish_work,
    scoring_work,
    training_work,
)
from palestra.builders.capacity_workload import PolicyLoad, Round, Workload, mean_tokens
from palestra.engine.kv_cache import MAX_PREFILL_TOKENS

ROLLOUT, UPDATE = "rollout", "training"
STEP = Work(steps=1)
SLICES_PER_WORKER = 2  # the default of `backend.slices`
LIMITS = {
    "flops": "matrix products",
    "small_flops": "products with small matrices",
    "attention": "attention",
    "trained_attention": "attention",
    "passes": "starting small passes",
    "trained_passes": "starting small passes",
    "weight_bytes": "reading the weights",
    "activation_bytes": "reading and writing activations",
    "trained_activation_bytes": "reading and writing activations",
    "logits": "softmax and draws over the vocabulary",
    "trained_logits": "softmax over the vocabulary",
    "layers": "starting the layers of small passes",
    "mixed_layers": "starting the layers of small passes",
    "graph_passes": "draws between decoding steps",
    "graph_layers": "launching the small kernels of decoding",
    "trained_layers": "starting the layers of small passes",
    "rows": "bookkeeping of tokens",
    "tensors": "updating many small tensors",
    "answers": "prompts, records and credit of answers",
    "steps": "records of a step",
}


@dataclass(frozen=True)
class Phase:
    """A phase of a step: its `part` (rollout or training), device `seconds`, `wait_s` of waiting for envs, and `limit`,
    the kind of work that takes most of the time, in words."""

    name: str
    part: str
    seconds: float
    wait_s: float = 0.0
    limit: str = ""


@dataclass(frozen=True)
class Layout:
    """Assignment of processes to sampling and training: `samplers` that play (0: the trainer plays itself) and
    `trainers`, each on a device of its own. `ranks`: processes among which torchrun splits both. `staleness`: steps
    that play is ahead of training. Samplers play `whole_episodes` in slices, one after the other (`--workers`), or only
    answer requests (`sampler:`). `cores`: CPU cores that all processes share (None: each has its own device)."""

    samplers: int = 0
    trainers: int = 1
    ranks: int = 1
    staleness: int = 0
    whole_episodes: bool = True
    cores: int | None = None

    @property
    def devices(self) -> int:
        """Number of devices that the layout uses."""
        return self.ranks if self.ranks > 1 else self.samplers + self.trainers


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: from one step to the next (`wall_s`), of the rollout and of training from start to end, and
    device seconds of all processes together (`busy_s`)."""

    wall_s: float
    rollout_s: float
    training_s: float
    busy_s: float
    layout: Layout


def rollout_works(workload: Workload) -> dict[str, Work]:
    """Returns the work of a rollout by one process, by phase: prefill, decode, and the records of episodes."""
    prefill, decode = Work(), Work()
    for each in workload.rounds:
        for policies in sampled_together(workload.policies):
            first, rest = _sampling_work(workload, each, policies)
            prefill, decode = prefill + first, decode + rest
    return {"prefill": prefill, "decode": decode, "episodes": Work(answers=workload.answers)}


def rollout_phases(workload: Workload, machine: Machine) -> list[Phase]:
    """Returns the phases of a rollout by one process."""
    episode = workload.episode
    waits = sum(math.ceil(each.env_steps / episode.concurrent) * episode.env_wait_s for each in workload.rounds)
    envs = Phase("env steps", ROLLOUT, workload.env_steps * episode.env_cpu_s, waits, "the env")
    return [*(_phase(name, ROLLOUT, work, machine) for name, work in rollout_works(workload).items()), envs]


def sampled_together(policies: Sequence[PolicyLoad]) -> Iterator[list[PolicyLoad]]:
    """Yields, for each engine, its policies, whose rows share the engine's passes."""
    for engine in dict.fromkeys(policy.engine for policy in policies):
        yield [policy for policy in policies if policy.engine == engine]


def _sampling_work(workload: Workload, each: Round, policies: Sequence[PolicyLoad]) -> tuple[Work, Work]:
    """Returns the work of a round's prefill and of its decoding on one engine."""
    share = sum(policy.share for policy in policies)
    load = max((policy.load for policy in policies), key=lambda load: load.adapter_params)
    mixed = len(policies) > 1
    prompts, answers = share * each.prompts, share * each.answers
    passes = max(1, math.ceil(prompts * each.prompt_tokens / MAX_PREFILL_TOKENS))
    waves = max(1, math.ceil(answers / workload.max_num_seqs))
    first = prefill_work(load, prompts, each.prompt_tokens, context=each.context, mixed=mixed, passes=passes)
    rest = decode_work(
        load,
        answers,
        mean_tokens(policies),
        prompt=each.prompt_tokens + each.context,
        mixed=mixed,
        passes=waves * (max(policy.max_tokens for policy in policies) - 1),
    )
    return first, rest


def training_works(workload: Workload, policy: PolicyLoad) -> dict[str, Work]:
    """Returns the work of training one policy: passes, scoring, optimizer, and the copy of its adapter."""
    batch = policy.training_load(workload.rounds, workload.trained)
    passes = training_work(policy.load, batch, checkpointing=policy.checkpointing)
    return {
        "forward and backward": policy.epochs * passes,
        "scoring": policy.scoring * scoring_work(policy.load, batch),
        "optimizer": policy.updates * optimizer_work(policy.load),
        "publishing": publish_work(policy.load),
    }


def training_phases(workload: Workload, machine: Machine, policy: PolicyLoad) -> list[Phase]:
    """Returns the phases of training one policy."""
    return [_phase(name, UPDATE, work, machine) for name, work in training_works(workload, policy).items()]


def step_work(workload: Workload) -> Work:
    """Returns all work of a step, without the envs."""
    works = [*rollout_works(workload).values(), STEP]
    works += [work for policy in workload.trained_policies for work in training_works(workload, policy).values()]
    return sum(works, Work())


def step_phases(workload: Workload, machine: Machine) -> list[Phase]:
    """Returns all phases of a step in one process; those of training are summed over policies."""
    trained = [training_phases(workload, machine, policy) for policy in workload.trained_policies]
    updates = [_joined(same) for same in zip(*trained, strict=True)]
    return [*rollout_phases(workload, machine), *updates, _phase("records", UPDATE, STEP, machine)]


def _joined(phases: Sequence[Phase]) -> Phase:
    return replace(phases[0], seconds=sum(phase.seconds for phase in phases))


def _phase(name: str, part: str, work: Work, machine: Machine) -> Phase:
    return Phase(name, part, machine.seconds(work), limit=limit_of(work, machine))


def limit_of(work: Work, machine: Machine) -> str:
    """Returns the kind of work that takes most of the seconds of `work`, in words; empty if there is none."""
    costs = {name: getattr(work, name) * machine.seconds_per.get(name, 0.0) for name in UNITS}
    largest = max(costs, key=lambda name: costs[name])
    return LIMITS[largest] if costs[largest] else ""


def seconds_of(phases: Sequence[Phase], part: str) -> tuple[float, float]:
    """Returns device seconds and waits of the rollout or of training."""
    own = [phase for phase in phases if phase.part == part]
    return sum(phase.seconds for phase in own), sum(phase.wait_s for phase in own)


def step_time(workload: Workload, machine: Machine, layout: Layout) -> StepTime:
    """Returns the seconds of a step under `layout`.

    With `staleness` n, the rollout of step t may start once step t - n - 1 is trained. So a step takes at least the
    work of each process, and rollout plus training of one step take at most n + 1 steps.
    """
    if layout.ranks > 1:
        return _ranks_time(workload, machine, layout)
    by_policy = [seconds_of(training_phases(workload, machine, p), UPDATE)[0] for p in workload.trained_policies]
    records = machine.seconds(STEP)
    training = max(sum(by_policy) / layout.trainers, max(by_policy, default=0.0)) + records  # one trainer per learner
    sent = _publish_seconds(workload, machine, layout.samplers)
    in_turn = SLICES_PER_WORKER if layout.samplers and layout.whole_episodes else 1
    slices = in_turn * max(1, layout.samplers)
    own, waits = seconds_of(rollout_phases(workload.slice(slices), machine), ROLLOUT)
    busy, slow = slices * own + sum(by_policy) + records, machine.slowdown
    rollout, training = in_turn * (slow * own + waits) + sent, slow * training
    latency = (rollout + training) / (layout.staleness + 1)
    play = rollout if layout.whole_episodes else slow * own  # a worker plays no other slice while envs wait
    bounds = [latency, training, play] if layout.samplers else [latency, slow * busy]
    if layout.cores:
        bounds.append(slow * busy / min(layout.cores, layout.devices))
    return StepTime(max(bounds), rollout, training, busy, layout)


def _ranks_time(workload: Workload, machine: Machine, layout: Layout) -> StepTime:
    """Returns the seconds of a step whose episodes and passes torchrun splits among ranks, gradient sums included."""
    own, waits = seconds_of(rollout_phases(workload.slice(layout.ranks), machine), ROLLOUT)
    part = workload.slice(layout.ranks)
    training = sum(seconds_of(training_phases(part, machine, p), UPDATE)[0] for p in workload.trained_policies)
    sums = sum(policy.updates * 8 * _trained_params(policy) for policy in workload.trained_policies) / machine.network
    busy, slow = layout.ranks * (own + training), machine.slowdown
    apart = slow * machine.seconds(STEP) + sums
    wall = max(slow * (own + training) + waits, slow * busy / (layout.cores or layout.ranks)) + apart
    return StepTime(wall, slow * own + waits, slow * training + apart, busy + machine.seconds(STEP), layout)


def _trained_params(policy: PolicyLoad) -> int:
    return policy.load.adapter_params or policy.load.shape.params


def _publish_seconds(workload: Workload, machine: Machine, samplers: int) -> float:
    """Returns the seconds of sending new weights to the samplers over the network."""
    return samplers * sum(4 * _trained_params(policy) for policy in workload.trained_policies) / machine.network
