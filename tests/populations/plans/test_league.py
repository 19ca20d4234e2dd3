"""AlphaStar's rules, each by hand; then the league as a whole, with results in any order."""

import cProfile
import itertools
import pstats
from dataclasses import replace

import numpy as np
import pytest
from helpers.toy_populations import league_mixture
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.config import validate
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.plans.league_rules import without_monotone_suffix
from palestra.populations.population import Member, Population
from palestra.populations.tasks import AssessResult, OpponentResult, PlayResult, TrainResult, TrainTask

ME = "main_0"


def league(*members, seed=0, **config):
    """A league whose population starts with `uniform` and members frozen by the learners they are named after."""
    population = Population(("player",))
    population.add(Member("uniform", "player"))
    made = League(LeagueConfig(**{"explore_share": 0.0, "games_per_cell": 0, **config}), population, seed=seed)
    for name in members:
        owner = made.learners[name.rpartition("-")[0]]
        population.add(Member(name, "player", f"members/{name}"))
        owner.frozen_copies.append(name)
        owner.latest = owner.start = owner.parent = name
    return made


def set_win_rates(made, name, **rates):
    """Sets a learner's win rates against members (hyphens in their names written as underscores)."""
    for other, rate in rates.items():
        away = next(
            (m for m in [*made.logic.history("player").names, *made.learners] if m.replace("-", "_") == other), other
        )
        made.win_rates.add(name, away, games=100, points=100 * rate)


def met(made, name):
    return league_mixture(made.logic, made.learners[name])


def near(mix):
    return pytest.approx({name: p for name, p in mix.items() if p})


def answer(task, rate=0.5, games=100):
    """The result of a worker whose learner wins `rate` of its games against every opponent."""
    met = OpponentResult(games, 2 * rate - 1, 1.0, games * rate, 0)
    opponents = dict.fromkeys(task.opponents.mixes["player"], met)
    return TrainResult(env_steps=task.env_steps, mean_return=2 * rate - 1, opponents=opponents)


# opponents of main agents


def test_main_agent_starts_with_self_play_and_initial_members():
    assert met(league(), ME) == {"uniform": 0.5, ME: 0.5}


def test_main_agent_plays_exploiters_that_beat_it():
    """Priorities (1-p)^2 of .9, .6, .2 are .01, .16, .64 of .81; only the earlier exploiter is below .3, so it gets all
    15 %."""
    made = league("main_0-2", "main_exploiter_0-2")
    set_win_rates(made, ME, uniform=0.9, main_0_2=0.6, main_exploiter_0_2=0.2)
    expected = {
        "uniform": 0.5 * 0.01 / 0.81,
        "main_0-2": 0.5 * 0.16 / 0.81,
        "main_exploiter_0-2": 0.5 * 0.64 / 0.81 + 0.15,
        ME: 0.35,
    }
    assert met(made, ME) == near(expected)


def test_main_agent_plays_past_opponents_that_it_no_longer_beats():
    """Win rates .9, .5, .6, .55 against its past: the non-increasing suffix (.55) is dropped; .5 is below .7."""
    made = league("main_0-2", "main_0-4", "main_0-6", pfsp_share=0.0, verification_share=1.0)
    set_win_rates(made, ME, uniform=0.9, main_0_2=0.5, main_0_4=0.6, main_0_6=0.55)
    squares = np.array([0.01, 0.25, 0.16])
    assert met(made, ME) == near(dict(zip(["uniform", "main_0-2", "main_0-4"], squares / squares.sum(), strict=True)))


def test_exploiters_take_precedence_over_past_opponents():
    made = league("main_0-2", "main_0-4", "main_exploiter_0-2", pfsp_share=0.0, verification_share=1.0)
    set_win_rates(made, ME, uniform=0.9, main_0_2=0.1, main_0_4=0.6, main_exploiter_0_2=0.29)
    assert met(made, ME) == {"main_exploiter_0-2": 1.0}
    set_win_rates(made, ME, main_exploiter_0_2=1.0)
    assert "main_exploiter_0-2" not in met(made, ME)


@pytest.mark.parametrize("rates", [(0.9, 0.8, 0.75), (0.71, 0.8, 0.9)], ids=["falls steadily", "all beaten"])
def test_verification_share_is_self_play_if_nothing_is_forgotten(rates):
    made = league("main_0-2", "main_0-4", pfsp_share=0.0, verification_share=1.0)
    set_win_rates(made, ME, **dict(zip(["uniform", "main_0_2", "main_0_4"], rates, strict=True)))
    assert met(made, ME) == {ME: 1.0}


def test_self_play_is_shared_between_main_agents():
    made = league("main_0-2", "main_1-2", main_agents=2, pfsp_share=0.0, verification_share=0.0)
    assert met(made, ME) == {ME: 0.5, "main_1": 0.5}


def test_too_strong_main_agent_is_replaced_by_its_past():
    """0.3 is not above 0.3. Its past: p(1-p) over .8, .6, .5 is .16, .24, .25."""
    made = league("main_1-2", "main_1-4", main_agents=2, pfsp_share=0.0, verification_share=0.0)
    set_win_rates(made, ME, uniform=0.8, main_1_2=0.6, main_1_4=0.5, main_1=0.3)
    past = {"uniform": 0.16 / 0.65 / 2, "main_1-2": 0.24 / 0.65 / 2, "main_1-4": 0.25 / 0.65 / 2}
    assert met(made, ME) == near({ME: 0.5} | past)


def test_untrained_main_agent_is_its_initial_member():
    made = league(main_agents=2, pfsp_share=0.0, verification_share=0.0)
    assert met(made, ME) == {ME: 0.5, "uniform": 0.5}


# opponents of exploiters


def test_main_exploiter_plays_current_main_agents():
    made = league("main_0-2", "main_1-2", main_agents=2)
    assert met(made, "main_exploiter_0") == {"main_0": 0.5, "main_1": 0.5}


def test_losing_main_exploiter_plays_the_main_agents_past():
    made = league("main_0-2", "main_0-4")
    set_win_rates(made, "main_exploiter_0", uniform=0.5, main_0_2=0.2, main_0_4=0.0, main_0=0.1)
    assert met(made, "main_exploiter_0") == near({"uniform": 0.25 / 0.41, "main_0-2": 0.16 / 0.41})
    set_win_rates(made, "main_exploiter_0", main_0=0.2)
    assert met(made, "main_exploiter_0") == {"main_0": 1.0}


def test_league_exploiter_plays_the_history_by_capped_priority():
    """min(.5, 1-p) over .9, .7, .2 is .1, .3, .5; exploiters are history too."""
    made = league("main_0-2", "main_exploiter_0-2")
    set_win_rates(made, "league_exploiter_1", uniform=0.9, main_0_2=0.7, main_exploiter_0_2=0.2)
    expected = {"uniform": 0.1 / 0.9, "main_0-2": 0.3 / 0.9, "main_exploiter_0-2": 0.5 / 0.9}
    assert met(made, "league_exploiter_1") == near(expected)


def test_share_of_games_refreshes_the_judging_win_rates():
    made = league("main_0-2", "main_0-4", explore_share=0.3)
    set_win_rates(made, ME, uniform=1.0, main_0_2=1.0, main_0_4=0.5)
    mix = met(made, ME)
    assert mix["uniform"] == mix["main_0-2"] == pytest.approx(0.1)
    assert mix["main_0-4"] == pytest.approx(0.1 + 0.7 * 0.5) and mix[ME] == pytest.approx(0.7 * 0.5)
    assert made.logic.judges(made.learners["main_exploiter_0"]) == [ME]
    assert made.logic.judges(made.learners["league_exploiter_0"]) == made.logic.history("player").names


# tasks and results


def test_initial_tasks():
    tasks = {task.output_member: task for task in league().initial_tasks()}
    assert list(tasks) == ["main_0-1", "main_exploiter_0-1", "league_exploiter_0-1", "league_exploiter_1-1"]
    main = tasks["main_0-1"]
    assert main.name == "train/main_0-1" and main.members == ()  # `uniform` has no files
    assert main.opponents.mixes == {"player": {"uniform": 1.0}} and main.self_play == 0.5
    assert main.start is None and main.env_steps == 20_000
    assert tasks["main_exploiter_0-1"].self_play == 0


def test_slice_starts_from_the_last_and_plays_the_newest():
    made = league(league_exploiters=0)
    main, exploiter = made.initial_tasks()
    (second,) = made.on_result(main, answer(main))
    assert second.output_member == "main_0-2" and second.start == "main_0-1" and second.members == ("main_0-1",)
    (against,) = made.on_result(exploiter, answer(exploiter))
    assert against.opponents.mixes == {"player": {"main_0-1": 1.0}}  # it was uniform before it had trained
    assert against.members == ("main_0-1", "main_exploiter_0-1")
    made.on_result(against, answer(against, 0.6))
    assert made.win_rates.rate("main_exploiter_0", "main_0") == pytest.approx(0.6)
    assert made.win_rates.rate("main_0", "main_exploiter_0") == pytest.approx(0.4)


def test_games_count_for_frozen_and_current_copies():
    made = league("main_1-2", main_agents=2, pfsp_share=0.5, verification_share=0.0)
    task = made._slice(made.learners[ME])
    assert task.opponents.mixes["player"]["main_1-2"] == pytest.approx((0.25 + 0.25) / 0.75)
    made.on_result(task, answer(task, 0.9))
    assert made.win_rates.rate(ME, "main_1") == made.win_rates.rate(ME, "main_1-2") == pytest.approx(0.9)


def test_learners_start_from_and_reset_to_the_trained_member():
    population = Population(("player",))
    population.add(Member("tutored", "player", "members/tutored"))
    made = League(LeagueConfig(min_slices=1, max_slices=1, games_per_cell=0), population)
    tasks = made.initial_tasks()
    assert {task.start for task in tasks} == {"tutored"} and tasks[0].members == ("tutored",)
    (again,) = made.on_result(tasks[1], answer(tasks[1]))
    assert again.output_member == "main_exploiter_0-2" and again.start == "tutored"
    assert population.members["main_exploiter_0-1"].parent == "tutored"


# checkpoints and resets


@pytest.mark.parametrize(
    ("since", "rates", "frozen"),
    [
        (1, (0.9, 0.9), False),  # too early
        (2, (0.9, 0.71), True),
        (2, (0.9, 0.7), False),  # not above the threshold
        (3, (0.9, 0.69), False),
        (4, (0.0, 0.0), True),  # the maximum of slices is reached
    ],
)
def test_conditions_for_freezing_a_main_agent(since, rates, frozen):
    made = league("main_0-2", min_slices=2, max_slices=4)
    made.learners[ME].slices_since_freeze = since
    set_win_rates(made, ME, uniform=rates[0], main_0_2=rates[1])
    assert made.logic.should_freeze(made.learners[ME]) is frozen


def test_main_exploiter_is_frozen_by_win_rate_against_main_agents():
    made = league("main_0-2", "main_0-4", min_slices=2, max_slices=4)
    exploiter = made.learners["main_exploiter_0"]
    exploiter.slices_since_freeze = 2
    set_win_rates(made, exploiter.name, uniform=0.0, main_0_2=0.0, main_0_4=0.0, main_0=0.8)
    assert made.logic.should_freeze(exploiter)


def play_out(made, rate=0.5, choose=lambda waiting: 0):
    """Runs all tasks in an order given by `choose`; returns them in the order in which they were done."""
    waiting, done = list(made.initial_tasks()), []
    while waiting:
        task = waiting.pop(choose(waiting))
        done.append(task)
        result = PlayResult(()) if task.kind == "play" else AssessResult(nash_conv=0, exploitability=0, values=())
        waiting += made.on_result(task, answer(task, rate) if task.kind == "train" else result)
    return done


def test_main_agents_continue_and_main_exploiters_reset():
    made = league(min_slices=2, max_slices=2, slices=4, league_exploiters=0)
    starts = {task.output_member: task.start for task in play_out(made)}
    assert [starts[f"main_0-{n}"] for n in (1, 2, 3, 4)] == [None, "main_0-1", "main_0-2", "main_0-3"]
    assert [starts[f"main_exploiter_0-{n}"] for n in (1, 2, 3, 4)] == [
        None,
        "main_exploiter_0-1",
        None,
        "main_exploiter_0-3",
    ]
    parents = {member.name: member.parent for member in made.population}
    assert parents["main_0-4"] == "main_0-2" and parents["main_exploiter_0-4"] is None
    assert made.win_rates.rate("main_exploiter_0", ME) == 0.5  # of other weights


def test_league_exploiter_resets_with_probability_one_quarter():
    def starts(seed):
        made = league(seed=seed, min_slices=1, max_slices=1, slices=41, league_exploiters=1, main_exploiters=0)
        return [task.start for task in play_out(made) if task.learner == "league_exploiter_0"]

    anew = [start is None for seed in range(10) for start in starts(seed)[1:]]
    assert len(anew) == 400 and abs(sum(anew) - 100) < 3 * 8.7  # three standard deviations


def test_frozen_copy_plays_earlier_members():
    made = league(min_slices=1, max_slices=1, slices=1, games_per_cell=50, main_exploiters=0, league_exploiters=0)
    made.seats = ("player",) * 3
    (task,) = made.initial_tasks()
    (play,) = made.on_result(task, answer(task))
    assert play.kind == "play" and play.members == ("main_0-1",)
    assert play.cells == (("main_0-1", "uniform", "uniform"),) and play.games_per_cell == 50
    assert made.on_result(play, PlayResult(())) == []


def test_main_agent_copies_are_assessed_at_an_interval():
    made = league(min_slices=1, max_slices=1, slices=5, nash_conv_every=2)
    done = play_out(made)
    assessed = [task for task in done if task.kind == "assess"]
    assert [task.name for task in assessed] == ["assess/main_0-2", "assess/main_0-4"]
    assert assessed[1].strategies == {"player": {"main_0-4": 1.0}} and assessed[1].members == ("main_0-4",)
    result = AssessResult(nash_conv=0.5, exploitability=0.25, values=())
    made.on_result(assessed[0], result)
    assert made.task_metrics(assessed[0], result)["team"] == {
        "iteration": 2,
        "env_steps": 5 * 20_000,  # four learners' first slices, and its own second
        "games": 0,
        "nash_conv": 0.5,
        "exploitability": 0.25,
    }


def test_slice_metrics_are_logged():
    made = league("main_0-2", pfsp_share=1.0, verification_share=0.0)
    made.learners[ME].slices = 2
    task = made._slice(made.learners[ME])
    result = answer(task, 0.6)
    result.opponents["uniform"] = replace(result.opponents["uniform"], wins=100)
    made.on_result(task, result)
    (figures,) = made.task_metrics(task, result).values()
    assert figures["win_rate"] == pytest.approx(0.8) and figures["worst_win_rate"] == pytest.approx(0.6)
    assert figures["env_steps"] == 20_000 and figures["iteration"] == 3


# the whole league


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_league_invariants_hold_in_any_order_of_results(data):
    sizes = {role: data.draw(st.integers(least, 2)) for role, least in (("main_agents", 1), ("main_exploiters", 0))}
    config = {**sizes, "slices": 5, "explore_share": data.draw(st.sampled_from([0.0, 0.1])), "games_per_cell": 3}
    orders, outcomes = [], []

    def run(choose, rate):
        made = league(**config)
        waiting, there, done = list(made.initial_tasks()), {"uniform"}, []
        while waiting:
            task = waiting.pop(choose(len(waiting)))
            assert set(task.members) <= there - {"uniform"}
            if task.kind == "train":
                mix, self_play = task.opponents.mixes["player"], task.self_play
                assert set(mix) <= there and sum(mix.values()) == pytest.approx(1) and 0 <= self_play <= 1
            waiting += made.on_result(task, answer(task, rate()) if task.kind == "train" else PlayResult(()))
            there.add(task.output_member)
            done.append(task)
        assert len({task.name for task in done}) == len(done)
        assert all(learner.slices == 5 and learner.frozen_copies for learner in made.learners.values())
        return done

    def record(kept, value):
        kept.append(value)
        return value

    first = run(
        lambda n: record(orders, data.draw(st.integers(0, n - 1))),
        lambda: record(outcomes, data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))),
    )
    again, results = iter(orders), iter(outcomes)
    assert run(lambda n: next(again), lambda: next(results)) == first  # a resume relies on this


@given(st.lists(st.floats(0, 1), max_size=8))
def test_dropped_suffix_is_not_increasing(rates):
    kept = without_monotone_suffix(rates)
    tail = rates[max(kept - 1, 0) :]
    assert all(earlier >= later for earlier, later in itertools.pairwise(tail))
    assert kept == 0 or rates[kept - 2] < rates[kept - 1]


def test_without_monotone_suffix_by_hand():
    assert without_monotone_suffix([0.9, 0.6, 0.65, 0.6]) == 3
    assert without_monotone_suffix([0.9, 0.8, 0.7]) == 0
    assert without_monotone_suffix([0.5, 0.6]) == 2
    assert without_monotone_suffix([0.5]) == without_monotone_suffix([]) == 0


def calls_of_a_slice(members):
    """Python calls for handling the result of a slice and making the next task, in a league of this size: the mean of
    20."""
    names = [f"{learner}-{i + 10}" for i in range(members // 4) for learner in (ME, "main_exploiter_0")]
    names += [f"league_exploiter_{n}-{i + 10}" for i in range(members // 4) for n in (0, 1)]
    made = league(*names, opponents_per_slice=64, rated_opponents=16, games_per_cell=8, min_slices=1, max_slices=1)
    tasks, profile = made.initial_tasks(), cProfile.Profile()
    for number in range(20):
        result = answer(tasks[number % 4])
        profile.enable()
        new = made.on_result(tasks[number % 4], result)
        profile.disable()
        tasks[number % 4] = next(task for task in new if isinstance(task, TrainTask))
    return pstats.Stats(profile).total_calls / 20


def test_work_of_a_result_does_not_grow_with_the_league():
    assert calls_of_a_slice(4000) < 2 * calls_of_a_slice(400)


def test_invalid_leagues_are_refused():
    with pytest.raises(ValueError, match="min_slices: 5 is larger than max_slices: 4"):
        validate(LeagueConfig, {"min_slices": 5, "max_slices": 4})
    with pytest.raises(ValueError, match="add up to more than 1"):
        validate(LeagueConfig, {"pfsp_share": 0.9, "verification_share": 0.2})
    with pytest.raises(ValueError, match="one player"):
        League(LeagueConfig(), Population(("player_0", "player_1")))
    with pytest.raises(ValueError, match="0 members"):
        League(LeagueConfig(), Population(("player",)))
