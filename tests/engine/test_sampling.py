"""Top-k and top-p in a large vocabulary search the most likely tokens first, and keep the tokens that a full sort
keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from palestra.engine import sampling
from palestra.engine.sampling import SamplingConfig, sample_tokens


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


def test_rows_without_truncation_are_not_sorted(monkeypatch):
    logits_RV = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    u_R = np.array([0.999, 0.999])
    whole = sample_tokens(logits_RV, [SamplingConfig()] * 2, u_R)[0]
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("sorted"))
    mixed = sample_tokens(logits_RV, [SamplingConfig(), SamplingConfig(top_k=1)], u_R)[0]
    assert mixed.tolist() == [whole[0], int(logits_RV[1].argmax())]
