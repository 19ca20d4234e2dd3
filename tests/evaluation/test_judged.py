"""Comparisons by a judge: verdicts by hand, both orders, and `palestra eval --judge` with judges of known habits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.evaluation.judged import compare_judged, judge_pair, outcome, question, read_verdict
from palestra.policies.scripted import ScriptedPolicy
from palestra.types import Answer, Episode, Node


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A is brief.\nB", "B"),
        ("Both are right.\n\n**Tie**.", "tie"),
        ("a", "A"),
        ("A is better", None),
        ("", None),
        ("A\nas I said", None),
    ],
)
def test_verdict_is_the_last_line(reply: str, verdict: str | None) -> None:
    assert read_verdict(reply) == verdict


def test_only_a_preference_in_both_orders_wins() -> None:
    assert outcome("A", "B") == "A" and outcome("B", "A") == "B"
    ties = [("A", "A"), ("B", "B"), ("tie", "tie"), ("A", "tie"), ("tie", "A"), (None, "B"), ("A", None), (None, None)]
    assert all(outcome(*verdicts) == "tie" for verdicts in ties)


def said(text: str) -> Episode:
    node = Node(0, None, 0, {"agent": "Say yes."}, {"agent": Answer(text, "agent@7")}, {"agent": 0.25}, done=True)
    return Episode("toy", 0, {"agent": "agent@7"}, [node])


def test_judge_reads_both_orders_without_names_and_rewards() -> None:
    seen = []

    def script(query, rng):
        seen.append(query.observation)
        return "A" if query.observation.index("yes!") < query.observation.index("no!") else "B"

    verdicts = asyncio.run(judge_pair(ScriptedPolicy(script), said("yes!"), said("no!"), 0))
    assert verdicts == ("A", "B") and sorted(seen) == sorted(
        [question(said("yes!"), said("no!")), question(said("no!"), said("yes!"))]
    )
    assert not any("agent@7" in text or "0.25" in text for text in seen) and all("Say yes." in text for text in seen)


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    tree = {
        "env": {"type": "toys:Odd"},
        "policies": {
            "agent": {"type": "lora", "base": str(base), "sampling": {"max_tokens": 1}},
            "first": {"type": "scripted", "answers": ["I like the first.\nA"]},
            "mute": {"type": "scripted", "answers": ["no idea"]},
        },
    }
    path = tmp_path / "odd.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_judge_that_prefers_a_position_makes_ties(config: Path) -> None:
    done = CliRunner().invoke(app, ["eval", str(config), "--judge", "first", "--episodes", "4", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["against"] == {"agent": "base"} and found["judge"] == "first"
    assert [found[name] for name in ("wins", "losses", "ties", "disagreed", "unreadable")] == [0, 0, 4, 4, 0]
    assert found["win_rate"] == 0.5


def test_unreadable_replies_are_counted_and_tie(config: Path) -> None:
    found = compare_judged(str(config), {}, {}, "random", "mute", episodes=3)
    assert found.metrics() == {"wins": 0, "losses": 0, "ties": 3, "disagreed": 0, "unreadable": 3, "win_rate": 0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "base"], "name who compares with --judge"),
        (["--judge", "first", "--cross"], "--judge goes with --against"),
    ],
)
def test_options_that_do_not_fit_are_refused(config: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["eval", str(config), *arguments])
    assert done.exit_code != 0 and message in " ".join(done.output.split())
