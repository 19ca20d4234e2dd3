"""One evaluation for language agents and networks: the same names of targets and policies, the same form of result."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.vector_toys import Counted

from palestra.core.config import dump, validate
from palestra.evaluation.evaluate import EvalSetup, cross_play, evaluate, open_eval
from palestra.evaluation.target import EvalResult, find_target
from palestra.evaluation.text import TextEvalSetup
from palestra.evaluation.vector import common_eval_options
from palestra.runs import Run
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.policies.lm import LanguagePolicy
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig


@pytest.fixture(scope="module")
def text(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of two language agents."""
    policy = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    path = tmp_path_factory.mktemp("text") / "whisper.yaml"
    tree = {"env": {"type": "helpers.toys:Whisper"}, "policies": {"guide": policy, "walker": policy}}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def vector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of two networks."""
    tree: dict[str, Any] = {
        "env": {"type": "helpers.vector_toys:Counted", "num_envs": 8},
        "policies": {"seat0": {"type": "net", "hidden": [4]}, "seat1": {"type": "net", "hidden": [4]}},
        "algorithm": {"type": "ppo", "rollout_length": 4, "epochs": 1, "minibatches": 1},
        "env_steps": 8 * 4 * 3,
        "checkpoint_every": 32,
        "log_every": 1,
    }
    config = validate(VectorConfig, tree)
    with Run.create(tmp_path_factory.mktemp("vector"), dump(config)) as run:
        trainer = build_vector_run(config)
        restore_checkpoint(trainer, run)
        assert run_training(trainer, run)
        return run.path


def test_seats_are_assigned_by_wildcards_in_both_kinds(text: Path, vector: Path) -> None:
    assert evaluate(text, seats={"*": "expert"}, episodes=2).policy_names == {"guide": "expert", "walker": "expert"}
    names = evaluate(vector, seats={"seat?": "random"}, episodes=2).policy_names
    assert names == {"seat0": "random/seat0", "seat1": "random/seat1"}


def test_an_option_that_does_not_exist_is_refused(text: Path) -> None:
    """`temperature` is an option of the command, and of `sampling`: it was ignored here."""
    with pytest.raises(TypeError, match="no option temperature: it has sampling, greedy"):
        evaluate(text, episodes=2, temperature=0)  # type: ignore[call-arg]


def test_result_has_policies_metrics_and_optional_episodes(text: Path, vector: Path) -> None:
    spoken = evaluate(text, seats={"guide": "expert", "walker": "expert"}, episodes=3)
    assert spoken.metrics["episodes"] == len(spoken.episodes) == 3 and spoken.metrics["success"] == 1
    played = evaluate(vector, episodes=3, swap=True)
    assert played.policy_names == {"seat0": "seat1@3", "seat1": "seat0@3"}
    assert played.metrics["episodes"] == 3 and played.episodes == []


def test_result_prints_its_seats_and_numbers_and_a_notebook_shows_three_episodes(text: Path, vector: Path) -> None:
    spoken = evaluate(text, seats={"guide": "expert", "walker": "expert"}, episodes=5)
    policies, metrics, episodes = spoken
    assert len(episodes) == 5 and metrics is spoken.metrics and set(policies.values()) == {"expert"}
    numbers = "guide, walker: expert; success 100.0% [56.6%, 100.0%]; 5 episodes"
    assert str(spoken) == repr(spoken) == f"EvalResult({numbers})"
    page = spoken._repr_html_()
    assert numbers in page and page.count("<article>") == 3 and "the best" in page and "the worst" in page
    broken = EvalResult({"guide": "a"}, {"episodes": 4.0, "failed": 1.0, "success": 1 / 3, "team_return": 0.0}, [])
    assert repr(broken) == "EvalResult(guide: a; success 33.3% [6.1%, 79.2%]; 4 episodes, 1 failed)"
    played = evaluate(vector, episodes=3)
    assert repr(played).startswith("EvalResult(seat0: seat0@3; seat1: seat1@3; success ") and len(repr(played)) < 130
    assert "; return seat0 " in repr(played) and "<article>" not in played._repr_html_()
    many = EvalResult(dict.fromkeys("abcdef", "<b>"), {"returns": {"a": 1.0, "b": -1.0}, "episodes": 2.0}, [])
    assert repr(many) == "EvalResult(6 seats: <b>; return a 1.00 b -1.00; 2 episodes)"
    assert "6 seats: &lt;b&gt;" in many._repr_html_()


def test_run_name_target_loads_a_policy_of_either_kind(text: Path, vector: Path) -> None:
    assert set(evaluate(f"{text}:guide", episodes=1).policy_names.values()) == {"guide"}
    assert evaluate(text, seats={"walker": f"{text}:guide"}, episodes=1).policy_names["walker"] == "guide"
    everywhere = evaluate(f"{vector}:seat1", episodes=1)
    assert everywhere.policy_names == {"seat0": "seat1@3", "seat1": "seat1@3"}
    other = evaluate(vector, seats={"seat0": f"{vector}:seat1"}, episodes=1)
    assert other.policy_names == everywhere.policy_names


def test_older_checkpoint_is_selected_by_step_count(vector: Path) -> None:
    assert find_target(vector, step=2).checkpoint.step == 1  # type: ignore[union-attr]
    assert evaluate(vector, episodes=1).policy_names == {"seat0": "seat0@3", "seat1": "seat1@3"}
    assert evaluate(vector, episodes=1, checkpoint=2).policy_names == {"seat0": "seat0@2", "seat1": "seat1@2"}
    with pytest.raises(ValueError, match="no checkpoint after 9 steps; it has: 2, 3"):
        evaluate(vector, episodes=1, checkpoint=9)


def test_env_without_run_is_played_by_the_given_policies() -> None:
    found = evaluate("kuhn_poker", seats={"*": "random"}, episodes=20)
    assert found.metrics["episodes"] == 20 and sum(found.metrics["returns"].values()) == pytest.approx(0)
    with pytest.raises(
        ValueError, match=r'no policy "default" has been trained here.*=random, script:NAME or RUN:NAME'
    ):
        evaluate("kuhn_poker", episodes=1)


def test_games_have_the_env_options_of_the_runs_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "cooks.yaml"
    evals = {"one": {"env": {"max_steps": 4, "layout": "coord_ring"}}, "two": {"env": {"max_steps": 4}}}
    env = {"type": "overcooked", "max_steps": 9, "num_envs": 2}
    policies = {"cook": {"type": "net"}}
    path.write_text(yaml.safe_dump({"env": env, "policies": policies, "evals": evals}))

    def steps(**changes: Any) -> float:
        return evaluate(path, changes, {"*": "random"}, episodes=2).metrics["steps_per_episode"]

    assert steps() == 4 and steps(max_steps=6) == 6
    assert common_eval_options(validate(VectorConfig, yaml.safe_load(path.read_text()))) == {"max_steps": 4}


def test_all_seat_assignments_use_the_same_instances(vector: Path) -> None:
    found = cross_play(vector, members=["seat0", "random"], episodes=4)
    assert len(found) == 4 and {result.metrics["episodes"] for result in found} == {4}
    alone = evaluate(vector, seats={"seat1": "random"}, episodes=4)
    (same,) = (f for f in found if list(f.policy_names.values()) == ["seat0@3", "random/seat1"])
    assert same.metrics == alone.metrics


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ({"nobody": "random"}, 'no seat "nobody"'),
        ({"*": "who"}, 'no policy "who"; the run has '),
        ({"*": "nowhere:x"}, "there is no run, config or env nowhere"),
    ],
)
def test_unknown_names_are_refused_for_both_kinds(
    text: Path, vector: Path, seats: dict[str, str], message: str
) -> None:
    for target in (text, vector):
        with pytest.raises(ValueError, match=message):
            evaluate(target, seats=seats, episodes=1)


def test_env_is_closed_after_evaluation(vector: Path) -> None:
    before = Counted.not_closed
    evaluate(vector, episodes=4)
    with pytest.raises(ValueError, match="no seat"):
        evaluate(vector, seats={"nobody": "random"}, episodes=4)
    assert Counted.not_closed == before


def test_the_base_at_a_seat_is_that_of_its_own_policy(base: Path, tmp_path: Path) -> None:
    """Guide and walker differ in base, sampling and prompt; "base" plays each seat as its own policy would, untrained.
    A seat without a language model is played by the first one's base."""
    guide = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    walker = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 5}, "history": "conversation"}
    tree = {"env": {"type": "helpers.toys:Whisper"}, "policies": {"guide": guide, "walker": walker}}
    path = tmp_path / "whisper.yaml"
    path.write_text(yaml.safe_dump(tree))
    names = {"guide": "base", "walker": f"{path}:base"}
    with open_eval(path, {}, names, 1, {}) as setup:
        own = _language_policies(setup)
    assert [own[seat].sampling.max_tokens for seat in ("guide", "walker")] == [2, 5]
    assert [own[seat].history for seat in ("guide", "walker")] == ["none", "conversation"]
    assert own["guide"].sampler is not own["walker"].sampler
    path.write_text(yaml.safe_dump(tree | {"policies": {"walker": walker, "guide": {"type": "expert"}}}))
    with open_eval(path, {}, {"*": "base"}, 1, {}) as setup:
        assert {policy.sampling.max_tokens for policy in _language_policies(setup).values()} == {5}


def _language_policies(setup: EvalSetup) -> dict[str, LanguagePolicy]:
    assert isinstance(setup, TextEvalSetup)
    return {seat: policy for seat, policy in setup.policies.items() if isinstance(policy, LanguagePolicy)}


def test_wildcards_of_seats_hold_in_a_run_of_several_envs(base: Path, tmp_path: Path) -> None:
    """Training seats the walker by the pattern `walk*`, and so does an evaluation of one of the envs."""
    policy = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    path = tmp_path / "two.yaml"
    envs = {"short": {"type": "helpers.toys:Whisper"}, "long": {"type": "helpers.toys:Whisper", "turns": 2}}
    tree = {"envs": envs, "seats": {"walk*": "one"}, "policies": {"one": policy, "default": policy}}
    path.write_text(yaml.safe_dump(tree))
    with open_eval(path, {"base_env": "long"}, {}, 1, {}) as setup:
        assert setup.policy_names == {"guide": "default", "walker": "one"}
