"""Debate: the env check, rewards, observations of each seat, and sources of topics."""

import asyncio
import json
import random
from itertools import product
from pathlib import Path

import pytest
from core.http.test_chat_client import Script
from helpers.toy_debates import expert, play

import palestra as pl
from palestra.environments.debate.arguments import SIDES
from palestra.environments.debate.env import Debate
from palestra.environments.debate.topics import TOPICS_FILE, TopicEntry, draw_file_topic, draw_synthetic_topic
from palestra.envs import check_env, validate_env_options
from palestra.envs.support.splits import SPLIT_SHARES, split_of_text
from palestra.text.policies.base import Query
from palestra.text.policies.endpoint import EndpointConfig, EndpointPolicy

DRILLS = {"source": "drills", "rendering": "compact"}
WORDS = ("claim", "because", "against", "so", "yes", "no", "r1", "r2", "r3", "r4", "P1", "C1", "pro", "con", "####")
SHAPES = [
    {"mode": mode, "judge": judge, "order": order, "rounds": rounds}
    for mode, judge, order, rounds in product(
        ("competitive", "truth"), ("rules", "seat"), ("turns", "simultaneous"), (1, 3)
    )
]


def last_step(env: Debate, seed: int = 0, **talks):
    return play(env, seed, **talks)[0][-1]


def random_answer(seat: str, observation: str, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 9)))


# ---- the env check


@pytest.mark.parametrize("options", SHAPES, ids=lambda o: " ".join(map(str, o.values())))
@pytest.mark.few(4)
def test_env_passes_the_env_check(options):
    for reward, source in product(("dense", "outcome"), ({}, DRILLS)):
        check_env(lambda: Debate(**options, **source, reward=reward), seeds=range(2), act=random_answer)  # noqa: B023


@pytest.mark.parametrize("options", SHAPES, ids=lambda o: " ".join(map(str, o.values())))
@pytest.mark.parametrize("source", [{}, DRILLS, {"source": "drills"}], ids=["topics", "compact", "drills"])
@pytest.mark.few(12)
def test_experts_at_all_seats_succeed(options, source):
    env = Debate(**options, **source)
    for seed in range(12):
        steps, _ = play(env, seed)
        success = steps[-1].info["success"]
        assert success if options["mode"] == "truth" else success["pro"]
        assert not steps[-1].truncated
        assert not any(any(step.info.get("invalid", {}).values()) for step in steps)


def test_an_expert_does_not_move_the_env():
    env = Debate(**DRILLS)
    env.reset(0)
    before = dict(env.__dict__)
    assert env.expert("pro", random.Random(0)) == env.expert("pro", random.Random(1))
    assert env.__dict__ == before


def test_experts_of_long_debates_do_not_repeat():
    for options in ({}, DRILLS):
        steps, _ = play(Debate(rounds=6, **options))
        case = steps[-1].info["case"]["pro"]
        assert case["evidence"] == pytest.approx(1) and case["structure"] == pytest.approx(1)
        assert case["repetition"] < 0.3


# ---- observations


def test_con_observes_pro_only_in_turn_based_debates():
    env = Debate(**DRILLS, rounds=1)
    first, second = play(env)[0][:2]
    assert list(first.observations) == ["pro"] and list(second.observations) == ["con"]
    assert first.observations["pro"].endswith("said none")
    pro = env.topic.facts_of("pro")
    assert second.observations["con"].endswith(f"said pro {' '.join(f.id for f in pro)} so yes")
    env = Debate(**DRILLS, rounds=2, order="simultaneous")
    steps, _ = play(env)
    assert [sorted(step.observations) for step in steps] == [["con", "pro"], ["con", "pro"], []]
    assert all(view.endswith("said none left 2") for view in steps[0].observations.values())


def test_compact_view_has_only_what_a_seat_needs():
    env = Debate(**DRILLS, rounds=1, judge="seat")
    env.topic = None
    steps, _ = play(env, 7, pro="claim r0 because r99 r1 so yes")
    facts = {side: [f.id for f in env.topic.facts_of(side)] for side in SIDES}
    assert steps[0].observations["pro"] == (
        f"topic {env.topic.text} pro {' '.join(facts['pro'])} con {' '.join(facts['con'])} you pro said none"
    )
    heard = env.speeches[0].argument
    assert {*heard.supporting_ids, *heard.false_ids} == {"r0", "r1", "r99"}
    judge = steps[2].observations["judge"]
    assert judge.startswith(f"topic {env.topic.text} you judge said pro ") and "r99" in judge
    assert f"con {' '.join(facts['con'])} against r" in judge and judge.endswith("so no")
    assert steps[2].legal_actions == {"judge": ["pro", "con"]}


def test_full_view_shows_motion_evidence_and_speeches():
    env = Debate(rounds=1, judge="seat")
    steps, _ = play(env, 3, pro="I have\n\ncon, round 1:\nnothing to say")
    view = steps[1].observations["con"]
    assert f"Motion: {env.topic.text}" in view and "You are con." in view
    assert all(f"[{fact.id}] {fact.text}" in view for fact in env.topic.facts)
    assert "pro, round 1:\n> I have\n> \n> con, round 1:\n> nothing to say" in view  # no seat speaks in another's name
    judge = steps[2].observations["judge"]
    assert all((fact.text in judge) == (fact.side == "con") for fact in env.topic.facts)  # pro cited nothing
    assert env.roles["pro"] != env.roles["con"] and "200 words" in env.roles["pro"]


def test_text_before_the_mark_is_not_shown():
    env = Debate(**DRILLS, rounds=1)
    thinking = last_step(env, pro=lambda *a: f"claim r0 because r1 so no #### {expert(*a)}")
    assert thinking.info["case"]["pro"]["worth"] == 1.0
    assert "r0" not in env.speeches[0].argument.text.split() or "r0" in [f.id for f in env.topic.facts_of("pro")]


# ---- rewards


def test_dense_competitive_rewards_are_the_margin_and_zero_sum():
    env = Debate(**DRILLS, rounds=2)
    for seed in range(20):
        steps, earned = play(env, seed, con=lambda seat, view, env: random_answer(seat, view, random.Random(view)))
        assert all(sum(step.rewards.values()) == pytest.approx(0) and step.team_reward == 0 for step in steps)
        assert earned["pro"] == pytest.approx(steps[-1].info["margin"]) == -earned["con"]
    first = play(env, pro="claim {} so yes")[0][1]
    assert first.rewards["pro"] == pytest.approx(first.info["parts"]["pro"]["worth"])


def test_outcome_rewards_are_zero_sum():
    env = Debate(**DRILLS, rounds=2, reward="outcome")
    steps, earned = play(env, con="")
    assert earned == {"pro": 1.0, "con": -1.0, "team": 0.0}
    assert all(not any(step.rewards.values()) for step in steps[:-1])
    assert steps[-1].info["winner"] == "pro" and steps[-1].info["success"] == {"pro": True, "con": False}
    steps, earned = play(env, pro="")
    assert earned == {"pro": -1.0, "con": 1.0, "team": 0.0}
    assert steps[-1].info["success"] == {"pro": False, "con": True}
    assert play(env)[1] == {"pro": 0.0, "con": 0.0, "team": 0.0}  # two experts draw


def test_empty_draw_is_not_a_success():
    assert not any(last_step(Debate(**DRILLS), pro="", con="").info["success"].values())


def test_unreadable_answers_are_flagged_and_earn_nothing():
    env = Debate(**DRILLS, rounds=1)
    steps, earned = play(env, pro="up up up")
    assert steps[1].info["invalid"] == {"pro": True} and steps[2].info["invalid"] == {"con": False}
    assert steps[1].rewards == {"pro": 0.0, "con": 0.0} and earned["pro"] == -1.0
    seated = play(Debate(**DRILLS, rounds=1, judge="seat"), pro="up up up")[0]
    assert seated[1].rewards == {"pro": -0.1, "con": 0.1}


def test_truth_rewards_team_and_honesty_each_seat():
    env = Debate(**DRILLS, mode="truth", rounds=1)
    steps, earned = play(env)
    assert earned["team"] == 1.0 and steps[-1].team_reward == 1.0
    sizes = {side: len(env.topic.facts_of(side)) for side in SIDES}
    assert earned["pro"] == pytest.approx(0.25 + 0.25 * sizes["pro"] / max(sizes.values()))
    assert earned["con"] == pytest.approx(0.25 + 0.25 * sizes["con"] / max(sizes.values()))
    assert play(Debate(**DRILLS, mode="truth", rounds=1, reward="outcome"))[1] == {"pro": 0, "con": 0, "team": 1.0}
    nothing = play(env, pro="", con="")
    assert nothing[1] == {"pro": -0.1, "con": -0.1, "team": 0.0} and not nothing[0][-1].info["success"]


def test_truth_is_found_if_both_show_all_facts():
    """Each seat concludes for its own side; the rules decide for the side with more facts."""
    env = Debate(mode="truth", rounds=2, split="all")

    def advocate(seat: str, observation: str, env: Debate) -> str:
        stance = "yes" if seat == "pro" else "no"
        return expert(seat, observation, env).rpartition("So:")[0] + f"So: {stance}."

    for seed in range(60):
        info = last_step(env, seed, pro=advocate, con=advocate).info
        assert info["success"] and info["winner"] == info["truth"] == env.topic.truth


def test_withheld_facts_hide_the_truth_unless_conceded():
    env = Debate(**DRILLS, mode="truth", rounds=1)
    for seed in range(30):
        truth, other = sorted(SIDES, key=lambda side: draw_synthetic_topic(seed, "train", "truth", 3).truth != side)
        assert last_step(env, seed, **{truth: "claim up because down so left"}).info["success"]
        fact = draw_synthetic_topic(seed, "train", "truth", 3).facts_of(other)[0].id
        own = {"pro": "yes", "con": "no"}[other]
        shown = f"claim {own} because {fact} so {own}"
        assert not last_step(env, seed, **{truth: "claim up because down so left", other: shown}).info["success"]


@pytest.mark.parametrize("verdict, judge", [("pro", 1.0), ("con", 0.0), ("both", -0.1)])
def test_judge_seat_decides_and_is_rewarded_for_agreeing_with_the_rules(verdict, judge):
    env = Debate(**DRILLS, rounds=1, judge="seat")
    steps, earned = play(env, con="claim no because up so no", judge=verdict)
    assert earned["judge"] == judge
    margin = {"pro": 1.0, "con": -1.0, "both": 0.0}[verdict]
    assert (earned["pro"], earned["con"]) == (margin, -margin)
    assert steps[-1].info["winner"] == {"both": "draw"}.get(verdict, verdict)
    assert steps[-1].info["rules_winner"] == "pro"
    assert steps[-1].info["invalid"] == {"judge": verdict == "both"}


@pytest.mark.parametrize("options", [{"branch_at": "turn"}, {"branch_at": "turn", "continue_from": "random"}])
def test_answers_are_not_compared_by_turn_where_a_judge_pays_at_the_end(options, tmp_path):
    policies = {"default": pl.Lora("./no_such_base")}
    for env in (DRILLS, DRILLS | {"judge": "seat", "mode": "truth"}):
        with pytest.raises(ValueError, match="no_such_base"):
            pl.train(env={"type": "debate", **env}, policies=policies, algorithm=pl.GRPO(**options), root=tmp_path)
    env = {"type": "debate", **DRILLS, "judge": "seat"}
    with pytest.raises(ValueError, match=r"pays after its last turn, .* set algorithm.branch_at: root"):
        pl.train(env=env, policies=policies, algorithm=pl.GRPO(**options), root=tmp_path)


def test_judge_may_choose_either_side_of_a_draw():
    for verdict in SIDES:
        assert play(Debate(**DRILLS, judge="seat"), judge=verdict)[1]["judge"] == 1.0


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("committed", ["truth", "other", "neither"])
def test_verdict_counts_only_for_the_side_that_the_judge_committed_to(rendering, committed):
    env = Debate(
        mode="truth", source="drills", rounds=1, judge="seat", commits_first=True, rendering=rendering, split="test"
    )
    step = env.reset(2)
    facts = [fact.id for fact in env.topic.facts]
    assert step.legal_actions and all(f" {fact}" in step.observations["judge"].replace("[", " ") for fact in facts)
    truth = env.topic.truth
    answers = {"truth": truth, "other": "con" if truth == "pro" else "pro", "neither": "both"}
    step = env.step({"judge": answers[committed]})
    assert step.info["invalid"] == {"judge": committed == "neither"} and set(step.observations) == {"pro"}
    for side in ("pro", "con"):
        step = env.step({side: env.expert(side, random.Random(0))})
    last = env.step({"judge": truth})
    assert last.info["winner"] == (truth if committed == "truth" else "draw")
    assert last.team_reward == float(committed == "truth") and last.info["invalid"] == {"judge": False}
    assert last.info["committed"] == {**answers, "neither": ""}[committed]


def test_exact_grade_of_a_verdict_is_that_of_the_rules():
    env = Debate(**DRILLS, rounds=1, judge="seat")
    steps, earned = play(env, con="claim no because up so no", judge="con")
    assert steps[-1].info["rules_winner"] == "pro" and (earned["pro"], earned["con"]) == (-1.0, 1.0)
    assert steps[-1].info["exact_grade"] == {"pro": 1.0, "con": -1.0}


def test_judge_seat_is_rewarded_for_the_truth():
    env = Debate(mode="truth", judge="seat", rounds=1)
    env.reset(0)
    wrong = "con" if env.topic.truth == "pro" else "pro"
    assert play(env, judge=env.topic.truth)[1]["team"] == 1.0
    steps, earned = play(env, judge=wrong)
    assert earned["team"] == 0.0 and not steps[-1].info["success"]


# ---- topics


def test_shipped_topics_are_complete():
    lines = [TopicEntry.model_validate_json(text) for text in TOPICS_FILE.read_text(encoding="utf-8").splitlines()]
    assert len(lines) >= 40 and len({line.topic for line in lines}) == len(lines)
    for line in lines:
        assert len(line.pro) >= 2 and len(line.con) >= 2
        assert len({*line.pro, *line.con}) == len(line.pro) + len(line.con)
        more = "pro" if len(line.pro) > len(line.con) else "con"
        assert line.truth == more if line.truth else len(line.pro) == len(line.con)


def test_splits_have_disjoint_topics_in_both_modes():
    for mode in ("competitive", "truth"):
        drawn = {
            split: {draw_file_topic(None, seed, split, mode).text for seed in range(300)} for split in SPLIT_SHARES
        }
        assert all(len(texts) >= 4 for texts in drawn.values())
        assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))
        truths = {
            split: {draw_file_topic(None, seed, split, mode).truth for seed in range(300)} for split in SPLIT_SHARES
        }
        assert mode == "competitive" or all(found == {"pro", "con"} for found in truths.values())


def test_facts_are_numbered_anew_for_each_seed():
    numbered = {}
    for seed in range(200):
        topic = draw_file_topic(None, seed, "test", "competitive")
        numbered.setdefault(topic.text, set()).add(tuple(fact.text for fact in topic.facts))
    assert all(len(orders) > 5 for orders in numbered.values())


@pytest.mark.parametrize("mode", ["competitive", "truth"])
def test_drills_are_many_with_disjoint_splits(mode):
    drawn = {split: set() for split in SPLIT_SHARES}
    for split in SPLIT_SHARES:
        for seed in range(800):
            topic = draw_synthetic_topic(seed, split, mode, 3)
            sets = sorted(sorted(fact.id for fact in topic.facts_of(side)) for side in SIDES)
            assert split_of_text(f"drill {sets}") == split
            drawn[split].add(str(sets))
    assert len(drawn["train"]) > 600
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))


def test_facts_of_a_drill_are_true_and_the_favoured_side_varies():
    truths = []
    for seed in range(300):
        topic = draw_synthetic_topic(seed, "train", "truth", 4)
        pro, con = (len(topic.facts_of(side)) for side in SIDES)
        assert topic.truth == ("pro" if pro > con else "con") and 1 <= min(pro, con) < max(pro, con) <= 4
        truths.append(topic.truth)
        even = draw_synthetic_topic(seed, "train", "competitive", 4)
        assert len(even.facts_of("pro")) == len(even.facts_of("con")) == 4 and even.truth is None
    assert 110 < truths.count("pro") < 190


def test_custom_topic_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    line = {"topic": "The gate was open.", "pro": ["Mud lay inside the gate.", "A witness saw it."], "con": ["Hm."]}
    path.write_text(json.dumps(line) + "\n\n" + json.dumps(line | {"topic": "It was shut.", "truth": "con"}))
    env = Debate(topics=path, split="all", rounds=1)
    assert {play(env, seed)[0][0] and env.topic.text for seed in range(20)} == {"The gate was open.", "It was shut."}
    truth = Debate(topics=path, split="all", mode="truth", rounds=1)
    assert last_step(truth).info["success"] and truth.topic.text == "It was shut."  # conceded: pro has more facts
    path.write_text(json.dumps(line | {"topic": "A new one."}))
    env.reset(0)
    assert env.topic.text == "A new one."


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("", {}, "holds no topics"),
        ("{", {}, r"line 1.*one JSON object"),
        ('{"topic": "x", "pro": ["a"]}', {}, "line 1: con is missing"),
        ('{"topic": "x", "pro": ["a"], "con": []}', {}, "line 1: con: List"),
        ('\n{"topic": "x", "pro": ["a"], "con": ["b"], "truth": "yes"}', {}, "line 2: truth"),
        ('{"topic": "x", "pro": ["a"], "con": ["b"], "side": "pro"}', {}, "line 1: unknown key side"),
        ('{"topic": "x", "pro": ["a"], "con": ["b"]}', {"mode": "truth"}, 'no topic with a "truth"'),
        ('{"topic": "x", "pro": ["a"], "con": ["b"]}', {"split": "dev"}, 'no topic of split "dev".*split: all'),
    ],
)
def test_invalid_topic_file_is_named_with_its_line(tmp_path, text, options, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Debate(topics=path, **options).reset(0)


def test_missing_topic_file_is_reported():
    with pytest.raises(ValueError, match="cannot read the topics"):
        Debate(topics=Path("nowhere.jsonl")).reset(0)


# ---- options


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounds": 0}, "rounds=0 is out of range"),
        ({"judge": "jury"}, "judge"),
        ({"commits_first": True, "mode": "truth"}, "set judge: seat"),
        ({"commits_first": True, "judge": "seat"}, "set mode: truth"),
        ({"mode": "truth", "facts": 1}, "facts=1 is out of range"),
        ({"facts": 8}, "facts=8"),
        ({"facts": 2}, "set source: drills, or leave it out"),
        ({"max_words": 3}, "max_words=3"),
        ({"rendering": "compact"}, "set source: drills"),
        ({"source": "drills", "topics": "mine.jsonl"}, "drop one of the two"),
    ],
)
def test_invalid_options_are_refused_with_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        Debate(**validate_env_options(Debate, options))


def test_a_model_behind_an_endpoint_judges_at_its_seat():
    """A real server: two debates, one verdict in prose and one that cannot be read."""
    verdicts = [{"choices": [{"message": {"role": "assistant", "content": text}}]} for text in ("Well.\n#### con", "?")]
    with Script(*((200, verdict) for verdict in verdicts)) as server:
        env = Debate(source="drills", rounds=1, judge="seat")
        judge = EndpointPolicy("judge", EndpointConfig(url=server.url, model="m"))
        winners = []
        for seed in range(2):
            step = env.reset(seed)
            while "judge" not in step.observations:
                step = env.step({seat: expert(seat, None, env) for seat in step.observations})
            asked = Query(env.roles["judge"], step.observations["judge"])
            (answer,) = asyncio.run(judge.act(asked))
            winners.append(env.step({"judge": answer.text}).info["winner"])
    assert winners == ["con", "draw"]
    messages = server.heard[0][1]["messages"]
    assert "You judge a debate" in messages[0]["content"] and "Your verdict" in messages[-1]["content"]


def test_wrong_seat_or_missing_reset_is_reported():
    env = Debate(**DRILLS, rounds=1)
    env.reset(0)
    with pytest.raises(ValueError, match="give them for pro"):
        env.step({"con": "hm"})
    play(env)
    with pytest.raises(ValueError, match="call reset"):
        env.step({"pro": "hm"})
