"""Comparisons by a judge: verdicts by hand, both orders, and `palestra eval --judge` with judges of known habits."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from core.http.test_chat_client import Script
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.failures import ContextLengthExceeded, RunFailed
from palestra.core.types import Answer, Episode, Node
from palestra.evaluation.evaluate import open_eval
from palestra.evaluation.judged import (
    JUDGE_ROLE,
    JUDGE_TOKENS,
    Judge,
    Judgement,
    as_judge,
    compare_judged,
    judge_pair,
    outcome,
    question,
    read_verdict,
    summarise,
)
from palestra.evaluation.target import EvalResult
from palestra.text.policies.base import Query
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.scripted import ScriptedPolicy


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


def reply_of(text: str) -> Episode:
    node = Node(0, None, 0, {"agent": "Say yes."}, {"agent": Answer(text, "agent@7")}, {"agent": 0.25}, done=True)
    return Episode("toy", 0, {"agent": "agent@7"}, [node])


def test_judge_reads_both_orders_without_names_and_rewards() -> None:
    seen = []

    def script(query, rng):
        seen.append(query.observation)
        return "A" if query.observation.index("yes!") < query.observation.index("no!") else "B"

    first, second = asyncio.run(judge_pair(ScriptedPolicy(script), reply_of("yes!"), reply_of("no!"), 0))
    assert (first.verdict, second.verdict) == ("A", "B") and sorted(seen) == sorted(
        [question(reply_of("yes!"), reply_of("no!")), question(reply_of("no!"), reply_of("yes!"))]
    )
    assert not any("agent@7" in text or "0.25" in text for text in seen) and all("Say yes." in text for text in seen)


def test_a_failed_judgement_loses_neither_the_other_order_nor_other_pairs() -> None:
    def script(query, rng):
        if "long" in query.observation.split("Assistant B")[0]:
            raise ContextLengthExceeded("2000 tokens")
        return "A"

    judge, plain = ScriptedPolicy(script), reply_of("yes!")
    long = asyncio.run(judge_pair(judge, reply_of("long"), plain, 0))
    assert [each.verdict for each in long] == [None, "A"]
    assert long[0].error == "ContextLengthExceeded: 2000 tokens" and not long[1].error
    both = (EvalResult({}, {}, []),) * 2
    found = summarise(both, [long, asyncio.run(judge_pair(judge, plain, plain, 0))], "judge")
    assert found.metrics() == {
        "wins": 0,
        "losses": 0,
        "ties": 2,
        "disagreed": 1,
        "unreadable": 1,
        "failed": 1,
        "win_rate": 0.5,
    }
    assert found.error == "ContextLengthExceeded: 2000 tokens"


def test_a_reply_that_is_cut_gives_no_verdict() -> None:
    """It may be the beginning of "A is worse"."""
    said = {"choices": [{"message": {"role": "assistant", "content": "Well.\nA"}, "finish_reason": "length"}]}
    with Script((200, said)) as server:
        judge = EndpointPolicy("judge", EndpointConfig(url=server.url, model="m"))
        first, second = asyncio.run(judge_pair(judge, reply_of("yes!"), reply_of("no!"), 0))
    assert (first.verdict, second.verdict) == (None, None) and first.is_cut and second.reply == "Well.\nA"


def test_unreadable_judgements_give_no_result() -> None:
    both = (EvalResult({}, {}, []),) * 2
    good, lost, cut = Judgement("A", "A"), Judgement(None, error="Lost: gone"), Judgement(None, "x" * 99 + "hm", True)
    with pytest.raises(RunFailed, match=r"for any of 2 pairs; failed replies: 1, the first with Lost: gone; replies w"):
        summarise(both, [(good, lost), (cut, good)], "tiny")
    with pytest.raises(
        RunFailed, match=r"^judge tiny .* the first ends 'x{78}hm', cut at its token limit \(--judge-tok"
    ):
        summarise(both, [(good, cut)], "tiny")
    assert summarise(both, [(good, lost), (good, Judgement("B", "B"))], "tiny").win_rate == 0.75


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    tree = {
        "env": {"type": "helpers.toys:Odd"},
        "policies": {
            "agent": {
                "type": "lora",
                "base": str(base),
                "system": "Say a number.",
                "sampling": {"max_tokens": 1, "stop": ["e"]},
            },
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
    assert found["failed"] == 0 and "error" not in found
    assert found["win_rate"] == 0.5


def test_result_is_printed_as_a_table(config: Path) -> None:
    done = CliRunner().invoke(app, ["eval", str(config), "--judge", "first", "--episodes", "4"])
    rows = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    assert ["win", "rate", "50.0%"] in rows and ["disagreed", "4"] in rows and ["failed", "0"] in rows


def test_unreadable_replies_are_counted_and_tie() -> None:
    both, a, b, mute = (EvalResult({}, {}, []),) * 2, Judgement("A"), Judgement("B"), Judgement(None, "no idea")
    found = summarise(both, [(a, b), (mute, b), (a, mute), (a, a)], "judge")
    assert (found.wins, found.ties, found.disagreed, found.unreadable, found.failed) == (1, 3, 1, 2, 0)


def test_a_comparison_without_a_verdict_fails(config: Path) -> None:
    done = CliRunner().invoke(app, ["eval", str(config), "--judge", "mute", "--against", "random", "--episodes", "3"])
    shown = " ".join(done.output.split())
    assert (
        done.exit_code == 1
        and "gave no verdict in both orders for any of 3 pairs; replies without a verdict: 6, " in shown
    )


def test_a_language_model_judges_with_its_own_sampling_and_role(config: Path) -> None:
    """The judge is made from a policy with one-token answers and another role."""
    with open_eval(str(config), {}, {}, 1, {"sampling": {"temperature": 0.5}}) as setup:
        assert setup.load_policy("http://127.0.0.1:1/v1#m").config.temperature == 0.5
        base = setup.load_policy("base")
        judge = as_judge(base)
        assert isinstance(base, LanguagePolicy) and base.sampling.max_tokens == 1 and base.sampling.stop == ("e",)
        assert (judge.sampling.max_tokens, judge.sampling.temperature, judge.sampling.stop) == (JUDGE_TOKENS, 0, ())
        assert as_judge(base, 7).sampling.max_tokens == 7
        prompt = judge.encoder.tokenizer.decode(judge.encode_prompt(Query(JUDGE_ROLE, "?")))
        assert JUDGE_ROLE in prompt and "Say a number" not in prompt


def test_an_endpoint_judges_as_it_is_configured() -> None:
    far = EndpointPolicy("far", EndpointConfig(url="http://127.0.0.1/v1", model="m", max_tokens=40, temperature=0.3))
    assert as_judge(far) is far and as_judge(ScriptedPolicy(["A"]), 9).name == ScriptedPolicy(["A"]).name
    assert (as_judge(far, 9).config.max_tokens, as_judge(far, 9).config.temperature) == (9, 0.3)


def test_one_pair_too_long_for_the_judge_is_reported(config: Path) -> None:
    """No prompt leaves room for an answer as long as the base's context."""
    asked = ["eval", str(config), "--judge", "base", "--judge-tokens", "512", "--episodes", "2"]
    done = CliRunner().invoke(app, asked)
    shown = " ".join(done.output.split())
    assert done.exit_code == 1 and "failed replies: 4, the first with ContextLengthExceeded" in shown


def test_an_unknown_judge_is_refused_before_play(config: Path) -> None:
    played: list[int] = []
    with pytest.raises(ValueError, match='no policy "nobody"'):
        compare_judged(
            str(config), {}, {}, "random", Judge("nobody"), episodes=2, on_progress=lambda n, of: played.append(n)
        )
    assert played == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "base"], "name the judge with --judge"),
        (["--judge-tokens", "9"], "name the judge with --judge"),
        (["--judge", "first", "--cross"], "--judge goes with --judge-tokens, --against"),
    ],
)
def test_incompatible_options_are_refused(config: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["eval", str(config), *arguments])
    assert done.exit_code != 0 and message in " ".join(done.output.split())
