"""Exact probability that a language policy answers with a given word, summed over all tokenisations of the word.

In a game small enough to be enumerated, this gives the policy's action probabilities in every information state, from
which its best response and NashConv can be computed.

Shapes: `O` observations, `W` words, `T` tokens of a spelling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from palestra.engine.bases.model import Engine
from palestra.engine.sampling.live_batch import end_token_ids
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import ScoreRequest, score_prompts
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy

MAX_SPELLINGS = 256  # maximum number of spellings of a word


def word_probabilities(policy: LanguagePolicy, queries: Sequence[Query], words: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns the probability [O, W] float64 that the answer to each query is exactly each of its `words` [O][<= W]; 0
    for missing words. With `sampling.legal_only` they are the legal actions of the queries.

    Answers that contain tokens without text, such as special tokens, are not counted.

    Raises ValueError for a policy whose answers are not sampled from the model's own distribution (other temperatures,
    top-k, top-p or stop conditions), since the model's probabilities are then not those of the policy; for one whose
    answers depend on more than the query; and for one that is sampled on a server.
    """
    sampling = policy.sampling
    changed = sampling.temperature != 1 or sampling.top_k or sampling.top_p != 1
    if changed or sampling.stop or sampling.stop_token_ids or not sampling.stop_at_eos:
        raise ValueError(
            f"policy {policy.name} does not sample its answers from the model's own distribution ({sampling}), so "
            "their probabilities are not the model's: set temperature to 1 or 0, and leave the other settings out"
        )
    engine, prompts = _prompts(policy, queries)
    if sampling.legal_only:
        legal = [query.legal_actions for query in queries]
        if list(map(list, words)) != legal:
            raise ValueError(
                f"policy {policy.name} says legal actions only: ask for those of the queries, in their order"
            )
        return _choice_probabilities(policy, engine, prompts, queries)
    most = sampling.max_tokens
    ends = end_token_ids(engine)
    questions: list[ScoreRequest] = []
    where: list[tuple[int, int, int, bool]] = []
    for o, (prompt, query_words) in enumerate(zip(prompts, words, strict=True)):
        for w, word in enumerate(query_words):
            for spelling in token_spellings(engine.tokenizer, word):
                if len(spelling) <= most:
                    ids = np.concatenate([prompt, spelling, ends[:1]]).astype(np.int32)
                    targets = np.full((len(ids) - 1, len(ends)), -1)
                    targets[-1] = ends
                    questions.append(ScoreRequest(ids, policy.adapter, targets=targets))
                    where.append((o, w, len(spelling), len(spelling) == most))
    probs = np.zeros((len(queries), max(map(len, words))))
    for (o, w, length, cut), scores in zip(where, score_prompts(engine, questions), strict=True):
        assert scores.target_logprobs is not None
        probability = np.exp(scores.logprobs[len(scores.logprobs) - 1 - length : -1].astype(float).sum())
        probs[o, w] += probability * (1.0 if cut else np.exp(scores.target_logprobs[-1].astype(float)).sum())
    return probs


class _Fork(NamedTuple):
    """A place in the answers to query `query` where legal actions part: after the tokens `begun`, one of `following`
    comes next."""

    query: int
    begun: tuple[int, ...]
    following: list[int]


def _choice_probabilities(
    policy: LanguagePolicy, engine: Engine, prompts: Sequence[np.ndarray], queries: Sequence[Query]
) -> np.ndarray:
    """Returns the probability [O, W] float64 of each legal action of each query, where no other can be sampled: the
    product of its tokens' probabilities among those with which a legal action goes on."""
    choices = [policy.choices(query) for query in queries]
    forks = [fork for o, known in enumerate(choices) for fork in _forks(o, known)]
    questions = []
    for fork in forks:
        ids = np.concatenate([prompts[fork.query], fork.begun, fork.following[:1]]).astype(np.int32)
        targets = np.full((len(ids) - 1, len(fork.following)), -1)
        targets[-1] = fork.following
        questions.append(ScoreRequest(ids, policy.adapter, targets=targets))
    probs = np.zeros((len(queries), max(map(len, choices))))
    for o, known in enumerate(choices):
        probs[o, : len(known)] = 1.0
    for fork, scores in zip(forks, score_prompts(engine, questions), strict=True):
        assert scores.target_logprobs is not None
        likely = np.exp(scores.target_logprobs[-1].astype(float))
        share = dict(zip(fork.following, likely / likely.sum(), strict=True))
        at = len(fork.begun)
        for w, choice in enumerate(choices[fork.query]):
            if choice[:at] == fork.begun:
                probs[fork.query, w] *= share[choice[at]]
    return probs


def _forks(query: int, choices: Sequence[tuple[int, ...]]) -> Iterator[_Fork]:
    """Returns the places where the `choices` of query number `query` part."""
    following: dict[tuple[int, ...], set[int]] = {}
    for choice in choices:
        for t, token in enumerate(choice):
            following.setdefault(choice[:t], set()).add(token)
    return (_Fork(query, begun, sorted(after)) for begun, after in following.items() if len(after) > 1)


def greedy_answers(policy: LanguagePolicy, queries: Sequence[Query]) -> list[str]:
    """Returns the one answer of a policy at temperature 0 to each query. Raises ValueError as `word_probabilities`
    does."""
    assert policy.sampling.temperature == 0
    engine, prompts = _prompts(policy, queries)
    requests = [
        Request(prompt, 1, policy.sampling, policy.adapter, choices=policy.choices(query))
        for prompt, query in zip(prompts, queries, strict=True)
    ]
    answers = Sampler(engine).sample_all(requests)
    return [policy.read(sampled, prompt).text for (sampled,), prompt in zip(answers, prompts, strict=True)]


def _prompts(policy: LanguagePolicy, queries: Sequence[Query]) -> tuple[Engine, list[np.ndarray]]:
    """Returns the model of a policy and its prompts [P]. Raises ValueError if the policy's answers do not follow from
    the prompts alone."""
    engine = policy.sampler.engine
    if engine is None:
        raise ValueError(
            f"policy {policy.name} is sampled on a server, which does not give its probabilities: sample in this "
            "process"
        )
    if policy.history == "conversation":
        raise ValueError(
            f"policy {policy.name} remembers its conversation (history: conversation), so its answers do not follow "
            "from the observation"
        )
    if policy.sampling.thinking_token_budget is not None or policy.context.max_tokens is not None:
        raise ValueError(
            f"policy {policy.name} has a budget (sampling.thinking_token_budget or context.max_tokens), which changes "
            "its answers: leave it out"
        )
    return engine, [policy.encode_prompt(query) for query in queries]


@lru_cache(maxsize=4096)
def token_spellings(tokenizer: Any, word: str) -> tuple[tuple[int, ...], ...]:
    """Returns all token sequences that decode to `word`, shortest first. Raises ValueError if there are more than
    `MAX_SPELLINGS`."""
    pieces = _pieces(tokenizer)
    ways: list[list[tuple[int, ...]]] = [[()]]
    for end in range(1, len(word) + 1):
        spellings: list[tuple[int, ...]] = []
        for start in range(end):
            for token in pieces.get(word[start:end], ()):
                spellings += [(*way, token) for way in ways[start]]
        ways.append(spellings)
        if len(spellings) > MAX_SPELLINGS:
            raise ValueError(f'"{word}" can be spelled in more than {MAX_SPELLINGS} ways: choose a shorter word')
    return tuple(sorted(ways[-1], key=len))


@lru_cache(maxsize=8)
def _pieces(tokenizer: Any) -> dict[str, list[int]]:
    """Returns the tokens that decode to each text, without special tokens."""
    special = set(tokenizer.all_special_ids)
    tokens: dict[str, list[int]] = {}
    for token in sorted(tokenizer.get_vocab().values()):
        if token not in special:
            tokens.setdefault(tokenizer.decode([token]), []).append(token)
    return tokens
