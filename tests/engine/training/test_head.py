"""The head in chunks of rows: log-probabilities, entropies and gradients of whole logits, with the memory of one
chunk."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS, LOGPROB_ATOL
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.core.losses import actor_critic_loss, clipped_policy_loss
from palestra.core.types import Datum, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.forward import logits as chunks
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.token_sampling import SamplingConfig, counter_uniform, sample_tokens
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.distill import DistillExample, ReverseKL
from palestra.engine.training.multi_adapter import Job, JobResult, train_jobs
from palestra.service.worker.losses import build_loss
from palestra.testing import tiny_lm, tiny_tokenizer

VOCAB = 272
AT_ONCE, CHUNKED, ROW_BY_ROW = 2**25, VOCAB * 7, 1
HEADS = ["frozen", "adapted", "trained", "trained and tied", "scaled", "logit scale"]


def engine_of(head: str) -> Engine:
    """A small engine in float64 with no weight at its initial value; some models scale the head's output."""
    if head in ("scaled", "logit scale"):
        kind, changes = ("granite", {"logits_scaling": 3.0}) if head == "scaled" else ("cohere", {"logit_scale": 0.3})
        shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind, **shape, num_key_value_heads=2, intermediate_size=48, pad_token_id=0, **changes
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="palestra").eval().requires_grad_(False)
        engine = Engine(model, tiny_tokenizer(), kind)
    else:
        engine = tiny_lm(1, tie_word_embeddings=head == "trained and tied")
    with torch.no_grad():
        for weight in engine.model.double().parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return engine


def trainer_of(head: str, *, critic: bool = False) -> AdapterWeights:
    engine = engine_of(head)
    if head.startswith("trained"):
        return AdapterWeights(engine, None, critic=critic)
    targets = ["q_proj", "lm_head"] if head == "adapted" else "all-linear"
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=4, target_modules=targets), seed=0)
    with torch.no_grad():
        for name, (a, b) in adapter.weights.items():
            b.normal_(0, 0.05, generator=torch.Generator().manual_seed(3))
            adapter.weights[name] = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    return AdapterWeights(engine, adapter, critic=critic)


def samples_of(*, temperature: float = 1.0) -> list[Sample]:
    """Siblings that differ from their first token, from a later one or never, and a second prompt at another
    temperature."""
    rng = np.random.default_rng(0)
    prompt, answers = rng.integers(5, 250, 9), rng.integers(5, 250, (4, 12))
    answers[1, :5] = answers[0, :5]
    answers[3] = answers[0]
    pairs = [*((prompt, answer, temperature) for answer in answers), (rng.integers(5, 250, 5), answers[2], 1.0)]
    return [
        Sample(
            p.astype(np.int32),
            a.astype(np.int32),
            rng.normal(-5, 0.3, len(a)).astype(np.float32),
            rng.normal(0, 1, len(a)).astype(np.float32),
            temperature=t,
            returns=rng.normal(0, 1, len(a)).astype(np.float32),
        )
        for p, a, t in pairs
    ]


def gradients(
    trainer: AdapterWeights, samples: list[Sample], **options: float
) -> tuple[dict[str, float], list[torch.Tensor]]:
    loss = actor_critic_loss if trainer.critic else clipped_policy_loss
    metrics = trainer.forward_backward(samples, loss, **options)
    return metrics, [torch.zeros(()) if p.grad is None else p.grad for p in trainer.parameters]


@pytest.mark.parametrize(
    ("limit", "entropy", "temperature", "critic"), [(CHUNKED, 0.3, 0.7, True), (ROW_BY_ROW, 0.0, 1.0, False)]
)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.few(4)
def test_chunked_gradients_equal_whole_logits(monkeypatch, head, limit, entropy, temperature, critic):
    samples = samples_of(temperature=temperature)
    metrics, expected = gradients(trainer_of(head, critic=critic), samples, entropy=entropy)
    monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
    found_metrics, found = gradients(trainer_of(head, critic=critic), samples, entropy=entropy)
    assert found_metrics == pytest.approx(metrics, rel=1e-10)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_chunked_logits_keep_the_precision_also_when_recomputed(monkeypatch, head, precision):
    samples = samples_of()
    found = []
    for limit in (AT_ONCE, CHUNKED):
        monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
        engine = tiny_lm(1, tie_word_embeddings=False, initializer_range=0.2)
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0) if head == "frozen" else None
        trainer = AdapterWeights(engine, adapter, precision=precision, checkpointing=True)
        found.append(gradients(trainer, samples)[1])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=float(theirs.abs().max()) * 2e-2 + 1e-9)


def test_chunked_logprobs_and_values_equal_whole_logits(monkeypatch):
    trainer, samples = trainer_of("frozen", critic=True), samples_of(temperature=0.7)
    torch.nn.init.normal_(trainer.critic.weight)
    expected = trainer.logprobs(samples), trainer.values(samples)
    monkeypatch.setattr(chunks, "MAX_LOGITS", CHUNKED)
    for whole, parts in zip(expected, (trainer.logprobs(samples), trainer.values(samples)), strict=True):
        for ours, theirs in zip(parts, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


def run_jobs(trainers: list[AdapterWeights], data: list[Datum], options: dict[str, float]) -> list[JobResult]:
    jobs = [Job(trainer, data, build_loss("ppo", options)) for trainer in trainers]
    passes = train_jobs(trainers[0].engine, jobs, 1000)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("entropy", [0.0, 0.2])
def test_chunked_multi_adapter_jobs_equal_unchunked(monkeypatch, entropy, targets):
    rng = np.random.default_rng(0)
    engine = tiny_lm(1, initializer_range=0.2)
    trainers = [AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(rank=r), seed=r)) for r in (2, 4)]
    data = []
    for length in (9, 14):
        shape = (length,) if targets == 1 else (length, targets)
        names = ("weights", "logprobs", "advantages")
        inputs = {name: rng.normal(-1, 0.1, shape).astype(np.float32) for name in names}
        data.append(Datum(rng.integers(5, 250, length), rng.integers(5, 250, shape), inputs))
    found = []
    for limit in (AT_ONCE, CHUNKED):
        monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
        results = run_jobs(trainers, data, {"entropy": entropy})
        found.append((results, [p.grad for trainer in trainers for p in trainer.parameters]))
        for parameter in (p for trainer in trainers for p in trainer.parameters):
            parameter.grad = None
    (whole, whole_grads), (parts, part_grads) = found
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=LOGPROB_ATOL)
    for a, b in zip(part_grads, whole_grads, strict=True):
        torch.testing.assert_close(a, b, **GRADIENTS)


def test_chunked_distillation_equals_unchunked(monkeypatch):
    engine, rng = tiny_lm(1, initializer_range=0.2), np.random.default_rng(0)
    examples = [
        DistillExample(
            rng.integers(5, 250, 4), rng.integers(5, 250, 7), rng.integers(5, 250, 20), np.ones(20, np.float32)
        )
        for _ in range(2)
    ]
    teacher = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=9)
    with torch.no_grad():
        for _, b in teacher.weights.values():
            b.normal_(0, 0.1)
    found = []
    for limit in (AT_ONCE, CHUNKED):
        monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
        trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(rank=4), seed=1))
        loss = ReverseKL(engine, teacher.snapshot(), examples, temperature=1.2)
        passes = train_jobs(engine, [Job(trainer, loss.data, loss)], 1000)
        assert not isinstance(list(passes), Exception)
        found.append((loss.example_losses, [p.grad for p in trainer.parameters]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, **GRADIENTS)


def test_chunked_sampling_equals_whole_logits(monkeypatch):
    rng = np.random.default_rng(0)
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    settings = [
        SamplingConfig(temperature=t, top_p=p, keep_sampling_mask=i % 3 == 0)
        for i, (t, p) in enumerate(zip(rng.uniform(0, 2, 20), [1.0, 0.8] * 10, strict=True))
    ]
    zeros = np.zeros(20, np.uint64)
    u = counter_uniform(zeros, np.arange(20, dtype=np.uint64), zeros)
    expected = sample_tokens(logits, settings, u)
    monkeypatch.setattr(chunks, "MAX_LOGITS", CHUNKED)
    found = sample_tokens(logits, settings, u)
    assert found.tokens_R.tolist() == expected.tokens_R.tolist() and found.logps_R.tolist() == expected.logps_R.tolist()
    kept = [[ids.tolist() for ids in each.kept_ids] for each in (found, expected)]
    assert kept[0] == kept[1] and any(kept[0]) and not all(kept[0])


MEASURE = """
import resource, sys
import numpy as np
from palestra.engine.forward import logits
from palestra.engine.lora.adapters import Adapter, LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.core.losses import clipped_policy_loss
from palestra.testing import tiny_lm
from palestra.core.types import Sample

tokens, full = int(sys.argv[1]), sys.argv[2] == "full"
logits.MAX_LOGITS = 2**22
engine = tiny_lm(0, vocab_size=32768, max_position_embeddings=4096, num_hidden_layers=1)
adapter = None if full else Adapter(engine.linear_layers, LoraConfig(), seed=0)
trainer = AdapterWeights(engine, adapter)
rng, zeros = np.random.default_rng(0), np.zeros(64, np.float32)

def samples(count):
    pairs = [(rng.integers(5, 250, 4), rng.integers(5, 250, 64)) for _ in range(count)]
    return [Sample(prompt, answer, zeros, zeros + 1) for prompt, answer in pairs]

trainer.forward_backward(samples(2), clipped_policy_loss, entropy=0.1)
trainer.forward_backward(samples(tokens // 64), clipped_policy_loss, entropy=0.1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["adapter", "full"])
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(what):
    """2,048 more tokens with 32,768 words would be 256 MiB of logits, several times over."""

    def peak(tokens: int) -> int:
        # freed blocks are returned to the system at once: the peak is that of live tensors
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-c", MEASURE, str(tokens), what]
        run = subprocess.run(call, capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert peak(2560) - peak(512) < 64 * 2**20
