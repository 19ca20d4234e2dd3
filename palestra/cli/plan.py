"""`palestra plan`: what a run will take on this machine, or on others, before it starts."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from palestra.cli.train import Settings
from palestra.launch.console import console, print_line, user_errors

if TYPE_CHECKING:
    from palestra.builders.capacity import Machine
    from palestra.builders.capacity_plan import CapacityPlan, Fleet

HERE = "here"
BUSY = 1.2  # slowdown by other programs from which on a line is printed


def plan(
    config: Annotated[Path, typer.Argument(help="the YAML config of a run of language agents")],
    settings: Settings = None,
    nodes: Annotated[int, typer.Option(min=1, help="machines")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each machine (0: processes on its CPU)")] = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="without GPUs: processes of each machine (default: its cores)")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="GPU model with known specifications (h100, ...), or `here`: benchmark this machine")
    ] = HERE,
    flops: Annotated[float | None, typer.Option(min=0.001, help="achieved TFLOP/s of matrix products")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="achieved GB/s of memory")] = None,
    network: Annotated[float | None, typer.Option(min=0.001, help="GB/s between machines (default: 1.25)")] = None,
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="free memory of a GPU in GiB")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="joint steps of an episode")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of a prompt")] = None,
    answer_tokens: Annotated[
        float | None,
        typer.Option(min=1, help="mean tokens of an answer (default: as the untrained policies answer)"),
    ] = None,
    env_wait: Annotated[float | None, typer.Option(min=0, help="seconds that an env step waits")] = None,
    env_cpu: Annotated[float | None, typer.Option(min=0, help="CPU seconds that an env step computes")] = None,
    trained: Annotated[float, typer.Option(min=0.01, max=1, help="share of answers with a gradient")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as one JSON object")] = False,
) -> None:
    """Plan a run: seconds of a step by phase, memory, traffic, staleness, the bottleneck, and how to share devices.

    Nothing is trained. What the config does not say about episodes is measured on a few of them, played by its
    untrained policies or, if their bases are large or not on this machine, by random agents.

        palestra plan configs/demo.yaml

        palestra plan configs/demo.yaml --nodes 2 --gpus 8 --machine h100 --set policies.planner.rank=32
    """
    with user_errors():
        from palestra.builders.capacity_plan import Fleet, plan_capacity, with_network
        from palestra.builders.capacity_probe import plays_itself, probe_episodes
        from palestra.builders.text_config import TextConfig
        from palestra.config import load, override, validate

        planned = validate(TextConfig, override(load(config), settings or []))
        costs = with_network(_machine(machine, gpus, flops, bandwidth, gpu_gib), network and network * 1e9)
        given = {"turns": turns, "prompt_tokens": prompt_tokens, "env_wait_s": env_wait, "env_cpu_s": env_cpu}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        changes |= {} if turns is None else {"going_on": ()}  # of so many joint steps, nothing else is known
        probed = probe_episodes(planned, own_policies=plays_itself(planned))
        episode = dataclasses.replace(probed, **changes)
        fleet = Fleet(nodes, gpus, processes or os.cpu_count() or 1)
        found = plan_capacity(planned, costs, episode, fleet, answer_tokens=answer_tokens, trained=trained)
        if as_json:
            print(json.dumps(_figures(found, fleet)))
        else:
            _show(found, fleet)


def _machine(name: str, gpus: int, flops: float | None, bandwidth: float | None, gib: float | None) -> Machine:
    """Returns the machine of the options. Raises ValueError if they do not fit together."""
    from palestra.builders.machines import machine_of_rates, published_machine
    from palestra.engine.devices import resolve_device

    if not gpus and (name != HERE or flops or bandwidth):
        raise ValueError("--machine, --flops and --bandwidth describe GPUs: add the GPUs of a node, such as --gpus 1")
    if (flops is None) != (bandwidth is None):
        raise ValueError("--flops and --bandwidth describe a GPU together: give both, or a data sheet by --machine")
    memory = None if gib is None else int(gib * 2**30)
    if flops is not None and bandwidth is not None:
        if memory is None:
            raise ValueError("--flops and --bandwidth need the memory of that GPU, too: add it, such as --gpu-gib 80")
        return machine_of_rates("a GPU", flops * 1e12, bandwidth * 1e9, memory=memory, note="by the given rates")
    if name != HERE:
        found = published_machine(name)
    else:
        device = resolve_device("auto" if gpus else "cpu")
        if gpus and device == "cpu":
            raise ValueError("there is no GPU here to measure: name one, such as --machine h100")
        from palestra.builders.calibration import Calibration

        found = Calibration(device).measure()
    return found if memory is None else dataclasses.replace(found, memory=memory)


def _figures(found: CapacityPlan, fleet: Fleet) -> dict[str, Any]:
    """Returns the plan as plain data."""
    from palestra.builders.capacity_plan import command_of

    return {
        "machine": {"name": found.machine.name, "note": found.machine.note, "slowdown": found.machine.slowdown},
        "phases": {phase.name: {"seconds": phase.seconds, "wait_s": phase.wait_s} for phase in found.phases},
        "step_s": found.step.wall_s,
        "busy_s": found.step.busy_s,
        "tokens_per_s": found.tokens_per_s,
        "bottleneck": found.bottleneck.name,
        "limit": found.bottleneck.limit,
        "staleness": found.staleness,
        "memory": {"peak": found.memory.peak, "sampler": found.sampler_memory, "trainer": found.trainer_memory},
        "free": found.memory.free,
        "traffic": dataclasses.asdict(found.traffic),
        "env_servers": found.env_servers,
        "layouts": [{"step_s": each.wall_s, "command": command_of(each.layout, fleet)} for each in found.layouts],
    }


def _show(found: CapacityPlan, fleet: Fleet) -> None:
    """Prints the plan as tables."""
    from palestra.builders.capacity_plan import HINTS, command_of, phase_table

    work, step, episode = found.workload, found.step, found.workload.episode
    print_line(f"machine: {found.machine.name} ({found.machine.note}), {fleet.devices} of them")
    print_line(
        f"a step: {work.answers:,.0f} answers of {work.answer_tokens:.0f} tokens in {len(work.rounds)} rounds, prompts "
        f"of {episode.prompt_tokens} tokens; an env step computes {1e3 * episode.env_cpu_s:.2f} ms and waits "
        f"{1e3 * episode.env_wait_s:.0f} ms"
    )
    if found.machine.slowdown > BUSY:
        print_line(
            f"other programs use this machine: a second of work takes {found.machine.slowdown:.1f} s here and now"
        )
    table = Table("phase", "device s", "s of the step", "limited by")
    for name, seconds, wall, limit in phase_table(found):
        table.add_row(name, f"{seconds:.3f}", f"{wall:.3f}", limit)
    table.add_row("step", f"{step.busy_s:.3f}", f"{step.wall_s:.3f}", "", style="bold")
    console.print(table)
    worst = found.bottleneck
    print_line(f"{found.tokens_per_s:,.0f} sampled tokens a second; bottleneck: {worst.name}: {HINTS[worst.name]}")
    print_line(f"staleness: {found.staleness:.1f} steps")
    gib = [bytes_ / 2**30 for bytes_ in (found.memory.peak, found.sampler_memory, found.trainer_memory)]
    print_line(
        f"memory: {gib[0]:.2f} GiB of {found.memory.free / 2**30:.1f}; a process that only samples {gib[1]:.2f}, only "
        f"trains {gib[2]:.2f} (by part: palestra info --config)"
    )
    if found.memory.changes is None:
        print_line("it does not fit, whatever the settings: choose a smaller base, or parallel: fsdp on several GPUs")
    elif found.memory.changes:
        print_line("it does not fit. It fits with: " + " ".join(f"--set {change}" for change in found.memory.changes))
    sent = found.traffic
    print_line(f"traffic of a step: {_mb(sent.weights)} of weights to each sampler, {_mb(sent.episodes)} of episodes")
    if found.env_servers:
        print_line(f"envs compute enough for {found.env_servers} env server(s) of their own (env: at)")
    shared = Table("s of a step", "tokens/s", f"on {fleet.devices} devices")
    for each in found.layouts:
        shared.add_row(f"{each.wall_s:.3f}", f"{work.tokens / each.wall_s:,.0f}", command_of(each.layout, fleet))
    console.print(shared)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
