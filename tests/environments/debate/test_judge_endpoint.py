"""The judge behind an endpoint: a real server on this machine that fails, hangs, is biased, or reveals the key."""

import asyncio
import json
import re
import subprocess
import sys
import time
from email.utils import formatdate

import pytest
from helpers.toy_debates import Endpoint, Reply, debate_in, endpoint, expert, play, playing

from palestra.core.http.chat_client import EndpointError
from palestra.environments.debate import judge_endpoint
from palestra.environments.debate.env import Debate
from palestra.environments.debate.judge_endpoint import EndpointJudge, read_scores
from palestra.envs import check_env
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

KEY = "sk-very-secret-4711"


@pytest.fixture(autouse=True)
def isolated(monkeypatch):
    """No cached verdicts of other tests, no proxy of this machine, and a key."""
    monkeypatch.setattr(judge_endpoint, "_memory", {})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TOY_JUDGE_KEY", KEY)


def judge_at(server: Endpoint, **changes) -> EndpointJudge:
    given = {"key_env": "TOY_JUDGE_KEY", "timeout": 5, "retries": 3, "limit": 20, "backoff": 0.01} | changes
    return EndpointJudge(url=server.url, model="toy-judge", **given)


def debate(server: Endpoint, changes: dict | None = None, **options) -> Debate:
    given = {"source": "drills", "rounds": 1, "reward": "outcome"} | options
    return Debate(judge=judge_at(server, **changes or {}), **given)


def verdict(server: Endpoint, changes: dict | None = None, **options) -> dict:
    """The info of the last step of a debate between two experts."""
    return play(debate(server, changes, **options))[0][-1].info


def decide_for_con(body: dict, number: int = 0) -> str:
    """A fair judge that always decides for con, under whichever name con appears."""
    return json.dumps({"scores": {"A": 2, "B": 9} if con(body) == "B" else {"A": 9, "B": 2}})


def con(body: dict) -> str:
    return "A" if debate_in(body)["A holds that the motion is"] == "not right" else "B"


# ---- prompts and verdicts


def test_both_orders_are_judged_and_averaged():
    with endpoint(decide_for_con) as server:
        env = debate(server, reward="dense")
        steps, earned = play(env)
        first, second = sorted(server.bodies, key=con, reverse=True)
    assert steps[-1].info["winner"] == "con" and steps[-1].info["scores"] == pytest.approx({"pro": 0.2, "con": 0.9})
    assert earned["con"] == pytest.approx(0.7) == -earned["pro"]
    assert first["model"] == "toy-judge" and first["path"] == "/v1/chat/completions" and first["temperature"] == 0
    by_pro, by_con = (speech.argument.text for speech in env.speeches)
    assert debate_in(first)["speeches"] == [
        {"by": "A", "round": 1, "spoken": 1, "text": by_pro},
        {"by": "B", "round": 1, "spoken": 2, "text": by_con},
    ]
    assert debate_in(second)["speeches"] == [
        {"by": "A", "round": 1, "spoken": 2, "text": by_con},
        {"by": "B", "round": 1, "spoken": 1, "text": by_pro},
    ]
    assert debate_in(first)["facts"] == {fact.id: fact.text for fact in env.topic.facts}  # all were cited
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_judge_sees_cited_facts_only():
    with endpoint(decide_for_con) as server:
        env = debate(server)
        play(env, con="claim no because up so no")
    assert debate_in(server.bodies[0])["facts"] == {fact.id: fact.text for fact in env.topic.facts_of("pro")}


def test_swapping_cancels_position_bias():
    def first_wins(body, number):
        return '{"winner": "A"}'

    def biased(body, number):  # con is better by 2; the first speaker gets 5 more
        return json.dumps({"scores": {"A": 8, "B": 5} if con(body) == "B" else {"A": 10, "B": 1}})

    with endpoint(first_wins) as server:
        assert verdict(server)["winner"] == "draw"
        assert verdict(server, {"swap": False})["winner"] == "pro"
        assert len(server.bodies) == 3
    with endpoint(biased) as server:
        fair = verdict(server, split="dev")
        assert fair["winner"] == "con" and fair["margin"] == pytest.approx((0.8 + 0.1) / 2 - (0.5 + 1.0) / 2)
        assert verdict(server, {"swap": False}, split="dev")["winner"] == "pro"


def test_truth_mode_asks_the_judge_for_the_truth():
    with endpoint(decide_for_con) as server:
        for seed in range(8):
            env = debate(server, mode="truth")
            steps, earned = play(env, seed)
            assert steps[-1].info["success"] == (env.topic.truth == "con") == bool(earned["team"])
    assert "which side is right" in server.bodies[0]["messages"][0]["content"]


def test_env_passes_the_env_check_with_an_inconsistent_judge():
    def moody(body, number):
        return json.dumps({"scores": {"A": number % 11, "B": 5}})

    with endpoint(moody) as server:
        check_env(lambda: debate(server), seeds=range(2))


def test_request_fields_can_be_added():
    with endpoint(decide_for_con) as server:
        verdict(server, {"body": {"max_tokens": 500, "temperature": 0.7}, "key_env": None})
    assert server.bodies[0]["max_tokens"] == 500 and server.bodies[0]["temperature"] == 0.7
    assert "authorization" not in server.headers[0]


# ---- parsing of verdicts


@pytest.mark.parametrize(
    "reply, scores",
    [
        ('{"winner": "A"}', (1, 0)),
        ('{"winner": "draw"}', (0.5, 0.5)),
        ('{"scores": {"A": 3, "B": 7.5}, "reason": "..."}', (0.3, 0.75)),
        ('<think>{"winner": "B"}?</think>\n{"winner": "A"}', (1, 0)),
        ('```json\n{"winner": "B"}\n```', (0, 1)),
        ('{"winner": "B", "scores": {"A": 3, "B": 4}}', (0.3, 0.4)),
        ('{"winner": "A", "scores": {"A": 3, "B": 4}}', None),
        ('{"winner": "pro"}', None),
        ('{"winner": ["A"]}', None),
        ('{"scores": {"A": 3}}', None),
        ('{"scores": {"A": 3, "B": 11}}', None),
        ('{"scores": {"A": true, "B": 1}}', None),
        ('{"scores": {"A": NaN, "B": 1}}', None),
        ('{"scores": {"A": "3", "B": 1}}', None),
        ('I think that {"winner": "A"}', None),
        ('{"winner": "A"} {"winner": "B"}', None),
        ('["A"]', None),
        ("{}", None),
        ("A", None),
        ("", None),
    ],
)
def test_only_well_formed_verdicts_are_parsed(reply, scores):
    assert read_scores(reply) == (scores and pytest.approx(scores))


def test_unparsable_verdict_is_requested_again():
    def mumbles(body, number):
        return decide_for_con(body) if len(body["messages"]) == 4 else "Well, con I guess."

    with endpoint(mumbles) as server:
        assert verdict(server)["winner"] == "con"
    again = [body for body in server.bodies if len(body["messages"]) == 4]
    assert len(server.bodies) == 4 and len(again) == 2
    assert again[0]["messages"][2] == {"role": "assistant", "content": "Well, con I guess."}
    with endpoint(lambda body, number: "Who knows?") as server:
        with pytest.raises(EndpointError, match=r"no verdict that can be read, twice: 'Who knows\?'"):
            verdict(server, split="dev")
        assert len(server.bodies) <= 4


# ---- an endpoint that fails


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_failure_is_retried(status):
    with endpoint(lambda body, number: Reply(status=status) if number < 3 else decide_for_con(body)) as server:
        assert verdict(server)["winner"] == "con"
    assert len(server.bodies) == 5


def test_non_completion_page_is_retried():
    with endpoint(lambda body, number: Reply(raw="<html>busy") if number < 2 else decide_for_con(body)) as server:
        assert verdict(server)["winner"] == "con"


def test_retry_after_is_respected_in_seconds_and_as_date():
    for split in ("test", "dev"):
        retry_after = "1" if split == "test" else formatdate(time.time() + 2.5, usegmt=True)  # in whole seconds
        asked: list[float] = []

        def busy(body, number):
            asked.append(time.monotonic())  # noqa: B023
            return Reply(status=429, headers={"Retry-After": retry_after}) if number == 0 else decide_for_con(body)  # noqa: B023

        with endpoint(busy) as server:
            assert verdict(server, {"swap": False}, split=split)["winner"] == "con"
        assert asked[1] - asked[0] > 0.95


def test_retry_after_beyond_the_timeout_fails_at_once():
    with endpoint(lambda body, number: Reply(status=429, headers={"Retry-After": "3600"})) as server:
        begun = time.monotonic()
        with pytest.raises(EndpointError, match="pause of 3600 seconds"):
            verdict(server)
        assert time.monotonic() - begun < 10


def test_retries_are_limited_and_the_error_explains():
    with endpoint(lambda body, number: Reply(status=503)) as server:
        with pytest.raises(EndpointError, match=r"failed 3 times \(last: HTTP 503\)\. Check url") as error:
            verdict(server, {"retries": 2, "swap": False})
        assert len(server.bodies) == 3 and server.url in str(error.value) and "toy-judge" in str(error.value)


@pytest.mark.parametrize("status, text", [(401, "bad key"), (404, "no such model"), (400, "too long")])
def test_permanent_failure_is_not_retried(status, text):
    with endpoint(lambda body, number: Reply(status=status, raw=text)) as server:
        with pytest.raises(EndpointError, match=f"HTTP {status}: '{text}'"):
            verdict(server, {"swap": False})
        assert len(server.bodies) == 1


def test_timeout_is_retried():
    def slow_at_first(body, number):
        return Reply(wait=None) if number == 0 else decide_for_con(body)

    with endpoint(slow_at_first) as server:
        assert verdict(server, {"timeout": 1, "swap": False})["winner"] == "con"
    assert len(server.bodies) == 2


def test_unreachable_endpoint_is_reported():
    with endpoint(decide_for_con) as server:
        pass
    with pytest.raises(EndpointError, match=r"failed 2 times \(last: ConnectError"):
        verdict(server, {"retries": 1})


def test_total_timeout_is_respected():
    with endpoint(lambda body, number: Reply(wait=None)) as server:
        begun = time.monotonic()
        with pytest.raises(EndpointError, match=r"no verdict within limit: 1 seconds"):
            verdict(server, {"limit": 1, "timeout": 60})
        assert time.monotonic() - begun < 5


def test_hung_judge_does_not_block_other_debates():
    """200 debates at once; the judge never answers 20 of them. The others end first, and these fail."""

    def hangs_at_times(body, number):
        spoken = debate_in(body)["speeches"][0]["text"]
        return Reply(wait=None) if int(re.search(r"number (\d+)", spoken)[1]) % 10 == 0 else decide_for_con(body)

    with endpoint(hangs_at_times) as server:
        options = {"timeout": 2, "limit": 4, "retries": 1, "swap": False}
        arena = EpisodeRunner(lambda: debate(server, options), "debate")
        matches = [EpisodeSpec(0, {seat: numbered(i) for seat in ("pro", "con")}, i) for i in range(200)]
        done: list[bool] = []
        begun = time.monotonic()
        episodes = asyncio.run(arena.play_all(matches, Branching(), lambda episode: done.append(episode.error is None)))
        assert time.monotonic() - begun < 30
    failed = [i for i, episode in enumerate(episodes) if episode.error]
    assert failed == list(range(0, 200, 10))
    assert all("EndpointError" in episodes[i].error and "timeout: 2 seconds" in episodes[i].error for i in failed)
    assert done == [True] * 180 + [False] * 20
    assert all(episode.leaves()[0].info["winner"] == "con" for episode in episodes if not episode.error)


def numbered(i: int) -> ScriptedPolicy:
    return ScriptedPolicy(lambda query, rng: f"claim yes because number {i} so no", "numbered")


# ---- cache of verdicts


def test_equal_debates_are_judged_once():
    with endpoint(decide_for_con) as server:

        async def many() -> list:
            return await asyncio.gather(*(playing(debate(server)) for _ in range(10)))

        assert {steps[-1].info["winner"] for steps, _ in asyncio.run(many())} == {"con"}
        assert len(server.bodies) == 2  # both orders, for each of the ten debates
        verdict(server)
        assert len(server.bodies) == 2
        play(debate(server), 1)
        assert len(server.bodies) == 4


def test_failures_are_not_cached():
    with endpoint(lambda body, number: Reply(status=400) if number == 0 else decide_for_con(body)) as server:
        with pytest.raises(EndpointError):
            verdict(server, {"swap": False})
        assert verdict(server, {"swap": False})["winner"] == "con"


def test_disk_cache_survives_the_process(tmp_path, monkeypatch):
    cache = tmp_path / "verdicts" / "toy.sqlite"
    with endpoint(decide_for_con) as server:
        before = verdict(server, {"cache": cache})
        assert len(server.bodies) == 2
        monkeypatch.setattr(judge_endpoint, "_memory", {})
        assert verdict(server, {"cache": cache}) == before and len(server.bodies) == 2
        verdict(server, {"cache": cache, "swap": False})  # another question
        assert len(server.bodies) == 3
        code = (
            "import asyncio, random\n"
            "from palestra.envs import make_env\n"
            "async def go():\n"
            f"    env = make_env('palestra.environments.debate.env:Debate', source='drills', rounds=1, judge=dict(\n"
            f"        url={server.url!r}, model='toy-judge', cache={str(cache)!r}))\n"
            "    step = env.reset(0)\n"
            "    while not step.done:\n"
            "        step = await env.step({s: env.expert(s, random.Random(0)) for s in step.observations})\n"
            "    print(step.info['winner'])\n"
            "asyncio.run(go())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "con" and len(server.bodies) == 3
    assert KEY.encode() not in cache.read_bytes()


def test_invalid_cache_file_is_reported(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("I am no database, and nobody may write into me. " * 20)
    with endpoint(decide_for_con) as server, pytest.raises(ValueError, match=r"cannot keep verdicts in .*notes.txt"):
        debate(server, {"cache": path})
    assert path.read_text().startswith("I am no database")


def test_uncreatable_cache_folder_is_reported(tmp_path):
    (tmp_path / "notes.txt").write_text("no folder")
    with pytest.raises(ValueError, match=r"cannot keep verdicts in .*toy.sqlite: .*name another file as judge.cache"):
        EndpointJudge(url="http://127.0.0.1:1", model="m", cache=tmp_path / "notes.txt" / "toy.sqlite").check()


# ---- the key


def test_key_is_in_no_error_repr_or_info():
    def tells_tales(body, number):
        return Reply(status=401, raw=f"the key {KEY} is not one of ours; not {KEY}, I said")

    with endpoint(tells_tales) as server:
        env = debate(server)
        with pytest.raises(EndpointError) as error:
            play(env)
        arena = EpisodeRunner(lambda: debate(server), "debate")
        talk = {seat: ScriptedPolicy(["claim yes because no so up"]) for seat in env.seats}
        (episode,) = asyncio.run(arena.play_all([EpisodeSpec(0, talk, 0)], Branching()))
    assert "***" in str(error.value) and "***" in episode.error
    chain = [error.value, error.value.__cause__, error.value.__context__]
    for shown in (*map(repr, chain), repr(episode), repr(env.judge), repr(vars(env)), env.judge.model_dump_json()):
        assert KEY not in shown
    with endpoint(decide_for_con) as server:
        assert KEY not in repr(verdict(server))


def test_missing_or_invalid_key_is_reported_without_showing_it(monkeypatch):
    with endpoint(decide_for_con) as server:
        for key, message in (("", "set the environment variable TOY_JUDGE_KEY"), ("sk 12\n34", "one line of ASCII")):
            monkeypatch.setenv("TOY_JUDGE_KEY", key)
            with pytest.raises(ValueError, match=message) as error:
                debate(server)
            assert "12" not in str(error.value)


def test_experts_cite_all_facts_of_a_drill():
    """An assumption of the tests above: two experts cite all facts of a drill."""
    env = Debate(source="drills", rounds=1)
    play(env)
    assert all(set(s.argument.supporting_ids) == {f.id for f in env.topic.facts_of(s.side)} for s in env.speeches)
    assert expert("pro", "", env)
