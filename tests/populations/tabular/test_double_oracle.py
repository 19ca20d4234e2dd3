"""Double oracles: curves known from papers and OpenSpiel."""

from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np
import pytest
from populations.tabular.spiel import tree

from palestra.populations.plans.solvers import CoarseCorrelatedEquilibrium, Nash, Uniform
from palestra.populations.tabular.best_response import best_response, nash_conv
from palestra.populations.tabular.game_tree import uniform_policy
from results.populations.parts.double_oracle import XFPSolver, anytime_psro, exact_payoffs, joint_psro, psro, xdo


def test_uniform_psro_equals_fictitious_play() -> None:
    leduc = tree("leduc_poker")
    solver = XFPSolver(leduc)
    for stage in islice(psro(leduc, Uniform().solve), 12):
        assert stage.nash_conv == pytest.approx(nash_conv(leduc, solver.average_policy()), abs=1e-9)
        solver.run(1)


@pytest.mark.parametrize(
    ("name", "known"),
    [("kuhn_poker", {1: 0.625}), ("leduc_poker", {1: 5.21, 5: 3.39, 10: 2.35, 20: 1.55, 30: 1.09, 38: 0.91})],
)
def test_uniform_psro_follows_openspiels_curve(name: str, known: dict[int, float]) -> None:
    """OpenSpiel's psro_v2 with exact responses, and payoffs from 1,000 games each."""
    stages = list(islice(psro(tree(name), Uniform().solve), max(known) + 1))
    assert {number: stages[number].nash_conv for number in known} == pytest.approx(known, abs=0.006)


def test_nash_psro_follows_openspiels_curve_within_noise() -> None:
    """OpenSpiel's, with payoffs from 1,000 games: Kuhn 0.833, then 0.016 at 10; Leduc 6.83, then 3.16 at 10."""
    kuhn = list(islice(psro(tree("kuhn_poker"), Nash().solve), 11))
    assert kuhn[1].nash_conv == pytest.approx(0.833, abs=5e-4) and kuhn[10].nash_conv < 0.016
    leduc = list(islice(psro(tree("leduc_poker"), Nash().solve), 11))
    assert leduc[1].nash_conv == pytest.approx(6.83, abs=5e-3) and 2.5 < leduc[10].nash_conv < 3.9
    assert leduc[10].num_members == (11, 11)


def test_iterate_is_an_equilibrium_of_its_members() -> None:
    """NashConv of the mixture, restricted to the members, is 0 with Nash weights."""
    kuhn, members = tree("kuhn_poker"), [uniform_policy(tree("kuhn_poker"))]
    for stage in islice(psro(kuhn, Nash().solve), 4):
        assert [mix.sum() for mix in stage.member_weights] == pytest.approx([1, 1])
        assert stage.nash_conv == pytest.approx(nash_conv(kuhn, stage.policy), abs=1e-12)
        payoffs = exact_payoffs(kuhn, {0: members, 1: members})
        first, second = stage.member_weights
        assert (payoffs[0] @ second).max() == pytest.approx(first @ payoffs[0] @ second, abs=1e-9)
        assert (first @ payoffs[1]).max() == pytest.approx(first @ payoffs[1] @ second, abs=1e-9)
        answers = [best_response(kuhn, stage.policy, player)[0] for player in (0, 1)]
        members.append(np.concatenate([answers[player][kuhn.player_rows(player)] for player in (0, 1)]))


def test_psro_on_a_three_player_game_from_another_start() -> None:
    kuhn = tree("kuhn_poker", players=3)
    passing = np.tile([1.0, 0.0], (48, 1))
    stages = list(islice(psro(kuhn, Uniform().solve, passing), 30))
    assert stages[0].nash_conv == nash_conv(kuhn, passing) and stages[-1].num_members == (30, 30, 30)
    assert stages[-1].nash_conv < 0.5 < stages[0].nash_conv


def test_anytime_psro_never_gets_worse() -> None:
    """Except for what regret matching leaves open; PSRO's own curve rises by 2 from its start."""
    curve = [stage.nash_conv for stage in islice(anytime_psro(tree("leduc_poker"), iterations=200), 9)]
    assert np.diff(curve).max() < 0.01 and curve[8] < 2.5
    kuhn = [stage.nash_conv for stage in islice(anytime_psro(tree("kuhn_poker"), iterations=300), 11)]
    assert np.diff(kuhn).max() < 0.005 and kuhn[-1] < 0.1


def test_xdo_follows_the_published_curve() -> None:
    """Exploitability, half of NashConv, on Leduc poker: below 0.42 at 6, 0.09 at 8, 0.001 at 16 (its authors' runs)."""
    leduc = tree("leduc_poker")
    stages = list(islice(xdo(leduc), 9))
    assert stages[1].nash_conv == pytest.approx(6.83, abs=5e-3)  # a single response each, as in PSRO's first iteration
    assert stages[6].nash_conv / 2 < 0.42 and stages[8].nash_conv / 2 < 0.09
    allowed = [stage.num_members for stage in stages]
    assert allowed[0] == (0, 0) and allowed[1] == (468, 468) and allowed == sorted(allowed)
    assert max(allowed[-1]) <= leduc.action_mask[leduc.player_rows(0)].sum()


@pytest.mark.slow
def test_xdo_solves_leduc_poker_in_sixteen_iterations() -> None:
    *_, last = islice(xdo(tree("leduc_poker")), 17)
    assert last.nash_conv / 2 < 0.001


def test_joint_psro_finds_a_coarse_correlated_equilibrium_of_three_players() -> None:
    kuhn = tree("kuhn_poker", players=3)
    stages = list(islice(joint_psro(kuhn, CoarseCorrelatedEquilibrium().solve_joint), 7))
    assert stages[0].cce_gap == pytest.approx(nash_conv(kuhn, uniform_policy(kuhn)), abs=1e-9)
    assert stages[-1].joint.shape == (7, 7, 7) and stages[-1].joint.sum() == pytest.approx(1)
    assert stages[-1].expected_returns.sum() == pytest.approx(0, abs=1e-9)
    assert stages[-1].cce_gap < 0.3 < stages[0].cce_gap


def test_unsupported_games_are_refused() -> None:
    three, bargaining = tree("kuhn_poker", players=3), tree("bargaining")
    for game in (three, bargaining):
        with pytest.raises(ValueError, match="anytime PSRO is for two-player zero-sum games"):
            next(anytime_psro(game))
    with pytest.raises(ValueError, match="XDO is for two"):
        next(xdo(three))


def test_members_are_best_responses_to_the_previous_policy() -> None:
    seen: list[tuple[int, ...]] = []

    def solve(payoffs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Weights the newest member only, which makes PSRO iterated best response."""
        seen.append(payoffs[0].shape)
        return [np.eye(size)[-1] for size in payoffs[0].shape]

    kuhn = tree("kuhn_poker")
    stages = list(islice(psro(kuhn, solve), 4))
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for before, after in pairwise(stages):
        for player in (0, 1):
            own = kuhn.player_rows(player)
            assert np.array_equal(after.policy[own], best_response(kuhn, before.policy, player)[0][own])


def test_xdo_continues_without_new_responses() -> None:
    *_, last = islice(xdo(tree("kuhn_poker"), iterations=200), 40)
    assert last.nash_conv < 0.002
