"""Losses of palestra equal TRL's on the same random log-probabilities, with their gradients.

TRL has its own virtual environment, that of bench/lm.py; `make test-trl` installs it there and runs this.
"""

import numpy as np
import pytest
from helpers.peer_cases import LENGTHS, LONGEST, TRL, assert_equal_loss, draw, run_cases, scored, shares, trained_tokens

from palestra.core.losses import LOSSES
from palestra.core.types import Answer, Episode, Node
from palestra.text.algorithms.grpo import GRPO
from palestra.text.losses import MEAN_KINDS, bradley_terry_loss, kto_loss, preference_loss

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make test-trl"),
]

BOUNDS = {"epsilon": 0.2, "epsilon_high": 0.28}
POLICY = {  # TRL's config; palestra's loss, its options, and how its mean is taken
    "grpo": ({"loss_type": "grpo", **BOUNDS}, "clipped_policy", {"clip": 0.2, "clip_high": 0.28}, "answers"),
    "dapo": ({"loss_type": "dapo", **BOUNDS}, "clipped_policy", {"clip": 0.2, "clip_high": 0.28}, "tokens"),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": LONGEST},
        "clipped_policy",
        {"clip": 0.2},
        "constant",
    ),
    "dual clip": (
        {"loss_type": "dapo", "epsilon": 0.2, "delta": 1.5},
        "clipped_policy",
        {"clip": 0.2, "dual_clip": 1.5},
        "tokens",
    ),
    "kl": (  # as in GRPO's paper: TRL's default weights the penalty by the ratio (DeepSeek-V3.2, 2025)
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": False},
        "clipped_policy",
        {"clip": 0.2, "kl": 0.3},
        "answers",
    ),
    "importance-weighted kl": (
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": True},
        "clipped_policy",
        {"clip": 0.2, "kl": 0.3, "kl_importance_weight": True},
        "answers",
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", {"clip_high_threshold": 1.3}, "tokens"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **BOUNDS},
        "gspo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        "answers",
    ),
}
VALUES = [0, 0.5, 0.5, 0.5, 0.5, 1]
SETTINGS = {  # TRL's config and palestra's settings
    "flat grpo": ({"loss_type": "grpo", "epsilon": 0.2}, {"loss_aggregation": "sequence"}),
    "flat dapo": ({"loss_type": "dapo", "epsilon": 0.2}, {"loss_aggregation": "token"}),
    "flat dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": LONGEST},
        {"loss_aggregation": "constant", "max_completion_length": LONGEST},
    ),
}
PREFERENCES = {  # TRL's config, palestra's options, and whether there is a reference
    "sigmoid": ({"loss_type": ["sigmoid"]}, {"kind": "sigmoid"}, True),
    "hinge": ({"loss_type": ["hinge"]}, {"kind": "hinge"}, True),
    "ipo": ({"loss_type": ["ipo"]}, {"kind": "ipo"}, True),
    # TRL has no loss without a reference: a uniform reference is equivalent.
    "reference free": ({"loss_type": ["sigmoid"]}, {"kind": "sigmoid", "reference_free": True}, False),
    # TRL's "aot" with label smoothing is DPO on sorted ratios: with one pair there is nothing to sort.
    "smoothed": ({"loss_type": ["aot"], "label_smoothing": 0.2}, {"kind": "sigmoid", "label_smoothing": 0.2}, True),
}


def policy_case(name: str) -> dict:
    return {"trainer": "grpo", "config": POLICY[name][0], **draw(7, LENGTHS)}


def flat_case(name: str) -> dict:
    """Advantages of `VALUES`, which are 0 for four of six answers."""
    drawn = draw(9, LENGTHS) | {"advantages": np.array(VALUES) - 0.5}
    return {"trainer": "grpo", "config": SETTINGS[name][0], **drawn}


def preference_case(name: str) -> dict:
    config, _, referred = PREFERENCES[name]
    drawn = draw(8, LENGTHS if name != "smoothed" else [4, 6])
    return {
        "trainer": "dpo",
        "config": config | {"beta": 0.4},
        **drawn,
        **({} if referred else {"ref": 0 * drawn["ref"]}),
    }


PAIRWISE = {  # TRL's trainer and settings, palestra's options, lengths of the sides; neither has a reference
    "simpo": ({"trainer": "simpo", "gamma": 0.7, "smoothing": 0.0}, {"kind": "simpo", "target_margin": 0.7}, LENGTHS),
    "smoothed simpo": (
        {"trainer": "simpo", "gamma": 0.7, "smoothing": 0.1},
        {"kind": "simpo", "target_margin": 0.7, "label_smoothing": 0.1},
        LENGTHS,
    ),
    # With several pairs, TRL's likelihood is the mean over all tokens, palestra's over pairs.
    "orpo": ({"trainer": "orpo"}, {"kind": "orpo"}, [4, 6]),
}


def pairwise_case(name: str) -> dict:
    config, _, lengths = PAIRWISE[name]
    return config | {"beta": 0.4} | draw(8, lengths)


def kto_case() -> dict:
    """Three desirable and three undesirable answers, and a reference point of 0.3."""
    config = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    return {"trainer": "kto", "config": config, "kl": [0.1, 0.5], "label": [1, 0, 1, 1, 0, 0]} | draw(11, LENGTHS)


def reward_case(center: float | None) -> dict:
    """Rewards of three chosen and three rejected sides, one value each."""
    return {"trainer": "reward", "center": center} | draw(12, [1] * 6)


@pytest.fixture(scope="module")
def trl() -> dict[str, dict]:
    """TRL's results for all cases, from one process."""
    cases = {name: policy_case(name) for name in POLICY} | {name: preference_case(name) for name in PREFERENCES}
    cases |= {name: flat_case(name) for name in SETTINGS} | {name: pairwise_case(name) for name in PAIRWISE}
    cases |= {"kto": kto_case(), "reward": reward_case(None), "centered reward": reward_case(0.01)}
    return run_cases(TRL, "trl_losses.py", cases)


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_equal_trl(trl: dict[str, dict], name: str) -> None:
    _, loss, options, mean = POLICY[name]
    case = policy_case(name)
    lengths = case["mask"].sum(1)
    weights = {
        "tokens": lambda: shares(lengths, np.ones(len(lengths))),
        "answers": lambda: shares(lengths, 1 / lengths),
        "constant": lambda: shares(lengths, np.ones(len(lengths)), LONGEST),
    }[mean]()
    tokens = scored(case, case["advantages"], weights, np.arange(len(lengths)))
    value, _ = LOSSES[loss](tokens, **options)
    assert_equal_loss(tokens, value, trl[name], case["mask"])


@pytest.mark.parametrize("name", SETTINGS)
def test_zero_advantage_answers_count_in_the_mean_as_in_trl(trl: dict[str, dict], name: str) -> None:
    """From rewards to gradients: of values 0, 1/2, 1/2, 1/2, 1/2, 1 only two answers get a pass."""
    case = flat_case(name)
    algorithm = GRPO(branch_at="root", group_size=len(VALUES), scale="none", clip=0.2, **SETTINGS[name][1])
    episode = Episode("hand", 0, {"a": "p"})
    for i, (value, length) in enumerate(zip(VALUES, LENGTHS, strict=True)):
        ids = np.full(length, i)
        said = Answer("", "p@0", np.zeros(1, int), ids, case["old"][i, :length])
        episode.nodes.append(Node(i, None, 0, {}, {"a": said}, {"a": value}, done=True))
    samples, _ = algorithm.build_samples([episode], "p")
    assert [s.token_ids[0] for s in samples if s.has_gradient] == [0, 5]
    tokens = trained_tokens(samples, [case["logp"][s.token_ids[0], : len(s.token_ids)] for s in samples])
    value, _ = algorithm.loss(tokens, **algorithm.loss_options)
    assert_equal_loss(tokens, value, trl[name], case["mask"] * np.isin(np.arange(6), [0, 5])[:, None])


@pytest.mark.parametrize("name", [*PREFERENCES, *PAIRWISE])
def test_preference_losses_equal_trl(trl: dict[str, dict], name: str) -> None:
    options = (PREFERENCES | PAIRWISE)[name][1]
    case = preference_case(name) if name in PREFERENCES else pairwise_case(name)
    lengths = case["mask"].sum(1)
    count = len(lengths) // 2  # the chosen sides of all pairs, then the rejected ones
    signs, groups = np.repeat([1.0, -1.0], count), np.tile(np.arange(count), 2)
    advantages = signs / lengths if options["kind"] in MEAN_KINDS else signs
    weights = shares(lengths, 1 / np.tile(lengths[:count] + lengths[count:], 2))
    tokens = scored(case, advantages, weights, groups)
    value, _ = preference_loss(tokens, beta=0.4, **options)
    assert_equal_loss(tokens, value, trl[name], case["mask"])


@pytest.mark.parametrize(("name", "center"), [("reward", None), ("centered reward", 0.01)])
def test_reward_model_loss_equals_trl(trl: dict[str, dict], name: str, center: float | None) -> None:
    case = reward_case(center)
    signs, pairs = np.repeat([1.0, -1.0], 3), np.tile(np.arange(3), 2)
    tokens = scored(case, signs, np.full(6, 1 / 6), pairs)
    value, metrics = bradley_terry_loss(tokens._replace(value_M=tokens.logp_M), center_coef=center or 0.0)
    assert_equal_loss(tokens, value, trl[name], case["mask"])
    chosen, rejected = case["logp"][:3, 0], case["logp"][3:, 0]
    assert metrics["accuracy"].item() == pytest.approx((chosen > rejected).mean())
    assert metrics["margin"].item() == pytest.approx((chosen - rejected).mean())


def test_kto_loss_equals_trl(trl: dict[str, dict]) -> None:
    """TRL's estimate of the reference point is the mean of `kl`; palestra's is part of the reference."""
    case = kto_case()
    lengths = case["mask"].sum(1)
    case["ref"] = case["ref"] + np.mean(case["kl"]) / lengths[:, None]
    weights = np.where(np.array(case["label"]) == 1, 1.5, -0.5)
    tokens = scored(case, weights, shares(lengths, 1 / lengths), np.arange(len(lengths)))
    value, _ = kto_loss(tokens, beta=0.4)
    assert_equal_loss(tokens, value, trl["kto"], case["mask"])
