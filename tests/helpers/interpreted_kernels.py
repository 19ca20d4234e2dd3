"""Runs the Triton kernels on a CPU, and prints what they computed beside what plain torch computes.

    TRITON_INTERPRET=1 python interpreted_kernels.py              one line of JSON: the largest relative differences
    TRITON_INTERPRET=1 python interpreted_kernels.py gradients    likewise of gradients and of a joined training pass
    python interpreted_kernels.py compile                         compiles all kernels for GPUs; one line: their number

A process of its own: Triton is told to interpret before it is imported.
"""

import inspect
import json
import sys

import numpy as np
import torch
from helpers.small_models import random_adapter

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine import kernels
from palestra.engine.cuda.paged_attention import PageTable, attention_by_gathering, attention_by_kernels
from palestra.engine.forward.attention_terms import AttentionTerms
from palestra.engine.lora import low_rank
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.low_rank import (
    GroupedLinear,
    RowColumns,
    add_by_kernels,
    columns_of,
    kernel_products,
    kernels_agree,
    padded_rank,
    training_kernels_agree,
)
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.train_pass import run_together
from palestra.testing import tiny_lm

# counts of rows and ranks of the adapters, sizes of layers, inputs
PRODUCTS = {
    "one row": ([1], [8], [64], 64),
    "64 adapters of ranks 1 to 128": ([1] * 64, [1, 2, 4, 8, 16, 32, 64, 128] * 8, [24, 9], 40),
    "empty groups": ([0, 5, 0, 30], [3, 7, 128, 16], [70], 300),
    "bare rows": ([3, 2, 20], [8, 16, 0], [33], 48),
    "bare rows between adapters": ([4, 3, 2, 5, 1], [0, 8, 0, 0, 16], [33], 48),
    "bare rows only": ([5], [0], [16], 16),
    "large tiles": ([290, 3, 70], [8, 33, 5], [70], 140),
    "three layers": ([2, 40, 2], [12, 20, 4], [96, 32, 32], 96),
    "inputs in shares": ([4, 4], [16, 8], [16], 2000),
}
DTYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*fp16": torch.float16}


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def products(counts: list[int], ranks: list[int], sizes: list[int], inputs: int, broken: float = 0.0) -> float:
    """The difference of `add_by_kernels` to products of each row alone, in float64; of all adapters but the first, if
    that has weights that are `broken`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), inputs), (sum(counts), sum(sizes))]
    shapes += [(len(sizes), sum(ranks), inputs), (sum(ranks), sum(sizes))]
    x, y, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    first_R, rank_R = torch.tensor(columns_of(counts, ranks))
    if broken:
        a[:, : ranks[0], 0] = broken
        b[: ranks[0], 0] = broken
    expected = y.double()
    for row, (first, rank) in enumerate(zip(first_R.tolist(), rank_R.tolist(), strict=True)):
        own = slice(first, first + rank)
        parts = zip(a.double(), b.double().split(sizes, 1), strict=True)
        expected[row] += torch.cat([x[row].double() @ a_Ti[own].T @ b_Tl[own] for a_Ti, b_Tl in parts])
    width = max(16, padded_rank(ranks))
    add_by_kernels(x, y, a, b, sizes, RowColumns(first_R, rank_R, width))
    healthy = slice(counts[0] if broken else 0, None)
    return gap(y[healthy], expected[healthy])


def gradients(counts: list[int], ranks: list[int], sizes: list[int], inputs: int, broken: float = 0.0) -> float:
    """The largest difference of the output of `GroupedLinear` by kernels, and of the gradients of input, A and B, to
    the products of each block alone, by autograd in float64; of all adapters but the first, if that is `broken`."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, outputs = sum(counts), sum(ranks), sum(sizes)
    shapes = [(rows, inputs), (columns, inputs), (columns, outputs), (outputs, inputs), (rows, outputs)]
    x, a, b, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    if broken:
        for values, own in ((x, counts[0]), (a, ranks[0]), (b, ranks[0]), (grad, counts[0])):
            values[:own, 0] = broken
    exact = [values.double().requires_grad_() for values in (x, a, b)]
    blocks = zip(exact[0].split(counts), exact[1].split(ranks), exact[2].split(ranks), strict=True)
    expected = torch.cat([x_Ri @ weight.double().T + x_Ri @ a_ri.T @ b_ro for x_Ri, a_ri, b_ro in blocks])
    leaves = [values.requires_grad_() for values in (x, a, b)]
    found = GroupedLinear.apply(x, weight, None, a, b, kernel_products(counts, ranks, x.device))
    pairs = [(found, expected)]
    ours = torch.autograd.grad(found, leaves, grad)
    pairs += zip(ours, torch.autograd.grad(expected, exact, grad.double()), strict=True)
    gaps = []
    for (mine, plain), own in zip(pairs, (counts[0], counts[0], ranks[0], ranks[0]), strict=True):
        healthy = slice(own if broken else 0, None)
        gaps.append(gap(mine[healthy].detach(), plain[healthy].detach()))
    return max(gaps, key=lambda value: (value != value, value))  # NaN above all


def joined_pass() -> float:
    """The largest difference of the gradients of four roles, of one pass by kernels, to those of their own passes."""
    engine = tiny_lm(1)
    configs = [
        LoraConfig(rank=3),
        LoraConfig(rank=40, target_modules=["q_proj", "down_proj"]),
        LoraConfig(rank=16, use_rslora=True),
        LoraConfig(rank=2, target_modules=["v_proj"]),
    ]
    grads = []
    shapes = []
    low_rank.trains_by_kernels = lambda x: not shapes.append(x.shape)
    for is_joined in (False, True):
        passes = []
        for number, config in enumerate(configs):
            rng = np.random.default_rng(number)
            prompt, answer = (rng.integers(5, 250, size).astype(np.int32) for size in (9 + number, 4))
            logprobs, advantages = rng.normal(size=(2, 4)).astype(np.float32)
            weights = AdapterWeights(engine, random_adapter(engine, config, number))
            passes += weights.passes([Sample(prompt, answer, logprobs - 5, advantages)], clipped_policy_loss)
        for together in [passes] if is_joined else [[each] for each in passes]:
            run_together(together)
        grads.append([weight.grad for each in passes for weight in each.weights.parameters])
    assert shapes
    return max(gap(joined, own.double()) for own, joined in zip(*grads, strict=True))


def attention(heads: int, kv_heads: int, width: int, terms: AttentionTerms) -> float:
    """The difference of attention over pages to plain torch."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 12, kv_heads, 32, width, generator=generator)
    q = torch.randn(3, heads, width, generator=generator)
    pages = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(3)])
    table = PageTable(pages, torch.tensor([1, 33, 40]), torch.tensor([2, 32, 20]))
    given = q, kv, table, (table.length_R - 40).clip(0), width**-0.5, terms
    return gap(attention_by_kernels(*given), attention_by_gathering(*given).double())


def compile_all() -> int:
    """Compiles each kernel for two generations of GPUs and each dtype; returns the number of programs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime import JITFunction

    sizes = {"ROWS": 64, "COLUMNS": 16, "BLOCK": 64, "HEADS": 8, "KV_HEADS": 2, "GROUPS": 4, "PADDED_GROUPS": 16}
    sizes |= {"WIDTH": 64, "PADDED_WIDTH": 64, "PAGE": 32, "HALF": 32, "PADDED_HALF": 32, "PADDED_SHARES": 4}
    sizes |= {"HAS_CAP": True, "HAS_SINKS": True}
    whole = {"first_ptr", "rank_ptr", "block_ptr", "tile_ptr", "page_ptr", "prompt_ptr", "answer_ptr", "place_ptr"}
    single = {"inner_ptr", "partial_ptr", "top_ptr", "total_ptr", "sinks_ptr"}
    count = 0
    for _, kernel in inspect.getmembers(kernels, lambda each: isinstance(each, JITFunction)):
        for dtype in DTYPES:
            kinds = {}
            for name in kernel.arg_names:
                kind = "*i64" if name in whole else "*fp32" if name in single else dtype
                scalar = "fp32" if name in ("scale", "cap") else "i32"
                kinds[name] = "constexpr" if name.isupper() else kind if name.endswith("_ptr") else scalar
            source = ASTSource(kernel, kinds, {name: sizes[name] for name in kernel.arg_names if name.isupper()})
            for capability in (80, 90):
                count += bool(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
    return count


def all_gradients() -> dict[str, float]:
    gaps = {name: gradients(*case) for name, case in PRODUCTS.items() if any(case[1])}
    for broken in (torch.nan, torch.inf):
        gaps[f"beside an adapter of {broken}"] = gradients([3, 4, 1, 70], [4, 8, 0, 20], [20], 24, broken)
    gaps["a joined pass"] = joined_pass()
    for check in (kernels_agree, training_kernels_agree):
        for dtype in (torch.float32, torch.float16):  # the interpreter has no products in bfloat16
            gaps[f"{check.__name__}, {dtype}"] = 0.0 if check(torch.device("cpu"), dtype) else 1.0
    return gaps


def main() -> None:
    if sys.argv[1:] == ["compile"]:
        print(compile_all())
        return
    if sys.argv[1:] == ["gradients"]:
        print(json.dumps(all_gradients()))
        return
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, 0.5])
    gaps = {name: products(*case) for name, case in PRODUCTS.items()}
    for broken in (torch.nan, torch.inf):
        gaps[f"beside an adapter of {broken}"] = products([3, 4, 1], [4, 8, 0], [20], 24, broken)
    gaps["attention"] = attention(4, 2, 16, AttentionTerms())
    gaps["attention with a cap and sinks"] = attention(6, 2, 24, AttentionTerms(softcap=2.0, sinks_H=sinks))
    print(json.dumps(gaps))


if __name__ == "__main__":
    main()
