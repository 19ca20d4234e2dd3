"""MinT's recipes with both published toolkits: 0.1.0 on tinker 0.15 and 0.2.0 on tinker 0.22."""

import pytest
from helpers.official import Official

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
KEYS = ("sk-of-mints", "tml-of-tinkers")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("clients", ["a", "b"])
def test_two_agents_learn_with_frozen_samplers(official: Official, clients: str, key: str) -> None:
    report = official.report(clients, "two_agents", key=key)
    for agent in (0, 1):
        losses = [step[agent] for step in report["losses"]]
        assert losses[-1] < 0.1 * losses[0]
    assert report["last"] == [3, 3]  # of three questions
    assert report["ranks"] == [8, 16]
    assert report["drift"] < 1e-5
    assert len(set(report["paths"])) == 2


@pytest.mark.parametrize("clients", ["a", "b"])
def test_an_adapter_is_saved_sampled_and_trained_on(official: Official, clients: str) -> None:
    report = official.report(clients, "adapter", key=KEYS[0])
    assert report["losses"][-1] < 0.02 * report["losses"][0]
    assert report["said"] == [report["secret"]] * 2
    assert report["stopped"] == ["stop", "stop"]
    assert report["resumed"][0] == pytest.approx(report["resumed"][1], abs=1e-6)
    assert "/weights/" in report["state"] and "/sampler_weights/" in report["weights"]


@pytest.mark.parametrize("clients", ["a", "b"])
def test_custom_preference_loss_of_the_client_learns(official: Official, clients: str) -> None:
    report = official.report(clients, "dpo", key=KEYS[0])
    assert report["dpo"][-1] < 0.1 * report["dpo"][0]
    assert report["margin"][-1] > report["margin"][0] + 4
