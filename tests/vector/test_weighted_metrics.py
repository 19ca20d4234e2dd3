"""Metrics of an update of several minibatches are means over its actions."""

import pytest
import torch

import palestra as pl
from palestra.vector.learners.nets import WEIGHT_KEY, mean_metrics


def test_mean_of_minibatches_by_hand():
    """Minibatches of 3 and 1 actions; each gradient step counts the same."""
    lines = [{"entropy": torch.tensor(1.0), "grad_norm": 1.0, WEIGHT_KEY: torch.tensor(3.0)}]
    lines += [{"entropy": torch.tensor(3.0), "grad_norm": 3.0, WEIGHT_KEY: torch.tensor(1.0)}]
    assert mean_metrics(lines) == {"entropy": 1.5, "grad_norm": 2.0}
    assert mean_metrics([{"entropy": 1.0}, {"entropy": 3.0}]) == {"entropy": 2.0}
    assert mean_metrics([]) == {}


@pytest.mark.parametrize("algorithm", [pl.vector.PPO, pl.PQN])
def test_metrics_do_not_depend_on_the_minibatches(algorithm, tmp_path):
    """Networks that hardly learn, in a game whose number of acting seats is no multiple of the minibatches."""

    def metrics(minibatches):
        run = pl.train(
            env={"type": "kuhn_poker", "num_envs": 3},
            policies={"default": pl.Net(hidden=[8], lr=1e-12)},
            algorithm=algorithm(rollout_length=7, minibatches=minibatches, epochs=1),
            steps=21,
            root=tmp_path,
        )
        line = run.metrics[run.metrics["policy"] == "default"].iloc[-1].dropna().to_dict()
        return {key: line[key] for key in ("entropy", "policy_loss", "value_loss", "q_loss", "q") if key in line}

    whole, parts = metrics(1), metrics(4)
    assert len(whole) >= 2 and parts == pytest.approx(whole, rel=1e-4, abs=1e-6)
