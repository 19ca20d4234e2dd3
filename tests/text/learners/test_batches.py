"""A learner's batches: a prompt is computed in one of them where that is possible, and no batch is one turn of all."""

import numpy as np
import pytest

from palestra.core.types import Sample
from palestra.engine.sampling.sampler import Sampler
from palestra.testing import tiny_lm
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig


def sample(prompt, group=-1, has_gradient=True):
    zeros = np.zeros(2, np.float32)
    return Sample(np.asarray(prompt), np.array([7, 8]), zeros, zeros, group=group, has_gradient=has_gradient)


def split(samples, **config):
    """The batches, each as the indices of its samples."""
    engine = tiny_lm(0)
    options = LoraPolicyConfig(**config)
    learner = LanguageLearner("p", options, build_weights(options, engine, seed=0), Sampler(engine), engine.tokenizer)
    index = {id(s): i for i, s in enumerate(samples)}
    return [[index[id(s)] for s in batch] for batch in learner.batches(samples)]


def conversations(count, turns, siblings):
    """Samples of `siblings` answers in each turn of `count` conversations; each turn's prompt goes on from the last."""
    return [sample([1, c, *range(t)]) for c in range(count) for t in range(turns) for _ in range(siblings)]


def batches_of(batches, unit):
    """For each unit of `unit` neighbours, the numbers of the batches that it lies in."""
    where = {i: b for b, batch in enumerate(batches) for i in batch}
    return [{where[i] for i in range(start, start + unit)} for start in range(0, len(where), unit)]


def test_conversations_lie_in_one_batch():
    batches = split(conversations(count=12, turns=4, siblings=8), batch_size=96)
    assert [len(batch) for batch in batches] == [96] * 4
    assert all(len(found) == 1 for found in batches_of(batches, unit=4 * 8))
    assert all(batch == sorted(batch) for batch in batches)


def test_prompts_lie_in_one_batch_where_conversations_are_too_large():
    batches = split(conversations(count=2, turns=8, siblings=4), batch_size=16)
    assert [len(batch) for batch in batches] == [16] * 4
    assert all(len(found) == 1 for found in batches_of(batches, unit=4))


@pytest.mark.parametrize("count", [5, 10, 20])
def test_a_batch_has_several_seats(count):
    """Four seats in turn, with prompts of their own: batches in order would each have one seat."""
    samples = [sample([seat, story]) for story in range(count) for seat in range(4) for _ in range(8)]
    for batch in split(samples, batch_size=8 * count):
        assert len({samples[i].prompt_ids[0] for i in batch}) > 1


def test_few_prompts_have_answers_in_every_batch():
    batches = split([sample([p]) for p in range(2) for _ in range(8)], batch_size=4)
    assert batches == [[i, i + 4, i + 8, i + 12] for i in range(4)]


def test_groups_are_never_split():
    """Pairs of an answer and a worse one, as for preferences, whose prompts are all the same."""
    samples = [sample([5], group=i // 2) for i in range(12)]
    assert all(len(found) == 1 for found in batches_of(split(samples, batch_size=4), unit=2))


def test_epochs_repeat_and_batches_without_gradient_are_left_out():
    samples = [sample([p], has_gradient=p == 1) for p in range(3) for _ in range(2)]
    assert split(samples, batch_size=2, epochs=2) == [[2, 3], [2, 3]]
    assert split(samples, epochs=3) == [list(range(6))] * 3
    assert split([], batch_size=4) == []
