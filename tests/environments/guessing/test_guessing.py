"""Guessing games: rewards of questions by hand, experts at their optimum, and lies of the answerer."""

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.guessing.env import GuessingGame, GuessNumber
from palestra.environments.guessing.twenty_questions import TABLE_FILE, TwentyQuestions, read_table
from palestra.envs import check_env
from palestra.envs.support.splits import SPLIT_SHARES

NUMBERS: list[dict[str, Any]] = [
    {},
    {"answers": "seat", "rendering": "compact"},
    {"answers": "seat", "corrected": False, "low": -20, "high": 40, "split": "dev"},
    {"reward": "outcome", "low": 0, "high": 999, "split": "test"},
]
QUESTIONS: list[dict[str, Any]] = [
    {},
    {"answers": "seat", "reward": "outcome", "split": "test"},
    {"answers": "seat", "corrected": False, "rendering": "compact", "split": "dev"},
    {"things": 30, "rendering": "compact", "max_questions": 9, "split": "base"},
]
ENVS = [(GuessNumber, options) for options in NUMBERS] + [(TwentyQuestions, options) for options in QUESTIONS]


def reset_to_secret(env: GuessingGame, secret: Any) -> Any:
    """The first step of a game with this secret."""
    env.drawn = [secret]
    return env.reset(0)


def env_with_secret(game: Any, **options: Any) -> GuessingGame:
    """An env of a split that contains this secret: with few secrets not all do."""
    for split in SPLIT_SHARES:
        with suppress(ValueError):
            return game(split=split, **options)
    raise AssertionError(f"no split has a secret for {options}")


def play(env: GuessingGame, *answers: str) -> list[Any]:
    """The steps of a game with these answers, each given by the seat that acts."""
    steps = []
    seat = env.asker
    for answer in answers:
        steps.append(env.step({seat: answer}))
        seat = next(iter(steps[-1].observations), "")
    return steps


# ---- guess the number


def test_guess_reward_is_its_information_gain() -> None:
    env = GuessNumber(low=1, high=8)
    step = reset_to_secret(env, 3)
    assert env.questions == 4 and "Guesses left: 4." in step.observations["guesser"]
    first, outside, again, won = play(env, "#### 4", "9", "4", "3.")
    assert first.rewards == {"guesser": pytest.approx(math.log2(8 / 3) / 3)}  # 1, 2, 3 are left of 8
    assert first.observations["guesser"].startswith("Asked and answered so far:\n4: lower\nGuesses left: 3.")
    assert outside.rewards == {"guesser": -0.1} and outside.info["invalid"] == {"guesser": True}
    assert again.rewards == {"guesser": 0} and again.info["invalid"] == {"guesser": False}
    assert won.rewards == {"guesser": pytest.approx(math.log2(3) / 3)} and won.team_reward == 1
    assert (
        won.done
        and not won.truncated
        and won.info
        == {
            "success": True,
            "asked": 4,
            "invalid": {"guesser": False},
            "reward_terms": {"guesser": {"form": 0.0, "information": won.rewards["guesser"]}},
        }
    )


def test_episode_is_truncated_at_the_guess_limit() -> None:
    env = GuessNumber(low=1, high=8, max_guesses=2, rendering="compact")
    assert reset_to_secret(env, 8).observations == {"guesser": "range 1 8 left 2"}
    _, last = play(env, "1", "fly")
    assert last.done and last.truncated and last.team_reward == 0 and not last.info["success"]


@pytest.mark.parametrize("answer", ["", "12 13", "1e1", "--3", "+3", "٣", "101", "0", "9" * 5000, "three"])
def test_guess_outside_the_range_is_invalid(answer: str) -> None:
    env = GuessNumber()
    env.reset(0)
    assert env.step({"guesser": answer}).info["invalid"] == {"guesser": True}


def test_numbers_may_be_negative() -> None:
    env = GuessNumber(low=-3, high=3)
    reset_to_secret(env, -2)
    assert play(env, "I say\n#### -2")[0].info["success"]


@pytest.mark.parametrize("high", [2, 7, 8, 100])
def test_bisection_finds_every_number_in_the_least_guesses(high: int) -> None:
    env, most = env_with_secret(GuessNumber, high=high), 0
    for secret in range(1, high + 1):
        step = reset_to_secret(env, secret)
        while not step.done:
            step = env.step({"guesser": env.expert("guesser", random.Random(secret))})
        assert step.info["success"]
        most = max(most, step.info["asked"])
    assert most == env.questions == math.floor(math.log2(high)) + 1


# ---- a second seat answers


def test_lie_is_penalised_and_corrected() -> None:
    env = GuessNumber(low=1, high=8, answers="seat", rendering="compact")
    reset_to_secret(env, 6)
    asked, lied = play(env, "4", "lower")
    assert asked.observations == {"answerer": "secret 6 asked 4 left 3"}
    assert asked.rewards == {"guesser": pytest.approx(1 / 3)}  # by the truth: 5, 6, 7, 8 are left
    assert lied.rewards == {"answerer": -0.5} and lied.info["lie"] and lied.info["invalid"] == {"answerer": False}
    assert lied.observations == {"guesser": "range 1 8 4 higher left 3"}
    _, unread = play(env, "5", "perhaps")
    assert unread.rewards == {"answerer": -0.1} and unread.info["invalid"] == {"answerer": True}
    assert unread.observations == {"guesser": "range 1 8 4 higher 5 higher left 2"} and not unread.info["lie"]
    (won,) = play(env, "6")
    assert won.info["success"] and won.team_reward == 1


def test_uncorrected_lie_is_observed() -> None:
    env = GuessNumber(low=1, high=8, answers="seat", corrected=False, rendering="compact")
    reset_to_secret(env, 6)
    _, lied = play(env, "4", "lower")
    assert lied.rewards == {"answerer": -0.5} and lied.observations == {"guesser": "range 1 8 4 lower left 3"}
    assert int(env.expert("guesser", random.Random(0))) == 2
    play(env, "1", "lower")
    assert 1 <= int(env.expert("guesser", random.Random(0))) <= 8  # nothing is consistent with the answers


def test_last_question_is_answered_before_the_end() -> None:
    env = GuessNumber(low=1, high=8, max_guesses=1, answers="seat")
    reset_to_secret(env, 6)
    asked, answered = play(env, "4", "#### lower")
    assert not asked.done and answered.done and answered.truncated and answered.rewards == {"answerer": -0.5}


def test_outcome_reward_pays_success_only() -> None:
    env = TwentyQuestions(answers="seat", reward="outcome")
    reset_to_secret(env, "eagle")
    paid = [(step.team_reward, *step.rewards.values()) for step in play(env, "bird", "no", "hm", "is eagle")]
    assert paid == [(0, 0), (0, 0), (0, 0), (1, 0)]


# ---- twenty questions


def test_attribute_table_separates_all_things() -> None:
    table = read_table(TABLE_FILE)
    assert len(table.things) >= 60 and len(table.attributes) >= 20
    assert len(set(table.things.values())) == len(table.things)
    assert all(sum(key in has for has in table.things.values()) > 0 for key in table.attributes)
    assert all(said.endswith("?") for said in table.attributes.values())
    for thing, is_true, is_false in [("bat", "flies", "bird"), ("whale", "mammal", "legs"), ("sun", "sky", "made")]:
        assert is_true in table.things[thing] and is_false not in table.things[thing]


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        ("flies", "flies yes"),
        ("#### ask flies", "flies yes"),
        ("Let me see.\n#### Can it fly?", "flies yes"),
        ("is owl", None),  # not in the table
        ("eat", None),
        ("is bat", "is bat no"),
        ("Is it a bat?", "is bat no"),
        ("the bat", None),
        ("", None),
    ],
)
def test_questions_are_parsed(answer: str, heard: str | None) -> None:
    env = TwentyQuestions(rendering="compact")
    reset_to_secret(env, "eagle")
    step = env.step({"asker": answer})
    assert step.info["invalid"] == {"asker": heard is None}
    assert step.observations["asker"] == (f"{heard} left 19" if heard else "left 19")


def test_wrong_guess_removes_one_candidate() -> None:
    env = TwentyQuestions(things=4)
    assert env.secrets == ("dog", "cat", "horse", "cow")
    reset_to_secret(env, "cow")
    wrong, halved, won = play(env, "is dog", "farm", "is it a cow?")
    assert wrong.rewards == {"asker": pytest.approx(math.log(4 / 3) / math.log(4))}
    assert halved.rewards == {"asker": pytest.approx(math.log(3 / 2) / math.log(4))}  # horse or cow
    assert won.rewards == {"asker": pytest.approx(1 / 2)} and won.info["success"]
    assert "Is it the dog? no\nIs it a farm animal? yes" in halved.observations["asker"]


def test_answerer_observes_the_truth() -> None:
    env = TwentyQuestions(answers="seat")
    reset_to_secret(env, "penguin")
    step = env.step({"asker": "flies"})
    assert "The secret thing is: penguin." in step.observations["answerer"]
    assert "Is it a bird?" in step.observations["answerer"] and "Now you are asked: Can it fly?" in str(step)
    assert "penguin" not in env.step({"answerer": "no"}).observations["asker"]


def test_experts_find_every_thing() -> None:
    env, asked = TwentyQuestions(answers="seat", rendering="compact"), []
    for number, secret in enumerate(env.secrets):
        step = reset_to_secret(env, secret)
        while not step.done:
            seat = next(iter(step.observations))
            step = env.step({seat: env.expert(seat, random.Random(number))})
            assert not step.info["invalid"][seat] and not step.info.get("lie")
        assert step.info["success"]
        asked.append(step.info["asked"])
    assert sum(asked) / len(asked) < 8.5  # 6.5 bits


def test_custom_attribute_table(tmp_path: Path) -> None:
    file = tmp_path / "birds.json"
    table: dict[str, Any] = {
        "attributes": {"flies": "Can it fly?"},
        "things": {"owl": ["flies"], "emu": [], "kiwi": []},
    }
    file.write_text(json.dumps(table))
    env = env_with_secret(TwentyQuestions, file=file)
    for secret in env.secrets:
        step = reset_to_secret(env, secret)
        while not step.done:
            step = env.step({"asker": env.expert("asker", random.Random(0))})
        assert step.info["success"]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"things": {}}, "KeyError"),
        ({"attributes": {}, "things": {"owl": ["flies"]}}, "holds no such: add a question"),
        ({"attributes": {"can fly": "Can it fly?"}, "things": {"owl": []}}, "must be single words"),
        ({"attributes": {"owl": "Is it one?"}, "things": {"owl": []}}, r"\['owl'\] must be"),
    ],
)
def test_invalid_tables_are_refused(tmp_path: Path, table: dict[str, Any], why: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=why):
        TwentyQuestions(file=file)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        TwentyQuestions(file=tmp_path / "none.json")


# ---- both games


@pytest.mark.parametrize(("game", "options"), ENVS, ids=str)
def test_env_passes_the_env_check(game: Any, options: dict[str, Any]) -> None:
    words = ["50", "3", "#### 17", "yes", "no", "higher", "lower", "made", "is sun", "animal", "hm"]
    check_env(lambda: game(**options), seeds=range(4), act=lambda seat, seen, rng: rng.choice(words))


@pytest.mark.parametrize(("game", "options"), ENVS, ids=str)
def test_experts_win(game: Any, options: dict[str, Any]) -> None:
    env = game(**options)
    for seed in range(10):
        rng, step, paid = random.Random(seed), env.reset(seed), 0.0
        while not step.done:
            seat = next(iter(step.observations))
            step = env.step({seat: env.expert(seat, rng)})
            paid += sum(step.rewards.values()) + step.team_reward
        assert step.info["success"] and paid == pytest.approx(1 if env.reward == "outcome" else 2)


def test_no_two_splits_share_a_secret() -> None:
    for game in (GuessNumber, TwentyQuestions):
        drawn = [game(split=split).drawn for split in SPLIT_SHARES]
        assert sorted(secret for part in drawn for secret in part) == sorted(game().secrets)
        assert all(drawn)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match="high=1 is out of range: give 2"):
        GuessNumber(high=1)
    with pytest.raises(ValueError, match="things=1 is out of range: give 2 to 91"):
        TwentyQuestions(things=1)
    with pytest.raises(ValueError, match="set answers: seat"):
        TwentyQuestions(corrected=False)
    with pytest.raises(ValueError, match=r'of 2 secrets none is in split "(dev|test)"'):
        [GuessNumber(high=2, split=split) for split in ("dev", "test")]
