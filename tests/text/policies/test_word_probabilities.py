"""The probability of a word equals its frequency in samples."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_tokenizer
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policies.word_probabilities import greedy_answers, token_spellings, word_probabilities

QUERIES = [Query("sokoban planner", f"size 4 you r1 c{column} box r2 c2 goal r3 c1") for column in (2, 3)]
N = 6000


def merging() -> PreTrainedTokenizerFast:
    """A tokenizer that can encode "ab" as one token or as two."""
    plain = tiny_tokenizer()
    tokenizer = Tokenizer(models.BPE(vocab=plain.get_vocab() | {"ab": 271}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = plain.chat_template
    return fast


def speaker(most: int, **sampling: object) -> LanguagePolicy:
    """The shipped base, in a game that it knows."""
    engine, settings = Engine.load("tiny"), SamplingConfig(max_tokens=most, **sampling)
    return LanguagePolicy("it", Sampler(engine), ChatEncoder(engine.tokenizer), settings)


def test_word_has_all_its_token_spellings() -> None:
    tokenizer = merging()
    a, b, both = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "ab"))
    assert token_spellings(tokenizer, "ab") == ((both,), (a, b))
    assert set(token_spellings(tokenizer, "abab")) == {(both, both), (a, b, both), (both, a, b), (a, b, a, b)}
    assert token_spellings(tokenizer, "") == ((),)
    with pytest.raises(ValueError, match="more than 256 ways"):
        token_spellings(tokenizer, "ab" * 9)


@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_probabilities_match_sampled_frequencies(most: int) -> None:
    """A word shorter than `most` must be followed by the end token; one of that length need not."""
    policy = speaker(most)
    for number, query in enumerate(QUERIES):
        answers = asyncio.run(policy.act(Query(query.role, query.observation, n=N, seed=7)))
        decode, ends = policy.encoder.tokenizer.decode, set(policy.sampler.batch.end_ids.tolist())
        plain = [a for a in answers if all(t in ends or decode([t], skip_special_tokens=True) for t in a.token_ids)]
        counts = Counter(answer.text for answer in plain)
        words = [word for word, _ in counts.most_common(12) if word.isascii() and word.isprintable() and word]
        found = word_probabilities(policy, QUERIES, [words, words])[number]
        often = np.array([counts[word] / N for word in words])
        assert len(words) > 3 and often.max() > 0.02
        assert np.all(np.abs(found - often) < 4.5 * np.sqrt(found * (1 - found) / N) + 1e-4), (found, often)


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"stop": ("x",)}])
def test_policy_with_modified_distribution_is_refused(changed: dict) -> None:
    policy = speaker(2, **changed)
    with pytest.raises(ValueError, match="model's own distribution"):
        word_probabilities(policy, QUERIES, [["a"], ["a"]])


def test_temperature_0_is_deterministic() -> None:
    policy = speaker(3, temperature=0.0)
    said = [asyncio.run(policy.act(Query(q.role, q.observation, n=1, seed=5)))[0].text for q in QUERIES]
    assert greedy_answers(policy, QUERIES) == said
