"""Iterative solvers: iterates equal OpenSpiel's, and known distances from an equilibrium."""

import numpy as np
import pyspiel
import pytest
from populations.tabular.spiel import spiel_tree, tree

from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import expected_returns
from results.populations.parts.double_oracle import TabularSolver, XFPSolver


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize(("game", "iterations"), [("kuhn_poker", 30), ("leduc_poker", 4), ("kuhn_poker(players=3)", 8)])
def test_iterates_equal_openspiel(game: str, iterations: int, plus: bool) -> None:
    found, loaded = spiel_tree(game), pyspiel.load_game(game)
    ours, theirs = CFRSolver(found, plus=plus), (pyspiel.CFRPlusSolver if plus else pyspiel.CFRSolver)(loaded)
    ours.run(iterations)
    for _ in range(iterations):
        theirs.evaluate_and_update_policy()
    pairs = [(ours.policy, theirs.current_policy()), (ours.average_policy(), theirs.average_policy())]
    for policy, table in pairs:
        for words, legal, row in zip(found.info_state_texts, found.action_mask, policy, strict=True):
            known = dict(table.get_state_policy(words))
            assert [row[action] for action in np.flatnonzero(legal)] == pytest.approx(list(known.values()), abs=1e-9)


@pytest.mark.parametrize(
    ("plus", "name", "iterations", "known"),
    [
        (False, "kuhn_poker", 10, 0.137),
        (False, "kuhn_poker", 100, 0.0165),
        (False, "leduc_poker", 100, 0.1914),
        (True, "kuhn_poker", 100, 0.0024),
        (True, "leduc_poker", 10, 1.221),
        (True, "leduc_poker", 100, 0.0268),
    ],
)
def test_nash_conv_equals_openspiels_solvers(plus: bool, name: str, iterations: int, known: float) -> None:
    found = tree(name)
    solver = CFRSolver(found, plus=plus)
    solver.run(iterations)
    assert nash_conv(found, solver.average_policy()) == pytest.approx(known, rel=0.005)


def test_value_of_kuhn_poker_is_one_eighteenth() -> None:
    found = tree("kuhn_poker")
    solver = CFRSolver(found, plus=True)
    solver.run(3000)
    assert expected_returns(found, solver.average_policy()) == pytest.approx([-1 / 18, 1 / 18], abs=1e-4)


def test_fictitious_play_equals_openspiel_on_leduc() -> None:
    """OpenSpiel's XFP: 2.348 after 10 iterations, 0.500 after 100."""
    found = tree("leduc_poker")
    solver = XFPSolver(found)
    solver.run(10)
    assert nash_conv(found, solver.average_policy()) == pytest.approx(2.348, abs=5e-4)
    solver.run(90)
    assert nash_conv(found, solver.average_policy()) == pytest.approx(0.500, abs=5e-4)


@pytest.mark.parametrize("make", [CFRSolver, XFPSolver])
def test_consecutive_runs_equal_one_run(make: type[CFRSolver] | type[XFPSolver]) -> None:
    found = tree("kuhn_poker")
    solvers: list[TabularSolver] = [make(found), make(found)]
    solvers[0].run(7)
    solvers[1].run(3)
    solvers[1].run(4)
    assert np.array_equal(solvers[0].average_policy(), solvers[1].average_policy())


def test_masked_actions_are_never_played() -> None:
    """Leduc poker without raises: only calls are left, so every decision has one action."""
    leduc = tree("leduc_poker")
    calm = leduc.action_mask & (np.arange(3) < 2)
    solver = CFRSolver(leduc, plus=True, action_mask=calm)
    solver.run(50)
    policy = solver.average_policy()
    assert not policy[~calm].any() and np.allclose(policy.sum(1), 1)
    assert nash_conv(leduc, policy, action_mask=calm) == pytest.approx(0, abs=1e-9)
    assert nash_conv(leduc, policy) > 1
    once = leduc.action_mask & ~(np.arange(3) == 0)  # no player folds
    solver = CFRSolver(leduc, plus=True, action_mask=once)
    solver.run(200)
    assert nash_conv(leduc, solver.average_policy(), action_mask=once) < 0.02
