"""Measures GRPO steps on a GPU, compared with TRL and with the limits of the GPU's arithmetic and memory.

    python bench/gpu.py            SmolLM2-135M's and Qwen3-0.6B's shapes (random weights), about 5 minutes
    python bench/gpu.py --quick    the same with fewer steps and one size of TRL's micro-batches
    python bench/gpu.py --shapes 1.7b --alone    another shape, without TRL
    python bench/gpu.py --adapters --shapes 1.7b --alone    also steps of several adapters

A step has 16 prompts of 96 tokens with 8 answers of 128 tokens each, one LoRA adapter of rank 16, bfloat16. Times are
wall seconds, the best of several steps. TRL runs in this Python if it is installed, with transformers' `generate`, no
reference model, and micro-batches of 32 and 128 answers. Figures, by shape:

    sample_tokens_per_s    sampled tokens per second
    sample_of_limit        seconds to read weights, cache and logits at the GPU's measured copy rate, over the seconds
                           of sampling
    graphs_vs_plain        sampled tokens per second with decoding steps recorded as CUDA graphs, over those without
    train_of_limit         seconds of the fewest FLOPs of a forward and backward pass (limit.py) at the GPU's measured
                           rate, over the seconds of training
    step_vs_trl            whole steps per second over TRL's
    peak_vs_trl            peak GPU memory over TRL's
    adapters16_sample_vs_1, adapters64_sample_vs_1
                           with --adapters: sampled tokens per second with so many adapters of ranks 4 to 40 in one
                           batch of 64 prompts, over those with one of rank 16
    adapters16_step_vs_1, adapters64_step_vs_1
                           the same for whole steps, in which the adapters are trained together
    adapters64_peak_vs_1   peak GPU memory of such a step over that with one adapter
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from limit import layer_matrices, qwen3_06b_config, qwen3_config, random_prompts, save_random, shared_prefix_step_flops
from lm import Ours, ids
from peak import peak_of
from rich.console import Console
from rich.table import Table

from palestra.core.losses import clipped_policy_loss
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.train_pass import join_passes, run_together

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import absent, finish

PROMPT, NEW, K, RANK, GROUPS = 96, 128, 8, 16, 16
SHAPES = {
    "135m": qwen3_config(49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536),
    "0.6b": qwen3_06b_config(),
    "1.7b": qwen3_config(151936, hidden=2048, layers=28, heads=16, head_dim=128, mlp=6144),
    "4b": qwen3_config(151936, hidden=2560, layers=36, heads=32, head_dim=128, mlp=9728),
}
MIXED_RANKS = [4, 8, 12, 16, 16, 16, 16, 40]  # their mean is RANK
ADAPTER_TARGETS = {"adapters16_step_vs_1": 0.8, "adapters64_step_vs_1": 0.7, "adapters64_peak_vs_1": 1.3}
TARGETS = {"graphs_vs_plain": 1.0, "step_vs_trl": 3.5, "peak_vs_trl": 0.33}
console = Console(width=120)


def clock(run: Callable[[], object], repeats: int) -> float:
    """The wall seconds of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


class OnGpu:
    """palestra's engine on a device, with one adapter in training."""

    def __init__(self, folder: str, device: str = "cuda") -> None:
        self.ours = Ours(folder, RANK, device=device)
        (adapter,) = self.ours.adapters(1)
        self.adapter, self.trainer = adapter, AdapterWeights(self.ours.engine, adapter)
        self.prompts = ids(GROUPS, PROMPT)

    def sample(self, new: int = NEW) -> list[list[Any]]:
        return self.ours.sample(self.prompts, K, new, [self.adapter.snapshot()])

    def train(self, groups: list[list[Any]]) -> None:
        self.ours.train(self.trainer, self.prompts, groups)


def busy_share(run: Callable[[], object]) -> float:
    """The share of the seconds of `run` in which a kernel runs on the GPU; a lower bound, since profiling slows the
    rest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        seconds = clock(run, 1)
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined]
    return sum(e.time_range.elapsed_us() for e in kernels) / 1e6 / seconds


def copy_rate() -> float:
    """Bytes per second of a copy within the GPU, bytes read plus bytes written."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / clock(lambda: b.copy_(a), 10)


def matmul_rate() -> float:
    """FLOP per second of a large bfloat16 product."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / clock(lambda: a @ b, 10)


def least_sampling_seconds(config: Any, rate: float) -> float:
    """Seconds of sampling at `rate` bytes per second if each decoding step moves only what it must: all weights, keys
    and values of the live tokens (those of a prompt once), and the logits, written and read."""
    layer = sum(inputs * outputs for inputs, outputs in layer_matrices(config).values())
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    live = GROUPS * (PROMPT + K * NEW / 2)
    return 2 * (weights + token * live + 2 * GROUPS * K * config.vocab_size) * (NEW - 1) / rate


def measured(shape: str, folder: str, *, repeats: int) -> dict[str, float]:
    """palestra's steps: seconds, peak GPU memory in GiB and shares of the limits."""
    config = SHAPES[shape]
    ours = OnGpu(folder)
    for _ in range(2):
        ours.train(ours.sample())  # steps of each size are recorded from their fourth use on
    torch.cuda.reset_peak_memory_stats()
    sample, groups = clock(ours.sample, repeats), ours.sample()
    train = clock(lambda: ours.train(groups), repeats)
    step = clock(lambda: ours.train(ours.sample()), repeats)
    peak = torch.cuda.max_memory_allocated() / 2**30
    graphs = ours.ours.sampler.batch.graphs  # type: ignore[attr-defined]
    repeated, reason = graphs.num_repeated, graphs.refusal
    busy = busy_share(lambda: ours.sample(16)), busy_share(lambda: ours.train(groups))
    graphs.refusal = "switched off"
    plain = 2 * clock(lambda: ours.sample(NEW // 2), 1)
    flops = shared_prefix_step_flops(config, PROMPT, NEW, K, GROUPS, RANK)
    shares = f"kernels run {busy[0]:.0%} of the time in sampling and {busy[1]:.0%} in training"
    console.print(
        f"{shape}: {repeated} steps repeated from graphs {reason}; {shares}; {GROUPS * K * NEW / plain:.0f} plain"
    )
    return {
        "sample_s": sample,
        "train_s": train,
        "step_s": step,
        "peak_gib": peak,
        "sample_tokens_per_s": GROUPS * K * NEW / sample,
        "sample_of_limit": least_sampling_seconds(config, copy_rate()) / sample,
        "graphs_vs_plain": plain / sample,
        "train_of_limit": (flops.forward + flops.backward) / matmul_rate() / train,
    }


def several_adapters(ours: Ours, *, repeats: int) -> dict[str, float]:
    """Figures of steps with 16 and 64 adapters of mixed ranks in one batch, over those with one."""
    found = {}
    prompts = ids(4 * GROUPS, PROMPT)
    for number in (1, 16, 64):
        ranks = [RANK] if number == 1 else MIXED_RANKS * (number // len(MIXED_RANKS))
        trainers = [AdapterWeights(ours.engine, adapter) for adapter in ours.adapters_of(ranks)]

        def sample(trainers: list[AdapterWeights] = trainers) -> list[list[Any]]:
            snapshots = [trainer.snapshot(f"{i:02}") for i, trainer in enumerate(trainers)]
            return ours.sample(prompts, K, NEW, [snapshot for snapshot in snapshots if snapshot])

        def step(trainers: list[AdapterWeights] = trainers, sample: Callable[[], list[list[Any]]] = sample) -> None:
            groups = sample()
            queues = []
            for i, trainer in enumerate(trainers):
                samples = ours.samples_of(prompts[i :: len(trainers)], groups[i :: len(trainers)])
                queues.append(trainer.passes(samples, clipped_policy_loss))
            for together in join_passes(queues):
                run_together(together)
            for trainer in trainers:
                trainer.optim_step(OptimConfig(lr=1e-5))

        step()
        torch.cuda.reset_peak_memory_stats()
        found[number] = clock(sample, repeats), clock(step, repeats), torch.cuda.max_memory_allocated()
        console.print(f"{number} adapters: sampling {found[number][0]:.2f} s, whole step {found[number][1]:.2f} s")
    figures = {}
    for number in (16, 64):
        figures[f"adapters{number}_sample_vs_1"] = found[1][0] / found[number][0]
        figures[f"adapters{number}_step_vs_1"] = found[1][1] / found[number][1]
    return figures | {"adapters64_peak_vs_1": found[64][2] / found[1][2]}


def trl_steps(folder: str, *, quick: bool) -> dict[str, float]:
    """TRL's steps with its fastest micro-batch size: seconds, and the least peak GPU memory in GiB of all sizes."""
    prompts = Path(folder) / "prompts.json"
    prompts.write_text(json.dumps(random_prompts(GROUPS, PROMPT)))
    spec = {"model": folder, "prompts": str(prompts), "K": K, "new_tokens": NEW, "prompts_per_step": GROUPS}
    spec |= {"rank": RANK, "steps": 2, "warmup": 1, "micro_batches": [128] if quick else [32, 128], "device": "cuda"}
    found = peak_of(sys.executable, "trl_grpo.py", json.dumps(spec))
    return {
        "step_s": GROUPS * K / found["samples_per_cpu_s"],
        "sample_s": found["cpu_s_generation"] / 2,
        "train_s": found["cpu_s_rest"] / 2,
        "peak_gib": min(each["peak_gpu_gib"] for each in found["tried"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "0.6b"])
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--adapters", action="store_true", help="also steps of several adapters")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        absent("a CUDA device. On a CPU, run bench/lm.py.")
    table = Table(title=f"{torch.cuda.get_device_name()}: seconds of a GRPO step, {GROUPS} x {K} answers")
    for heading in ("", "sampling", "training", "whole step", "peak GiB"):
        table.add_column(heading, justify="right" if heading else "left")
    figures: dict[str, float] = {}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            save_random(SHAPES[shape], folder)
            found = {"palestra": measured(shape, folder, repeats=2 if given.quick else 4)}
            console.print(f"{shape}: {json.dumps(found)}")  # before TRL, which takes long
            names = ("sample_tokens_per_s", "sample_of_limit", "graphs_vs_plain", "train_of_limit")
            figures |= {f"{name}_{shape}": found["palestra"][name] for name in names}
            if given.adapters:
                several = several_adapters(Ours(folder, RANK, device="cuda"), repeats=2)
                figures |= {f"{name}_{shape}": value for name, value in several.items()}
            if not given.alone and find_spec("trl"):
                torch.cuda.empty_cache()
                found["TRL"] = trl_steps(folder, quick=given.quick)
                for name in ("step", "peak"):
                    key = f"{name}_{'s' if name == 'step' else 'gib'}"
                    ratio = found["TRL"][key] / found["palestra"][key]
                    figures[f"{name}_vs_trl_{shape}"] = ratio if name == "step" else 1 / ratio
        for who, row in found.items():
            cells = [f"{row[name]:.2f}" for name in ("sample_s", "train_s", "step_s", "peak_gib")]
            table.add_row(f"{shape} {who}", *cells)
    console.print(table)
    wanted = TARGETS | (ADAPTER_TARGETS if given.adapters else {})
    targets = {f"{name}_{shape}": value for name, value in wanted.items() for shape in given.shapes}
    finish("gpu", figures, targets, is_stored=not given.quick)


if __name__ == "__main__":
    main()
