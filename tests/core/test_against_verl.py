"""Losses, KL estimates and importance weights of palestra equal verl's on the same random log-probabilities, with their
gradients.

`make test-verl` installs verl 0.9.1 in its own virtual environment and runs this file and
tests/text/credit/test_credit_against_verl.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.peer_cases import LENGTHS, LONGEST, VERL, assert_equal_loss, draw, run_cases, scored, shares

from palestra.core.losses import (
    LOSSES,
    LossInputs,
    add_kl_and_entropy,
    importance_weight,
    kl_estimates,
    value_function_loss,
)
from palestra.engine.training.head import ScoredTokens, score_logits
from palestra.text.algorithms.grpo import GRPO

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not VERL.exists(), reason="verl is not installed: make test-verl"),
]

Case = dict[str, Any]
MODES = {  # verl's `loss_agg_mode`; palestra's token weights of answers of these lengths
    "token-mean": lambda lengths: shares(lengths, np.ones(len(lengths))),
    "seq-mean-token-mean": lambda lengths: shares(lengths, 1 / lengths),
    "seq-mean-token-sum-norm": lambda lengths: shares(lengths, np.ones(len(lengths)), LONGEST),
}
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
CLIPPED = {"loss": "vanilla", "config": CLIPS | {"clip_ratio_c": 3.0}}
OUR_CLIPPED = {"clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
OF_THE_PAPER = "cispo of the paper"
POLICY: dict[str, tuple[Case, dict]] = {  # verl's settings, and palestra's of GRPO
    "vanilla": (CLIPPED, OUR_CLIPPED),
    "k2": (CLIPPED | {"kl_type": "mse"}, OUR_CLIPPED | {"kl_coef": 0.3, "kl_estimator": "k2"}),
    "k3": (CLIPPED | {"kl_type": "low_var_kl"}, OUR_CLIPPED | {"kl_coef": 0.3}),
    "gspo": ({"loss": "gspo", "config": CLIPS}, {"surrogate": "gspo", "clip": 0.2, "clip_high": 0.28}),
    # verl also clips from below, by default at 0.8; MiniMax-M1 (Chen et al., 2025, sec. 3.1) does not.
    OF_THE_PAPER: (
        {"loss": "cispo", "config": {"clip_ratio_low": 10.0, "clip_ratio_high": 0.28}},
        {"surrogate": "cispo", "clip_high": 0.28},
    ),
}
# verl's settings; palestra's loss and its options, which no algorithm sets
ALONE: dict[str, tuple[Case, str, dict]] = {
    "cispo": ({"loss": "cispo", "config": CLIPS}, "cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
    "dro": ({"loss": "dro", "dro_beta": 0.1}, "dro", {"beta": 0.1}),
}
BETWEEN = {"importance_cap": 2.0, "importance_floor": 0.5}
CORRECTIONS = {  # by palestra's `importance_mode`: verl's settings, and palestra's
    "token_truncate": ({"rollout_is": "token", "rollout_is_threshold": 2.0}, {"importance_cap": 2.0}),
    "token_mask": ({"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}, BETWEEN),
    "sequence_truncate": ({"rollout_is": "sequence", "rollout_is_threshold": 2.0}, {"importance_cap": 2.0}),
    "sequence_mask": ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"}, BETWEEN),
}
# The bounds of verl's k1 are those of the sampler's probability over the trainer's, the inverse of its weights: these
# keep weights from 1/4 to 2. palestra has no equivalent of its filters by means (seq_mean_k1: of the geometric mean),
# k2 and k3.
REJECTIONS = {
    "token_mask": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4.0"},
    "sequence_mask": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4.0"},
}
WEIGHTED = ("vanilla", "gspo", OF_THE_PAPER)
UNBOUNDED = 1e8  # a bound above all weights here


def drawn(seed: int) -> Case:
    """Log-probabilities as in `draw`, and an advantage of every token [B, T]."""
    case = draw(seed, LENGTHS)
    return case | {"advantages": np.random.default_rng(seed + 1).normal(0, 1, case["logp"].shape)}


def policy_case(name: str, mode: str = "token-mean", **more: Any) -> Case:
    """Log-probabilities far enough apart for the dual clip, and a sampler that differs from the trainer."""
    case = drawn(7)
    case["old"] = case["logp"] + 2.5 * (case["old"] - case["logp"])
    case["sampler"] = case["old"] + np.random.default_rng(9).normal(0, 0.5, case["old"].shape)
    return {"kind": "policy", "mode": mode, "loss_scale_factor": LONGEST} | case | (POLICY | ALONE)[name][0] | more


def inputs(case: Case) -> LossInputs:
    """palestra's loss inputs of the case's tokens."""
    lengths, at = case["mask"].sum(1), case["mask"] == 1
    tokens = scored(case, np.zeros(len(lengths)), MODES[case["mode"]](lengths), np.arange(len(lengths)))
    fields = {"advantages": "advantage_M", "sampler": "sampler_logp_M", "returns": "return_M"}
    return tokens._replace(**{fields[name]: torch.tensor(case[name][at]) for name in fields.keys() & case.keys()})


def our_loss(name: str, tokens: LossInputs, **importance: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """palestra's loss and metrics; uncorrected without settings for `importance` sampling."""
    if name in ALONE:
        _, loss, options = ALONE[name]
        return LOSSES[loss](tokens, **options)
    algorithm = GRPO(**{"importance_cap": None} | POLICY[name][1] | importance)
    return algorithm.loss(tokens, **algorithm.loss_options)


def value_case(mode: str) -> Case:
    case = drawn(9)
    case["returns"] = case["logp"] + np.random.default_rng(1).normal(0, 1, case["logp"].shape)
    return {"kind": "value", "mode": mode, "loss_scale_factor": LONGEST, "clip": 0.3} | case


def entropy_case(mode: str) -> Case:
    """Logits [B, T, 5]."""
    return {"kind": "entropy", "mode": mode} | drawn(10) | {"logp": np.random.default_rng(2).normal(0, 2, (6, 7, 5))}


def distant_case(**correction: Any) -> Case:
    """Log-ratios to the sampler that exceed the bounds, two of them above the 20 at which verl clamps them."""
    case, rng = drawn(11), np.random.default_rng(3)
    gaps = rng.normal(0, 0.7, case["old"].shape)
    gaps[0, :2] = 25.0, -25.5
    gaps[2, 0] = -30.0
    return {"kind": "correction", **case, "sampler": case["old"] - gaps, "correction": correction}


@pytest.fixture(scope="module")
def verl() -> dict:
    """verl's results for all cases, from one process."""
    cases: dict = {(name, mode): policy_case(name, mode) for name in POLICY | ALONE for mode in MODES}
    cases |= {("value", mode): value_case(mode) for mode in MODES}
    cases |= {("entropy", mode): entropy_case(mode) for mode in ("token-mean", "seq-mean-token-mean")}
    cases |= {("kl", kind): {"kind": "kl", "kl_type": kind, **draw(7, LENGTHS)} for kind in ("k1", "k2", "k3", "k3+")}
    for mode, (correction, _) in CORRECTIONS.items():
        cases[mode] = distant_case(**correction)
        cases |= {(name, mode): policy_case(name, correction=correction) for name in WEIGHTED}
    for mode, rejection in REJECTIONS.items():
        weights = {"rollout_is": mode.split("_")[0], "rollout_is_threshold": UNBOUNDED}
        cases["rejection", mode] = distant_case(**rejection)
        cases["vanilla", "rejection", mode] = policy_case("vanilla", correction=rejection | weights)
    return run_cases(VERL, "verl_losses.py", cases)


# ---- losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY | ALONE)
def test_policy_losses_equal_verl(verl: dict, name: str, mode: str) -> None:
    case = policy_case(name, mode)
    tokens = inputs(case)
    value, metrics = our_loss(name, tokens)
    if name != "dro":
        assert metrics["clip_fraction"] > 0
    if name == "vanilla":
        assert value != LOSSES["clipped_policy"](tokens, clip=0.2, clip_high=0.28)[0]
    assert_equal_loss(tokens, value, verl[name, mode], case["mask"])


@pytest.mark.parametrize("mode", MODES)
def test_value_loss_equals_verl(verl: dict, mode: str) -> None:
    case = value_case(mode)
    tokens = inputs(case)
    tokens = tokens._replace(value_M=tokens.logp_M, old_value_M=tokens.old_logp_M)
    value, metrics = value_function_loss(tokens, value_coef=1.0, value_clip=0.3)
    assert metrics["value_clip_fraction"] > 0
    assert_equal_loss(tokens, value, verl["value", mode], case["mask"])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_entropy_equals_verl(verl: dict, mode: str) -> None:
    """The bonus is the mean entropy, negated."""
    case = entropy_case(mode)
    logits = torch.tensor(case["logp"][case["mask"] == 1], requires_grad=True)
    wanted = ScoredTokens(torch.arange(len(logits)), torch.zeros(len(logits), dtype=torch.long), None)
    tokens = inputs(drawn(10) | {"mode": mode})
    tokens = tokens._replace(logp_M=logits, entropy_M=score_logits(logits, wanted, entropy_grad=True)[1])
    bonus, _ = add_kl_and_entropy(tokens, torch.zeros(()), {}, 0.0, 1.0)
    assert_equal_loss(tokens, -bonus, verl["entropy", mode], case["mask"])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
def test_kl_estimates_equal_verl(verl: dict, kind: str) -> None:
    """k3+ has the value of k3 and the gradient of k2, like `kl_estimator: k2`. verl clamps log-ratios at 20."""
    case = draw(7, LENGTHS)
    logp, ref = torch.tensor(case["logp"], requires_grad=True), torch.tensor(case["ref"])
    values = kl_estimates(logp, ref, kind[:2])
    np.testing.assert_allclose(values.detach().numpy(), verl["kl", kind]["values"], atol=1e-12)
    values = kl_estimates(logp, ref, "k2") if kind == "k3+" else values
    (slopes,) = torch.autograd.grad(values.sum(), logp)
    np.testing.assert_allclose(slopes.numpy(), verl["kl", kind]["slopes"], atol=1e-12)


# ---- sampler mismatch


def weigh(
    case: Case, mode: str, importance_cap: float, importance_floor: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """palestra's weights of the case's tokens, and which are out of bounds."""
    at = case["mask"] == 1
    sequence = torch.tensor(np.repeat(np.arange(len(at)), at.sum(1)))
    gaps = torch.tensor((case["old"] - case["sampler"])[at])
    return importance_weight(gaps, sequence, cap=importance_cap, floor=importance_floor, mode=mode)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_importance_weights_equal_verl(verl: dict, mode: str) -> None:
    """verl's weights are at least exp(-20), 2e-9."""
    case = distant_case()
    weights, outside = weigh(case, mode, **CORRECTIONS[mode][1])
    assert 0 < outside.sum() < len(outside)
    np.testing.assert_allclose(weights, np.array(verl[mode]["weights"])[case["mask"] == 1], atol=1e-8)


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_losses_equal_verl(verl: dict, name: str, mode: str) -> None:
    """A token of weight 0 counts in the mean."""
    case = policy_case(name)
    tokens = inputs(case)
    value, _ = our_loss(name, tokens, **CORRECTIONS[mode][1], importance_mode=mode)
    assert_equal_loss(tokens, value, verl[name, mode], case["mask"])


@pytest.mark.parametrize("mode", REJECTIONS)
def test_rejected_tokens_equal_verl(verl: dict, mode: str) -> None:
    case = distant_case()
    _, outside = weigh(case, mode, 2.0, 0.25)
    assert 0 < outside.sum() < len(outside)
    assert (np.array(verl["rejection", mode]["mask"])[case["mask"] == 1] == 0).tolist() == outside.tolist()


@pytest.mark.parametrize("mode", REJECTIONS)
def test_rejected_tokens_count_in_palestras_mean_only(verl: dict, mode: str) -> None:
    """verl's mean is over the tokens that it keeps."""
    case = policy_case("vanilla")
    tokens = inputs(case)
    options = {"importance_cap": 2.0, "importance_floor": 0.25, "importance_mode": mode}
    value, metrics = our_loss("vanilla", tokens, **options)
    kept = 1 - metrics["importance_cap_fraction"].item()
    assert 0.2 < kept < 0.9
    assert_equal_loss(tokens, value / kept, verl["vanilla", "rejection", mode], case["mask"])
