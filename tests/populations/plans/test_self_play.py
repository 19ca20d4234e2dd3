"""Self-play with a pool: known values of fictitious play, the opponents of each matchmaker, and the order of tasks."""

import random

import numpy as np
import pytest
from helpers.toy_populations import ExactGame, Matrix, drive, population, replay_log, tree
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.config import validate
from palestra.populations.plans.psro import PSRO
from palestra.populations.plans.psro_config import PSROConfig
from palestra.populations.plans.self_play import SelfPlay, SelfPlayConfig
from palestra.populations.population import Population
from palestra.populations.tasks import OpponentResult, TrainResult

TWO = ("player_0", "player_1")
ONE = ("agent",)


def self_play(players=TWO, seats=(), **config):
    return SelfPlay(validate(SelfPlayConfig, config), population(*players), seats)


def on_kuhn(players=TWO, seats=(), rng=None, **config):
    plan = self_play(players, seats, **config)
    return plan, drive(plan, ExactGame(tree("kuhn_poker"), players), rng)


def train_tasks(log):
    return {task.output_member: task for task, *_ in log if task.kind == "train"}


def test_uniform_history_gives_fictitious_play():
    """OpenSpiel's XFP on Kuhn poker: 0.625 at 1, 0.167 at 10, 0.048 at 50."""
    curve = on_kuhn(slices=30, matchmaker={"type": "history"})[0].nash_convs
    assert curve[1] == pytest.approx(0.625) and curve[2] == pytest.approx(5 / 12)
    assert curve[10] == pytest.approx(0.167, abs=0.04) and curve[30] < 0.1


def test_latest_opponent_only_cycles():
    plan, log = on_kuhn(slices=12, nash_conv_of="latest")
    assert min(plan.nash_convs.values()) > 0.3  # the average of the same members is better:
    assert on_kuhn(slices=12)[0].nash_convs[12] < 0.7
    for name, task in train_tasks(log).items():
        player, _, number = name.rpartition("-")
        (other,) = {*TWO} - {player}
        assert task.opponents.mixes == {other: {f"{other}-{int(number) - 1}" if number != "1" else "uniform": 1.0}}


def test_solution_matchmaker_equals_psro():
    plan, log = on_kuhn(slices=6, matchmaker={"type": "solution"}, games_per_cell=1, start="fresh")
    psro = PSRO(PSROConfig(iterations=6), population(*TWO))
    same = train_tasks(drive(psro, ExactGame(tree("kuhn_poker"), TWO)))
    for name, task in train_tasks(log).items():
        for other, mix in task.opponents.mixes.items():
            assert mix == pytest.approx(same[name].opponents.mixes[other])
    assert plan.payoffs.shape == (7, 7)


def test_pool_drops_the_oldest_member():
    _, log = on_kuhn(slices=6, matchmaker={"type": "history"}, pool_size=2)
    assert train_tasks(log)["player_0-6"].opponents.mixes == {"player_1": {"player_1-4": 0.5, "player_1-5": 0.5}}
    assert train_tasks(log)["player_0-1"].opponents.mixes == {"player_1": {"uniform": 1.0}}


def test_pfsp_prefers_opponents_that_beat_the_learner():
    plan = self_play(ONE, ONE * 2, slices=3, matchmaker={"type": "pfsp"}, self_play=0.2, start="last")
    (first,) = plan.initial_tasks()
    assert first.opponents.mixes == {"agent": {"uniform": 1.0}} and first.self_play == 0.2
    (second, _assess) = sorted(plan.on_result(first, answer(uniform=0.75)), key=lambda task: task.kind, reverse=True)
    # win rates 3/4 and, unplayed, 1/2: (1/4)^2 and (1/2)^2
    assert second.opponents.mixes["agent"] == pytest.approx({"uniform": 0.2, "agent-1": 0.8})
    assert second.start == "agent-1" and second.members == ("agent-1",)


def answer(**rates):
    opponents = {name.replace("_", "-"): OpponentResult(100, 0.0, 1.0, 100 * rate, 0) for name, rate in rates.items()}
    return TrainResult(env_steps=10, mean_return=0.0, opponents=opponents)


@pytest.mark.parametrize("matchmaker", ["latest", "history", "solution"])
def test_members_do_not_depend_on_task_order(matchmaker):
    config = {"slices": 5, "matchmaker": {"type": matchmaker}, "games_per_cell": 1, "cells_per_task": 2}
    plain, *others = [on_kuhn(rng=rng, **config)[0] for rng in (None, random.Random(1), random.Random(2))]
    for other in others:
        assert other.nash_convs == pytest.approx(plain.nash_convs, abs=1e-9)


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from(["latest", "history", "pfsp", "solution"]), st.integers(0, 3))
def test_replayed_log_gives_the_same_tasks_and_metrics(seed, matchmaker, pool):
    payoff, rng = np.random.default_rng(seed).normal(size=(4, 4)), random.Random(seed)
    config = {
        "slices": 4,
        "matchmaker": {"type": matchmaker},
        "games_per_cell": 10,
        "pool_size": pool,
        "nash_conv_every": 2,
    }
    log = drive(self_play(**config), Matrix([payoff, -payoff], TWO), rng)
    assert not replay_log(self_play(**config), log)
    assert replay_log(self_play(**config), log[: rng.randrange(len(log))])


def test_player_waits_only_for_the_others_slice():
    plan, game = self_play(slices=3, nash_conv_every=0), ExactGame(tree("kuhn_poker"), TWO)
    one, two = plan.initial_tasks()
    assert plan.on_result(one, game(one)) == []
    again = plan.on_result(two, game(two))
    assert [task.output_member for task in again] == ["player_0-2", "player_1-2"]
    assert plan.summary()["iteration"] == 1


def test_run_stops_at_the_target_nash_conv_measured_at_its_interval():
    plan, _ = on_kuhn(slices=40, matchmaker={"type": "history"}, nash_conv_every=4, stop_nash_conv=0.2)
    assert plan.is_done and max(plan.nash_convs) < 40
    assert all(number % 4 == 0 for number in plan.nash_convs)
    assert list(on_kuhn(slices=5, nash_conv_every=3)[0].nash_convs) == [3, 5]


def test_metrics_count_members_and_env_steps():
    _, log = on_kuhn(slices=3, games_per_cell=1)
    rounds = [notes["team"] for *_, notes in log if "members" in notes.get("team", {})]
    assert [(line["iteration"], line["members"], line["env_steps"]) for line in rounds] == [
        (1, 3, 20),
        (2, 5, 40),
        (3, 7, 60),
    ]


@pytest.mark.parametrize(
    ("config", "players", "words"),
    [
        ({"matchmaker": {"type": "solution"}}, TWO, "games_per_cell: 0"),
        (
            {"matchmaker": {"type": "solution"}, "games_per_cell": 9, "meta_solver": {"type": "cce"}},
            TWO,
            "which meta_solver cce does not give",
        ),
        ({"self_play": 0.5}, TWO, "symmetric: true"),
        ({"matchmaker": {"type": "pfps"}}, TWO, "did you mean pfsp"),
    ],
)
def test_invalid_configs_are_refused_with_the_fix(config, players, words):
    with pytest.raises(ValueError, match=words):
        self_play(players, **config)


def test_every_player_needs_an_initial_member():
    with pytest.raises(ValueError, match='"player_0" has no initial member'):
        SelfPlay(SelfPlayConfig(), Population(TWO))
