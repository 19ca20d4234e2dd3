"""Selection of pairs by hand, the weight of a pair, and a team that learns from pairs alone."""

import asyncio
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.config import dump, parse, validate
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run, load_episodes, read_lines
from palestra.runs.loop import run_training
from palestra.text.algorithms.dpo import DPO
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.losses import preference_loss

names = count()


def answer(policy="p@0", ids=None):
    """An answer with tokens that no other answer has."""
    ids = [next(names), 7] if ids is None else ids
    n = len(ids)
    return Answer("x", policy, np.array([1, 2], np.int32), np.array(ids, np.int32), np.full(n, -0.25, np.float32))


def turn(values, said=None, policy="p@0"):
    """One joint step of seat "a": siblings with these values; `said` sets their tokens."""
    episode = Episode("hand", 0, {"a": "p"})
    for i, value in enumerate(values):
        spoken = answer(policy, said[i] if said else None)
        episode.nodes.append(Node(i, None, 0, {}, {"a": spoken}, {}, value, done=True))
    return episode


def node_pairs(episode, samples):
    """(chosen node, rejected node) of each pair of one-answer sides."""
    of = {tuple(n.answers["a"].token_ids.tolist()): n.id for n in episode.nodes}
    chosen = [of[tuple(s.token_ids.tolist())] for s in samples if s.advantages[0] > 0]
    rejected = [of[tuple(s.token_ids.tolist())] for s in samples if s.advantages[0] < 0]
    return list(zip(chosen, rejected, strict=True))


def notes(episode, seat="a"):
    return [node.advantages.get(seat) for node in episode.nodes]


# ---- which sibling is preferred


def test_the_best_is_preferred_to_the_worst():
    episode = turn([0.0, 2.0, -1.0, 1.0])
    samples, figures = DPO().build_samples([episode], "p")
    assert node_pairs(episode, samples) == [(1, 2)] and notes(episode) == [0, 1, -1, 0]
    assert figures == {"groups": 1.0, "pairs": 1.0, "zero_std_fraction": 0.0}


def test_pairs_all_uses_every_pair_of_different_values():
    """Of 0, 2, 0, 1 equal values form no pair; an answer's note is the number of pairs it won minus those it lost."""
    episode = turn([0.0, 2.0, 0.0, 1.0])
    samples, figures = DPO(pairs="all").build_samples([episode], "p")
    assert sorted(node_pairs(episode, samples)) == [(1, 0), (1, 2), (1, 3), (3, 0), (3, 2)]
    assert notes(episode) == [-2, 3, -2, 2 - 1]
    assert figures == {"groups": 1.0, "pairs": 5.0, "zero_std_fraction": 0.0}
    assert [s.group for s in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_pairs_need_the_minimum_margin():
    episode = turn([0.0, 1.0, 3.0])
    assert node_pairs(episode, DPO(pairs="all", min_margin=2.0).build_samples([episode], "p")[0]) == [(2, 0), (2, 1)]
    assert node_pairs(episode, DPO(pairs="all", min_margin=2.5).build_samples([episode], "p")[0]) == [(2, 0)]
    assert DPO(min_margin=3.1).build_samples([episode], "p")[0] == []
    assert (
        len(DPO(min_margin=0.3).build_samples([turn([0.4, 0.7])], "p")[0]) == 2
    )  # 0.7 - 0.4 is slightly less than 0.3 in floats


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9 + 0.1])
def test_equal_values_give_no_pair(value):
    for pairs in ("best_worst", "all"):
        episode = turn([value] * 3)
        samples, figures = DPO(pairs=pairs).build_samples([episode], "p")
        assert samples == [] and figures == {"groups": 1.0, "pairs": 0.0, "zero_std_fraction": 1.0}
        assert notes(episode) == [0, 0, 0]
    assert DPO().build_samples([turn([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])], "p")[0] == []


def test_equal_answers_give_no_pair():
    """Answers 1 and 2 are equal and were rewarded by chance; the next best pair is the third over the second."""
    episode = turn([3.0, 0.0, 2.0], [[5, 6], [5, 6], [8]])
    (better, worse), figures = DPO().build_samples([episode], "p")
    assert better.token_ids.tolist() == [8] and worse.token_ids.tolist() == [5, 6]
    assert notes(episode) == [0, -1, 1] and figures["pairs"] == 1
    assert DPO().build_samples([turn([1.0, 0.0], [[5, 6], [5, 6]])], "p")[0] == []


def test_empty_answers_are_not_paired():
    episode = turn([9.0, 0.0, 1.0], [[], [5], [6]])
    assert node_pairs(episode, DPO().build_samples([episode], "p")[0]) == [(2, 1)]


def test_pair_values_use_the_mixed_reward():
    episode = turn([1.0, 0.0])
    episode.nodes[1].rewards = {"a": 0.5, "b": 100.0}
    assert node_pairs(episode, DPO(team_weight=1.0).build_samples([episode], "p")[0]) == [(0, 1)]
    assert node_pairs(episode, DPO(team_weight=0.2).build_samples([episode], "p")[0]) == [(1, 0)]


def test_only_own_answers_of_successful_rollouts_are_paired():
    failed = turn([0.0, 1.0])
    failed.error = "RuntimeError: boom"
    samples, figures = DPO().build_samples(
        [failed, turn([0.0, 1.0], policy="q@0"), turn([1.0, 0.0], policy="p@17")], "p"
    )
    assert len(samples) == 2 and figures["groups"] == 1
    assert notes(failed) == [None, None]


def test_no_episodes_give_no_pairs():
    assert DPO().build_samples([], "p") == ([], {"groups": 0.0, "pairs": 0.0, "zero_std_fraction": 0.0})


@given(st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=6))
def test_chosen_side_has_the_higher_value(values):
    every, one = turn(values), turn(values)
    found = node_pairs(every, DPO(pairs="all").build_samples([every], "p")[0])
    assert all(values[better] > values[worse] for better, worse in found)
    assert len(set(found)) == len(found) == sum(a > b for a in values for b in values)
    for better, worse in node_pairs(one, DPO().build_samples([one], "p")[0]):
        assert values[better] == max(values) and values[worse] == min(values)


# ---- sides


def lines():
    """Root branching: two trajectories in which a acts twice and b once; the second has the higher value."""
    episode = Episode("hand", 0, {"a": "p", "b": "q"})
    rows = [
        (None, "a", "p@0", [10, 11], 0.0, False),
        (None, "a", "p@0", [12], 0.0, False),
        (0, "b", "q@0", [20], 0.0, False),
        (1, "b", "q@0", [21], 0.0, False),
        (2, "a", "p@0", [13, 14, 15], 0.0, True),
        (3, "a", "p@0", [16, 17], 1.0, True),
    ]
    for i, (parent, seat, policy, ids, team, over) in enumerate(rows):
        depth = 0 if parent is None else episode.nodes[parent].depth + 1
        episode.nodes.append(Node(i, parent, depth, {}, {seat: answer(policy, ids)}, {}, team, done=over))
    return episode


def test_trajectory_pairs_hold_all_answers_of_a_seat():
    episode = lines()
    samples, figures = DPO(branch_at="root", group_size=2).build_samples([episode], "p")
    assert [s.token_ids.tolist() for s in samples] == [[12], [16, 17], [10, 11], [13, 14, 15]]
    assert [set(s.advantages.tolist()) for s in samples] == [{1.0}, {1.0}, {-1.0}, {-1.0}]
    assert {s.group for s in samples} == {0} and {s.weight for s in samples} == {1 / 8}
    assert notes(episode) == [-1, 1, None, None, -1, 1] and notes(episode, "b") == [None] * 6
    assert figures == {"groups": 1.0, "pairs": 1.0, "zero_std_fraction": 0.0}
    assert samples[0].logprobs.tolist() == [-0.25] and samples[0].prompt_ids.tolist() == [1, 2]


def test_ipo_averages_over_the_tokens_of_a_side():
    """Three tokens chosen and five rejected, in two answers each."""
    samples, _ = DPO(branch_at="root", group_size=2, loss_type="ipo").build_samples([lines()], "p")
    assert [s.advantages.tolist() for s in samples] == [
        pytest.approx([1 / 3]),
        pytest.approx([1 / 3] * 2),
        pytest.approx([-1 / 5] * 2),
        pytest.approx([-1 / 5] * 3),
    ]
    assert {s.weight for s in samples} == {1 / 8}


def test_pairs_have_equal_weight_at_any_length():
    episodes = [turn([0.0, 1.0], [[1], [2]]), turn([0.0, 1.0, 2.0], [[3, 4, 5], [6] * 9, [7]])]
    samples, _ = DPO(pairs="all").build_samples(episodes, "p")
    shares = {}
    for sample in samples:
        shares[sample.group] = shares.get(sample.group, 0.0) + sample.weight * len(sample.token_ids)
    assert list(shares) == [0, 1, 2, 3] and list(shares.values()) == pytest.approx([1.0] * 4)


# ---- config


def test_loss_options_are_passed_to_the_loss():
    assert DPO().loss is preference_loss and DPO().loss_options == {"kind": "sigmoid", "beta": 0.1}
    options = {"beta": 0.5, "label_smoothing": 0.1, "reference_free": True}
    assert DPO(loss_type="hinge", **options).loss_options == {"kind": "hinge"} | options


def test_trees_branch_as_they_do_for_grpo():
    turns, whole = DPO(team_weight=0.5).branching, DPO(branch_at="root", group_size=3, continue_from="best").branching
    assert (turns.branch_at, turns.group_size, turns.continue_from, turns.team_weight) == ("turn", 4, "best", 0.5)
    assert (whole.branch_at, whole.group_size, whole.continue_from) == ("root", 3, "all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "not to ipo: leave it"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"beta": 0.0}, "beta"),
        ({"group_size": 1}, "group_size"),
        ({"pairs": "some"}, "pairs"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DPO(**settings)


def test_documented_settings_are_the_defaults():
    page = (Path(__file__).parents[3] / "docs" / "algorithms" / "dpo.md").read_text(encoding="utf-8")
    (settings,) = (
        parse(block.split("```")[0])["algorithm"] for block in page.split("```yaml")[1:] if "type: dpo" in block
    )
    assert validate(DPO, settings) == DPO() and set(DPO.model_fields) - set(settings) == {"epsilon"}


# ---- with weights in training


def whisper(base, steps=20, **algorithm):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    config = {
        "name": "whisper",
        "steps": steps,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": dict(speech), "walker": dict(speech)},
        "algorithm": {"type": "dpo"} | algorithm,
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }
    return validate(TextConfig, config)


def run_of(config, root):
    setup = build(config)
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(setup, run)
        return run.path, setup


@pytest.fixture(scope="module")
def pair_run(base, tmp_path_factory):
    """A run of two policies that learn for 8 steps from pairs alone."""
    return run_of(whisper(base, steps=8), tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_team_learns_from_pairs(base, tmp_path):
    """On held-out instances; chance is 1/4."""
    path, _ = run_of(whisper(base), tmp_path)
    before, after = [line["success"] for line in read_lines(path / "evals.jsonl")]
    assert before < 0.4 and after > 0.8
    last = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guide"][-1]
    assert last["margin"] > 0.2 and last["accuracy"] > 0.7
    assert last["chosen_logp"] > last["rejected_logp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [{"branch_at": "root", "group_size": 8}, {"reference_free": True, "loss_type": "hinge"}], ids=str
)
def test_team_learns_from_trajectory_pairs_without_a_reference(base, tmp_path, algorithm):
    path, _ = run_of(whisper(base, **algorithm), tmp_path)
    before, after = [line["success"] for line in read_lines(path / "evals.jsonl")]
    assert before < 0.4 and after > 0.7


@pytest.mark.slow
def test_full_model_learns_from_pairs_with_a_copy_as_reference(base, tmp_path):
    """On held-out instances; chance is 1/4. Without a copy the error message names the setting."""
    full = {"type": "full", "base": str(base), "lr": 2e-3, "sampling": {"max_tokens": 1}}
    tree = parse(dump(whisper(base, steps=15))) | {"policies": {"guide": full, "walker": full | {"reference": "copy"}}}
    with pytest.raises(ValueError, match=r"set policies\.guide\.reference: copy"):
        validate(TextConfig, tree)
    tree["policies"]["guide"] = full | {"reference": "disk"}
    path, setup = run_of(validate(TextConfig, tree), tmp_path)
    assert read_lines(path / "evals.jsonl")[-1]["success"] > 0.6
    assert setup.learners["guide"].weights.full_reference.is_base


def test_run_records_pairs_as_advantages(pair_run):
    path, _ = pair_run
    first = next(line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guide")
    assert first["groups"] == 32 and first["samples"] == 2 * first["pairs"] > 0
    assert first["zero_std_fraction"] == pytest.approx(1 - first["pairs"] / 32)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-4) and first["margin"] == pytest.approx(0, abs=1e-4)
    for episode in load_episodes(path / "episodes" / "step-000000.parquet"):
        for node in episode.nodes:
            for seat in node.answers:
                assert node.advantages[seat] in (-1, 0, 1)


def test_reference_stays_the_base_during_training(pair_run):
    """After 8 steps the reference is still the base: the margins that the run records are relative to it."""
    path, setup = pair_run
    episodes = load_episodes(path / "episodes" / "step-000000.parquet")
    learner, algorithm = setup.learners["guide"], setup.stages[0].algorithm
    samples, _ = algorithm.build_samples(episodes, "guide")
    assert samples and all(sample.reference_logprobs is None for sample in samples)
    refined, figures = asyncio.run(algorithm.finalize_samples(samples, learner, {}))
    now = asyncio.run(learner.logprobs(samples))
    assert figures == {}
    for sample, own in zip(refined, now, strict=True):
        # of step 0, sampled by the base
        np.testing.assert_allclose(sample.reference_logprobs, sample.logprobs, atol=1e-3)
        assert np.abs(sample.reference_logprobs - own).max() > 0.1
    free = DPO(reference_free=True)
    assert asyncio.run(free.finalize_samples(samples, learner, {})) == (samples, {})
    assert asyncio.run(algorithm.finalize_samples([], learner, {})) == ([], {})
