"""PSRO against known results and theorems: exact curves on Kuhn and Leduc poker, double oracle, levels, joint solvers;
and a state that depends on the order of finished tasks alone."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.toy_populations import ExactGame, Matrix, drive, population, replay_log, tree
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.config import validate
from palestra.populations.normal_form import equilibria
from palestra.populations.payoffs import PayoffCell
from palestra.populations.plans.meta_strategy import MetaStrategy
from palestra.populations.plans.psro import PSRO
from palestra.populations.plans.psro_config import PSROConfig
from palestra.populations.plans.psro_responses import Response, gain_error
from palestra.populations.population import Member, Population
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tasks import AssessResult, OpponentResult, PlayResult, TrainResult
from results.populations.parts.double_oracle import XFPSolver

TWO = ("player_0", "player_1")
THREE = (*TWO, "player_2")
RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])


def psro(players=TWO, seats=(), **config):
    return PSRO(validate(PSROConfig, config), population(*players), seats)


def on_kuhn(players=TWO, seats=(), rng=None, **config):
    plan, game = psro(players, seats, **config), ExactGame(tree("kuhn_poker"), players)
    return plan, game, drive(plan, game, rng)


def team_metric(log, figure):
    """A metric of the lines that concern all players, by iteration."""
    return {lines["team"]["iteration"]: lines["team"][figure] for *_, lines in log if figure in lines.get("team", {})}


# curves


def test_kuhn_with_nash_follows_openspiels_curve():
    """OpenSpiel's psro_v2 with exact responses and 1,000 games per cell has 0.833, 0.397, 0.218, 0.099, ... and 0.016
    at 10, where the noise of its payoffs keeps it from 0."""
    plan, _, log = on_kuhn(iterations=10)
    curve = plan.nash_convs
    assert curve[0] == pytest.approx(11 / 12) and curve[1] == pytest.approx(5 / 6)
    assert curve[2] < 0.397 and curve[3] < 0.218 and curve[10] < 0.016
    assert team_metric(log, "nash_conv") == curve


def test_uniform_solver_gives_fictitious_play():
    """OpenSpiel's psro_v2 and XFP both have 0.625 at 1, 0.264 at 5, 0.167 at 10; equally good responses may differ."""
    curve = on_kuhn(iterations=10, meta_solver={"type": "uniform"})[0].nash_convs
    assert curve[5] == pytest.approx(0.264, abs=0.05) and curve[10] == pytest.approx(0.167, abs=0.04)
    play = XFPSolver(tree("kuhn_poker"))
    for number in (1, 2):
        play.run(1)
        assert curve[number] == pytest.approx(nash_conv(tree("kuhn_poker"), play.average_policy()), abs=1e-9)


@pytest.mark.slow
def test_leduc_follows_openspiels_curve():
    """psro_v2, Nash, exact responses: 6.83 at 1, about 3.2 at 10 and 1.6 at 20."""
    plan, game = psro(iterations=20), ExactGame(tree("leduc_poker"), TWO)
    drive(plan, game)
    curve = plan.nash_convs
    assert curve[0] == pytest.approx(4.747222, abs=1e-6) and curve[1] == pytest.approx(6.8333, abs=1e-3)
    assert 2.4 < curve[10] < 4.0 and 1.1 < curve[20] < 2.1


def test_exact_response_gains_sum_to_nash_conv():
    plan, _, log = on_kuhn(iterations=8)
    gaps = team_metric(log, "gap")
    assert len(gaps) == 8
    for number, gap in gaps.items():
        assert gap == pytest.approx(plan.nash_convs[number - 1], abs=1e-9)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(2, 6))
def test_double_oracle_ends_at_an_equilibrium(seed, rows, columns):
    """McMahan et al., 2003: when no response is new, the meta-strategy is an equilibrium of the whole game."""
    payoff = np.random.default_rng(seed).normal(size=(rows, columns))
    plan, game = psro(iterations=rows * columns + 1, stop_nash_conv=1e-7), Matrix([payoff, -payoff], TWO)
    drive(plan, game, random.Random(seed))
    assert plan.nash_convs[max(plan.nash_convs)] < 1e-7
    assert game.nash_conv(plan.meta_strategies[-1].all_marginals()) < 1e-6 or plan.is_done


# the order of tasks


@pytest.mark.parametrize(
    "config", [{}, {"pipeline_levels": 3, "slices": 2}, {"meta_solver": {"type": "uniform"}, "cells_per_task": 2}]
)
def test_members_do_not_depend_on_task_order(config):
    plans = [on_kuhn(iterations=5, rng=rng, **config)[0] for rng in (None, random.Random(1), random.Random(2))]
    for other in plans[1:]:
        assert other.nash_convs == pytest.approx(plans[0].nash_convs, abs=1e-9)
        assert [meta.names for meta in other.meta_strategies] == [meta.names for meta in plans[0].meta_strategies]


@settings(max_examples=8)
@given(
    st.integers(0, 2**32),
    st.fixed_dictionaries(
        {
            "pipeline_levels": st.integers(1, 3),
            "slices": st.integers(1, 3),
            "cells_per_task": st.integers(1, 4),
            "adaptive_games": st.sampled_from([0, 100]),
            "nash_conv_every": st.integers(0, 2),
            "start": st.sampled_from(["fresh", "last", "best"]),
        }
    ),
)
def test_replayed_log_gives_the_same_tasks_and_metrics(seed, config):
    payoff, rng = np.random.default_rng(seed).normal(size=(4, 4)), random.Random(seed)
    game = Matrix([payoff, -payoff], TWO, noise=1.0)
    log = drive(psro(iterations=4, **config), game, rng)
    assert not replay_log(psro(iterations=4, **config), log)
    some = rng.randrange(len(log))
    assert replay_log(psro(iterations=4, **config), log[:some])  # the remaining tasks of a killed run


def test_cells_are_played_as_soon_as_both_members_exist():
    plan, game = psro(iterations=2), ExactGame(tree("kuhn_poker"), TWO)
    (first,) = plan.initial_tasks()
    new = plan.on_result(first, game(first))
    assess, one, two = new
    assert [task.kind for task in new] == ["assess", "train", "train"]
    (play,) = plan.on_result(one, game(one))  # while the other player still trains
    assert play.cells == (("player_0-1", "uniform"),) and play.members == ("player_0-1",)
    (both,) = plan.on_result(two, game(two))
    assert sorted(both.cells) == [("player_0-1", "player_1-1"), ("uniform", "player_1-1")]
    assert plan.on_result(play, game(play)) == []
    assert [task.output_member for task in plan.on_result(both, game(both))] == ["", "player_0-2", "player_1-2"]
    assert plan.on_result(assess, game(assess)) == []  # no task waited for it


# levels


def test_pipeline_levels_train_concurrently_against_lower_snapshots():
    _, _, log = on_kuhn(iterations=6, pipeline_levels=3, slices=3)
    trained = [task for task, *_ in log if task.kind == "train"]
    numbers = {task.output_member: int(task.output_member.partition("~")[0].rpartition("-")[2]) for task in trained}
    at = {task.output_member: place for place, task in enumerate(trained)}
    assert at["player_0-3~1"] < at["player_0-1"]  # the third level started before the first was done
    met = {
        task.output_member: {n for mix in task.opponents.mixes.values() for n in mix} - {"uniform"} for task in trained
    }
    snapshots = [(maker, name) for maker, names in met.items() for name in names if "~" in name]
    assert snapshots and all(numbers[name] < numbers[maker] for maker, name in snapshots)
    for maker, names in met.items():
        if "~" not in maker:  # frozen members responded to frozen members only
            assert not any("~" in name for name in names)


def test_pipeline_psro_with_exact_responses_equals_psro():
    plain, piped = on_kuhn(iterations=6)[0], on_kuhn(iterations=6, pipeline_levels=3, slices=2)[0]
    assert piped.nash_convs == pytest.approx(plain.nash_convs, abs=1e-9)
    assert {m.name for m in piped.population} == {m.name for m in plain.population}


def test_pipeline_slice_starts_from_the_previous_one():
    _, _, log = on_kuhn(iterations=3, pipeline_levels=2, slices=2)
    starts = {task.output_member: task.start for task, *_ in log if task.kind == "train"}
    for maker, start in starts.items():
        name, _, number = maker.partition("~")
        if number and int(number) > 1:
            assert start == f"{name}~{int(number) - 1}"
        elif not number:
            assert start.startswith(f"{name}~")


# joint solvers


@pytest.mark.parametrize("solver", ["cce", "ce"])
def test_jpsro_closes_the_gap_of_three_player_kuhn(solver):
    """Marris et al., 2021: it converges to an equilibrium of its kind, and the gap measured by responses is the true
    one."""
    steps = 7 if solver == "cce" else 4
    plan = psro(THREE, iterations=steps, meta_solver={"type": solver})
    game = ExactGame(tree("kuhn_poker", players=3), THREE)
    log = drive(plan, game)
    gaps = team_metric(log, "gap")
    assert gaps[1] > 2 and gaps[steps] < (0.1 if solver == "cce" else 0.5)
    if solver == "cce":
        for number in (1, 4, 7):
            assert gaps[number] == pytest.approx(game.coarse_gap(plan.meta_strategies[number - 1]), abs=1e-7)


@pytest.mark.parametrize("rng", [None, random.Random(1)])
def test_jpsro_drops_duplicates_and_ends_at_an_equilibrium(rng):
    """All members are different policies of Kuhn poker, and the run ends by itself once no exact response gains, at a
    correlated equilibrium of the whole game."""
    plan, game, _ = on_kuhn(rng=rng, meta_solver={"type": "ce"}, iterations=40)
    members = plan.payoffs.members
    assert len(plan.meta_strategies) < 40 and plan.meta_strategies[-1].names == plan.meta_strategies[-2].names
    for player in TWO:
        policies = [game.policies[name].tobytes() for name in members[player]]
        assert len(set(policies)) == len(policies) < 40
    assert game.coarse_gap(plan.meta_strategies[-1]) < 1e-5  # a correlated equilibrium is a coarse one


def test_joint_task_names_joint_lineups():
    log = drive(psro(meta_solver={"type": "cce"}, iterations=3), chicken())
    tasks = [task for task, *_ in log if task.kind == "train"]
    for task in tasks:
        (other,) = {*TWO} - {task.player}
        assert all(list(lineup.members) == [other] for lineup in task.opponents.joint)
        assert sum(lineup.probability for lineup in task.opponents.joint) == pytest.approx(1)


def chicken():
    """Aumann's game: dare or yield."""
    payoff = np.array([[0.0, 7], [2, 6]])
    return Matrix([payoff, payoff.T], TWO)


def test_correlated_solver_trains_a_response_per_recommendation():
    plan = psro(meta_solver={"type": "ce"}, iterations=3)
    drive(plan, chicken())
    for number, meta in enumerate(plan.meta_strategies[:-1]):
        for player in TWO:
            recommended = {r.recommended for r in plan.responses if (r.iteration, r.player) == (number + 1, player)}
            assert recommended == set(meta.marginal(player))


def run_learned_task(game, games=None, spread=0.0):
    """Runs tasks of a game with learned responses: results have the mean return and, with `games`, the number of games
    and their spread."""

    def do(task):
        result = game(task)
        if task.kind == "train" and games:
            mean = result.mean_return
            met = OpponentResult(games, mean, mean**2 + spread**2, 0, 0)
            result = replace(result, opponents={"all": met})
        return result

    return do


def responses_by_iteration(plan):
    """The number of responses of each iteration and player."""
    return Counter((response.iteration, response.player) for response in plan.responses)


def large_game(seed, members=12):
    return Matrix([np.random.default_rng(seed + seat).normal(size=(members, members)) for seat in range(2)], TWO)


@pytest.mark.parametrize("limit", [None, 2])
def test_responses_to_recommendations_are_limited(limit):
    """Without a limit the members of learned responses may double in every iteration."""
    config = {"max_responses": limit} if limit else {}
    plan = psro(meta_solver={"type": "ce"}, iterations=6, **config)
    drive(plan, run_learned_task(large_game(0)))
    counts = responses_by_iteration(plan)
    assert max(counts.values()) == (limit or 4) and len(plan.meta_strategies) == 7
    for number, meta in enumerate(plan.meta_strategies[:-1], start=1):
        for player in TWO:
            mix = meta.marginal(player)
            chosen = {r.recommended for r in plan.responses if (r.iteration, r.player) == (number, player)}
            assert min(mix[one] for one in chosen) >= max((p for one, p in mix.items() if one not in chosen), default=0)


def test_limited_responses_still_end_at_an_equilibrium():
    """Rarer recommendations get their responses once the others gain nothing."""
    plan, game, _ = on_kuhn(meta_solver={"type": "ce"}, iterations=200, max_responses=1)
    assert plan.is_done and len(plan.meta_strategies) < 200
    assert max(responses_by_iteration(plan).values()) == 1
    assert game.coarse_gap(plan.meta_strategies[-1]) < 1e-5
    assert plan.meta_strategies[-1].names == plan.meta_strategies[-2].names


@pytest.mark.parametrize(("spread", "joins"), [(0.0, True), (1.0, True), (60.0, False)])
def test_learned_responses_join_if_their_gain_exceeds_its_error(spread, joins):
    """The response to uniform play of chicken: daring earns 3.5, yielding 4 and uniform play 3.75, so the gain is 0.25.
    With 10,000 games the standard errors are 0, 0.01 and 0.6."""
    plan = psro(meta_solver={"type": "ce"}, iterations=1)
    drive(plan, run_learned_task(chicken(), games=10_000, spread=spread))
    assert [len(own) for own in plan.meta_strategies[-1].names] == [1 + joins, 1 + joins]


def test_payoffs_of_uncertain_members_make_a_gain_uncertain():
    meta = MetaStrategy(TWO, (("a", "b"), ("c",)), np.array([[0.4], [0.6]]), is_correlated=True)
    response, result = Response("r", "player_0", 1, "b"), TrainResult(env_steps=1, mean_return=2.0)
    stderr = [np.array([[np.inf], [0.5]]), np.zeros((2, 1))]
    assert gain_error(response, result, meta, stderr) is None
    met = {"c": OpponentResult(100, 2.0, 8.0, 0, 0)}  # a standard error of 2 / 10
    found = gain_error(response, replace(result, opponents=met), meta, stderr)
    assert found == pytest.approx(0.6 * math.hypot(0.2, 0.5))


@pytest.mark.parametrize("solver", ["ce", "cce"])
def test_run_ends_when_the_table_is_full(monkeypatch, solver):
    """The solver would refuse a larger table."""
    most = 8 * (2 * 9 * 8) * (2 * 9 * 8 + 81) if solver == "ce" else 8 * (2 * 5) * (2 * 5 + 25)
    monkeypatch.setattr(equilibria, "MAX_BYTES", most)
    plan = psro(meta_solver={"type": solver}, iterations=20)
    members = "9 x 9" if solver == "ce" else "5 x 5"
    with pytest.warns(UserWarning, match=f"with {members} members, whose .*, since solver {solver} takes no larger"):
        drive(plan, run_learned_task(large_game(1)))
    assert plan.is_done and [len(own) for own in plan.meta_strategies[-1].names] == [int(members[0])] * 2
    assert not [response for response in plan.responses if not response.is_frozen]
    assert plan.summary()["iteration"] == len(plan.meta_strategies) - 1 < 20


# kinds of populations


def test_one_population_may_play_every_seat():
    plan, _, log = on_kuhn(("agent",), ("agent", "agent"), iterations=6)
    assert [m.name for m in plan.population] == ["uniform", *(f"agent-{i}" for i in range(1, 7))]
    cells = [tuple(sorted(cell)) for task, *_ in log if task.kind == "play" for cell in task.cells]
    assert len(cells) == len(set(cells)) == 7 * 8 / 2
    assert plan.nash_convs[6] < 0.3 < plan.nash_convs[0]


def test_rectified_responses_start_from_supported_members():
    plan, game = psro(("agent",), ("agent", "agent"), rectified=True, iterations=3), Matrix([RPS, -RPS], TWO)
    game.players, game.actions = ["agent", "agent"], {"agent": 3}
    seen = []
    for task, _, _ in drive(plan, run_symmetric_task(game)):
        if task.kind == "train":
            seen.append((task.start, set(task.opponents.mixes["agent"])))
    assert len(seen) >= 3
    assert all(start is None or start in plan.population.members for start, _ in seen)


def run_symmetric_task(game):
    """Runs the tasks of one population in a symmetric two-player game."""

    def do(task):
        if task.kind == "assess":
            return AssessResult(nash_conv=1.0, exploitability=0.5, values=())
        if task.kind == "train":
            worth = game.payoffs[0] @ game.mixed("agent", task.opponents.mixes["agent"])
            game.chosen[task.output_member] = int(worth.argmax())
            return TrainResult(env_steps=1, mean_return=float(worth.max()))
        cells = []
        for one, other in task.cells:
            mean = float(game.mixture("agent", one) @ game.payoffs[0] @ game.mixture("agent", other))
            cells.append(PayoffCell(1, (mean, -mean), (0.0, 0.0), (0, 0), exact=True))
        return PlayResult(tuple(cells))

    return do


@pytest.mark.parametrize("start", ["fresh", "last", "best"])
def test_response_starts_from_the_configured_member(start):
    plan, _, log = on_kuhn(iterations=4, start=start)
    starts = {task.output_member: task.start for task, *_ in log if task.kind == "train"}
    assert starts["player_0-1"] is None  # uniform has no weights
    if start != "best":
        assert starts["player_0-3"] == {"fresh": None, "last": "player_0-2"}[start]
        return
    meta = plan.meta_strategies[2]
    tables = plan.game.payoff_tensors(meta.names)
    earned = tables[0] @ meta.joint.sum(0)
    assert earned[meta.names[0].index(starts["player_0-3"])] == pytest.approx(earned.max())
    assert plan.population.members["player_0-3"].parent == starts["player_0-3"]


# games


def test_adaptive_games_follow_the_meta_strategy():
    payoff = np.random.default_rng(3).normal(size=(5, 5))
    game = Matrix([payoff, -payoff], TWO, noise=1.0)
    plan = psro(iterations=3, games_per_cell=100, adaptive_games=1000)
    log = drive(plan, game)
    more = [task for task, *_ in log if "/more-" in task.name]
    given = sum(len(task.cells) * task.games_per_cell for task in more)
    assert given == 4 * 1000 and plan.game.num_games == given + 100 * 16
    assert plan.payoffs.games().min() == 100 < plan.payoffs.games().max()
    assert not [
        task for task, *_ in on_kuhn(iterations=2, adaptive_games=1000)[2] if "/more-" in task.name
    ]  # all payoffs are known


def test_exact_payoffs_count_no_games():
    plan, _, log = on_kuhn(iterations=2)
    assert plan.game.num_games == 0 and team_metric(log, "games")[2] == 0 and team_metric(log, "env_steps")[2] == 40


def test_run_stops_at_the_target_nash_conv():
    plan = on_kuhn(iterations=10, stop_nash_conv=0.25)[0]
    assert plan.is_done and plan.nash_convs[3] <= 0.25 < plan.nash_convs[2] and 5 not in plan.nash_convs
    assert plan.summary()["iteration"] <= 4


def test_nash_conv_is_measured_at_its_interval_and_at_the_end():
    assert list(on_kuhn(iterations=5, nash_conv_every=3)[0].nash_convs) == [0, 3, 5]
    assert on_kuhn(iterations=2, nash_conv_every=0)[0].nash_convs == {}


def test_iteration_metrics_hold_the_meta_strategy():
    plan, _, log = on_kuhn(iterations=3)
    lines = [notes for *_, notes in log if "team" in notes and "members" in notes["team"]]
    assert [line["team"]["members"] for line in lines] == [1, 3, 5, 7]
    for number, line in enumerate(lines):
        for player in TWO:
            mix = {key.removeprefix("mix/"): p for key, p in line[player].items() if key.startswith("mix/")}
            assert mix == plan.meta_strategies[number].marginal(player) and sum(mix.values()) == pytest.approx(1)
        assert line["player_0"]["value"] == pytest.approx(-line["player_1"]["value"])
    assert lines[-1]["player_0"]["value"] == pytest.approx(-1 / 18, abs=0.1)


# errors


@pytest.mark.parametrize(
    ("config", "players", "seats", "words"),
    [
        ({"pipeline_levels": 2, "rectified": True}, TWO, (), "set pipeline_levels: 1"),
        ({"pipeline_levels": 2, "meta_solver": {"type": "cce"}}, TWO, (), "set pipeline_levels: 1"),
        ({"rectified": True, "meta_solver": {"type": "ce"}}, TWO, (), "which meta_solver ce does not give"),
        ({"rectified": True, "meta_solver": {"type": "prd"}}, THREE, (), "two seats"),
        ({}, THREE, (), "meta_solver nash is for two seats"),
        ({"meta_solver": {"type": "cce"}}, ("agent",), ("agent", "agent"), "symmetric: false"),
        ({"self_play": 0.5}, TWO, (), "symmetric: true"),
        ({"itertions": 3}, TWO, (), "did you mean iterations"),
    ],
)
def test_invalid_configs_are_refused_with_the_fix(config, players, seats, words):
    with pytest.raises(ValueError, match=words):
        psro(players, seats, **config)


def test_every_player_needs_an_initial_member():
    lonely = Population(TWO)
    lonely.add(Member("uniform", "player_0"))
    with pytest.raises(ValueError, match='"player_1" has no initial member'):
        PSRO(PSROConfig(), lonely)


def test_padded_meta_strategy_is_unchanged():
    meta = MetaStrategy.independent(TWO, (["a", "b"], ["c"]), [np.array([0.25, 0.75]), np.array([1.0])])
    wide = meta.pad_to((["a", "b", "d"], ["c", "e"]))
    assert wide.joint.shape == (3, 2) and wide.all_marginals() == meta.all_marginals() == {
        "player_0": {"a": 0.25, "b": 0.75},
        "player_1": {"c": 1.0},
    }
