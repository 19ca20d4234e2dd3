"""Recorded decoding steps give the answers of plain steps, and a record that would give others is not used.

On a CPU a step is computed again instead of replayed (recorded_steps.py).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.recorded_steps import SHAPE, assert_equal_answers, recording, requests, snapshots
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.check.self_check import choose_engine
from palestra.engine.cuda import decode_graphs
from palestra.engine.cuda.decode_graphs import MIN_USES, DecodeStep
from palestra.engine.cuda.paged_attention import PageTable, paged_attention
from palestra.engine.forward.attention_terms import AttentionTerms
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_lm, tiny_tokenizer

FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=16),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=16, attn_logit_softcapping=5.0),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_recorded_steps_give_the_answers_of_plain_ones(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").eval().requires_grad_(False)
    engine = choose_engine(model, family, lambda of, plain: Engine(of, tiny_tokenizer(), family, plain=plain))
    assert engine.plain_path is None
    asked = requests([*snapshots(engine, 4), None])
    sampler, graphs = recording(engine)
    answers = sampler.sample_all(asked)
    assert graphs.num_repeated > 10
    assert not graphs.refusal
    assert_equal_answers(answers, Sampler(engine).sample_all(asked))


@pytest.mark.parametrize("ranks", [(8,), (4, 8, 2)])
@pytest.mark.few(1)
def test_rows_use_their_own_adapters_of_several_ranks(ranks):
    engine = tiny_lm(1, initializer_range=0.2)
    adapters = snapshots(engine, *ranks)
    sampler, graphs = recording(engine)
    for asked in (requests(adapters), requests([*adapters[::-1], None]), requests(adapters[:1])):
        answers = sampler.sample_all(asked)
        assert_equal_answers(answers, Sampler(engine).sample_all(asked))
    assert graphs.num_repeated > 30


def test_records_distinguish_adapters_and_new_weights():
    engine = tiny_lm(2, initializer_range=0.2)
    sampler, graphs = recording(engine)
    for targets in (["q_proj"], ["v_proj", "down_proj"], ["q_proj"]):
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=4, target_modules=targets), seed=1)
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.normal_(0, 0.3)
        asked = requests([adapter.snapshot()])
        assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    before = graphs.num_repeated
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.mul_(0.9)  # trained in place
    asked = requests([None])
    assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    assert graphs.num_repeated > before
    before = graphs.num_repeated
    for weight in engine.model.parameters():
        weight.data = weight.data * 0.9  # replaced by other tensors
    assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    assert graphs.num_repeated > before and not graphs.refusal


def test_a_small_budget_preempts_and_gives_equal_answers():
    engine = tiny_lm(3, initializer_range=0.2)
    asked = requests([None], tokens=60)
    page = 2 * 2 * 2 * 16 * 32 * 4  # layers, keys and values, heads, width, tokens, bytes
    sampler, graphs = recording(engine, cache_bytes=24 * page)
    answers = sampler.sample_all(asked)
    assert sampler.batch.counts["preempted_answers"] > 0
    assert graphs.num_repeated > 10
    assert_equal_answers(answers, Sampler(engine).sample_all(asked))


def test_a_record_that_differs_is_not_used():
    engine = tiny_lm(4, initializer_range=0.2)

    def wrong(compute):
        result = compute().clone()
        return lambda: result.copy_(compute()).mul_(1.01), result

    def fails(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    asked = requests([None])
    expected = Sampler(engine).sample_all(asked)
    for record, message in ((wrong, "nats"), (fails, "not permitted")):
        sampler, graphs = recording(engine, record)
        with pytest.warns(UserWarning, match=message):
            answers = sampler.sample_all(asked)
        assert graphs.num_repeated == 0
        assert_equal_answers(answers, expected)


def test_one_clients_nan_does_not_end_recording(monkeypatch):
    """A plain step with NaN cannot be compared with a record; the rows are computed again, and later steps recorded."""
    engine = tiny_lm(3, **SHAPE)
    plain = DecodeStep.logits
    calls = []

    def logits(step, *given):
        calls.append(step)
        return plain(step, *given) * (torch.nan if len(calls) == MIN_USES else 1.0)

    wanted = Sampler(engine).sample_all(requests([None]))
    monkeypatch.setattr(DecodeStep, "logits", logits)
    sampler, graphs = recording(engine)
    assert_equal_answers(sampler.sample_all(requests([None])), wanted)
    assert graphs.num_repeated > 0 and not graphs.refusal


def test_a_step_with_fewer_rows_uses_the_record_of_more(monkeypatch):
    """Rows end one after the other; a record is used if at most an eighth of its rows are unused."""
    engine = tiny_lm(4, initializer_range=0.2)
    sampler, graphs = recording(engine)
    asked = [
        replace(request, sampling=SamplingConfig(max_tokens=8 + 3 * i)) for i, request in enumerate(requests([None]))
    ]
    assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    assert {shape.rows for shape in graphs._steps} == {12}
    assert graphs.num_repeated == 20  # of 22 steps
    monkeypatch.setattr(decode_graphs, "MIN_COVERED_USES", 3)
    assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    assert {12} < {shape.rows for shape in graphs._steps}
    assert not graphs.refusal


def test_prompts_are_gathered_for_one_pass():
    """With answers of many lengths, rows are refilled an eighth at a time, and each answer is unchanged."""
    engine = tiny_lm(4, initializer_range=0.2)
    rng = np.random.default_rng(0)
    asked = [
        Request(rng.integers(5, 250, 20).astype(np.int32), 1, SamplingConfig(max_tokens=5 + i % 23), None, seed=i)
        for i in range(120)
    ]
    passes = []
    for sampler in (recording(engine, max_num_seqs=32)[0], Sampler(engine, max_num_seqs=32)):
        own, count = sampler.batch._prefill, []
        sampler.batch._prefill = lambda groups, own=own, count=count: count.append(len(groups)) or own(groups)
        passes.append(count)
        answers = sampler.sample_all(asked)
        assert [len(group) for group in answers] == [1] * 120
        passes.append(answers)
    gathered, found, plain, expected = passes
    assert_equal_answers(found, expected)
    assert min(gathered[:-1]) >= 4 and len(gathered) < 0.6 * len(plain)


def test_oldest_records_are_dropped(monkeypatch):
    engine = tiny_lm(4, initializer_range=0.2)
    asked = requests([None])
    repeated = []
    monkeypatch.setattr(decode_graphs, "MIN_COVERED_USES", 1)
    for most in (64, 1):
        monkeypatch.setattr(decode_graphs, "MAX_STEPS", most)
        sampler, graphs = recording(engine)
        for _ in range(2):
            assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
        repeated.append(graphs.num_repeated)
    assert repeated[1] < repeated[0]


def test_room_for_adapters_is_as_large_as_few_sizes_and_kept_for_records_only(monkeypatch):
    """It takes gigabytes on a large base: each sum of ranks has no room of its own."""
    monkeypatch.setattr(decode_graphs, "MAX_STEPS", 1)
    engine = tiny_lm(4, initializer_range=0.2)
    sampler, graphs = recording(engine)
    for ranks, columns in (((8,), 64), ((60, 60), 128), ((128, 128, 8), 384), ((128, 128, 70), 384)):
        asked = requests(snapshots(engine, *ranks), count=len(ranks), tokens=8)
        for _ in range(2):
            sampler.sample_all(asked)
        assert {shape.columns for shape in graphs._steps} == {columns for columns, _ in graphs._columns} == {columns}
    assert not graphs.refusal


def test_out_of_memory_while_recording_falls_back_to_plain_steps():
    engine = tiny_lm(4, initializer_range=0.2)

    def full(compute):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sampler, graphs = recording(engine, full)
    asked = requests([None])
    assert_equal_answers(sampler.sample_all(asked), Sampler(engine).sample_all(asked))
    assert not graphs.refusal


def reference_attention(q_RHD, kv_2NhPD, table, first_R, scale, terms):
    """Softmax attention of each row and head alone, in float64."""
    out = torch.empty(q_RHD.shape, dtype=torch.float64)
    for r, (prompt, answer) in enumerate(zip(table.prompt_R.tolist(), table.answer_R.tolist(), strict=True)):
        pages_2hTD = kv_2NhPD.double().cpu()[:, table.page_RW[r].cpu()].transpose(1, 2).flatten(2, 3)
        start = -(-prompt // 32) * 32  # of the answer
        k_hTD, v_hTD = torch.cat([pages_2hTD[:, :, :prompt], pages_2hTD[:, :, start : start + answer]], 2)
        for head in range(q_RHD.shape[1]):
            group = head // (q_RHD.shape[1] // len(k_hTD))
            score_T = k_hTD[group] @ q_RHD[r, head].double().cpu() * scale
            if terms.softcap is not None:
                score_T = terms.softcap * torch.tanh(score_T / terms.softcap)
            score_T[: int(first_R[r])] = -torch.inf
            sink = score_T[:0] if terms.sinks_H is None else terms.sinks_H[head : head + 1].double().cpu()
            out[r, head] = torch.softmax(torch.cat([score_T, sink]), 0)[: len(score_T)] @ v_hTD[group]
    return out


@pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64), (16, 8, 128), (2, 2, 80), (40, 1, 32)])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cuda bf16", marks=pytest.mark.gpu)]
)
def test_attention_by_page_tables(shape, device):
    """Heads of any number, groups and width; a window, a cap and sinks; lengths around the ends of pages."""
    heads, kv_heads, width = shape
    kind, _, half = device.partition(" ")
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if half else torch.float32
    kv = torch.randn(2, 30, kv_heads, 32, width, generator=generator).to(kind, dtype)
    q = torch.randn(5, heads, width, generator=generator).to(kind, dtype)
    sinks = torch.randn(heads, generator=generator).to(kind)
    pages = torch.stack([torch.randperm(30, generator=generator)[:8] for _ in range(5)])
    prompt, answer = torch.tensor([1, 32, 33, 90, 100]), torch.tensor([1, 2, 32, 33, 64])
    table = PageTable(*(x.to(kind) for x in (pages, prompt, answer)))
    begin = torch.zeros(5, dtype=torch.long, device=kind)
    window = (table.length_R - 40).clip(0)
    for first, terms in (
        (begin, AttentionTerms()),
        (window, AttentionTerms()),
        (begin, AttentionTerms(softcap=2.0)),
        (window, AttentionTerms(None, 3.0, sinks)),
    ):
        found = paged_attention(q, kv, table, first, width**-0.5, terms)
        expected = reference_attention(q, kv, table, first, width**-0.5, terms)
        torch.testing.assert_close(found.double().cpu(), expected, atol=2e-2 if half else 1e-5, rtol=0)


def on_a_gpu(config, dtype="float32"):
    """The engine of a random model on the GPU."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to("cuda", getattr(torch, dtype)).eval().requires_grad_(False)
    family = config.model_type
    return choose_engine(model, family, lambda of, plain: Engine(of, tiny_tokenizer(), family, plain=plain))


def gaps_to_training(engine, sampler, tokens):
    """Differences between the log-probabilities of sampled tokens and those of a training pass, for two adapters."""
    adapters = [Adapter(engine.linear_layers, LoraConfig(rank=rank), seed=rank) for rank in (4, 8)]
    with torch.no_grad():
        for adapter in adapters:
            for _, b in adapter.weights.values():
                b.normal_(0, 0.3)
    asked = requests([adapter.snapshot() for adapter in adapters], count=8, tokens=tokens)
    answers = sampler.sample_all(asked)
    gaps = []
    for number, adapter in enumerate(adapters):
        samples = [
            Sample(request.prompt_ids, a.token_ids, a.logprobs, np.ones(len(a.token_ids), np.float32))
            for request, group in zip(asked[number::2], answers[number::2], strict=True)
            for a in group
        ]
        trained = np.concatenate(AdapterWeights(engine, adapter).logprobs(samples))
        gaps.append(np.abs(trained - np.concatenate([sample.logprobs for sample in samples])))
    return np.concatenate(gaps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_graphs_on_a_gpu(family, dtype):
    """Log-probabilities of the sampled tokens of two batches with several adapters equal those of a training pass."""
    engine = on_a_gpu(FAMILIES[family], dtype)
    sampler = Sampler(engine)
    for tokens in (60, 61):
        gaps = gaps_to_training(engine, sampler, tokens)
        assert gaps.max() < 1e-3 if dtype == "float32" else gaps.mean() < 0.1
    graphs = sampler.batch.graphs
    assert not graphs.refusal
    assert graphs.num_repeated > 60


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
OTHERS = {
    "gpt_oss": FAMILIES["gpt_oss"],
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, **EXPERTS),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),  # by the model's own forward
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*not recorded as CUDA graphs")
@pytest.mark.parametrize("family", OTHERS)
def test_mixtures_of_experts_and_convolutions_on_a_gpu(family):
    """Log-probabilities of sampled tokens equal those of a training pass, whether steps are recorded or not."""
    engine = on_a_gpu(OTHERS[family])
    sampler = Sampler(engine)
    assert gaps_to_training(engine, sampler, 60).max() < 1e-3
    graphs = getattr(sampler.batch, "graphs", None)
    print(f"{family}: {graphs.num_repeated} steps repeated {graphs.refusal}" if graphs else f"{family}: plain path")


@pytest.mark.gpu
def test_model_that_synchronises_with_the_gpu_is_not_recorded():
    """torch's random numbers and allocator still work afterwards."""
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"], attn_implementation="eager")
    model = model.to("cuda").eval().requires_grad_(False)
    engine = choose_engine(model, "llama", lambda of, plain: Engine(of, tiny_tokenizer(), "llama", plain=plain))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    asked = requests([None])
    with pytest.warns(UserWarning, match="not recorded as CUDA graphs"):
        answers = Sampler(engine).sample_all(asked)
    assert [len(group) for group in answers] == [request.n for request in asked]
    assert torch.randn(1000, device="cuda").std() > 0.8
    torch.cuda.empty_cache()
