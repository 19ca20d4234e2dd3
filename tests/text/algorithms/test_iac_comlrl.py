"""Values, targets, losses and gradients of IAC and MAAC are those of CoMLRL's trainers.

comlrl_iac_1.4.3.jsonl has CoMLRL's values; comlrl_actor_critic.py writes them, in a virtual environment with the
package.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL

from palestra.core.config.presets import expand_preset
from palestra.core.types import Answer, Episode, Node
from palestra.text.algorithms.ppo import PPO
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.build.engines import Engines
from palestra.text.learners.lm import LanguageLearner
from palestra.text.learners.lm_config import FullPolicyConfig, LoraPolicyConfig
from palestra.text.learners.separate_critic import SeparateCriticWeights

CASES = [json.loads(line) for line in Path(__file__).with_name("comlrl_iac_1.4.3.jsonl").read_text().splitlines()]
SEATS = ("a", "b")


def learner_of(case: dict[str, Any], seat: str) -> LanguageLearner:
    """A learner at CoMLRL's weights: the tiny base, with the same value head. A separate critic is a new adapter, which
    equals the base."""
    shared = case["critic"] == "shared"
    config = FullPolicyConfig(base="tiny") if shared else LoraPolicyConfig(base="tiny")
    learner = Engines("cpu", 8).build_learner(seat, config, 0, "shared" if shared else "separate")
    head = critic_trainer(learner).critic
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, head.in_features))
        head.bias.fill_(0.1)
    return learner


def critic_trainer(learner: LanguageLearner) -> Any:
    return learner.weights.critic_weights if isinstance(learner.weights, SeparateCriticWeights) else learner.weights


def episode_of(case: dict[str, Any]) -> Episode:
    """The joint answers: siblings of one turn, or one trajectory of two."""
    episode, turns = Episode("toy", 0, {seat: seat for seat in SEATS}), case["turns"]
    for number, reward in enumerate(case["rewards"]):
        answers = {}
        for seat, own in zip(SEATS, case["agents"], strict=True):
            one = own["samples"][number]
            ids, zeros = np.array(one["token_ids"], np.int32), np.zeros(len(one["token_ids"]), np.float32)
            answers[seat] = Answer("", f"{seat}@0", np.array(one["prompt_ids"], np.int32), ids, zeros)
        parent = number - 1 if turns > 1 and number else None
        depth = number if turns > 1 else 0
        episode.nodes.append(Node(number, parent, depth, {}, answers, {}, reward, done=depth + 1 == turns))
    return episode


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, list(c.values())[:6])))
@pytest.mark.few(4)
def test_values_and_losses_are_those_of_comlrl(case: dict[str, Any]) -> None:
    """CoMLRL's joint prompts have labels between the seats' prompts, so they are passed to palestra's critic as they
    are.

    CoMLRL's action critic has the residual as its advantage, target minus value, whose mean is 0 for an exact critic.
    palestra takes the value; the expected loss is computed from CoMLRL's values and log-probabilities.
    """
    is_q = case["critic_type"] == "q"
    options = {} if case["critic"] == "central" else {"critic": case["critic"]}
    tree = dict(
        type=case["name"],
        **options,
        group_size=case["generations"],
        critic_type=case["critic_type"],
        gamma=0.9,
        normalize_advantages=case["normalised"],
        value_coef=2 * case["value_loss_coef"],
        old_logprobs="sampler",
    )
    algorithm = PPO.model_validate(expand_preset(tree, TEXT_PRESETS))
    for seat, comlrl in zip(SEATS, case["agents"], strict=True):
        learner = learner_of(case, seat)
        samples, _ = algorithm.build_samples([episode_of(case)], seat)
        for sample, one in zip(samples, comlrl["samples"], strict=True):
            if one["critic_ids"]:
                sample.critic_ids = np.array(one["critic_ids"], np.int32)
        samples, _ = asyncio.run(algorithm.finalize_samples(samples, learner, {}))
        logps = asyncio.run(learner.logprobs(samples))
        for sample, logp, one in zip(samples, logps, comlrl["samples"], strict=True):
            assert logp.sum() == pytest.approx(one["logprob"], abs=LOGPROB_ATOL)
            assert sample.values[0] == pytest.approx(one["value"], abs=LOGPROB_ATOL)
            assert sample.returns[0] == pytest.approx(one["target"], abs=LOGPROB_ATOL)
            assert sample.advantages[0] == pytest.approx(one["value" if is_q else "advantage"], abs=1e-3)
        metrics = asyncio.run(learner.forward_backward(samples, algorithm.loss, **algorithm.loss_options))
        value_loss = case["value_loss_coef"] * comlrl["value_error"]
        of_values = -np.mean([one["logprob"] * one["value"] for one in comlrl["samples"]])
        expected = (of_values if is_q else comlrl["policy_loss"]) + (value_loss if case["critic"] == "shared" else 0.0)
        assert metrics["loss"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert float(critic_trainer(learner).critic.bias.grad) == pytest.approx(comlrl["head_gradient"], abs=1e-3)
        if case["critic"] == "shared":
            gradients = [p.grad for p in learner.weights.policy_parameters if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            assert norm == pytest.approx(comlrl["policy_gradient_norm"], rel=2e-3)
        else:
            assert metrics["value_loss"] == pytest.approx(comlrl["value_error"] / 2, abs=1e-3)
