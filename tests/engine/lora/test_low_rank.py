"""Low-rank products by row: every way gives the products of each row alone, with 64 adapters of mixed ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.recorded_steps import assert_equal_answers, recording, requests, snapshots
from helpers.tolerances import LOGPROB_ATOL
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from palestra.engine.forward.quantized import QuantizedLinear
from palestra.engine.lora import low_rank
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.low_rank import (
    MAX_KERNEL_ROWS,
    BatchedProducts,
    GroupedLinear,
    KernelProducts,
    RowColumns,
    add_by_masks,
    add_by_runs,
    choose_products,
    columns_of,
    kernels_agree,
    padded_rank,
    runs_of,
    training_kernels_agree,
)
from palestra.engine.lora.routes import AdapterStack, BlockRoute, MultiAdapterRoute, SingleAdapterRoute
from palestra.engine.sampling.sampler import Sampler
from palestra.testing import tiny_lm

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".cache/triton"
MIXED_RANKS = [1, 2, 4, 8, 16, 32, 64, 128] * 8

blocks = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 7, 8, 33])), min_size=1, max_size=12)


def matrices(counts, ranks, inputs=24, outputs=20):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), inputs), (sum(counts), outputs), (sum(ranks), inputs), (sum(ranks), outputs)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def products_of_rows(x, y, a, b, counts, ranks):
    """Each row alone, in float64."""
    expected = y.double()
    first_R, rank_R = columns_of(counts, ranks)
    for row, (first, rank) in enumerate(zip(first_R.tolist(), rank_R.tolist(), strict=True)):
        own = slice(first, first + rank)
        expected[row] += x[row].double() @ a[own].double().T @ b[own].double()
    return expected


@given(blocks)
def test_runs_and_masks_give_the_products_of_each_row(given_blocks):
    counts, ranks = (list(values) for values in zip(*given_blocks, strict=True))
    x, y, a, b = matrices(counts, ranks)
    expected = products_of_rows(x, y, a, b, counts, ranks)
    by_runs = y.clone()
    add_by_runs(x, by_runs, a, b, runs_of(counts, ranks, x.device))
    first_R, rank_R = torch.tensor(columns_of(counts, ranks))
    by_masks = y.clone()
    add_by_masks(x, by_masks, a[None], b, [b.shape[1]], RowColumns(first_R, rank_R, padded_rank(ranks)))
    for found in (by_runs, by_masks):
        torch.testing.assert_close(found.double(), expected, atol=1e-5 * max(ranks), rtol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_masks_leave_rows_alone_beside_an_adapter_that_is_not_finite(broken):
    """0 times such a weight is NaN. A and B are broken in turn, and the product of an A overflows."""
    counts, ranks = [3, 4], [2, 8]
    first_R, rank_R = torch.tensor(columns_of(counts, ranks))
    for change in (lambda a, b: a[1].fill_(broken), lambda a, b: b[1, 3].fill_(broken), lambda a, b: a[0].fill_(3e38)):
        x, y, a, b = matrices(counts, ranks)
        expected = products_of_rows(x, y, a, b, counts, ranks)
        change(a, b)
        add_by_masks(x, y, a[None], b, [b.shape[1]], RowColumns(first_R, rank_R, 16))
        torch.testing.assert_close(y[3:].double(), expected[3:], atol=1e-4, rtol=1e-5)
        assert not y[:3].isfinite().all()


@given(blocks)
def test_gradients_of_grouped_products_are_those_of_each_row(given_blocks):
    """For blocks of any sizes, and blocks without an adapter: the products of each row's own matrices, by autograd."""
    counts, ranks = (list(values) for values in zip(*given_blocks, strict=True))
    counts, ranks = [*counts, 3], [*ranks, 0]
    x, y, a, b = matrices(counts, ranks)
    weight = torch.randn(y.shape[1], x.shape[1], generator=torch.Generator().manual_seed(1))
    leaves = [leaf.requires_grad_() for leaf in (x, a, b)]
    found = GroupedLinear.apply(x, weight, None, a, b, BatchedProducts(runs_of(counts, ranks, x.device)))
    first_R, rank_R = columns_of(counts, ranks)
    owns = [slice(first, first + rank) for first, rank in zip(first_R.tolist(), rank_R.tolist(), strict=True)]
    expected = torch.stack([row @ weight.T + (row @ a[own].T) @ b[own] for row, own in zip(x, owns, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-5 * max(ranks), rtol=1e-5)
    ours = torch.autograd.grad((found * y).sum(), leaves)
    theirs = torch.autograd.grad((expected * y).sum(), leaves)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5 * len(y), rtol=1e-4)


@given(blocks)
def test_a_run_computes_at_most_half_as_many_rows_again(given_blocks):
    counts, ranks = (list(values) for values in zip(*given_blocks, strict=True))
    found = iter([max(count, 16) for count in counts if count])
    for run in runs_of(counts, ranks, torch.device("cpu")):
        assert run.adapters * run.width <= 1.5 * sum(next(found) for _ in range(run.adapters))
        assert (run.columns.stop - run.columns.start) % run.adapters == 0
    assert next(found, None) is None


def test_equal_blocks_of_one_rank_are_one_product():
    assert len(runs_of([8] * 64, [16] * 64, torch.device("cpu"))) == 1
    ranks = sorted(MIXED_RANKS)
    assert len(runs_of([8] * 64, ranks, torch.device("cpu"))) == 8


def test_kernels_train_several_runs_of_few_rows(monkeypatch):
    """One run takes as few launches without them, and many rows take longer than launches; a CPU has no kernels."""
    x = torch.zeros(1)
    assert isinstance(choose_products(x, [8] * 64, MIXED_RANKS), BatchedProducts)
    monkeypatch.setattr(low_rank, "trains_by_kernels", lambda x: True)
    assert isinstance(choose_products(x, [8] * 64, MIXED_RANKS), KernelProducts)
    assert isinstance(choose_products(x, [8] * 64, [16] * 64), BatchedProducts)
    limit = MAX_KERNEL_ROWS
    assert isinstance(choose_products(x, [limit, limit], [4, 8]), KernelProducts)
    assert isinstance(choose_products(x, [limit + 1, limit], [4, 8]), BatchedProducts)


@pytest.mark.parametrize("kind", ["linear", "nf4", "conv1d"])
def test_blocks_of_any_kind_of_layer_equal_each_adapter_alone(kind):
    """Outputs and gradients; one of the adapters leaves the layer out. Layers with a forward of their own are called
    once for all blocks."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 20) if kind != "conv1d" else Conv1D(20, 64)
    layer = QuantizedLinear(layer, "nf4") if kind == "nf4" else layer.requires_grad_(False)
    layers = {"one": layer, "other": nn.Linear(64, 20)}
    configs = [LoraConfig(rank=rank, target_modules=[name]) for rank, name in ((3, "one"), (2, "other"), (8, "one"))]
    adapters = [Adapter(layers, config, seed=number) for number, config in enumerate(configs)]
    for adapter in adapters:
        for _, b in adapter.weights.values():
            b.data.normal_()
    counts = [5, 4, 30]
    x = torch.randn(1, sum(counts), 64, requires_grad=True)
    grad = torch.randn(1, sum(counts), 20)
    leaves = [x, *adapters[0].parameters(), *adapters[2].parameters()]
    calls = []
    if kind == "nf4":
        layer.dequantize = lambda: calls.append(1) or QuantizedLinear.dequantize(layer)
    joined = BlockRoute(adapters, counts).linear("one", x, layer)
    assert len(calls) == (kind == "nf4")
    pieces = zip(adapters, x.split(counts, 1), strict=True)
    alone = torch.cat([SingleAdapterRoute(adapter).linear("one", piece, layer) for adapter, piece in pieces], 1)
    torch.testing.assert_close(joined, alone, atol=1e-5, rtol=1e-5)
    found = [torch.autograd.grad(output, leaves, grad) for output in (joined, alone)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_64_adapters_of_mixed_ranks_answer_as_each_alone():
    """In one batch, plain and by recorded steps: 2,040 columns, and the bare base beside them."""
    engine = tiny_lm(1, initializer_range=0.2)
    adapters = [*snapshots(engine, *MIXED_RANKS), None]
    asked = [request for adapter in adapters for request in requests([adapter], count=1, tokens=5)]
    sampler, graphs = recording(engine)
    for _ in range(2):
        recorded = sampler.sample_all(asked)
    assert graphs.num_repeated > 4 and not graphs.refusal
    together = Sampler(engine).sample_all(asked)
    alone = [Sampler(engine).sample_all([request])[0] for request in asked]
    assert_equal_answers(together, alone)
    assert_equal_answers(recorded, alone)


def test_an_adapter_of_fewer_layers_or_lower_ranks_leaves_the_others_alone():
    """A stack has room for the largest rank of each adapter at every layer; what it does not use adds nothing."""
    engine = tiny_lm(1, initializer_range=0.2)
    first, second = snapshots(engine, 3, 5)
    name = next(iter(first.weights))
    a, b = second.weights[name]
    second.weights = {name: (a[:2], b[:, :2])}
    stack = AdapterStack([first, second], engine.linear_layers)
    x = torch.randn(6, a.shape[1])
    route = MultiAdapterRoute(stack, [2, 3])
    for layer in first.weights:
        if stack.linears[layer].in_features != x.shape[1]:
            continue
        found = route.linear(layer, x, stack.linears[layer]) - stack.linears[layer](x)
        expected = torch.zeros_like(found)
        for rows, snapshot in ((slice(0, 2), first), (slice(2, 5), second)):
            if pair := snapshot.weights.get(layer):
                expected[rows] = x[rows] @ pair[0].T @ pair[1].T
        torch.testing.assert_close(found, expected, atol=LOGPROB_ATOL, rtol=0)


# ---- the kernels, in a process of its own: Triton interprets them on a CPU


def by_triton(*arguments, **environment):
    if not (TRITON / ".installed").exists():
        pytest.skip("Triton is not there: `make test` installs it on Linux")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(TRITON)])
    command = [sys.executable, str(ROOT / "tests/helpers/interpreted_kernels.py"), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_kernels_give_the_numbers_of_plain_torch():
    gaps = by_triton(TRITON_INTERPRET="1")
    assert len(gaps) == 13
    assert all(gap < 1e-5 for gap in gaps.values()), gaps  # also if one is NaN


@pytest.mark.timeout(300)
def test_gradients_by_kernels_are_those_of_each_block():
    gaps = by_triton("gradients", TRITON_INTERPRET="1")
    assert len(gaps) == 15
    assert all(gap < 1e-5 for gap in gaps.values()), gaps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_gpus():
    """For two generations of GPUs and three dtypes: seven kernels."""
    assert by_triton("compile") == 7 * 3 * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_agree_on_a_gpu(dtype):
    assert kernels_agree(torch.device("cuda"), dtype)
    assert training_kernels_agree(torch.device("cuda"), dtype)


def test_columns_of_rows():
    assert columns_of([2, 0, 1, 2], [3, 5, 4, 0]).tolist() == [[0, 0, 8, 12, 12], [3, 3, 4, 0, 0]]
    assert [padded_rank(ranks) for ranks in ([1], [16, 4], [17])] == [16, 16, 32]
