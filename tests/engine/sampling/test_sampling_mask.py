"""Log-probabilities of the distribution after top-k and top-p, in the sampler and in training, and their gradients."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS, LOGPROB_ATOL

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample, SamplingMask
from palestra.engine.bases.model import Engine
from palestra.engine.forward import logits as chunks
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig, sample_tokens
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.head import ScoredTokens, score_logits
from palestra.engine.training.kept_tokens import KeptTokens
from palestra.testing import tiny_lm

CHANCES = [0.5, 0.3, 0.15, 0.05]
CUT = SamplingConfig(max_tokens=8, temperature=0.8, top_k=20, top_p=0.7, stop_at_eos=False, keep_sampling_mask=True)
VOCAB = 272
AT_ONCE, CHUNKED, ROW_BY_ROW = 2**25, VOCAB * 7, 1


def kept(*options, u=0.0):
    settings = [SamplingConfig(**own) for own in options]
    return sample_tokens(torch.tensor([CHANCES] * len(settings)).log(), settings, np.full(len(settings), u))


# ---- the sampler


def test_truncated_log_probabilities_by_hand():
    """top_k = 2 leaves 0.5 and 0.3, of which 0.3 is 3/8; top_p = 0.81 leaves 0.95; at temperature 1/2 probabilities are
    squared: 0.25 and 0.09 of 0.34. A row of the same batch without truncation keeps 0.3."""
    keep = {"keep_sampling_mask": True}
    rows = [{"top_k": 2, **keep}, {"top_p": 0.81, **keep}, {"top_k": 2, "temperature": 0.5, **keep}, {"top_k": 2}]
    found = kept(*rows, u=0.74)  # the second token: below 0.5/0.8, 0.5/0.95 and 0.25/0.34 is the first
    assert found.tokens_R.tolist() == [1, 1, 1, 1]
    assert np.exp(found.logps_R) == pytest.approx([3 / 8, 0.3 / 0.95, 0.09 / 0.34, 0.3])
    assert [ids.tolist() for ids in found.kept_ids] == [[0, 1], [0, 1, 2], [0, 1], []]


def test_no_mask_is_recorded_without_truncation():
    """Greedy answers, and sampling from all tokens: the usual log-probabilities and no mask."""
    keep = {"keep_sampling_mask": True}
    found = kept({**keep}, {"temperature": 0, "top_k": 2, **keep})
    assert np.exp(found.logps_R) == pytest.approx([0.5, 0.5]) and not any(map(len, found.kept_ids))
    (answer,) = Sampler(tiny_lm(0)).sample_all([request(SamplingConfig(max_tokens=3, **keep), n=1)])[0]
    assert answer.sampling_mask is None


def request(sampling=CUT, n=3, seed=1, prompt=(5, 6, 7, 8)):
    return Request(np.array(prompt, np.int32), n, sampling, seed=seed)


def test_answers_have_the_mask_of_each_token():
    """The same tokens as without the setting; each is in its mask, which has at most top_k tokens, whose probabilities
    sum to one."""
    sampler = Sampler(tiny_lm(0, initializer_range=0.3))
    plain = CUT.model_copy(update={"keep_sampling_mask": False})
    with_mask, without = sampler.sample_all([request(), request(plain)])
    for own, other in zip(with_mask, without, strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist() and other.sampling_mask is None
        rows = own.sampling_mask.rows()
        assert len(rows) == len(own.token_ids) == 8
        assert all(t in row and len(row) <= 20 for t, row in zip(own.token_ids.tolist(), rows, strict=True))
        assert (own.logprobs > other.logprobs).all()  # a share of the mass is lower than of the whole


# ---- training


def test_gradient_of_the_truncated_policy_is_unbiased():
    """In expectation over the sampled tokens, the gradient of their truncated log-probability is 0, so a baseline adds
    nothing. That of the whole distribution is the difference of the two probabilities."""
    for masked in (True, False):
        logits_V = torch.tensor(CHANCES).log().requires_grad_()
        sets = KeptTokens(torch.tensor([0, 1] * 2), torch.tensor([0, 2]), torch.tensor([2, 2]))
        wanted = ScoredTokens(torch.tensor([0, 0]), torch.tensor([0, 1]), None, sets if masked else None)
        logps, _ = score_logits(logits_V[None], wanted, entropy_grad=False)
        (torch.tensor([5 / 8, 3 / 8]) * logps).sum().backward()
        expected = [0.0] * 4 if masked else [5 / 8 - 0.5, 3 / 8 - 0.3, -0.15, -0.05]
        assert logits_V.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_entropy_is_of_the_truncated_distribution():
    # and a row that keeps all tokens
    sets = KeptTokens(torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([2, 0]))
    wanted = ScoredTokens(torch.tensor([0, 0]), torch.tensor([1, 1]), None, sets)
    logps, entropy = score_logits(torch.tensor([CHANCES]).log(), wanted, entropy_grad=False)
    assert logps.exp().tolist() == pytest.approx([3 / 8, 0.3])
    whole = -sum(p * math.log(p) for p in CHANCES)
    assert entropy.tolist() == pytest.approx([-(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(3 / 8)), whole])


def trainer_and_samples(head):
    """A trainer in float64 with weights other than the initial ones, and its samples in float32: siblings of two
    prompts, those of the second without masks."""
    engine = tiny_lm(1, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    targets = ["q_proj", "lm_head"] if head == "adapted" else "all-linear"
    adapter = None
    if head != "trained":
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=4, target_modules=targets), seed=0)
        for _, b in adapter.weights.values():
            b.detach().normal_(0, 0.05, generator=generator)
    samples = sampled(engine, adapter.snapshot("now", torch.float32) if adapter else None)
    engine.model.double()
    for name, (a, b) in adapter.weights.items() if adapter else ():
        adapter.weights[name] = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    return AdapterWeights(engine, adapter), samples


def sampled(engine, adapter):
    prompts = [np.array(ids, np.int32) for ids in ((5, 6, 7, 8), (9, 10, 11))]
    settings = [CUT, CUT.model_copy(update={"keep_sampling_mask": False})]
    requests = [Request(ids, 3, own, adapter, seed=1) for ids, own in zip(prompts, settings, strict=True)]
    groups = Sampler(engine).sample_all(requests)
    rng = np.random.default_rng(0)
    return [
        Sample(ids, own.token_ids, own.logprobs, rng.normal(size=8), 0.8, sampling_mask=own.sampling_mask)
        for ids, group in zip(prompts, groups, strict=True)
        for own in group
    ]


def naive_scores(model, sample):
    """Log-probabilities and entropies [T] by transformers' own pass, position by position over the kept tokens."""
    ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
    logits_TV = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / sample.temperature
    whole = [list(range(logits_TV.shape[1]))] * len(logits_TV)
    sets = sample.sampling_mask.rows() if sample.sampling_mask else whole
    rows = [row[own].log_softmax(-1) for row, own in zip(logits_TV, sets, strict=True)]
    chosen = [row[own.index(token)] for row, own, token in zip(rows, sets, sample.token_ids.tolist(), strict=True)]
    return torch.stack(chosen), torch.stack([-(row.exp() * row).sum() for row in rows])


@pytest.mark.parametrize("limit", [AT_ONCE, CHUNKED, ROW_BY_ROW])
def test_trainer_equals_a_naive_implementation(monkeypatch, limit):
    """A full model's loss with an entropy bonus, its gradient, and log-probabilities, beside transformers' logits."""
    trainer, samples = trainer_and_samples("trained")
    own = trainer.engine.model
    model = type(own)._from_config(copy.deepcopy(own.config), attn_implementation="eager").double().eval()
    model.load_state_dict(own.state_dict())
    monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, logps in zip(samples, trainer.logprobs(samples), strict=True):
        chosen, entropy = naive_scores(model, sample)
        np.testing.assert_allclose(logps, chosen.detach(), atol=1e-6)
        loss = loss - (chosen * torch.tensor(sample.advantages)).sum() / 48 - 0.3 * entropy.sum() / 48
    loss.backward()
    current = [with_current(sample) for sample in samples]
    metrics = trainer.forward_backward(current, clipped_policy_loss, entropy=0.3)
    for ours, theirs in zip(trainer.parameters, model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **GRADIENTS)
    assert metrics["kl"] == 0 and metrics["clip_fraction"] == 0  # the ratio to the trainer's own is exactly 1
    assert metrics["sampler_kl"] == pytest.approx(0, abs=1e-5)  # and to the sampler's up to float32


def with_current(sample):
    sample.old_logprobs = "current"
    return sample


@pytest.mark.parametrize("head", ["frozen", "adapted"])
def test_gradients_of_adapters_do_not_depend_on_the_chunks(monkeypatch, head):
    found = []
    for limit in (AT_ONCE, CHUNKED, ROW_BY_ROW):
        trainer, samples = trainer_and_samples(head)
        monkeypatch.setattr(chunks, "MAX_LOGITS", limit)
        trainer.forward_backward(samples, clipped_policy_loss, entropy=0.3)
        found.append([p.grad for p in trainer.parameters])
        monkeypatch.undo()
    assert any(gradient.abs().max() > 1e-4 for gradient in found[0])
    for other in found[1:]:
        for ours, whole in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, whole, atol=1e-10, rtol=1e-8)


def test_sampler_and_trainer_agree_on_the_shipped_base():
    engine = Engine.load("tiny", device="cpu")
    prompt = np.array(engine.tokenizer.encode("up down left"), np.int32)
    answers = Sampler(engine).sample_all([Request(prompt, 4, CUT, seed=3)])[0]
    assert any(len(row) < 20 for answer in answers for row in answer.sampling_mask.rows())  # top_p removed tokens too
    plain = [Sample(prompt, a.token_ids, a.logprobs, np.zeros(8, np.float32), 0.8) for a in answers]
    masked = [
        Sample(prompt, a.token_ids, a.logprobs, np.zeros(8, np.float32), 0.8, sampling_mask=a.sampling_mask)
        for a in answers
    ]
    trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0))
    for answer, own, whole in zip(answers, trainer.logprobs(masked), trainer.logprobs(plain), strict=True):
        np.testing.assert_allclose(own, answer.logprobs, atol=LOGPROB_ATOL)
        assert (whole < own - 0.1).any()


def test_mask_of_lists_and_back():
    rows = [[3, 4], [], [7]]
    mask = SamplingMask.join([np.array(row, np.int32) for row in rows])
    assert mask.ids.tolist() == [3, 4, 7] and mask.counts.tolist() == [2, 0, 1] and mask.rows() == rows
