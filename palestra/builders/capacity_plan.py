"""Plans the time, memory, traffic and staleness of a run, and which layout of processes uses its devices best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from palestra.builders.capacity import Machine
from palestra.builders.capacity_phases import ROLLOUT, Layout, Phase, StepTime, step_phases, step_time
from palestra.builders.capacity_workload import EpisodeShape, Workload, build_workload
from palestra.builders.memory_plan import MemoryPlan, plan_memory
from palestra.builders.text_config import TextConfig
from palestra.engine.memory import peak_bytes
from palestra.remote.samplers.config import SamplerServersConfig

CHARACTERS_PER_TOKEN = 4  # typical of large models' tokenizers
ANSWER_BYTES = 200  # of an answer's record beside its tokens
ENV_SERVER_USE = 0.7  # share of its time that an env server spends in env steps
MIN_ENV_SHARE = 0.1  # of a step's seconds; env servers are suggested if envs compute for longer
SUGGESTED = 5
HINTS = {
    "prefill": "more samplers (--workers, or sampler:), or shorter prompts",
    "decode": "more samplers (--workers, or sampler:), or more answers in a pass (episodes, max_num_seqs)",
    "env steps": "staleness: 1 or more plays during training; env servers (env: at) where envs compute",
    "episodes": "--workers: they encode prompts and play envs too",
    "forward and backward": "torchrun splits the passes; larger micro_batch_tokens where memory is left",
    "scoring": "do without a reference or teacher, or torchrun",
    "optimizer": "larger batch_size: fewer optimizer steps",
    "publishing": "a smaller rank",
    "records": "more episodes in a step; save_episodes_every: 0",
}


@dataclass(frozen=True)
class Fleet:
    """Devices that a run may have: `gpus` of each of `nodes` machines or, with 0, `processes` on CPU cores."""

    nodes: int = 1
    gpus: int = 0
    processes: int = 1

    @property
    def devices(self) -> int:
        """GPUs, or processes on CPU cores, of all machines."""
        return self.nodes * (self.gpus or self.processes)


@dataclass(frozen=True)
class Traffic:
    """Bytes sent per step if other processes play: adapters (or full models) to each sampler, and episodes to the
    trainer."""

    weights: int
    episodes: int


@dataclass(frozen=True)
class CapacityPlan:
    """Plan of a run's time and memory: of a step on a machine as configured (`step`; its `phases` in one process), and
    on all devices of a fleet, fastest layout first (`layouts`). `memory` is for one process that plays and trains;
    `sampler_memory` and `trainer_memory` are bytes of processes that only sample or only train. `staleness` is the
    expected one, in steps, `env_servers` the number that the run would keep busy."""

    machine: Machine
    workload: Workload
    phases: list[Phase]
    step: StepTime
    layouts: list[StepTime]
    memory: MemoryPlan
    traffic: Traffic
    staleness: float
    env_servers: int

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of the whole step."""
        return self.workload.tokens / self.step.wall_s

    @property
    def sampler_memory(self) -> int:
        """Bytes of a process that only samples."""
        return peak_bytes(
            [part for part in self.memory.parts if part.phase != "training" and not _is_trained(part.name)]
        )

    @property
    def trainer_memory(self) -> int:
        """Bytes of a process that only trains."""
        return peak_bytes([part for part in self.memory.parts if part.phase != "sampling"])

    @property
    def bottleneck(self) -> Phase:
        """The phase that takes most of a step's time under the layout of the config."""
        return max(self.phases, key=lambda phase: phase_wall(phase, self.step.layout, self.machine.slowdown))


def _is_trained(name: str) -> bool:
    return name.startswith(("optimizer", "reference"))


def phase_wall(phase: Phase, layout: Layout, slowdown: float = 1.0) -> float:
    """Returns the seconds that a phase adds to a step, if no other phase hides it; `slowdown` is the machine's."""
    shares = layout.ranks if layout.ranks > 1 else (layout.samplers or 1) if phase.part == ROLLOUT else layout.trainers
    return slowdown * phase.seconds / shares + phase.wait_s / (layout.staleness + 1)


def plan_capacity(
    config: TextConfig,
    machine: Machine,
    episode: EpisodeShape,
    fleet: Fleet | None = None,
    *,
    answer_tokens: float | None = None,
    trained: float = 1.0,
) -> CapacityPlan:
    """Returns the plan of a run. Raises ValueError for a run that a server trains (`engine:`)."""
    if config.engine:
        raise ValueError(f"this run trains on the server {config.engine}: plan it with the server's own config")
    fleet = fleet or Fleet()
    device = "cuda" if fleet.gpus else "cpu"
    workload = build_workload(
        config, episode, device=device, cache_bytes=machine.cache_bytes, answer_tokens=answer_tokens, trained=trained
    )
    own = layout_of(config, None if fleet.gpus else fleet.devices)
    step = step_time(workload, machine, own)
    layouts = [step_time(workload, machine, layout) for layout in candidates(config, workload, fleet)]
    return CapacityPlan(
        machine,
        workload,
        step_phases(workload, machine),
        step,
        sorted(layouts, key=lambda each: (round(each.wall_s, 6), each.layout.devices, each.layout.staleness))[
            :SUGGESTED
        ],
        plan_memory(config, prompt_tokens=episode.prompt_tokens, free=machine.memory, device=device),
        traffic(workload),
        expected_staleness(step, in_flight=config.in_flight_updates != "none"),
        env_servers(workload, step.wall_s),
    )


def layout_of(config: TextConfig, cores: int | None) -> Layout:
    """Returns the layout that the config asks for; on CPU all processes share `cores` cores."""
    backend, samplers, trainers = config.backend, 0, 1
    if backend.type != "inline":
        play, train = backend.placement.get("play", {}), backend.placement.get("train", {})
        samplers, trainers = int(play.get("workers", backend.num_workers)), int(train.get("workers", 1))
    elif isinstance(config.sampler, SamplerServersConfig):
        samplers = len(config.sampler.urls)
    elif config.sampler:
        samplers = config.sampler.count
    whole = config.sampler is None
    return Layout(samplers, trainers, staleness=config.staleness, whole_episodes=whole, cores=cores)


def candidates(config: TextConfig, workload: Workload, fleet: Fleet) -> Iterator[Layout]:
    """Yields the layouts to compare on a fleet: one process, torchrun, and processes that play next to processes that
    train, in turn or one step ahead."""
    devices, cores = fleet.devices, None if fleet.gpus else fleet.devices
    yield Layout(cores=cores)
    if devices > 1:
        yield Layout(ranks=devices, cores=cores)
    ahead = [0] if any(p.trains_whole_model for p in workload.policies) or config.algorithm.max_redraws else [0, 1]
    for trainers in range(1, min(devices, max(1, len(workload.trained_policies))) + 1):
        for samplers in {devices - trainers, devices} if cores else {devices - trainers}:
            if samplers > 0 and (trainers == 1 or samplers == devices - trainers):
                yield from (Layout(samplers, trainers, staleness=n, cores=cores) for n in ahead)


def command_of(layout: Layout, fleet: Fleet) -> str:
    """Returns the command, without the config, that starts a run with `layout`."""
    if layout.ranks > 1:
        nodes = f"--nnodes {fleet.nodes} " if fleet.nodes > 1 else ""
        return f"torchrun {nodes}--nproc-per-node {layout.ranks // fleet.nodes} -m palestra train"
    ahead = f" --set staleness={layout.staleness}" if layout.staleness else ""
    if not layout.samplers:
        return "palestra train" + ahead
    if fleet.nodes == 1 and not fleet.gpus and layout.trainers == 1:
        return f"palestra train --backend local --workers {layout.samplers}{ahead}"
    gpu = ", num_gpus: 1" if fleet.gpus else ""
    placement = f"{{train: {{workers: {layout.trainers}{gpu}}}, play: {{workers: {layout.samplers}{gpu}}}}}"
    return f"palestra train --backend ray --set 'backend.placement={placement}'{ahead}"


def traffic(workload: Workload) -> Traffic:
    """Returns the bytes of a step's new weights, in float32, and of its episodes: ids of prompts and answers,
    log-probabilities and texts."""
    weights = sum(4 * (policy.load.adapter_params or policy.load.shape.params) for policy in workload.trained_policies)
    prompts = sum(r.prompts * (r.prompt_tokens + r.context) for r in workload.rounds) * (4 + CHARACTERS_PER_TOKEN)
    answers = workload.answers * (ANSWER_BYTES + (8 + CHARACTERS_PER_TOKEN) * workload.answer_tokens)
    return Traffic(weights, round(prompts + answers))


def expected_staleness(step: StepTime, *, in_flight: bool) -> float:
    """Returns the mean age, in training steps, of the weights that played the episodes a step trains on, if episodes
    start as early as `staleness` allows. With in-flight updates it is the mean age of the weights that sampled a token,
    which is lower, since answers get new weights during a rollout."""
    if not in_flight:
        return float(step.layout.staleness)
    return max(0.0, step.layout.staleness - step.rollout_s / step.wall_s / 2)


def env_servers(workload: Workload, step_s: float) -> int:
    """Returns how many env servers a step of `step_s` seconds keeps busy; 0 if its envs compute little."""
    computed = workload.env_steps * workload.episode.env_cpu_s
    return 0 if computed < MIN_ENV_SHARE * step_s else max(1, round(computed / step_s / ENV_SERVER_USE + 0.5))


def with_network(machine: Machine, network: float | None) -> Machine:
    """Returns the machine with `network` bytes per second between nodes (None: its own)."""
    return machine if network is None else replace(machine, network=network)


def phase_table(plan: CapacityPlan) -> list[tuple[str, float, float, str]]:
    """Returns (name, device seconds, seconds of the step, what limits it) of each phase that takes time."""
    rows = [(p.name, p.seconds, phase_wall(p, plan.step.layout, plan.machine.slowdown), p.limit) for p in plan.phases]
    return [row for row in rows if row[2] > 0]
