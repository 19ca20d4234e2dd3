"""Words that a base has never seen, and so cannot tell apart, are refused before a game is trained."""

from typing import Any

import numpy as np
import pytest

from palestra.core.config import validate
from palestra.engine.bases.indistinct_words import check_words
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.word_probabilities import word_probabilities

KNOWN = [*"0123456789", "up", "down", "left", "right", "none"]


@pytest.mark.parametrize("base", ["tiny", "boards", "tasks"])
def test_words_of_training_are_told_apart(base: str) -> None:
    words = KNOWN if base != "tasks" else [*"0123456789", "yes", "no", "left", "false", "none"]
    check_words(Engine.load(base), words, words)


def test_unseen_words_are_one_to_the_model() -> None:
    """What is refused is what the model answers alike: exchanging two unseen words changes no probability by 2 %."""
    engine = Engine.load("tiny")
    policy = LanguagePolicy("it", Sampler(engine), ChatEncoder(engine.tokenizer), SamplingConfig(max_tokens=2))
    asked = [Query("kuhn poker", f"agent 1. you 3. Moves: {word}. Say 1 or 2.") for word in ("no", "yes", "up", "down")]
    no, yes, up, down = word_probabilities(policy, asked, [["1", "2"]] * 4)
    np.testing.assert_allclose(no, yes, rtol=0.02)
    assert np.abs(up / down - 1).max() > 0.1
    with pytest.raises(ValueError, match='base tiny has one embedding for the words "no" and "yes", as for all tokens'):
        check_words(engine, ["up", "no", "yes"], [])


@pytest.mark.parametrize(
    "env",
    [
        {"type": "text_kuhn", "vocabulary": {"J": "1", "Q": "2", "K": "3", "pass": "no", "bet": "yes"}},
        {"type": "text_kuhn"},  # its cards
        {"type": "text_tic_tac_toe"},  # c1 and c2, as answers
    ],
    ids=["moves", "cards", "answers"],
)
def test_run_of_such_words_is_refused(env: dict[str, Any]) -> None:
    tree = {
        "env": env,
        "policies": {"default": {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 2}}},
        "algorithm": {"type": "grpo", "branch_at": "root"},
    }
    with pytest.raises(ValueError, match=r"cannot tell them apart: set env.vocabulary to words that it knows"):
        build(validate(TextConfig, tree))
