"""Policies without a model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from palestra.core.config import validate
from palestra.envs import make_env
from palestra.populations.workers.action_reader import LMActionReader
from palestra.text.build.policy_resolver import make_policy
from palestra.text.policies.base import Query
from palestra.text.policies.scripted import RandomPolicy
from palestra.text.policy_configs import RandomConfig


def shares(policy: RandomPolicy) -> list[float]:
    """Returns how often the policy bets with each card of Kuhn poker, of 400 times."""
    found = []
    for card in "JQK":
        query = Query("kuhn poker", f"You hold {card}.", legal_actions=["pass", "bet"], n=400, seed=0)
        answers = asyncio.run(policy.act(query))
        found.append(float(np.mean([answer.text == "bet" for answer in answers])))
    return found


def test_a_random_policy_is_uniform_unless_it_has_odds():
    found = shares(RandomPolicy())
    assert 0.4 <= min(found) <= max(found) <= 0.6
    found = shares(RandomPolicy(odds=1e6, seed=3))
    assert max(found) - min(found) > 0.5


def test_odds_follow_from_the_observation_alone():
    assert shares(RandomPolicy(odds=30)) == shares(RandomPolicy(odds=30))
    assert shares(RandomPolicy(odds=30, seed=1)) != shares(RandomPolicy(odds=30))


def test_odds_are_refused_where_the_env_lists_no_actions():
    query = Query("sum", "1 + 1?", n=1, seed=0)
    with pytest.raises(ValueError, match="this env lists none: leave odds out"):
        asyncio.run(RandomPolicy(odds=30).act(query))


@pytest.mark.parametrize("odds", [1.0, 20.0])
def test_the_table_of_a_random_policy_is_how_it_plays(odds: float):
    policy = make_policy("random", validate(RandomConfig, {"type": "random", "odds": odds}), None)  # type: ignore[arg-type]
    reader = LMActionReader(make_env("text_kuhn"))
    table = reader.read(policy)
    assert np.allclose(table.sum(1), 1) and (np.ptp(table[:, 0]) > 0.1) == (odds > 1)
    for query, row in zip(reader.queries, reader._legal_table(policy), strict=True):
        asked = Query(query.role, query.observation, legal_actions=["pass", "bet"], n=1000, seed=1)
        passed = np.mean([answer.text == "pass" for answer in asyncio.run(policy.act(asked))])
        assert abs(passed - row[0]) < 0.08  # five standard deviations
