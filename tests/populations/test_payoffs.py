"""Payoff tables: lookup of cells in any seat order, and allocation of games."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from palestra.populations.payoffs import PayoffCell, PayoffTable
from palestra.populations.plans.empirical_game import _variance_gains, allocate_games


def table(seats, members):
    made = PayoffTable(seats)
    for player, names in members.items():
        for name in names:
            made.add_member(player, name)
    return made


def cell(games, mean, m2, wins=None, draws=0):
    return PayoffCell(games, tuple(map(float, mean)), tuple(m2), tuple(wins or [0] * len(mean)), draws)


def rps(known=True):
    made = table(["all", "all"], {"all": ["rock", "paper", "scissors"]})
    for one, other, mean in (("rock", "scissors", 1), ("paper", "rock", 1), ("scissors", "paper", 1)):
        if known:
            made.set_exact([one, other], [mean, -mean])
        else:
            made.add_games([one, other], cell(games=4, mean=[mean, -mean], m2=[1, 1], wins=[3, 0], draws=1))
    for name in made.members["all"]:
        made.set_exact([name, name], [0, 0])
    return made


def pair():
    """Red has one member more than blue."""
    return table(["red", "blue"], {"red": ["r0", "r1", "r2"], "blue": ["b0", "b1"]})


def test_payoff_table_has_one_array_per_seat():
    made = pair()
    made.add_games(["r1", "b0"], cell(games=10, mean=[2.0, -1.0], m2=[90.0, 0.0]))
    mean, games = made.mean(unplayed=0.25), made.games()
    assert mean[0].tolist() == [[0.25, 0.25], [2.0, 0.25], [0.25, 0.25]] and mean[1][1, 0] == -1.0
    assert games.tolist() == [[0, 0], [10, 0], [0, 0]]
    assert made.stderr()[0][1, 0] == pytest.approx(1.0) and made.stderr()[0][0, 0] == np.inf
    assert np.isnan(made.mean()[0]).sum() == 5


def test_payoff_table_grows_with_members():
    made = PayoffTable(["red", "blue"])
    assert made.mean()[0].shape == (0, 0)
    made.add_member("red", "r0")
    made.add_member("blue", "b0")
    made.set_exact(["r0", "b0"], [1, -1])
    made.add_member("red", "r1")
    assert made.mean()[0].shape == (2, 1) and made.mean()[0][0, 0] == 1 and made.cells_below() == [("r1", "b0")]


def test_symmetric_games_share_cells():
    made = table(["all", "all"], {"all": ["a", "b"]})
    made.add_games(["a", "b"], cell(games=1, mean=[1.0, 0.0], m2=[0, 0], wins=[1, 0]))
    made.add_games(["b", "a"], cell(games=1, mean=[4.0, 3.0], m2=[0, 0], wins=[1, 0]))
    assert made.cell(["a", "b"]).mean == (2.0, 2.0) and made.cell(["a", "b"]).wins == (1, 1)
    assert made.cell(["b", "a"]).mean == (2.0, 2.0) and made.cell(["b", "a"]).games == 2
    assert made.mean()[0][0, 1] == made.mean()[1][1, 0]


def test_symmetric_zero_sum_table_is_antisymmetric():
    first, second = rps().mean()
    assert first.tolist() == [[0, -1, 1], [1, 0, -1], [-1, 1, 0]]
    assert np.array_equal(second, -first) and np.array_equal(second, first.T)


def test_three_seats_of_one_population_share_all_orders():
    made = table(["all"] * 3, {"all": ["a", "b", "c"]})
    made.add_games(["c", "a", "b"], cell(games=5, mean=[3.0, 1.0, 2.0], m2=[0, 0, 0]))
    assert made.cell(["a", "b", "c"]).mean == (1.0, 2.0, 3.0) and made.cell(["b", "c", "a"]).mean == (2.0, 3.0, 1.0)
    assert made.games().sum() == 6 * 5 and len(list(made.cells())) == 10  # multisets of 3 out of 3


def test_two_populations_of_two_seats_each():
    made = table(["red", "blue", "red", "blue"], {"red": ["r", "s"], "blue": ["b"]})
    made.add_games(["s", "b", "r", "b"], cell(games=1, mean=[1.0, 2.0, 3.0, 4.0], m2=[0] * 4))
    assert made.cell(["r", "b", "s", "b"]).mean == (3.0, 3.0, 1.0, 3.0)


def test_cells_below_lists_missing_games():
    made = rps(known=False)
    assert made.cells_below(4) == [] and len(made.cells_below(5)) == 3  # known cells need none
    made.add_member("all", "well")
    assert made.cells_below() == [("rock", "well"), ("paper", "well"), ("scissors", "well"), ("well", "well")]


def test_scores_count_draws_half():
    names, points = rps(known=False).pairwise_scores()
    assert names == ["rock", "paper", "scissors"]
    assert points.tolist() == [[0, 0.5, 3.5], [3.5, 0, 0.5], [0.5, 3.5, 0]]


def test_pairwise_scores_of_an_asymmetric_game():
    made = pair()
    made.add_games(["r0", "b1"], cell(games=4, mean=[0, 0], m2=[0, 0], wins=[3, 1]))
    names, points = made.pairwise_scores()
    assert points[names.index("r0"), names.index("b1")] == 3 and points[names.index("b1"), names.index("r0")] == 1


def test_exact_payoffs_keep_expected_wins_and_draws_without_games():
    made = pair()
    made.add_games(
        ["r0", "b1"], replace(cell(games=8, mean=[0.25, -0.25], m2=[0, 0], wins=[3.5, 1.5], draws=3), exact=True)
    )
    names, points = made.pairwise_scores()
    assert points[names.index("r0"), names.index("b1")] == 5 and points[names.index("b1"), names.index("r0")] == 3
    assert made.games().sum() == 0 and made.cell(["r0", "b1"]).exact and made.stderr()[0][0, 1] == 0


def test_name_may_be_in_both_populations():
    made = table(["red", "blue"], {"red": ["uniform", "r"], "blue": ["uniform"]})
    made.set_exact(["uniform", "uniform"], [1, -1])
    assert made.cell(["uniform", "uniform"]).mean == (1, -1) and made.pairwise_scores()[0] == ["uniform", "r"]


# ---- files


def test_csv_has_one_row_per_cell():
    rows = list(csv.DictReader(io.StringIO(rps(known=False).to_csv())))
    assert len(rows) == 6
    assert rows[0]["members_0"] == "rock" and rows[0]["members_1"] == "scissors" and rows[0]["mean_0"] == "1.0"
    assert float(rows[0]["stderr_0"]) == pytest.approx((1 / 3 / 4) ** 0.5) and rows[0]["wins_0"] == "3"
    assert [row["exact"] for row in rows] == ["False"] * 3 + ["True"] * 3


# ---- allocation of games


def uniform(made):
    return [np.full(count, 1 / count) for count in made.shape]


def test_games_are_allocated_by_variance():
    """One cell of variance 100, one of 1, with 100 games each: Neyman allocates in proportion to 10 : 1, so the next
    games go to the first until it has about ten times as many."""
    made = table(["red", "blue"], {"red": ["r"], "blue": ["b", "c"]})
    made.add_games(["r", "b"], cell(games=100, mean=[0, 0], m2=[9900, 9900]))
    made.add_games(["r", "c"], cell(games=100, mean=[0, 0], m2=[99, 99]))
    given = allocate_games(made, uniform(made), 2000)
    total = [100 + given.get(("r", "b"), 0), 100 + given.get(("r", "c"), 0)]
    assert sum(total) == 2200 and total[0] / total[1] == pytest.approx(10, rel=0.2)


def test_games_are_allocated_by_meta_strategy_weight():
    made = pair()
    strategies = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 0.0])]
    given = allocate_games(made, strategies, 100)
    # no player's deviation depends on the others
    assert set(given) == {("r0", "b0"), ("r1", "b0"), ("r2", "b0"), ("r0", "b1")}
    others = [given["r1", "b0"], given["r2", "b0"], given["r0", "b1"]]
    # both players' deviations depend on the first
    assert given["r0", "b0"] > max(others) + 3 and max(others) - min(others) <= 1


def test_allocation_is_greedily_optimal():
    """Greedy: of all ways to give three games to these cells, none has a lower sum of weighted variances."""
    made = pair()
    made.add_games(["r0", "b0"], cell(games=3, mean=[0, 0], m2=[8.0, 2.0]))
    strategies = [np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.4])]
    given = allocate_games(made, strategies, 3)
    gains = _variance_gains(made, strategies)

    def total(more):
        return sum(gain / (played + 1 + more.count(key)) for key, (gain, played) in gains.items())

    every = [[a, b, c] for a in gains for b in gains for c in gains]
    assert total([key for key, count in given.items() for _ in range(count)]) == pytest.approx(min(map(total, every)))


def test_variance_gain_of_a_cell_by_hand():
    """Red's members are weighted by blue's squared shares, blue's by red's; without games the variance is 1 for each
    seat."""
    gains = _variance_gains(pair(), [np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.75])])
    assert gains["r0", "b0"] == (pytest.approx(0.25**2 + 0.5**2), 0)
    assert gains["r2", "b1"] == (pytest.approx(0.75**2), 0)


def test_symmetric_cells_count_both_orders():
    made = table(["all", "all"], {"all": ["a", "b"]})
    gains = _variance_gains(made, [np.array([0.3, 0.7])] * 2)
    assert gains["a", "b"][0] == pytest.approx(2 * (0.3**2 + 0.7**2))  # needed by both players, in either seat
    assert gains["a", "a"][0] == pytest.approx(2 * 0.3**2)


def test_joint_strategy_is_marginalised_over_others():
    """With "both the same", each of blue's members is met half of the time, as with independent halves."""
    made = table(["red", "blue"], {"red": ["r", "s"], "blue": ["b", "c"]})
    assert _variance_gains(made, np.eye(2) / 2) == _variance_gains(made, [np.array([0.5, 0.5])] * 2)


def test_allocation_respects_chunks_and_budget():
    given = allocate_games(pair(), uniform(pair()), 25, chunk=10)
    assert sorted(given.values()) == [5, 10, 10]
    assert allocate_games(pair(), uniform(pair()), 0) == {} and allocate_games(rps(), uniform(rps()), 10) == {}


def test_cells_without_games_are_allocated_first():
    made = table(["red", "blue"], {"red": ["r"], "blue": ["b", "c"]})
    made.add_games(["r", "b"], cell(games=5, mean=[1, -1], m2=[0, 0]))
    assert allocate_games(made, uniform(made), 3)["r", "c"] == 3


# ---- refusals


def test_inconsistent_games_are_refused():
    made, games = pair(), cell(games=1, mean=[0, 0], m2=[0, 0])
    with pytest.raises(ValueError, match="player at each seat"):
        PayoffTable([])
    with pytest.raises(ValueError, match='"green" plays no seat'):
        made.add_member("green", "g")
    with pytest.raises(ValueError, match='already has a member "r0"'):
        made.add_member("red", "r0")
    with pytest.raises(ValueError, match='"b0" is not a member of "red", which has r0, r1, r2'):
        made.add_games(["b0", "r0"], games)
    with pytest.raises(ValueError, match="1 members for 2 seats"):
        made.cell(["r0"])
    with pytest.raises(ValueError, match="a number for each"):
        made.add_games(["r0", "b0"], cell(games=1, mean=[0], m2=[0]))
    with pytest.raises(ValueError, match="3 payoffs for 2 seats"):
        made.set_exact(["r0", "b0"], [0, 0, 0])
    with pytest.raises(ValueError, match=r"strategies over \(1, 2\)"):
        allocate_games(made, [np.ones(1), np.ones(2) / 2], 5)
    with pytest.raises(ValueError, match="two seats, and this one has 3"):
        table(["all"] * 3, {"all": ["a"]}).pairwise_scores()
