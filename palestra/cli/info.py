"""`palestra info`: what is installed, and the memory that a run will take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import palestra
from palestra.api.console import console, print_line, user_errors
from palestra.cli.train import Settings


def info(
    base: Annotated[str | None, typer.Option(help="print the peak memory of a run with this base")] = None,
    config: Annotated[Path | None, typer.Option(help="config of that run (default: a LoRA adapter, GRPO)")] = None,
    settings: Settings = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of the longest prompt")] = 512,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1, help="plan for a GPU with so many GiB free instead of this machine")
    ] = None,
) -> None:
    """Show versions, the device, and the available envs, bases, algorithms and sandbox.

    With --base or --config, show how its bases run, the memory that the run takes at most, and settings with which it
    fits:

        palestra info --base Qwen/Qwen3-0.6B
        palestra info --config configs/demo.yaml --set policies.planner.micro_batch_tokens=4096
        palestra info --base Qwen/Qwen3-4B --gpu-gib 22
    """
    if base is None and config is None:
        return _show_installation()
    with user_errors():
        from palestra.engine.bases.model import describe_base
        from palestra.text.build.memory_plan import plan_memory

        planned = _planned_config(base, config, settings or [])
        for name in dict.fromkeys(policy.base for policy in planned.policies.values() if hasattr(policy, "base")):
            for line in describe_base(name):
                print_line(line)
            _show_conversations(name)
        free = None
        device = None
        if gpu_gib is not None:
            free = int(gpu_gib * 2**30)
            device = "cuda"
        plan = plan_memory(planned, prompt_tokens=prompt_tokens, free=free, device=device)
        table = Table("memory", "GiB", "when", "what for")
        for part in plan.parts:
            table.add_row(part.name, f"{part.bytes / 2**30:.2f}", part.phase or "always", part.detail)
        table.add_row("peak", f"{plan.peak / 2**30:.2f}", "", f"{plan.free / 2**30:.1f} GiB are free", style="bold")
        console.print(table)
        if plan.changes is None:
            print_line(
                "it does not fit, whatever the settings: choose a smaller base, or parallel: fsdp on several GPUs"
            )
        elif plan.changes:
            print_line("it does not fit. It fits with: " + " ".join(f"--set {change}" for change in plan.changes))


def _show_conversations(base: str) -> None:
    """Prints how the conversations of a base compare with its chat template."""
    from palestra.engine.bases.names import tokenizer_of
    from palestra.engine.conversation.report import check_conversations

    table = Table("conversation", "chat template", "what there is to say")
    for finding in check_conversations(tokenizer_of(base)):
        table.add_row(finding.probe, finding.verdict, finding.note)
    console.print(table)


def _planned_config(base: str | None, path: Path | None, settings: list[str]) -> Any:
    """Returns the run to plan, with `base` if named. Raises ValueError without a language model."""
    from palestra.core.config import load, override, validate
    from palestra.text.config import TextConfig

    tree: dict[str, Any] = (
        load(path) if path else {"env": {"type": "sokoban"}, "policies": {"default": {"type": "lora"}}}
    )
    config = validate(TextConfig, override(tree, settings))
    models = [name for name, policy in config.policies.items() if hasattr(policy, "base")]
    if not models:
        raise ValueError("this run has no language model in this process: its memory is not planned")
    changes = [f"policies.{name}.base={base}" for name in models] if base else []
    return validate(TextConfig, override(tree, [*settings, *changes]))


def _show_installation() -> None:
    """Prints versions, the device, and the available envs, bases, algorithms and sandbox."""
    import torch
    import transformers

    from palestra.core.config import type_choices
    from palestra.core.config.shipped import SHIPPED_BASES_DIR
    from palestra.engine.bases.packaged_bases import PACKAGED_BASES, is_installed
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS
    from palestra.populations.build.build import PopulationConfig
    from palestra.text.config import TextConfig
    from palestra.vector.config import VectorConfig

    table = Table(show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({torch.get_num_threads()} threads)"
    bases = sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json"))
    bases += [name if is_installed(name) else f"{name} ({base.install})" for name, base in PACKAGED_BASES.items()]
    for row in (
        ("palestra", palestra.__version__),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("device", device),
        ("text envs", ", ".join(sorted(TEXT_ENVS)) + ", or module:Class"),
        ("vector envs", ", ".join(sorted(VECTOR_ENVS)) + ", or module:Class"),
        ("bases", ", ".join(bases) + ", a local folder, a GGUF file, or a hub name"),
        (
            "algorithms",
            f"{', '.join(type_choices(TextConfig, 'algorithm'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'algorithm'))}",
        ),
        (
            "policies",
            f"{', '.join(type_choices(TextConfig, 'policies'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'policies'))}",
        ),
        ("populations", ", ".join(type_choices(PopulationConfig, "population"))),
        ("sandbox", _sandbox()),
    ):
        table.add_row(*row)
    console.print(table)


def _sandbox() -> str:
    """Name of the sandbox that is available here, or why there is none."""
    from palestra.sandbox import open_sandbox

    try:
        return open_sandbox().name
    except ValueError as error:
        return f"none: {error}"
