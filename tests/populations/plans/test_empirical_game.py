"""Tasks and payoffs of the empirical game."""

import numpy as np
import pytest
from helpers.toy_populations import population
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.populations.payoffs import PayoffCell, PayoffTable
from palestra.populations.plans.empirical_game import EmpiricalGame, cells_containing
from palestra.populations.population import Member
from palestra.populations.tasks import PlayResult

TWO = ("red", "blue")


def result(task, mean, **more):
    cell = PayoffCell(task.games_per_cell, tuple(mean), (1.0, 1.0), (0, 0), **more)
    return PlayResult((cell,) * len(task.cells))


@settings(max_examples=30)
@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_each_cell_is_played_once_as_members_arrive(seats, first, second):
    players = tuple(dict.fromkeys(seats))
    names = {player: [] for player in players}
    payoffs, cells = PayoffTable(seats), []
    coming = [("a", f"a{i}") for i in range(first)] + [("b", f"b{i}") for i in range(second)]
    for player, name in [one for one in coming if one[0] in players]:
        names[player].append(name)
        payoffs.add_member(player, name)
        cells += cells_containing(seats, names, player, name)
    canonical = [payoffs.canonical(cell)[0] for cell in cells]
    assert sorted(canonical) == sorted(payoffs.cells())


def test_new_member_plays_existing_members():
    game = EmpiricalGame(population(*TWO), TWO, games=50, cells=2)
    (first,) = game.initial_tasks()
    assert first.cells == (("uniform", "uniform"),) and first.games_per_cell == 50 and first.members == ()
    (one,) = game.add_member(Member("red-1", "red", "members/red-1"))
    two, three = (
        game.add_member(Member("blue-1", "blue", "members/blue-1")),
        game.add_member(Member("blue-2", "blue", "w")),
    )
    assert [task.cells for task in two] == [(("uniform", "blue-1"), ("red-1", "blue-1"))]
    assert one.members == ("red-1",) and two[0].members == ("blue-1", "red-1")
    assert game.open_tasks == {task.name for task in [first, one, *two, *three]}
    for task in (first, one):
        game.record_result(task, result(task, [0.5, -0.5]))
    assert game.num_games == 100
    assert game.payoffs.cell(("red-1", "uniform")).mean == (0.5, -0.5)


def test_cells_per_task_are_limited():
    game = EmpiricalGame(population(*TWO), TWO, games=1, cells=2)
    game.initial_tasks()
    for number in range(4):
        game.add_member(Member(f"red-{number}", "red", "w"))
    assert [len(task.cells) for task in game.add_member(Member("blue-1", "blue", "w"))] == [2, 2, 1]


def test_snapshots_play_under_their_final_names():
    game = EmpiricalGame(population(*TWO), TWO, games=10, cells=9)
    game.record_result((first := game.initial_tasks()[0]), result(first, [0.0, 0.0]))
    (task,) = game.snapshot_tasks("red", "red-1", {"red": {"red-1": "red-1~2"}, "blue": {"blue-1": "blue-1~1"}})
    assert task.cells == (("red-1~2", "uniform"), ("red-1~2", "blue-1~1"))
    assert task.members == ("red-1~2", "blue-1~1") and not game.open_tasks
    assert not game.has_payoffs(("red-1", "uniform"))
    game.record_result(task, result(task, [1.0, -1.0]))
    assert game.has_payoffs(("red-1", "uniform")) and game.has_payoffs(("red-1", "blue-1"))
    red, blue = game.payoff_tensors((["uniform", "red-1"], ["uniform"]))
    assert red.tolist() == [[0.0], [1.0]] and blue.tolist() == [[0.0], [-1.0]]


def test_frozen_members_need_no_provisional_payoffs():
    game = EmpiricalGame(population(*TWO), TWO, games=10, cells=9)
    game.initial_tasks()
    game.add_member(Member("red-1", "red", "w"))
    assert game.snapshot_tasks("red", "red-1", {"red": {}, "blue": {}}) == []
    (task,) = game.snapshot_tasks("red", "red-1", {"red": {}, "blue": {"blue-1": "blue-1~1"}})
    assert task.cells == (("red-1", "blue-1~1"),)


def test_provisional_payoffs_are_replaced_by_newer_and_final_ones():
    game = EmpiricalGame(population(*TWO), TWO, games=1, cells=1)
    game.set_snapshot_returns(("a", "b"), (1.0, -1.0))
    game.set_snapshot_returns(("a", "b"), (2.0, -2.0))
    assert game.payoff_tensors((["a"], ["b"]))[0] == 2.0
    game.payoffs.add_member("red", "a")
    game.payoffs.add_member("blue", "b")
    assert game.payoff_tensors((["a"], ["b"]))[0] == 2.0
    game.payoffs.add_games(("a", "b"), PayoffCell(3, (0.5, -0.5), (1.0, 1.0), (0, 0)))
    assert game.payoff_tensors((["a"], ["b"]))[0] == 0.5


def test_provisional_payoffs_are_symmetrised_over_seats():
    game = EmpiricalGame(population("all"), ("all", "all"), games=1, cells=1)
    game.set_snapshot_returns(("a", "b"), (1.0, -2.0))
    first, second = game.payoff_tensors((["b"], ["a"]))
    assert first.tolist() == [[-2.0]] and second.tolist() == [[1.0]]


def test_exact_payoffs_count_no_games():
    game = EmpiricalGame(population(*TWO), TWO, games=50, cells=2)
    (first,) = game.initial_tasks()
    game.record_result(first, result(first, [0.5, -0.5], exact=True))
    assert game.num_games == 0 and game.payoffs.cell(("uniform", "uniform")).exact
    assert game.adaptive_tasks(np.ones((1, 1)), 100, "more") == []


def test_additional_games_are_merged():
    game = EmpiricalGame(population(*TWO), TWO, games=50, cells=2)
    (first,) = game.initial_tasks()
    game.record_result(first, result(first, [0.5, -0.5]))
    (more,) = game.adaptive_tasks(np.ones((1, 1)), 100, "more-0")
    assert more.games_per_cell == 100 and more.name in game.open_tasks
    game.record_result(more, result(more, [-0.25, 0.25]))
    assert game.payoffs.cell(("uniform", "uniform")).mean == pytest.approx((0.0, 0.0))
    assert game.num_games == 150 and not game.open_tasks
