"""pass@k and majority vote: by hand, by enumeration, and in evaluations from the command line."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.config import dump, validate
from palestra.core.types import Episode, Node
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.rollouts.sample_metrics import majority_success, pass_at_k, sample_metrics, sample_rows


def sample(success, answer=None, **info):
    info |= {"success": success} | ({} if answer is None else {"answer": answer})
    return Episode("hand", 0, {"a": "p"}, [Node(0, None, 0, {}, {}, done=True, info=info)])


def unanswered():
    """An episode whose env reports that the team gave no answer."""
    return Episode("hand", 0, {"a": "p"}, [Node(0, None, 0, {}, {}, done=True, info={"answer": None})])


def of_instances(episodes, samples):
    """Numbers the instances of episodes, of which each has `samples` neighbours."""
    return [replace(episode, seed=i // samples) for i, episode in enumerate(episodes)]


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 2, 1) == 0.25 and pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)
    for wrong in ((8, 2, 9), (8, 2, 0), (4, 5, 1)):
        with pytest.raises(ValueError, match="must be from 1"):
            pass_at_k(*wrong)


def test_majority_vote_by_hand():
    """Three answer 7 and two 8; a tie counts as the mean; an episode without an answer does not vote."""
    seven, eight, none = sample(True, "7"), sample(False, " 8"), unanswered()
    assert majority_success([seven, seven, seven, eight, eight]) == 1
    assert majority_success([seven, eight, eight, none, none, none]) == 0
    assert majority_success([seven, eight, none]) == 0.5 and majority_success([none, none]) == 0


def test_an_env_without_final_answers_has_no_majority():
    """Answers of seats are not the team's answer."""
    ended = sample(True, answers={"a": "7", "b": "8"})
    assert "maj_at_k" not in sample_metrics([ended] * 4, 2) and "maj_at_k" not in sample_metrics([sample(True)] * 4, 2)


def test_an_instance_without_any_answer_counts_as_lost():
    """Whether the env reports answers is decided over all instances: in one of them no sample may have an answer."""
    cut_off, solved = sample(False), sample(True, "7")
    assert sample_metrics(of_instances([cut_off, cut_off, solved, solved], 2), 2)["maj_at_k"] == {"2": 0.5}
    silent = of_instances([unanswered(), unanswered(), solved, solved], 2)
    assert sample_metrics(silent, 2)["maj_at_k"] == {"2": 0.5}


def test_without_success_there_is_no_pass_at_k_and_no_majority():
    """An env that reports no success, whose rewards are any numbers: absent is not failed."""
    node = Node(0, None, 0, {}, {}, team_reward=0.4, done=True, info={"answer": "7"})
    episodes = of_instances([Episode("hand", 0, {"a": "p"}, [node])] * 4, 2)
    assert sample_metrics(episodes, 2) == {"episodes": 2.0, "samples": 2.0}


def test_samples_of_a_repeated_instance_are_of_one_instance():
    """Two instances, each played by two seeds with two samples: intervals are over two values of four samples."""
    episodes = [replace(sample(i < 4), seed=i // 2, instance=i // 4) for i in range(8)]
    found = sample_metrics(episodes, 2)
    assert found["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert found["pass_at_k_ci95"]["1"] == pytest.approx(1.96 * 0.5**0.5 / 2**0.5)


def test_metrics_are_means_over_instances():
    """One and four successes of four: pass@1 is 1/4 and 1, pass@2 is 1/2 and 1. A failed sample is no success."""
    episodes = of_instances([sample(i == 0, "7" if i == 0 else "8") for i in range(4)] + [sample(True, "7")] * 4, 4)
    found = sample_metrics(episodes, 4)
    assert found["episodes"] == 2 and found["samples"] == 4
    assert found["pass_at_k"] == pytest.approx({"1": 0.625, "2": 0.75, "4": 1.0})
    assert found["pass_at_k_ci95"]["1"] == pytest.approx(1.96 * 0.75 / 2**0.5 / 2**0.5)
    assert found["maj_at_k"] == {"4": 0.5}
    assert dict(sample_rows(found))["pass@1"] == "62.5% ± 73.5%"
    assert sample_metrics(episodes, 1) == {} and sample_rows({}) == []
    episodes[1].error = "lost"
    assert sample_metrics(episodes, 4)["pass_at_k"] == pytest.approx(
        {"1": (1 / 3 + 1) / 2, "2": (2 / 3 + 1) / 2, "4": 1}
    )
    assert set(sample_metrics([sample(True)] * 3, 3)["pass_at_k"]) == {"1", "2", "3"}


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """An untrained pair of agents, evaluated with four samples before and after one step."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 1}}
    tree = {
        "steps": 1,
        "episodes": 2,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": dict(speech), "walker": dict(speech)},
        "evals": {"test": {"episodes": 20, "env": {"split": "test"}, "samples": 4}, "one": {"episodes": 20}},
    }
    config = validate(TextConfig, tree)
    with Run.create(tmp_path_factory.mktemp("runs"), dump(config), "run") as opened:
        assert run_training(build(config), opened)
        return opened.path


def test_run_records_sample_metrics(run):
    lines = {line["name"]: line for line in read_lines(run / "evals.jsonl")}
    assert "pass_at_k" not in lines["one"]
    found = lines["test"]
    assert found["episodes"] == 20 and found["samples"] == 4 and found["pass_at_k"]["1"] == found["success"]
    assert found["pass_at_k"]["1"] < found["pass_at_k"]["2"] < found["pass_at_k"]["4"]


def test_eval_command_prints_sample_metrics(run):
    shown = CliRunner().invoke(app, ["eval", str(run), "--episodes", "10", "--samples", "4"])
    assert shown.exit_code == 0 and "pass@4" in shown.output
    plain = CliRunner().invoke(app, ["eval", str(run), "--episodes", "10", "--samples", "4", "--json"])
    found = json.loads(plain.stdout)
    assert found["samples"] == 4 and set(found["pass_at_k"]) == {"1", "2", "4"}
    report = CliRunner().invoke(app, ["report", str(run), "--out", str(run / "page.html")])
    assert report.exit_code == 0 and "pass@4" in (run / "page.html").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["math", "--env", "team=single"],
        ["math", "--env", "kinds=[arithmetic]", "--env", "unsafe=true"],
        ["math_review"],
        ["math_relay"],
        ["math_relay", "--env", "team=single"],
    ],
)
def test_final_answer_of_a_team_votes(arguments):
    options = ["--seats", "*=expert", "--episodes", "3", "--samples", "2", "--json"]
    done = CliRunner().invoke(app, ["eval", *arguments, *options])
    found = json.loads(done.stdout)
    assert found["maj_at_k"] == {"2": 1.0} and found["pass_at_k"] == {"1": 1.0, "2": 1.0}
