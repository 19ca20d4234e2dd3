"""Credit across seats: tables worked by hand, the axioms that define each kind, and its effect on teams that learn."""

import asyncio
import random
from itertools import permutations
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from palestra.core.types import Answer, Step
from palestra.envs.base import Env
from palestra.text.algorithms.grpo import GRPO
from palestra.text.credit.estimators import (
    batch_advantages,
    counterfactual_credit,
    credit_in_context,
    role_advantages,
    shapley_credit,
    total_effect_index,
)
from palestra.text.rollouts.tree_rollout import EpisodeRunner, EpisodeSpec

values = st.floats(-100, 100).map(lambda x: round(x, 3))
shapes = arrays.array_shapes(min_dims=1, max_dims=4, max_side=3)
tables = arrays.arrays(np.float64, shapes, elements=values)


def close(x):
    return pytest.approx(x, abs=1e-9)


# ---- baselines beyond the group


def test_batch_advantages_subtract_the_batch_mean():
    """The mean of 1, 2, 6 and 3 is 3. An answer alone in its group has an advantage, and so have groups of equal
    values."""
    assert batch_advantages([[1.0], [2.0, 6.0], [3.0]]) == [[-2.0], [-1.0, 3.0], [0.0]]
    assert batch_advantages([[4.0, 4.0], [1.0, 1.0]]) == [[1.5, 1.5], [-1.5, -1.5]]
    assert batch_advantages([[2.5], [2.5]]) == [[0.0], [0.0]] and batch_advantages([]) == []


def test_role_advantages_subtract_a_moving_average():
    """b: 0 -> 0.5 -> 0.25 with a decay of 1/2. Each advantage is the return minus the average that already includes
    it."""
    assert role_advantages([1.0, 0.0], 0.0, decay=0.5) == ([0.5, -0.25], 0.25)
    assert role_advantages([1.0, -1.0], 0.0) == (pytest.approx([0.95, -0.9975]), pytest.approx(-0.0025))
    assert role_advantages([], 0.7) == ([], 0.7)


@given(st.lists(values, min_size=1, max_size=9), values)
def test_role_advantage_is_proportional_to_return_minus_old_average(returns, average):
    """Including a return in its own average scales the advantage by the decay, and does not bias it."""
    for value in returns:
        (advantage,), after = role_advantages([value], average)
        assert advantage == close(0.95 * (value - average))
        average = after


def test_role_advantage_of_a_constant_return_vanishes():
    advantages, average = role_advantages([1.0] * 200, 0.0)
    assert average == pytest.approx(1, abs=1e-4) and advantages[0] == pytest.approx(0.95)
    assert 0 < advantages[-1] < 1e-4


# ---- tables by hand

TWO = np.array([[4.0, 0.0], [0.0, 2.0]])  # seat 0 chooses the row, seat 1 the column; the mean is 1.5
GRID = np.indices((2, 2, 2)).astype(float)
AND_AND_ONE = 8 * GRID[0] * GRID[1] + 4 * GRID[2]  # a and b earn 8 together, c earns 4 alone; the mean is 2 + 2


def test_counterfactual_credit_of_two_seats_by_hand():
    """The means of columns, over the choices of seat 0, are 2 and 1; the means of rows too."""
    assert counterfactual_credit(TWO, 0).tolist() == [[2, -1], [-2, 1]]
    assert counterfactual_credit(TWO, 1).tolist() == [[2, -2], [-1, 1]]


def test_shapley_values_of_two_seats_by_hand():
    """Half of what the seat adds when it comes first (2 or 1, less 1.5), and half of what it adds when it comes
    last."""
    assert shapley_credit(TWO, 0).tolist() == [[1.25, -0.25], [-1.25, 0.25]]
    assert shapley_credit(TWO, 1).tolist() == [[1.25, -1.25], [-0.25, 0.25]]


def test_credits_of_three_seats_by_hand():
    """At (1, 1, 1), of value 12: a alone raises the first game from 2 to 4, and with b from 4 to 8; c raises its own
    from 2 to 4. The counterfactuals 4, 4 and 2 count the same 8 twice."""
    assert [shapley_credit(AND_AND_ONE, i)[1, 1, 1] for i in range(3)] == close([3, 3, 2])
    assert [counterfactual_credit(AND_AND_ONE, i)[1, 1, 1] for i in range(3)] == close([4, 4, 2])


def test_credits_of_three_seats_with_a_harmful_one_by_hand():
    """At (1, 0, 1), of value 4: a adds 2 or, after b's 0, nothing; b costs an average team 2 and a team with a 4. The
    team then earns the same for every answer of a."""
    assert [shapley_credit(AND_AND_ONE, i)[1, 0, 1] for i in range(3)] == close([1, -3, 2])
    assert [counterfactual_credit(AND_AND_ONE, i)[1, 0, 1] for i in range(3)] == close([0, -4, 2])


def test_credit_in_context_fixes_the_others_answers():
    """With seat 1's first answer, seat 0's answers have the values 4 and 0; with its second, 0 and 2."""
    credit = counterfactual_credit(TWO, 0)
    assert credit_in_context(credit, 0, np.array([[0, 0]])).tolist() == [2, -2]
    assert credit_in_context(credit, 0, np.array([[0, 1]])).tolist() == [-1, 1]
    assert credit_in_context(credit, 0, np.array([[0, 0], [1, 1]])).tolist() == [0.5, -0.5]
    assert credit_in_context(counterfactual_credit(np.array([3.0, 1.0]), 0), 0, np.array([[0]])).tolist() == [
        1,
        -1,
    ]  # no other seat acts


def test_total_effect_index_by_hand():
    """3a + b has variance 9/4 + 1/4. Each seat decides all of an exclusive or, and nothing of a constant."""
    two = np.indices((2, 2)).astype(float)
    assert [total_effect_index(3 * two[0] + two[1], i) for i in range(2)] == close([0.9, 0.1])
    assert [total_effect_index((two[0] != two[1]).astype(float), i) for i in range(2)] == [1, 1]
    assert [total_effect_index(np.full((2, 2), 7.0), i) for i in range(2)] == [0, 0]


# ---- axioms


def over_orders(q, seat):
    """Shapley's definition: what a seat adds when it joins, averaged over all orders of the seats."""
    seats = range(q.ndim)
    total = np.zeros_like(q)
    orders = list(permutations(seats))
    for order in orders:
        before = order[: order.index(seat)]
        without = q.mean(axis=tuple(i for i in seats if i not in before), keepdims=True)
        with_it = q.mean(axis=tuple(i for i in seats if i not in (*before, seat)), keepdims=True)
        total += with_it - without
    return total / len(orders)


@given(tables)
def test_shapley_by_coalitions_equals_the_mean_over_all_orders(q):
    for seat in range(q.ndim):
        np.testing.assert_allclose(shapley_credit(q, seat), over_orders(q, seat), atol=1e-9)


@given(tables)
def test_shapley_efficiency(q):
    np.testing.assert_allclose(sum(shapley_credit(q, seat) for seat in range(q.ndim)), q - q.mean(), atol=1e-9)


@given(tables, st.data())
def test_credits_are_symmetric(q, data):
    q = np.resize(q, (q.shape[0],) * q.ndim)
    one, other = data.draw(st.integers(0, q.ndim - 1)), data.draw(st.integers(0, q.ndim - 1))
    q = q + np.swapaxes(q, one, other)
    for credit in (shapley_credit, counterfactual_credit):
        np.testing.assert_allclose(credit(q, one), np.swapaxes(credit(q, other), one, other), atol=1e-9)


@given(tables, st.data())
def test_dummy_seat_has_zero_credit(q, data):
    dummy = data.draw(st.integers(0, q.ndim))
    q = np.repeat(np.expand_dims(q, dummy), data.draw(st.integers(1, 3)), axis=dummy)
    for credit in (shapley_credit, counterfactual_credit):
        np.testing.assert_allclose(credit(q, dummy), 0, atol=1e-9)
    assert total_effect_index(q, dummy) == close(0)


@given(tables, st.integers(0, 2**32 - 1))
def test_credits_are_additive(q, seed):
    r = np.random.default_rng(seed).normal(size=q.shape)
    for seat in range(q.ndim):
        for credit in (shapley_credit, counterfactual_credit):
            np.testing.assert_allclose(credit(q + r, seat), credit(q, seat) + credit(r, seat), atol=1e-9)


@given(tables)
def test_all_credits_average_to_the_group_mean_baseline(q):
    """The derivation of docs/algorithms/credit.md: averaged over the other seats' answers, all three credits are
    equal."""
    for seat in range(q.ndim):
        others = tuple(i for i in range(q.ndim) if i != seat)
        plain = q.mean(axis=others) - q.mean()
        joints = np.argwhere(np.ones(q.shape))
        for credit in (shapley_credit, counterfactual_credit):
            np.testing.assert_allclose(credit(q, seat).mean(axis=others), plain, atol=1e-9)
            np.testing.assert_allclose(credit_in_context(credit(q, seat), seat, joints), plain, atol=1e-9)


@given(tables, st.data())
def test_credit_in_context_sums_to_zero_over_own_answers(q, data):
    """In every joint answer, both kinds sum to zero over a seat's own answers, so they add nothing to the expected
    gradient."""
    joint = np.array([[data.draw(st.integers(0, side - 1)) for side in q.shape]])
    for seat in range(q.ndim):
        for credit in (shapley_credit, counterfactual_credit):
            assert credit_in_context(credit(q, seat), seat, joint).sum() == pytest.approx(0, abs=1e-7)


@given(arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=4), elements=values))
def test_shapley_of_two_seats_is_the_mean_of_both_other_credits(q):
    for seat in range(2):
        plain = q.mean(axis=1 - seat, keepdims=True) - q.mean()
        np.testing.assert_allclose(shapley_credit(q, seat), (plain + counterfactual_credit(q, seat)) / 2, atol=1e-9)


# ---- a matrix game in words


class Matrix(Env):
    """Each seat says a word at the same time; the team reward is a function of all words."""

    name = "matrix"

    def __init__(self, seats, worth):
        self.seats, self.worth = seats, worth

    def reset(self, seed):
        return Step({seat: "say a word" for seat in self.seats})

    def step(self, actions):
        return Step({}, team_reward=float(self.worth([actions[seat] for seat in self.seats])))

    def fork(self):
        return Matrix(self.seats, self.worth)


class Speaker:
    """A policy over words with one logit each, trained by a plain policy gradient."""

    def __init__(self, name, words):
        self.name, self.words, self.logits = name, words, dict.fromkeys(words, 0.0)

    def probability(self, word):
        return exp(self.logits[word]) / sum(exp(logit) for logit in self.logits.values())

    async def act(self, query):
        drawn = random.Random(query.seed).choices(self.words, [self.probability(w) for w in self.words], k=query.n)
        return [
            Answer(word, self.name, np.ones(1, np.int32), np.array([self.words.index(word)]), np.log([0.5]))
            for word in drawn
        ]

    def learn(self, samples, lr):
        before = {word: self.probability(word) for word in self.words}
        for sample in samples:
            for word in self.words:
                said = self.words[sample.token_ids[0]] == word
                self.logits[word] += lr * float(sample.advantages[0]) * (said - before[word]) / len(samples)


async def play(algorithm, worth, team, episodes=8, seed=0):
    arena = EpisodeRunner(lambda: Matrix(tuple(team), worth), "matrix")
    return await arena.play_all([EpisodeSpec(i, team, 1000 * seed + i) for i in range(episodes)], algorithm.branching)


async def train(algorithm, worth, team, steps, lr):
    for step in range(steps):
        episodes = await play(algorithm, worth, team, seed=step)
        for seat, speaker in team.items():
            speaker.learn(algorithm.build_samples(episodes, seat)[0], lr)


def train_team(algorithm, seats, worth, words, steps, lr):
    team = {seat: Speaker(seat, words) for seat in seats}
    asyncio.run(train(algorithm, worth, team, steps, lr))
    return team


FOUR = ("a", "b", "c", "d")
KINDS = {
    "paired": GRPO(group_size=4, scale="none", flat_groups="skip"),
    "crossed": GRPO(group_size=4, scale="none", flat_groups="skip", joints="crossed"),
    "counterfactual": GRPO(group_size=4, scale="none", flat_groups="skip", credit="counterfactual"),
    "shapley": GRPO(group_size=4, scale="none", flat_groups="skip", credit="shapley"),
}


def count_yes(said):
    return said.count("yes")


def right_signs(algorithm):
    """The share of trained answers whose advantage has the right sign: positive for "yes", negative for the other
    words."""
    words = ["yes", "no", "hm"]
    episodes = asyncio.run(play(algorithm, count_yes, {seat: Speaker(seat, words) for seat in FOUR}, episodes=4))
    samples = [sample for seat in FOUR for sample in algorithm.build_samples(episodes, seat)[0]]
    samples = [sample for sample in samples if sample.has_gradient]
    assert len(samples) > 40
    return np.mean([(sample.advantages[0] > 0) == (sample.token_ids[0] == 0) for sample in samples])


@pytest.mark.slow
def test_paired_joints_dilute_the_team_reward(check_score):
    """A seat's right word earns 1, and each of the three others' random words as much: a third of the advantages have
    the wrong sign. Crossed, every answer is combined with the same teams."""
    check_score(right_signs(KINDS["paired"]))
    assert all(right_signs(KINDS[kind]) == 1 for kind in ("crossed", "counterfactual", "shapley"))


@pytest.mark.slow
def test_crossed_joints_learn_faster_than_paired_ones(check_score):
    words = ["yes", "no", "hm"]
    paired, crossed = (
        np.mean(
            [
                speaker.probability("yes")
                for speaker in train_team(KINDS[kind], FOUR, count_yes, words, 12, 1.0).values()
            ]
        )
        for kind in ("paired", "crossed")
    )
    check_score(paired, "paired")
    check_score(crossed, "crossed")


CLIMB = {"aa": 11, "ab": -30, "ba": -30, "bb": 7, "bc": 6, "cc": 5}


def climbing_reward(said):
    """The climbing game (Claus & Boutilier, 1998): the best word earns the least if the others do not choose it too."""
    return CLIMB.get("".join(said), 0)


@pytest.mark.parametrize(
    ("kind", "climbs"), [("paired", False), ("crossed", False), ("counterfactual", True), ("shapley", True)]
)
@pytest.mark.few(2)
def test_credit_in_context_avoids_relative_overgeneralisation(kind, climbs, check_score):
    """Relative overgeneralisation: "a" earns -19 / 3 on average with partners that draw at random, and 11 with partners
    that say "a"."""
    algorithm = KINDS[kind].model_copy(update={"group_size": 6})
    team = train_team(algorithm, ("x", "y"), climbing_reward, ["a", "b", "c"], 40, 0.1)
    probabilities = [team[seat].probability("a") for seat in "xy"]
    check_score(min(probabilities) if climbs else max(probabilities))
