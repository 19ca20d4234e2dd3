"""KL penalties in the loss and in the reward: by hand, against exact gradients, and for a policy equal to its
reference."""

import asyncio

import numpy as np
import pytest
import torch

from palestra.core.losses import LossInputs, clipped_policy_loss, kl_estimates
from palestra.core.types import Answer, Episode, Node, SamplingMask
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.ppo import PPO
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.training.update import update_learner


class Drifted:
    """A learner whose reference has these log-probabilities for the tokens of each sample, by the sample's tokens."""

    name = "p"
    is_at_reference = False

    def __init__(self, reference):
        self.reference = reference

    def batches(self, samples):
        return [list(samples)]

    async def logprobs(self, samples, *, reference=False):
        assert reference
        return [np.array(self.reference[tuple(s.token_ids.tolist())], np.float32) for s in samples]


def answer(ids, logprobs):
    return Answer("", "p@3", np.array([1]), np.array(ids), np.array(logprobs, np.float32))


def siblings(*rows):
    """An episode of one-turn siblings from (token ids, log-probabilities, reward)."""
    nodes = [
        Node(i, None, 0, {}, {"a": answer(ids, logp)}, {"a": r}, done=True) for i, (ids, logp, r) in enumerate(rows)
    ]
    return Episode("hand", 0, {"a": "p"}, nodes)


def credit_samples(algorithm, episodes, learner):
    scores = asyncio.run(algorithm.token_scores(episodes, learner))
    samples, metrics = algorithm.build_samples(episodes, "p", {}, **({"scores": scores} if scores else {}))
    samples, more = asyncio.run(algorithm.finalize_samples(samples, learner, {}))
    return [s.advantages.tolist() for s in samples], metrics | more, samples


# ---- estimators


def test_estimates_by_hand():
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert kl_estimates(logp, ref, "k1").tolist() == [1, -1]
    assert kl_estimates(logp, ref, "k2").tolist() == [0.5, 0.5]
    e = np.e
    assert kl_estimates(logp, ref, "k3").tolist() == pytest.approx([1 / e - 1 + 1, e - 1 - 1])


LOGITS, REFERENCE = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -2.0]), 0)


def expected_gradient(**options):
    """The gradient of the KL penalty in the loss with respect to the logits, in expectation over the policy: every
    token of the vocabulary once, weighted by its probability."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    zeros = torch.zeros(4)
    tokens = LossInputs(logp, zeros, logp.detach(), REFERENCE, zeros, logp.detach().exp())
    return torch.autograd.grad(clipped_policy_loss(tokens, kl=1.0, **options)[0], logits)[0]


def exact_gradient():
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    return torch.autograd.grad((logp.exp() * (logp - REFERENCE)).sum(), logits)[0]


@pytest.mark.parametrize(
    "options", [{"kl_estimator": "k2"}, *({"kl_estimator": k, "kl_importance_weight": True} for k in ("k1", "k3"))]
)
def test_gradient_equals_that_of_the_divergence(options):
    torch.testing.assert_close(expected_gradient(**options), exact_gradient())


def test_k1_has_no_gradient_and_k3_that_of_the_forward_kl():
    torch.testing.assert_close(expected_gradient(kl_estimator="k1"), torch.zeros(4), atol=1e-6, rtol=0)
    forward = torch.log_softmax(LOGITS, 0).exp() - REFERENCE.exp()  # of KL(reference || policy)
    torch.testing.assert_close(expected_gradient(), forward)
    assert (forward - exact_gradient()).abs().max() > 0.1


def test_importance_weight_scales_the_kl_of_a_token():
    """Ratio e, log-ratio to the reference 1: k3 is 1/e, times e is 1."""
    one = [torch.tensor([x]) for x in (-1.0, 0.0, -2.0, -2.0, 0.0, 1.0)]
    _, metrics = clipped_policy_loss(LossInputs(*one), kl=1.0, kl_importance_weight=True)
    assert metrics["reference_kl"].item() == pytest.approx(1)


# ---- in the reward

A, B = (7, 8), (9,)
PLAYED = [((*A,), [-1.0, -1.0], 1.0), ((*B,), [-0.5], 0.0)]
HELD = Drifted({A: [-2.0, -0.5], B: [-1.5]})  # log-ratios 1 and -0.5; 1


def test_a_value_contains_the_penalty_of_the_whole_answer():
    """RLOO: the values are 1 - 0.4 * 0.5 and 0 - 0.4 * 1; each is the baseline of the other."""
    algorithm = GRPO(branch_at="root", group_size=2, baseline="others", scale="none", kl_coef=0.4, kl_in_reward=True)
    episode = siblings(*PLAYED)
    found, metrics, _ = credit_samples(algorithm, [episode], HELD)
    assert found[0] == pytest.approx([1.2, 1.2]) and found[1] == pytest.approx([-1.2])
    assert metrics["reference_kl"] == pytest.approx(0.5) and metrics["groups"] == 1
    assert [node.info["kl_penalty"]["a"] for node in episode.nodes] == pytest.approx([0.2, 0.4])
    assert "kl" not in algorithm.loss_options and algorithm.needs_reference


def test_a_forced_token_is_not_in_the_mean_of_the_divergence():
    """The first token of the first answer was forced; the others have log-ratios -0.5 and 1."""
    episode = siblings(((*A,), [0.0, -1.0], 1.0), PLAYED[1])
    forced = SamplingMask(np.array([7], np.int32), np.array([-1, 0], np.int32))
    episode.nodes[0].answers["a"].sampling_mask = forced
    algorithm = GRPO(branch_at="root", group_size=2, kl_coef=0.4, kl_in_reward=True)
    _, metrics, _ = credit_samples(algorithm, [episode], Drifted({A: [0.0, -0.5], B: [-1.5]}))
    assert metrics["reference_kl"] == pytest.approx(0.25)


def test_advantage_of_a_token_has_penalties_from_that_token_on():
    """REINFORCE++: values 0.8 and -0.4 have mean 0.2 and deviation 0.6; the second token does not include the first
    one's penalty of 0.4."""
    settings = {"branch_at": "root", "group_size": 1, "baseline": "batch", "kl_coef": 0.4, "kl_in_reward": True}
    found, _, _ = credit_samples(GRPO(**settings, scale="none"), [siblings(row) for row in PLAYED], HELD)
    assert found[0] == pytest.approx([0.6, 1.0]) and found[1] == pytest.approx([-0.6])
    found, _, _ = credit_samples(GRPO(**settings, scale="batch"), [siblings(row) for row in PLAYED], HELD)
    assert found[0] == pytest.approx([1.0, 1.0 + 0.4 / 0.6]) and found[1] == pytest.approx([-1.0])


def test_earlier_turns_are_earlier_tokens():
    first, then = answer([7], [-1.0]), answer([8], [-1.0])
    nodes = [Node(0, None, 0, {}, {"a": first}), Node(1, 0, 1, {}, {"a": then}, {"a": 2.0}, done=True)]
    settings = {"branch_at": "root", "group_size": 1, "baseline": "role", "scale": "none"}
    algorithm = GRPO(**settings, kl_coef=1.0, kl_in_reward=True)
    found, _, _ = credit_samples(
        algorithm, [Episode("e", 0, {"a": "p"}, nodes)], Drifted({(7,): [-1.5], (8,): [-1.25]})
    )
    assert found == [pytest.approx([0.95 * 1.25]), pytest.approx([0.95 * 1.25 + 0.5])]


@pytest.mark.parametrize("scale", ["std", "batch"])
def test_a_penalty_alone_is_not_scaled_to_the_size_of_a_reward(scale):
    """Two siblings of equal rewards, 1e-4 apart in their penalties."""
    rows = [((7,), [-1.0], 1.0), ((8,), [-1.0], 1.0)]
    algorithm = GRPO(branch_at="root", group_size=2, scale=scale, kl_coef=1.0, kl_in_reward=True)
    found, _, _ = credit_samples(algorithm, [siblings(*rows)], Drifted({(7,): [-1.0], (8,): [-1.0001]}))
    assert np.abs(found).max() == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_estimator": "k1"}, "averages to 0"),
        ({"kl_estimator": "k2", "kl_importance_weight": True}, "unbiased without it"),
        ({"kl_in_reward": True, "kl_estimator": "k2"}, "kl_estimator is for a KL penalty in the loss"),
        ({"kl_in_reward": True, "kl_importance_weight": True}, "leave kl_importance_weight out"),
    ],
)
def test_contradicting_kl_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPO(kl_coef=0.1, **settings)


# ---- a policy equal to its reference


def update_at_reference(algorithm, rewards, batch_size=None):
    """A learner on its reference, and the metrics of its update by answers of 6 tokens with these rewards."""
    engine = tiny_lm(0, initializer_range=0.2)
    config = LoraPolicyConfig(batch_size=batch_size, lr=1e-2)
    critic = algorithm.needs_critic
    weights = build_weights(config, engine, seed=0, critic=critic)
    learner = LanguageLearner("p", config, weights, Sampler(engine), engine.tokenizer)
    requests = [
        Request(np.arange(5, 12 + i).astype(np.int32), 1, SamplingConfig(max_tokens=6, stop_at_eos=False), seed=i)
        for i in range(len(rewards))
    ]
    rows = [
        Node(i, None, 0, {}, {"a": Answer("", "p@0", r.prompt_ids, a.token_ids, a.logprobs)}, {"a": reward}, done=True)
        for i, (r, (a,), reward) in enumerate(zip(requests, Sampler(engine).sample_all(requests), rewards, strict=True))
    ]
    episode = Episode("hand", 0, {"a": "p"}, rows)
    return learner, asyncio.run(update_learner(algorithm, learner, [episode], 0.0))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k1", "kl_importance_weight": True},
        {"kl_in_reward": True},
        {"kl_in_reward": True, "baseline": "batch", "scale": "batch"},
    ],
    ids=str,
)
def test_no_step_at_the_reference_without_advantages(settings):
    learner, metrics = update_at_reference(GRPO(branch_at="root", group_size=4, kl_coef=0.1, **settings), [1.0] * 4)
    assert metrics["updates"] == 0 and learner.version == 0 and learner.is_at_reference


def test_ppo_at_the_reference_has_no_gradient():
    """Without rewards and with a new critic (values 0), every advantage is exactly 0."""
    _, metrics = update_at_reference(PPO(kl_coef=0.1), [0.0] * 4)
    assert metrics["kl_sequence"] == 0 and metrics["grad_norm"] == 0


def test_penalty_alone_makes_a_step_once_the_policy_has_moved():
    """Of two batches the first has no advantages and is skipped; the second makes a step. Then rewards without
    differences make a step by the penalty alone."""
    algorithm = GRPO(branch_at="root", group_size=4, kl_coef=0.1)
    learner, metrics = update_at_reference(algorithm, [0.0, 0.5, 1.0, 0.5], batch_size=2)
    assert metrics["updates"] == 1 and learner.version == 1 and not learner.is_at_reference
    node = Node(0, None, 0, {}, {"a": answer([7, 8], [-1.0, -1.0])}, {"a": 1.0}, done=True)
    flat = [Episode("hand", 0, {"a": "p"}, [node])]
    assert asyncio.run(update_learner(algorithm, learner, flat, 0.0))["updates"] == 1


def test_checkpoint_keeps_the_reference(tmp_path):
    algorithm = GRPO(branch_at="root", group_size=4, kl_coef=0.1)
    learner, _ = update_at_reference(algorithm, [0.0, 0.0, 0.0, 1.0])
    learner.start_stage()
    assert learner.version == 1 and learner.is_at_reference
    learner.save(tmp_path)
    again, _ = update_at_reference(algorithm, [0.0] * 4)
    again.load(tmp_path)
    assert again.version == 1 and again.is_at_reference
