"""Properties of all text games: two renderings, two rewards, and rules in the full rendering."""

from typing import Any

import pytest

from palestra.envs import TEXT_ENVS, check_env, make_env
from palestra.envs.text import board_games

GAMES = [name for name in TEXT_ENVS if name.startswith("text_")]


@pytest.mark.parametrize("name", GAMES)
def test_full_rendering_passes_the_env_check(name: str) -> None:
    check_env(lambda: make_env(name, rendering="full", reward="outcome"), seeds=range(3))


@pytest.mark.parametrize("name", GAMES)
def test_full_rendering_states_rules_and_equal_observations(name: str) -> None:
    full, compact = make_env(name, rendering="full"), make_env(name)
    assert full.rules_text and full.rules_text in full.roles["player_0"]
    assert board_games.ANSWER_FORMAT in full.roles["player_0"]
    assert compact.roles["player_0"] == compact.rules.name.replace("_", " ")
    assert full.reset(5).observations == compact.reset(5).observations


def test_full_rendering_parses_the_words_after_the_mark() -> None:
    env: Any = make_env("text_kuhn", rendering="full")
    for answer, is_read in [("bet", True), ("I hold a king.\n#### Bet", True), ("#### bet!", False), ("bet it", False)]:
        env.reset(0)
        assert env.step({"player_0": answer}).info["invalid"] == {"player_0": not is_read}


def test_invalid_answer_has_no_penalty_with_outcome_reward() -> None:
    env: Any = make_env("text_leduc", reward="outcome")
    env.reset(1)
    step = env.step({"player_0": "hm"})
    assert step.info["invalid"] == {"player_0": True} and step.rewards["player_0"] == 0


def test_vocabulary_is_applied_to_the_rules() -> None:
    env: Any = make_env("text_kuhn", rendering="full", vocabulary={"pass": "no", "bet": "yes"})
    assert "bet to pay" not in env.roles["player_0"] and "yes to pay" in env.roles["player_0"]
