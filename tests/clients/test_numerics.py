"""Trainer, sampler and scoring return the same log-probabilities for one base and one adapter."""

import pytest
from helpers.official import Official

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.mark.parametrize("clients", ["a", "b", "c"])
def test_trainer_and_sampler_agree(official: Official, clients: str) -> None:
    report = official.report(clients, "numerics")
    assert report.pop("first") is None
    assert sorted(report) == ["sampled at 0.6", "sampled at 1.0", "scored"]
    assert max(report.values()) < 1e-4
