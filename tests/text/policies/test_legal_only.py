"""Guided choice: with `sampling.legal_only` an answer is a legal action, and its log-probability is that among legal
actions: in the sampler, in training, and in the tables of exact solvers."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from palestra.core.config import validate
from palestra.core.types import Answer
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.word_probabilities import greedy_answers, word_probabilities
from palestra.text.training.trainer import TextTrainer
from palestra.text.training.update import update_learner

WORDS = ["left", "left and right", "right", "7"]  # the first begins the second, but for its end token
QUERIES = [Query("walker", f"you are at {at}", legal_actions=WORDS[: 5 - at]) for at in (1, 2)]
N = 4000
SAMPLING = {"max_tokens": 2, "legal_only": True}
WORDS_OF_GAME = {"J": "1", "Q": "2", "K": "3", "pass": "up", "bet": "down"}


def speaker(**sampling: Any) -> LanguagePolicy:
    engine = Engine.load("tiny")
    settings = SamplingConfig(**{"max_tokens": 16, "legal_only": True} | sampling)
    return LanguagePolicy("it", Sampler(engine), ChatEncoder(engine.tokenizer), settings)


def answers_of(policy: LanguagePolicy, query: Query, n: int) -> list[Answer]:
    return asyncio.run(policy.act(Query(query.role, query.observation, n, 7, legal_actions=query.legal_actions)))


def test_answers_are_legal_and_as_frequent_as_their_probability() -> None:
    policy = speaker()
    found = word_probabilities(policy, QUERIES, [query.legal_actions or [] for query in QUERIES])
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    for row, query in zip(found, QUERIES, strict=True):
        answers = answers_of(policy, query, N)
        counts = Counter(answer.text for answer in answers)
        assert set(counts) <= set(query.legal_actions or [])
        often = np.array([counts[word] / N for word in WORDS])
        assert np.all(np.abs(row - often) < 4.5 * np.sqrt(row * (1 - row) / N) + 1e-4), (row, often)
        whole = {answer.text: np.exp(answer.logprobs.sum()) for answer in answers}
        assert whole == pytest.approx({word: row[WORDS.index(word)] for word in whole}, rel=1e-4)


def test_words_that_are_not_the_legal_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="says legal actions only: ask for those of the queries, in their order"):
        word_probabilities(speaker(), QUERIES, [WORDS[::-1], WORDS[:3]])


def test_greedy_answer_follows_the_likeliest_legal_tokens() -> None:
    policy = speaker(temperature=0)
    said = greedy_answers(policy, QUERIES)
    assert said == [answers_of(policy, query, 1)[0].text for query in QUERIES]
    assert all(word in (query.legal_actions or []) for word, query in zip(said, QUERIES, strict=True))


def config(base: Any = "tiny", **changes: Any) -> TextConfig:
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": SAMPLING}
    tree = {
        "name": "legal",
        "steps": 4,
        "episodes": 16,
        "env": {"type": "text_kuhn", "vocabulary": WORDS_OF_GAME},
        "policies": {"player_0": speech, "player_1": {"type": "random"}},
        "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4, "scale": "none", "entropy_coef": 0.1},
    }
    return validate(TextConfig, tree | changes)


def first_step(setup: TextTrainer) -> tuple[list[Answer], Any]:
    """Plays and trains one step; returns the answers of the trained policy and the metrics of its update."""
    moment = setup.position_of(0)
    episodes = asyncio.run(
        moment.stage.source.play(moment.episode_numbers, moment.stage.algorithm.branching, setup.algorithm_state)
    )
    answers = [node.answers["player_0"] for one in episodes for node in one.nodes if "player_0" in node.answers]
    return answers, asyncio.run(update_learner(moment.stage.algorithm, setup.learners["player_0"], episodes, 0.0))


def test_training_is_over_legal_actions() -> None:
    """The trainer's log-probabilities are the sampler's, and no entropy exceeds that of two words."""
    answers, metrics = first_step(build(config()))
    assert {answer.text for answer in answers} <= {"up", "down"}
    assert all(answer.sampling_mask is not None and answer.sampling_mask.counts.max() == 2 for answer in answers)
    assert metrics["sampler_kl"] == pytest.approx(0, abs=1e-5)
    assert 0 < metrics["entropy"] <= np.log(2) / 2 + 1e-6  # of each of two tokens, the second of which is forced


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"env": {"type": "plan_path"}, "seats": {"*": "player_0"}},
            "the env lists no legal actions with an observation: leave it out",
        ),
        (
            {"env": {"type": "text_kuhn", "vocabulary": WORDS_OF_GAME | {"pass": "a long word"}}},
            r"set sampling.max_tokens: \d+",
        ),
    ],
    ids=["no legal actions", "too long"],
)
def test_what_cannot_be_legal_says_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        setup = build(config(**changes))
        moment = setup.position_of(0)
        episodes = asyncio.run(
            moment.stage.source.play(moment.episode_numbers, moment.stage.algorithm.branching, setup.algorithm_state)
        )
        raise ValueError(episodes[0].error)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="legal_only: an answer is one of the legal actions and its end token"):
        SamplingConfig(legal_only=True, stop=("x",))
    with pytest.raises(ValueError, match="legal_only trains the distribution over the tokens that it leaves"):
        build(config(algorithm={"type": "dpo", "branch_at": "root"}))
    taught = {"default": {"type": "lora", "teacher": "other", "sampling": SAMPLING}, "other": {"type": "frozen"}}
    with pytest.raises(ValueError, match=r"legal_only trains .* but type: distill trains that of all tokens"):
        build(config(algorithm={"type": "distill"}, policies=taught))


def test_what_legal_only_keeps_is_not_called_biased() -> None:
    speech = {"type": "lora", "sampling": SAMPLING | {"top_p": 0.8}}
    assert not build(config(policies={"player_0": speech, "player_1": {"type": "random"}})).notes


def test_form_may_be_imitated_before_legal_play() -> None:
    assert build(config(algorithm={"type": "sft", "min_return": None})).learners


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((3,), (3, 4)), "one of the choices begins another"),
        (((99_999,),), "token ids from 0 to 511"),
        (((3, 4, 5),), "has 3 tokens with its end, and sampling.max_tokens is 2"),
    ],
)
def test_choices_that_cannot_be_sampled_are_refused(choices: Any, message: str) -> None:
    request = Request(np.array([1, 2], np.int32), 1, SamplingConfig(**SAMPLING), choices=choices)
    with pytest.raises(ValueError, match=message):
        Sampler(Engine.load("tiny")).sample_all([request])
