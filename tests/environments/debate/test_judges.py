"""The rule-based judge: cases by hand, and attempts to cheat it."""

import random

import pytest
from helpers.toy_debates import expert, play

from palestra.environments.debate.argument_parser import parse_argument
from palestra.environments.debate.arguments import Argument, Fact, Topic, content_words
from palestra.environments.debate.env import Debate
from palestra.environments.debate.judges import RuleJudge, ScoreWeights, Speech, read_verdict, repetition_rate
from palestra.environments.debate.topics import FACT_TOKENS
from palestra.envs import make_env

DRILL = Topic(
    "c1", (Fact("r1", "r1", "pro"), Fact("r7", "r7", "pro"), Fact("r3", "r3", "con"), Fact("r9", "r9", "con"))
)
TRAM = Topic(
    "The town should build a tram.",
    (
        Fact("P1", "A tram carries 160 riders, twice as many as a bus.", "pro"),
        Fact("P2", "The buses on the hill break down every nine days.", "pro"),
        Fact("C1", "Laying rails would close the market street for a year.", "con"),
        Fact("C2", "Half of the riders travel before seven in the morning.", "con"),
    ),
)
PRO = (
    "Claim: the town needs a tram.\nBecause: one tram carries 160 riders, as many as two buses [P1], and buses on the "
    "hill break down all the time [P2].\nSo: yes."
)


def parsed_answers(topic: Topic, *answers: str, longest: int = 200) -> list[Argument]:
    """The parsed answers of pro and con in turn."""
    return [parse_argument(answer, topic, ("pro", "con")[i % 2], longest) for i, answer in enumerate(answers)]


def scores(topic: Topic, *answers: str, **options) -> list[Speech]:
    """The parsed answers, and their scores."""
    rules = RuleJudge(topic, (len(answers) + 1) // 2, **options)
    arguments = parsed_answers(topic, *answers)
    return [Speech(i // 2 + 1, a, rules.score_argument(a, arguments[:i])) for i, a in enumerate(arguments)]


# ---- parsing


def test_compact_arguments_are_parsed():
    (argument,) = parsed_answers(DRILL, "claim r1 because r7 so yes")
    assert (argument.has_claim, argument.has_reason, argument.has_conclusion, argument.stance) == (
        True,
        True,
        True,
        "pro",
    )
    assert argument.supporting_ids == ("r1", "r7") and argument.false_ids == argument.rebutted_ids == ()
    _, con = parsed_answers(DRILL, "", "r9 because r3 r1 against r7 r12 so no")
    assert con.has_claim and con.supporting_ids == ("r9", "r3")  # text before the first keyword is a claim
    assert con.false_ids == ("r1",)  # the other side's fact, cited as its own
    assert sorted(con.rebutted_ids) == ["r12", "r7"] and con.stance == "con"


def test_prose_arguments_are_parsed():
    pro, con = parsed_answers(
        TRAM,
        PRO,
        "I argue that the town can wait with its tram. Since laying rails would close the market street for a year, "
        "shops would suffer. However, that buses break down every nine days can be mended by new brakes (P2). "
        "Therefore no.",
    )
    assert pro.supporting_ids == ("P1", "P2") and pro.has_claim and pro.has_reason and pro.has_conclusion
    assert con.supporting_ids == ("C1",)  # quoted without its number
    assert (
        con.rebutted_ids == ("P2",) and con.has_claim and con.has_reason and con.has_conclusion and con.stance == "con"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Claim: there are so many riders that the town is against the bus. Because: the hill needs a tram. So: yes.",
        "**Claim:** the town needs a tram.\n- **Because:** the hill is steep and buses fail.\n- **So:** yes",
        "Let me think. Against? So what... #### The town needs a tram because hills wear buses out, so yes",
    ],
)
def test_keywords_inside_a_sentence_start_no_part(text):
    (argument,) = parsed_answers(TRAM, text)
    assert (argument.has_claim, argument.has_reason, argument.has_conclusion) == (True, True, True)
    assert argument.rebuttal_words == () and argument.stance == "pro"


def test_bare_numbers_are_not_citations():
    (bare,) = parsed_answers(TRAM, "Claim: a tram for the town. Because: P1 P2. So: yes.")
    assert bare.supporting_ids == () and bare.false_ids == () and not bare.has_reason
    (other,) = parsed_answers(TRAM, "Because: the purple monkey dances slowly tonight [P1]. So: yes.")
    assert other.supporting_ids == ()
    (speech,) = parsed_answers(TRAM, "Because: a tram carries more riders [P1]. So: yes.")
    assert speech.supporting_ids == ("P1",)


def test_conclusion_needs_a_reason_and_the_own_side():
    assert not parsed_answers(DRILL, "so yes claim r1 because r7")[0].has_conclusion
    assert not parsed_answers(DRILL, "claim r1 so yes")[0].has_conclusion
    other = parsed_answers(DRILL, "claim r1 because r7 so no")[0]
    assert not other.has_conclusion and other.stance == "con"


def test_too_long_arguments_are_cut():
    (argument,) = parsed_answers(DRILL, "claim r1 because r7 so yes " + "up " * 94, longest=10)
    assert argument.text == "claim r1 because r7 so yes up up up up"
    assert argument.read_share == pytest.approx(38 / (27 + 3 * 94 - 1))  # in characters, without the last blank
    (endless,) = parsed_answers(DRILL, "x" * 100_000, longest=10)
    assert endless.read_share == pytest.approx(120 / 100_000)


def test_stop_words_and_inflection_are_ignored():
    assert content_words("The buses' brakes are worn, so they need mending!") == content_words(
        "bus brake worn needs mend"
    )


# ---- scores worked by hand: structure 1/4, evidence 1/2, rebuttal 1/4, off 1/4 of repetition


def test_best_argument_scores_one():
    pro, con = scores(DRILL, "claim r1 because r7 so yes", "claim r3 because r9 against r7 so no")
    assert pro.parts.worth == con.parts.worth == 1.0
    parts = pro.parts
    assert (parts.structure, parts.evidence, parts.rebuttal, parts.repetition, parts.honesty) == (1, 1, 1, 0, 1)


def test_partial_evidence_without_rebuttal_by_hand():
    _, con = scores(DRILL, "claim r1 because r7 so yes", "claim r3 because r3 so no")
    # The reason adds nothing to the claim, and without a reason there is no conclusion; one fact of two; no rebuttal of
    # pro.
    assert con.parts.structure == pytest.approx(1 / 3)
    assert con.parts.evidence == pytest.approx(1 / 2) and con.parts.rebuttal == 0
    assert con.parts.worth == pytest.approx(1 / 4 / 3 + 1 / 2 / 2)


def test_fabricated_facts_lower_the_score():
    _, con = scores(DRILL, "claim r1 because r1 so yes", "claim r3 because r9 r1 against r7 r5 so no")
    # Named: r3, r9 (its own), r1 (pro's, as its own), r5 (of no seat), r7 (pro's, but not cited): 2 of 5 are real.
    assert con.parts.honesty == pytest.approx(2 / 5) and con.parts.evidence == pytest.approx(2 / 5)
    assert con.parts.rebuttal == 0  # r1, which pro did cite, is not argued against
    assert con.parts.worth == pytest.approx(1 / 4 + 2 / 5 / 2)


def test_rebuttal_score_is_shared_with_fabrications():
    _, con = scores(DRILL, "claim yes because r1 so yes", "claim r3 because r9 against r1 r7 so no")
    assert con.parts.rebuttal == pytest.approx(1 / 2)


def test_fabricated_facts_can_be_rebutted():
    _, con = scores(DRILL, "claim yes because r12 so yes", "claim r3 because r9 against r12 so no")
    assert con.parts.rebuttal == 1 and con.parts.honesty == 1


def test_silent_opponent_needs_no_rebuttal():
    left, made_up = "claim r3 because r9 so no", "claim r3 because r9 against r1 so no"
    assert scores(DRILL, "", left)[1].parts.rebuttal == 1.0
    assert scores(DRILL, "", made_up)[1].parts.rebuttal == 0.0
    assert scores(DRILL, "", "")[1].parts.worth == 0.0


def test_scores_over_rounds_count_each_fact_once():
    speeches = scores(
        DRILL,
        "claim yes because r1 so yes",
        "claim r3 because r9 against r1 so no",
        "claim r1 because r7 against r3 so yes",
        "claim r3 because r9 against r1 so no",
    )
    first, all_of_it, second, again = [s.parts for s in speeches]
    assert (first.structure, first.evidence, first.rebuttal) == (0.5, 0.5, 0.5)
    assert (second.structure, second.evidence, second.rebuttal) == (0.5, 0.5, 0.5)  # r1 was cited before, r7 is new
    assert first.worth + second.worth == pytest.approx(1.0)
    assert (all_of_it.structure, all_of_it.evidence, all_of_it.rebuttal) == (0.5, 1.0, 0.5)
    # r7 is new and not answered, nothing else is new, and all of its three runs of three words occurred before.
    assert (again.structure, again.evidence, again.rebuttal, again.repetition) == (0.5, 0, 0, 0.5)
    assert again.worth == pytest.approx(0.5 / 4 - 0.5 / 4)


def test_prose_is_scored_by_the_same_rules():
    con = (
        "Claim: a tram would hurt the town. Because: laying the rails would close the market street for a whole year "
        "[C1]. Against: that it carries 160 riders helps few, when half of them travel before seven [P1, C2]. So: no."
    )
    speeches = scores(TRAM, PRO, con)
    assert [s.parts.worth for s in speeches] == [1.0, 1.0]
    unanswered = scores(TRAM, PRO, con.replace("Against: that it carries 160 riders helps few, when", "And"))[1]
    assert unanswered.parts.rebuttal == 0


def test_paraphrases_can_be_rebutted():
    pro = "Claim: the town likes its tram drivers more than anybody else. Because: the town is proud of them. So: yes."
    answer = (
        "Claim: the town is poor. Because: rails would close the market street for a year [C1]. Against: {} So: no."
    )
    assert (
        scores(TRAM, pro, answer.format("drivers whom a town likes drive buses just as well."))[1].parts.rebuttal == 1
    )
    assert scores(TRAM, pro, answer.format("the weather is bad."))[1].parts.rebuttal == 0


def test_repetition_counts_runs_of_three():
    assert repetition_rate(tuple("abcd"), []) == 0
    assert repetition_rate(tuple("abcabc"), []) == pytest.approx(1 / 4)  # abc bca cab ABC
    assert repetition_rate(tuple("abcd"), [tuple("xabc")]) == pytest.approx(1 / 2)
    assert repetition_rate(["a"], [["a"]]) == 1 and repetition_rate([], []) == 0


def test_weights_are_options():
    only = ScoreWeights(structure=0, evidence=1, rebuttal=0, repetition=0)
    speeches = scores(DRILL, "r1 r7", "claim r3 because r9 against r1 so no", weights=only)
    assert [s.parts.worth for s in speeches] == [1.0, 1.0]
    env = make_env("palestra.environments.debate.env:Debate", weights={"evidence": 0.5})
    assert env.weights == ScoreWeights(evidence=0.5)
    with pytest.raises(ValueError, match="no side could ever win"):
        make_env("palestra.environments.debate.env:Debate", weights={"structure": 0, "evidence": 0, "rebuttal": 0})


# ---- verdicts


def test_higher_score_wins_and_equal_scores_draw():
    rules = RuleJudge(DRILL, 1)
    best, worse = "claim r1 because r7 so yes", "claim r3 because r3 so no"
    assert rules.verdict(scores(DRILL, best, worse)).winner == "pro"
    assert rules.verdict(scores(DRILL, best, worse)).margin == pytest.approx(1 - 1 / 3)
    assert rules.verdict(scores(DRILL, "", worse)).winner == "con"
    assert rules.verdict(scores(DRILL, "", "")).winner == "draw"


UNEVEN = Topic("c1", (*DRILL.facts, Fact("r11", "r11", "con")))


def test_truth_mode_favours_the_side_with_more_facts():
    answers = ("claim r1 because r7 so yes", "claim r3 because r9 r11 against r1 so no")
    pro, con = scores(UNEVEN, *answers, mode="truth")
    assert (pro.parts.evidence, con.parts.evidence) == (pytest.approx(2 / 3), 1.0)
    assert RuleJudge(UNEVEN, 1, "truth").verdict([pro, con]).winner == "con"
    assert RuleJudge(UNEVEN, 1).verdict(scores(UNEVEN, *answers)).winner == "draw"  # each seat cites all its facts


def test_truth_mode_allows_concession():
    answers = ("claim r1 because r7 so no", "claim no because r5 so up")  # con cites nothing, but pro concedes
    assert RuleJudge(UNEVEN, 1, "truth").verdict(scores(UNEVEN, *answers, mode="truth")).winner == "con"
    # in competitive mode no seat concedes
    assert RuleJudge(UNEVEN, 1).verdict(scores(UNEVEN, *answers)).winner == "pro"
    crossed = scores(UNEVEN, "claim r1 because r7 so no", "claim r3 because r3 so yes", mode="truth")
    assert RuleJudge(UNEVEN, 1, "truth").verdict(crossed).winner == "pro"  # both concede: the scores decide


def test_verdict_must_name_exactly_one_side():
    assert read_verdict("pro") == read_verdict(" Pro.") == read_verdict("con is weak... #### **pro**") == "pro"
    assert [read_verdict(text) for text in ("", "pro con", "process", "#### ", "yes")] == [None] * 5


# ---- attempts to win without arguing


def stuffed(seat: str, observation: str, env: Debate) -> str:
    return "claim because reason evidence since therefore so conclusion against rebuttal however hence thus " * 8


def numbers(seat: str, observation: str, env: Debate) -> str:
    return "Claim: " + " ".join(fact.id for fact in env.topic.facts) + f" so {'yes' if seat == 'pro' else 'no'}"


def own_numbers(seat: str, observation: str, env: Debate) -> str:
    claim, *rest = [fact.id for fact in env.topic.facts_of(seat)]
    other = env.topic.facts_of("con" if seat == "pro" else "pro")[0].id
    return f"Claim: {claim}. Because: {' '.join(rest)}. Against: {other}. So: {'yes' if seat == 'pro' else 'no'}."


def parrot(seat: str, observation: str, env: Debate) -> str:
    return observation


def all_facts(seat: str, observation: str, env: Debate) -> str:
    """Cites all evidence as its own, with every part of an answer."""
    reasons = " ".join(f"{fact.text} [{fact.id}]." for fact in env.topic.facts)
    return f"Claim: {env.topic.text} Because: {reasons} So: {'yes' if seat == 'pro' else 'no'}."


def word_salad(seat: str, observation: str, env: Debate) -> str:
    words = " ".join(["because so therefore P1 C2 claim", *(fact.text for fact in env.topic.facts)]).split()
    return " ".join(random.Random(observation).choices(words, k=150))


def enormous(seat: str, observation: str, env: Debate) -> str:
    return expert(seat, observation, env) + " and so on" * 20_000


def again_and_again(seat: str, observation: str, env: Debate) -> str:
    return (expert(seat, observation, env) + " ") * 30


GAMERS = ["", "yes " * 50_000, stuffed, numbers, own_numbers, parrot, all_facts, word_salad, enormous, again_and_again]


@pytest.mark.parametrize("gamer", GAMERS, ids=lambda g: g[:4] or "empty" if isinstance(g, str) else g.__name__)
@pytest.mark.parametrize("side", ["pro", "con"])
@pytest.mark.few(8)
def test_honest_argument_beats_a_cheat(gamer, side):
    env = Debate(split="all", rounds=1)
    won = [play(env, seed, **{side: gamer})[0][-1].info["winner"] for seed in range(20)]
    assert set(won) == {"con" if side == "pro" else "pro"}


@pytest.mark.parametrize("options", [{}, {"source": "drills", "rendering": "compact"}, {"order": "simultaneous"}])
@pytest.mark.parametrize("side", ["pro", "con"])
@pytest.mark.few(3)
def test_expert_beats_random_text(options, side):
    env = Debate(**options)
    tokens = [*FACT_TOKENS, "claim", "because", "against", "so", "yes", "no", "P1", "P2", "P3", "C1", "C2", "C3"]

    def at_random(seat: str, observation: str, env: Debate) -> str:
        rng = random.Random(f"{observation} {seat}")
        return " ".join(rng.choices(tokens, k=rng.randint(1, 12)))

    other = "con" if side == "pro" else "pro"
    won = [play(env, seed, **{other: at_random})[0][-1].info["winner"] == side for seed in range(150)]
    assert sum(won) > 0.97 * len(won)


@pytest.mark.parametrize("side", ["pro", "con"])
def test_an_expert_beats_drill_shapes_filled_at_random(side):
    env = Debate(source="drills", rendering="compact", rounds=1)

    def shaped(seat: str, observation: str, env: Debate) -> str:
        a, b, c, d = random.Random(f"{observation} {seat}").choices(env.topic.facts, k=4)
        return f"claim {a.id} because {b.id} {c.id} against {d.id} so {'yes' if seat == 'pro' else 'no'}"

    def every_token(seat: str, observation: str, env: Debate) -> str:
        everything = " ".join(FACT_TOKENS)
        return f"claim {everything} because {everything} against {everything} so {'yes' if seat == 'pro' else 'no'}"

    other = "con" if side == "pro" else "pro"
    assert {play(env, seed, **{other: every_token})[0][-1].info["winner"] for seed in range(50)} == {side}
    won = [play(env, seed, **{other: shaped})[0][-1].info["winner"] for seed in range(200)]
    assert won.count(side) > 0.95 * len(won) and other not in won
