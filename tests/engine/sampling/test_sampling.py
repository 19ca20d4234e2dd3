"""Top-k and top-p in a large vocabulary search the most likely tokens first, and keep the tokens that a full sort
keeps."""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from palestra.engine.sampling import token_sampling as sampling
from palestra.engine.sampling.token_sampling import SamplingConfig, sample_tokens


@pytest.mark.parametrize(("spread", "most"), [(0.1, 1400), (6.0, 150)], ids=["many are kept", "few are kept"])
def test_tokens_equal_those_of_a_full_sort(monkeypatch, spread, most):
    generator = torch.Generator().manual_seed(0)
    logits_RV = spread * torch.randn(24, 1500, generator=generator)
    settings = [
        SamplingConfig(top_k=(0, 7, most)[i % 3], top_p=(1.0, 0.9, 0.3)[i % 2 + (i % 5 == 0)], temperature=0.5 + i / 48)
        for i in range(24)
    ]
    u_R = np.random.default_rng(0).random(24)
    exact, exact_logps, _ = sample_tokens(logits_RV, settings, u_R)
    sorted_widths = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda t, *a, **k: sorted_widths.append(t.shape[1]) or sort(t, *a, **k))
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 200)
    tokens, logps, _ = sample_tokens(logits_RV, settings, u_R)
    assert tokens.tolist() == exact.tolist() and logps.tolist() == exact_logps.tolist()
    assert bool(sorted_widths) == (most == 1400)


@pytest.mark.parametrize("candidates", [200, 1024], ids=["among the most likely", "among all"])
def test_kept_tokens_and_log_probabilities_equal_those_of_transformers(monkeypatch, candidates):
    """transformers generates by temperature, then top-k, then top-p of what top-k leaves."""
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", candidates)
    rng = np.random.default_rng(0)
    logits_RV = torch.tensor(rng.normal(0, rng.uniform(0.5, 6, (60, 1)), (60, 1500)), dtype=torch.float32)
    ks, ps = rng.choice([0, 2, 40, 250, 9000], 60), rng.choice([0.2, 0.6, 0.95, 1], 60)
    for i, logits_1V in enumerate(logits_RV.split(1)):  # alone: a row that needs a full sort sorts its batch
        own = SamplingConfig(temperature=rng.uniform(0.3, 1.5), top_k=ks[i], top_p=ps[i], keep_sampling_mask=True)
        tokens_R, logps_R, kept_ids = sample_tokens(logits_1V, [own], rng.random(1))
        scores_V = TemperatureLogitsWarper(own.temperature)(None, logits_1V)
        scores_V = TopKLogitsWarper(own.top_k)(None, scores_V) if own.top_k else scores_V
        scores_V = TopPLogitsWarper(own.top_p)(None, scores_V) if own.top_p < 1 else scores_V
        if own.is_truncated:  # else no mask is recorded
            assert kept_ids[0].tolist() == (scores_V[0] > -torch.inf).nonzero()[:, 0].tolist(), own
        assert logps_R[0] == pytest.approx(float(torch.log_softmax(scores_V, -1)[0, tokens_R[0]]), abs=1e-5)


def test_top_p_is_of_what_top_k_leaves():
    """Of 0.4 and 0.3 the first has 0.4 / 0.7 > 0.5."""
    logits_RV = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]).log()
    kept = sample_tokens(logits_RV, [SamplingConfig(top_k=2, top_p=0.5, keep_sampling_mask=True)], np.zeros(1))
    assert kept.kept_ids[0].tolist() == [0] and kept.logps_R.tolist() == pytest.approx([0.0])


def test_rows_without_truncation_are_not_sorted(monkeypatch):
    logits_RV = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    u_R = np.array([0.999, 0.999])
    whole = sample_tokens(logits_RV, [SamplingConfig()] * 2, u_R)[0]
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("sorted"))
    mixed = sample_tokens(logits_RV, [SamplingConfig(), SamplingConfig(top_k=1)], u_R)[0]
    assert mixed.tolist() == [whole[0], int(logits_RV[1].argmax())]
