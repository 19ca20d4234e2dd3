"""Advantages and rewards of palestra equal those of verl on the same random trajectories.

`make test-verl` installs verl 0.9.1 in a virtual environment of its own and runs this.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from helpers.actor_critic_runs import FixedValuesLearner, answer, credit_samples, play
from helpers.peer_cases import VERL, assert_equal_loss, draw, run_cases, trained_tokens

from palestra.core.types import Episode
from palestra.text.algorithms.grpo import GRPO, overlong_penalty
from palestra.text.algorithms.ppo import PPO, adapt_kl_coef

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not VERL.exists(), reason="verl is not installed: make test-verl"),
]

Case = dict[str, Any]
TURNS = [[3, 2], [4], [1, 2, 2], [6], [2, 5], [1, 1], [3], [4, 4], [2]]  # tokens of each turn of nine trajectories
GROUPS = [4, 3, 2]
GAP = 2  # tokens of the env between two turns
PENALTY = {"kl_coef": 0.1, "kl_in_reward": True}
GROUPED: dict[str, tuple[Case, dict]] = {  # verl's estimator, and the settings of palestra
    "grpo": ({"estimator": "grpo"}, {}),
    "dr_grpo": ({"estimator": "grpo", "options": {"norm_adv_by_std_in_grpo": False}}, {"scale": "none"}),
    "rloo": ({"estimator": "rloo"}, {"baseline": "others", "scale": "none"}),
    "grpo, KL in the reward": ({"estimator": "grpo", "kl_coef": 0.1}, PENALTY),
    "rloo, KL in the reward": (
        {"estimator": "rloo", "kl_coef": 0.1},
        {"baseline": "others", "scale": "none"} | PENALTY,
    ),
}
BATCHED = {  # by verl's estimator: the settings of palestra
    "reinforce_plus_plus": {"group_size": 1, "baseline": "batch", "scale": "batch"},
    "reinforce_plus_plus_baseline": {"baseline": "mean", "scale": "batch"},
}
GAE = {"estimator": "gae", "gamma": 0.9, "lam": 0.8}


def credit_case(turns: Sequence[Sequence[int]], groups: Sequence[int], *, is_final: bool = False, **more: Any) -> Case:
    """Trajectories of `turns`, in groups of these sizes; each turn (`is_final`: the last turn) has a reward at its last
    token. A row of `mask` has the tokens of the env between the turns as 0."""
    rows = [np.concatenate([np.ones(n)] + [np.r_[np.zeros(GAP), np.ones(k)] for k in own]) for n, *own in turns]
    mask = np.stack([np.pad(row, (0, 20 - len(row))) for row in rows]).astype(np.int64)
    drawn, rng = draw(12, [20] * len(rows)), np.random.default_rng(4)
    ends = (mask == 1) & (np.roll(mask, -1, 1) == 0)
    ends &= (mask.cumsum(1) == mask.sum(1, keepdims=True)) | (not is_final)
    return {
        "kind": "advantages",
        "turns": turns,
        "groups": groups,
        "index": np.repeat(np.arange(len(groups)), groups),
        "rewards": rng.normal(0, 1, mask.shape) * ends,
        "values": rng.normal(0, 1, mask.shape),
        "mask": mask,
        "logp": drawn["logp"],
        "old": drawn["old"] * mask,
        "ref": drawn["ref"] * mask,
    } | more


def grouped_case(name: str) -> Case:
    """The named case; for estimators without a penalty, all rewards of the second group are equal."""
    case = credit_case(TURNS, GROUPS, **GROUPED[name][0])
    if "kl_coef" not in case:
        case["rewards"][4:7] = 0
    return case


def by_turn(case: Case, name: str) -> list[list[np.ndarray]]:
    """The array's values at the tokens of each turn of each trajectory."""
    return [
        np.split(row[mask == 1], np.cumsum(turns)[:-1])
        for row, mask, turns in zip(case[name], case["mask"], case["turns"], strict=True)
    ]


def episodes_of(case: Case) -> list[Episode]:
    """One episode for each group."""
    lines = [
        [
            ({"a": answer(len(old), logprobs=old)}, {"a": float(reward.sum())}, 0.0)
            for old, reward in zip(*own, strict=True)
        ]
        for own in zip(by_turn(case, "old"), by_turn(case, "rewards"), strict=True)
    ]
    return [play(*lines[end - size : end]) for size, end in zip(case["groups"], np.cumsum(case["groups"]), strict=True)]


def credit(algorithm: GRPO | PPO, case: Case, field: str = "advantages") -> np.ndarray:
    """palestra's advantages (or another field of the samples) of all tokens, trajectory by trajectory."""
    values, reference = ([*chain(*by_turn(case, name))] for name in ("values", "ref"))
    samples, _ = credit_samples(algorithm, episodes_of(case), FixedValuesLearner(values, reference=reference))
    return np.concatenate([getattr(sample, field) for sample in samples])


def grpo(**settings: Any) -> GRPO:
    return GRPO(branch_at="root", **settings)


def per_token(case: Case, values: np.ndarray) -> np.ndarray:
    return np.repeat(values, case["mask"].sum(1))


def whole_case(mode: str) -> Case:
    case = credit_case(TURNS, GROUPS, estimator="grpo", options={"norm_adv_by_std_in_grpo": False})
    clipped = {"loss": "vanilla", "config": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}}
    return case | clipped | {"kind": "policy", "mode": mode}


@pytest.fixture(scope="module")
def verl() -> dict:
    """verl's results for all cases, from one process."""
    cases: dict = {name: grouped_case(name) for name in GROUPED}
    cases |= {(name, "alone"): credit_case([[3], [2]], [1, 1], estimator=name) for name in ("grpo", "rloo")}
    cases["rloo_vectorized", "alone"] = credit_case([[3], [2]], [1, 1], estimator="rloo_vectorized")
    for name in BATCHED:
        cases[name] = credit_case(TURNS, GROUPS, is_final=True, estimator=name)
        cases[name, "equal"] = credit_case([[4]] * 9, GROUPS, estimator=name)
    cases["penalised"] = credit_case(TURNS, [1] * 9, is_final=True, estimator="reinforce_plus_plus", kl_coef=0.1)
    cases["gae"] = credit_case(TURNS, [1] * 9, **GAE)
    cases["penalised gae"] = credit_case(TURNS, [1] * 9, **GAE, kl_coef=0.1)
    cases |= {("whole", mode): whole_case(mode) for mode in ("token-mean", "seq-mean-token-mean")}
    cases["overlong"] = {"kind": "overlong", "lengths": list(range(1, 21)), "limit": 20, "buffer": 6}
    cases["controller"] = {"kind": "kl_controller", "coef": 0.1, "target": 2.0, "horizon": 100, "steps": 8} | {
        "kls": [3.0, 2.1, 0.5, 1.9]
    }
    return run_cases(VERL, "verl_losses.py", cases)


# ---- advantages


@pytest.mark.parametrize("name", GROUPED)
def test_group_advantages_equal_verl(verl: dict, name: str) -> None:
    """verl divides by the sample deviation plus 1e-6, palestra by the population deviation (Shao et al., 2024, leave it
    open)."""
    case, settings = grouped_case(name), GROUPED[name][1]
    found = credit(grpo(**settings), case)
    sizes = np.repeat(GROUPS, GROUPS)
    factor = np.sqrt((sizes - 1) / sizes) if "scale" not in settings else np.ones(len(sizes))
    expected = np.array(verl[name]["advantages"])[case["mask"] == 1]
    np.testing.assert_allclose(found * per_token(case, factor), expected, atol=1e-5)
    assert np.abs(found).max() > 0.5


def test_only_answer_of_a_group_has_no_advantage(verl: dict) -> None:
    """verl's grpo and rloo take the reward itself, without a baseline; its rloo_vectorized gives 0, as palestra
    does."""
    case = credit_case([[3], [2]], [1, 1])
    at = case["mask"] == 1
    rewards = per_token(case, case["rewards"].sum(1))
    for name in ("grpo", "rloo"):
        np.testing.assert_allclose(np.array(verl[name, "alone"]["advantages"])[at], rewards, atol=1e-5)
    assert not np.array(verl["rloo_vectorized", "alone"]["advantages"]).any()
    assert not credit(grpo(), case).any() and not credit(grpo(baseline="others", scale="none"), case).any()


@pytest.mark.parametrize("name", BATCHED)
def test_batch_advantages_equal_verl_for_answers_of_equal_length(verl: dict, name: str) -> None:
    """verl's mean and (sample) deviation are over tokens, palestra's over answers. For unequal lengths verl's
    advantages are palestra's, standardised over tokens."""
    case = credit_case([[4]] * 9, GROUPS)
    found, tokens = credit(grpo(**BATCHED[name]), case), case["mask"].sum()
    expected = np.array(verl[name, "equal"]["advantages"])[case["mask"] == 1]
    np.testing.assert_allclose(found * np.sqrt((tokens - 1) / tokens), expected, atol=1e-5)

    case = credit_case(TURNS, GROUPS, is_final=True)
    found = credit(grpo(**BATCHED[name]), case)
    expected = np.array(verl[name]["advantages"])[case["mask"] == 1]
    np.testing.assert_allclose((found - found.mean()) / found.std(ddof=1), expected, atol=1e-5)


def test_reinforce_pp_returns_with_a_kl_penalty_equal_verl(verl: dict) -> None:
    """A token's return contains the penalties from that token on. palestra normalises by the mean and deviation of
    whole trajectories, verl by those of all tokens."""
    case = credit_case(TURNS, [1] * 9, is_final=True)
    returns = np.array(verl["penalised"]["returns"])
    whole = returns[:, 0]
    found = credit(grpo(**BATCHED["reinforce_plus_plus"], **PENALTY), case)
    expected = (returns[case["mask"] == 1] - whole.mean()) / whole.std()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "kl_coef"), [("gae", 0.0), ("penalised gae", 0.1)])
def test_gae_over_turns_equals_verl(verl: dict, name: str, kl_coef: float) -> None:
    """Tokens of the env between the turns are not discounted. verl divides by the sample deviation of all tokens."""
    case = credit_case(TURNS, [1] * 9)
    at, tokens = case["mask"] == 1, case["mask"].sum()
    algorithm = PPO(gamma=0.9, gae_lambda=0.8, kl_coef=kl_coef)
    np.testing.assert_allclose(credit(algorithm, case, "returns"), np.array(verl[name]["returns"])[at], atol=1e-5)
    found = credit(algorithm, case) * np.sqrt((tokens - 1) / tokens)
    np.testing.assert_allclose(found, np.array(verl[name]["advantages"])[at], atol=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_rewards_to_gradients_over_turns_equal_verl(verl: dict, mode: str) -> None:
    """A row of verl is a whole trajectory with all its turns, so that its mean over sequences is `trajectory`."""
    case = whole_case(mode)
    aggregation = {"token-mean": "token", "seq-mean-token-mean": "trajectory"}[mode]
    algorithm = grpo(scale="none", loss_aggregation=aggregation, clip=0.2, clip_high=0.28, dual_clip=3.0)
    samples = [sample for episode in episodes_of(case) for sample in algorithm.build_samples([episode], "p")[0]]
    tokens = trained_tokens(samples, [*chain(*by_turn(case, "logp"))])
    value, _ = algorithm.loss(tokens, **algorithm.loss_options)
    assert_equal_loss(tokens, value, verl["whole", mode], case["mask"])


# ---- rewards


def test_overlong_penalty_equals_verl(verl: dict) -> None:
    found = [-overlong_penalty(length, 20, 6) for length in range(1, 21)]
    assert found[13] == 0 and found[14] < 0 and found[19] == -1
    np.testing.assert_allclose(found, verl["overlong"]["rewards"], atol=1e-6)


def test_adaptive_kl_coefficient_equals_verl(verl: dict) -> None:
    """The update is the same. verl passes it the mean over the tokens of a sequence; Ziegler et al. (2019) and palestra
    pass their sum."""
    found = [0.1]
    for kl in (3.0, 2.1, 0.5, 1.9):
        found.append(adapt_kl_coef(found[-1], kl, target=2.0, sequences=8, horizon=100))
    np.testing.assert_allclose(found[1:], verl["controller"]["coefs"], atol=1e-12)
