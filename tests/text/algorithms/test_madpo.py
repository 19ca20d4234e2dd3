"""MADPO: the margin of joint answers by hand, and losses equal to CoMLRL's for the same joint answers.

comlrl_madpo_1.4.3.json has its numbers; comlrl_madpo.py writes them, in a virtual environment with the package.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.core.config import dump, validate
from palestra.core.config.presets import expand_preset
from palestra.core.types import Answer, Episode, Node
from palestra.engine.training.micro_batch import build_loss_inputs, micro_batches
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.text.algorithms.dpo import DPO
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.build.build import build
from palestra.text.config import TextConfig

COMLRL = json.loads(Path(__file__).with_name("comlrl_madpo_1.4.3.json").read_text())
SEATS = ("a", "b")


def episode_of(joints):
    """One joint step: a node for each (reward, log-probability of each seat's answer), answers of one token each."""
    episode = Episode("hand", 0, {seat: seat for seat in SEATS})
    for number, (reward, logps) in enumerate(joints):
        answers = {
            seat: Answer("", f"{seat}@0", np.ones(1, np.int32), np.array([number]), np.array([logp], np.float32))
            for seat, logp in zip(SEATS, logps, strict=True)
        }
        episode.nodes.append(Node(number, None, 0, {}, answers, {}, reward, done=True))
    return episode


def loss_and_gradient(config, episode, seat):
    """The loss of a seat, and its gradient by log-probability of each sample, chosen and rejected in turn."""
    samples, _ = config.build_samples([episode], seat)
    (batch,) = micro_batches(samples, 1000)
    logp_M = torch.tensor(np.concatenate([sample.logprobs for sample in samples]), requires_grad=True)
    loss, metrics = config.loss(build_loss_inputs(batch, logp_M, torch.zeros_like(logp_M)), **config.loss_options)
    loss.backward()
    return float(loss.detach()), logp_M.grad.numpy(), metrics


def madpo(**settings):
    return DPO.model_validate(expand_preset({"type": "madpo", **settings}, TEXT_PRESETS))


def test_the_margin_is_of_the_joint_answer_by_hand():
    """Seat a: -1 against -3, seat b: -2 against -1; the joint margin is 2 - 1 = 1, and beta 0.1."""
    episode = episode_of([(1.0, (-1.0, -2.0)), (0.0, (-3.0, -1.0))])
    for seat in SEATS:
        loss, gradient, metrics = loss_and_gradient(madpo(), episode, seat)
        assert loss == pytest.approx(np.log1p(np.exp(-0.1)))
        assert gradient == pytest.approx(np.array([-0.1, 0.1]) / (1 + np.exp(0.1)))
        assert float(metrics["margin"]) == pytest.approx(0.1)
    loss, _, _ = loss_and_gradient(DPO(reference_free=True), episode, "b")
    assert loss == pytest.approx(np.log1p(np.exp(0.1)))  # b's own margin is -1


def test_losses_are_those_of_comlrl():
    config = madpo(pairs="all", beta=COMLRL["beta"])
    episode = episode_of([(joint["reward"], joint["logprobs"]) for joint in COMLRL["joints"]])
    assert len(config.build_samples([episode], "a")[0]) == 2 * 6
    for seat, theirs in zip(SEATS, COMLRL["losses"], strict=True):
        assert loss_and_gradient(config, episode, seat)[0] == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("settings", [{"branch_at": "root"}, {"reference_free": False}, {"loss_type": "ipo"}])
def test_impossible_joint_margin_is_refused(settings):
    with pytest.raises(ValueError, match="set branch_at: turn, reference_free: true and loss_type"):
        DPO(**{"margin": "joint", "reference_free": True} | settings)


@pytest.mark.slow
def test_a_team_learns_from_joint_pairs(base, tmp_path):
    """Both seats answer the same noise at the same time, and earn 1 together if their answers begin with the same
    token."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    tree = {
        "steps": 12,
        "env": {"type": "helpers.toys:Peek"},
        "policies": {"solver": speech, "peeker": speech},
        "algorithm": {"type": "madpo", "group_size": 8},
        "evals": {"test": {"episodes": 100, "env": {"split": "test"}}},
    }
    config = validate(TextConfig, tree)
    with Run.create(tmp_path, dump(config), config.name) as run:
        assert run_training(build(config), run)
    before, after = [line["success"] for line in read_lines(run.path / "evals.jsonl")]
    assert before < 0.4 and after > 0.7
