"""Measures the engine's speed compared with TRL, with transformers' `generate`, and with the machine's matmul rate.

    python bench/lm.py            about 10 minutes; the first run makes TRL's virtual environment
    python bench/lm.py --quick    about 2 minutes
    python bench/lm.py --peak     also peak.py, which takes long: see there
    python bench/lm.py --model smollm2    SmolLM2-135M in place of the tiny model: real_model.py (--quick: without TRL)

Everything runs in one thread on the same tiny model (1.05 million parameters, random weights) with the same prompts and
K, and is measured in CPU seconds. palestra and its peers run alternately, so that other load on the machine slows them
equally. Figures:

    step_vs_trl         samples per CPU second of whole GRPO steps (sampling, forward, backward, update), over TRL's
    step_of_limit       seconds of the step's fewest FLOPs (limit.py) at the machine's matmul rate, over those measured
    sample_vs_generate  sampled tokens per CPU second over those of transformers' `generate`
    adapters16_vs_1     sampled tokens per CPU second with 16 adapters in one batch, over those with one
    adapters64_vs_1     the same with 64, in a batch of twice as many answers
    adapters64_mixed    the same with 64 of ranks 1 to 32, as many of each, whose mean rank is that of the others
    sample_of_limit_135m, step_of_limit_135m, step_vs_trl_135m
                        with --model: the same for a real model; sample_of_limit for sampling alone
    peak_vs_trl         with --peak: peak memory of a step on the shape of Qwen3-0.6B, over TRL's (at most 0.33)
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from generate_peer import best_generate_rate
from limit import cpu_seconds, matmul_rate, random_prompts, shared_prefix_step_flops, tiny_config, tiny_random
from peak import peak_figures
from real_model import TARGETS as REAL_MODEL_TARGETS
from real_model import real_model_figures
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.bases.pretrained import load_model
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import absent, finish

HERE = Path(__file__).parent
TRL = HERE / ".venv-trl"
PROMPT, NEW, K, RANK, GROUPS = 96, 16, 8, 8, 32
MIXED_RANKS = [1, 2, 4, 6, 8, 9, 2, 32] * 8  # their mean is RANK
TARGETS = {
    "step_vs_trl": 5.0,
    "step_of_limit": 0.4,
    "sample_vs_generate": 1.0,
    "adapters16_vs_1": 0.85,
    "adapters64_vs_1": 0.7,
}
console = Console(width=110)


class Ours:
    """palestra's engine on the benchmark's model. No token ends an answer, so that each has exactly `new` tokens."""

    def __init__(self, path: str, rank: int = RANK, cache_bytes: int | None = None, *, device: str = "cpu") -> None:
        self.engine, self.rank = Engine.load(path, device=device), rank
        self.sampler = Sampler(self.engine, cache_bytes=cache_bytes)
        self.sampler.batch.end_ids = np.array([], np.int64)

    def adapters(self, n: int) -> list[Adapter]:
        return self.adapters_of([self.rank] * n)

    def adapters_of(self, ranks: Sequence[int]) -> list[Adapter]:
        linears = self.engine.linear_layers
        return [Adapter(linears, LoraConfig(rank=rank), seed=seed) for seed, rank in enumerate(ranks)]

    def sample(self, prompts: Sequence[np.ndarray], k: int, new: int, snapshots: Sequence[Snapshot]) -> list[list[Any]]:
        requests = [
            Request(prompt, k, SamplingConfig(max_tokens=new), snapshots[i % len(snapshots)], seed=i)
            for i, prompt in enumerate(prompts)
        ]
        return self.sampler.sample_all(requests)

    def step(self, trainer: AdapterWeights, prompts: Sequence[np.ndarray], new: int = NEW) -> None:
        """Makes one GRPO step: samples and trains."""
        assert trainer.adapter is not None
        self.train(trainer, prompts, self.sample(prompts, K, new, [trainer.adapter.snapshot()]))

    def train(self, trainer: AdapterWeights, prompts: Sequence[np.ndarray], groups: Sequence[list[Any]]) -> None:
        """Updates the adapter from sampled `groups`."""
        trainer.forward_backward(self.samples_of(prompts, groups), clipped_policy_loss)
        trainer.optim_step(OptimConfig(lr=1e-5))

    def samples_of(self, prompts: Sequence[np.ndarray], groups: Sequence[list[Any]]) -> list[Sample]:
        """Returns samples with advantages. The reward of an answer is its share of even tokens, so that rewards differ
        in every group."""
        samples = []
        for prompt, siblings in zip(prompts, groups, strict=True):
            rewards = np.array([np.mean(s.token_ids % 2 == 0) for s in siblings])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for s, a in zip(siblings, advantages, strict=True):
                samples.append(Sample(prompt, s.token_ids, s.logprobs, np.full(len(s.token_ids), a, np.float32)))
        return samples


def ids(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    return [np.array(prompt, np.int32) for prompt in random_prompts(count, length, seed=seed)]


def trl_rate(path: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Figures of TRL's GRPOTrainer on the same model and prompts, in its own process."""
    spec = {"model": path, "K": K, "new_tokens": NEW, "prompts_per_step": 16, "rank": RANK}
    spec |= {"steps": 3, "warmup": 1, "micro_batches": [16]} if quick else {"steps": 6}
    return run_trl(spec, random_prompts(GROUPS, PROMPT), folder)


def run_trl(spec: dict[str, Any], prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    """Runs trl_grpo.py for `spec`, with `prompts` in a file of `folder`; returns the figures that it prints."""
    file = folder / "prompts.json"
    file.write_text(json.dumps(prompts))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [str(TRL / "bin/python"), str(HERE / "trl_grpo.py"), json.dumps(spec | {"prompts": str(file)})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the TRL peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def install_trl() -> None:
    """Makes TRL's virtual environment, unless it is there."""
    if (TRL / "installed").exists():
        return
    console.print(f"installing TRL into {TRL} (once, some minutes)")
    subprocess.run([sys.executable, "-m", "venv", str(TRL)], check=True)
    for packages in (["torch==2.13.0"], ["trl==1.16.0", "peft==0.21.2", "transformers==5.23.0"]):
        subprocess.run([str(TRL / "bin/pip"), "install", "--quiet", *packages], check=True)
    (TRL / "installed").touch()


def whole_steps(ours: Ours, path: str, folder: Path, *, quick: bool) -> dict[str, float]:
    """Figures of whole GRPO steps: palestra and TRL run alternately, and the best of each counts."""
    (adapter,) = ours.adapters(1)
    trainer, prompts = AdapterWeights(ours.engine, adapter), ids(GROUPS, PROMPT)
    flops = shared_prefix_step_flops(tiny_config(), PROMPT, NEW, K, GROUPS, RANK).total
    rates, shares, peers = [], [], []
    for _ in range(1 if quick else 3):
        matmul = matmul_rate()
        seconds = cpu_seconds(lambda: ours.step(trainer, prompts), 2 if quick else 5)
        rates.append(GROUPS * K / seconds)
        shares.append(flops / matmul / seconds)
        peers.append(trl_rate(path, folder, quick=quick)["samples_per_cpu_s"])
    table = Table(title=f"whole GRPO steps, {PROMPT} + {NEW} tokens, K = {K}, LoRA r{RANK}", title_justify="left")
    for heading in ("", "samples per CPU s", "share of the limit"):
        table.add_column(heading, justify="left" if not heading else "right")
    ours_best, trl_best, share = max(rates), max(peers), max(shares)
    table.add_row("palestra", f"{ours_best:.0f}", f"{share:.2f}")
    table.add_row("TRL GRPOTrainer", f"{trl_best:.0f}", f"{share * trl_best / ours_best:.2f}")
    console.print(table)
    return {"step_vs_trl": ours_best / trl_best, "step_of_limit": share}


def sampling(ours: Ours, path: str, *, quick: bool) -> dict[str, float]:
    """The figure of sampling without adapters: tokens per CPU second over those of `generate`."""
    prompts = ids(GROUPS, PROMPT)
    model = load_model(AutoModelForCausalLM, path, dtype=torch.float32)
    best_peer, best = 0.0, 0.0
    for _ in range(1 if quick else 3):
        peer, _sizes = best_generate_rate(
            model, [p.tolist() for p in prompts], new=NEW, K=K, sizes=(16, 32), repeats=1 if quick else 2
        )
        seconds = cpu_seconds(lambda: ours.sampler.sample_all([base_request(p, i) for i, p in enumerate(prompts)]), 3)
        best_peer, best = max(best_peer, peer), max(best, GROUPS * K * NEW / seconds)
    console.print(f"sampling: palestra {best:,.0f} tokens per CPU s, generate {best_peer:,.0f}\n")
    return {"sample_vs_generate": best / best_peer}


def base_request(prompt: np.ndarray, seed: int) -> Request:
    return Request(prompt, K, SamplingConfig(max_tokens=NEW), seed=seed)


def growth(ours: Ours, *, quick: bool) -> dict[str, float]:
    """Prints sampling rates by K, prompt length and number of adapters; returns the figures of several adapters."""
    repeats = 2 if quick else 4

    def rate(prompts: list[np.ndarray], k: int, used: Sequence[Snapshot]) -> float:
        return len(prompts) * k * NEW / cpu_seconds(lambda: ours.sample(prompts, k, NEW, used), repeats)

    table = Table(title="sampled tokens per CPU s, LoRA r8", title_justify="left", show_header=False)
    snapshots = named_snapshots(ours.adapters(64))
    table.add_row(
        "K siblings", *(f"{k}: {rate(ids(256 // k, PROMPT), k, snapshots[:1]):,.0f}" for k in (1, 2, 4, 8, 16))
    )
    lengths = (24, 96, 192, 384) if quick else (24, 48, 96, 192, 384)
    table.add_row("prompt tokens", *(f"{n}: {rate(ids(32, n), K, snapshots[:1]):,.0f}" for n in lengths))
    prompts = ids(GROUPS, PROMPT)
    used = {str(n): snapshots[:n] for n in (1, 2, 4, 16)}
    rates = rates_by_turns(lambda name: rate(prompts, K, used[name]), used)
    table.add_row("adapters in the batch", *(f"{n}: {value:,.0f}" for n, value in rates.items()))
    twice = ids(2 * GROUPS, PROMPT)
    many = {"1": snapshots[:1], "64": snapshots, "64 of ranks 1 to 32": named_snapshots(ours.adapters_of(MIXED_RANKS))}
    rates_64 = rates_by_turns(lambda name: rate(twice, K, many[name]), many)
    table.add_row("in twice the batch", *(f"{n}: {value:,.0f}" for n, value in rates_64.items()))
    console.print(table)
    return {
        "adapters16_vs_1": rates["16"] / rates["1"],
        "adapters64_vs_1": rates_64["64"] / rates_64["1"],
        "adapters64_mixed": rates_64["64 of ranks 1 to 32"] / rates_64["1"],
    }


def named_snapshots(adapters: Sequence[Adapter]) -> list[Snapshot]:
    return [adapter.snapshot(f"a{i:02}") for i, adapter in enumerate(adapters)]


def rates_by_turns(rate_of: Callable[[str], float], names: Iterable[str]) -> dict[str, float]:
    """The best of two rates of each, measured alternately, so that other load affects all."""
    rounds = [{name: rate_of(name) for name in names} for _ in range(2)]
    return {name: max(found[name] for found in rounds) for name in rounds[0]}


def real_model(base: str, *, quick: bool) -> None:
    """Measures a real model with real_model.py and prints its lines and figures."""
    with tempfile.TemporaryDirectory() as name:
        if not quick:
            install_trl()
        trl = None if quick else lambda spec, prompts: run_trl(spec, prompts, Path(name))
        figures, lines = real_model_figures(Ours, base, trl, quick=quick)
    for line in lines:
        console.print(line)
    finish(f"lm_{base}", figures, REAL_MODEL_TARGETS, is_stored=not quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--peak", action="store_true", help="also compare peak memory (peak.py)")
    parser.add_argument("--model", choices=["smollm2"], help="a real model instead of the tiny one")
    given = parser.parse_args()
    quick = given.quick
    if given.model:
        return real_model(given.model, quick=quick)
    if quick and not (TRL / "installed").exists():
        absent(f"TRL in {TRL}: `make test-trl` makes it, or this script without --quick")
    install_trl()
    with tempfile.TemporaryDirectory() as name:
        tiny_random(name)
        ours = Ours(name)
        figures = whole_steps(ours, name, Path(name), quick=quick)
        figures |= sampling(ours, name, quick=quick)
        figures |= growth(ours, quick=quick)
        if given.peak:
            figures |= peak_figures(TRL / "bin/python", quick=quick)
    finish("lm", figures, TARGETS, is_stored=not quick)


if __name__ == "__main__":
    main()
