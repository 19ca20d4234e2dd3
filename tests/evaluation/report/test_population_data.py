"""Data read from a population's run folder, for runs with known results."""

import json
from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from palestra.evaluation.report.population_data import (
    ExploitResult,
    crossplay_table,
    cyclicity_warning,
    describe_lower_bound,
    exploits_table,
    nash_conv_lower_bound,
    read_record,
    standings,
    standings_csv,
    standings_table,
)
from palestra.evaluation.report.population_plots import (
    best_responses,
    mixtures_by_player,
    nash_conv_points,
    plot_population,
    searched_settings,
)
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Member, Population
from palestra.populations.task_json import TaskRecord, crossplay_line
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask
from palestra.runs import Run


def cell(one, other, wins, losses, draws=0):
    """Games of a zero-sum game of two, won or lost by 1: the members and their payoffs."""
    games, mean = wins + losses + draws, (wins - losses) / (wins + losses + draws)
    m2 = wins + losses - games * mean**2
    return (one, other), PayoffCell(games, (mean, -mean), (m2, m2), (wins, losses), draws)


def play_line(name, *cells):
    members, payoffs = zip(*cells, strict=True)
    task = PlayTask(f"play/{name}", cells=members, games_per_cell=payoffs[0].games)
    return task, PlayResult(payoffs)


def train_line(name, player="agent", opponents=(), **fields):
    task = TrainTask(f"train/{name}", player=player, opponents=Opponents(dict(opponents)), output_member=name, **fields)
    return task, TrainResult(env_steps=10, mean_return=0.0)


def made_run(folder, tasks, members=None, metrics=()):
    """A run folder as the scheduler leaves it."""
    with Run.create(folder, "") as run:
        for number, (task, result) in enumerate(tasks):
            run.append_line("tasks.jsonl", TaskRecord(number, task, {}, result).to_json())
            run.log_timings(number, "team", {"task": task.name, "seconds": 1.0, "elapsed_s": 2.0 * number})
        for step, policy, figures in metrics:
            run.log_metrics(step, policy, figures)
    if members:
        (run.path / "population.json").write_text(json.dumps([asdict(member) for member in members]))
    return run.path


def symmetric(*names):
    population = Population(("agent",))
    population.add(Member("uniform", ""))
    for name in names:
        population.add(Member(name, "agent", f"members/{name}"))
    return population


def ladder(folder, exact=False):
    """Members of which each beats all earlier ones, 80 to 20."""
    names = ["uniform", "a", "b", "c"]
    cells = [*(cell(low, high, 20, 80) for low, high in combinations(names, 2)), cell("b", "b", 50, 50)]
    cells = [(members, replace(found, exact=exact)) for members, found in cells]
    tasks = [*(train_line(name) for name in names[1:]), play_line("all", *cells)]
    return made_run(folder, tasks, symmetric(*names[1:]))


def cycle(folder):
    """Rock, paper, scissors, which all slightly beat uniform play."""
    cells = [cell("rock", "scissors", 90, 10), cell("scissors", "paper", 90, 10), cell("paper", "rock", 90, 10)]
    cells += [cell(name, "uniform", 30, 20, 50) for name in ("rock", "paper", "scissors")]
    names = ("rock", "paper", "scissors")
    return made_run(folder, [*(train_line(name) for name in names), play_line("all", *cells)], symmetric(*names))


def text_of(what):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_transitive_population_is_ranked(tmp_path):
    record = read_record(ladder(tmp_path))
    rows = standings(record)
    assert [row.name for row in rows] == ["c", "b", "a", "uniform"]
    assert (
        rows[0].win_rate == pytest.approx(0.8) and rows[0].worst_win_rate == pytest.approx(0.8) and rows[0].games == 300
    )
    assert rows[1].worst_win_rate == pytest.approx(0.2) and rows[1].worst_opponent == "c"
    assert [row.skill.mu for row in rows] == sorted((row.skill.mu for row in rows), reverse=True)
    assert cyclicity_warning(record) == ""
    text = text_of(standings_table(record))
    assert "c" in text and "80.0%" in text and "OpenSkill" in text


def test_exact_payoffs_are_rated_by_expected_wins(tmp_path):
    """They get the ratings of games that end as expected."""
    played, exact = (read_record(ladder(tmp_path / name, exact=name == "exact")) for name in ("games", "exact"))
    assert exact.payoffs.games().sum() == 0 < played.payoffs.games().sum()
    assert standings(exact) == standings(played) and standings_csv(exact) == standings_csv(played)


def test_cyclic_population_has_equal_ratings_and_a_warning(tmp_path):
    record = read_record(cycle(tmp_path))
    rows = {row.name: row for row in standings(record)}
    three = [rows[name] for name in ("rock", "paper", "scissors")]
    assert np.ptp([row.elo for row in three]) < 1e-6
    assert {row.name: row.worst_opponent for row in three} == {"rock": "paper", "paper": "scissors", "scissors": "rock"}
    assert all(row.worst_win_rate == pytest.approx(0.1) for row in three)
    assert rows["uniform"].win_rate == pytest.approx(0.45)  # draws count as 1/2
    assert "cycles" in cyclicity_warning(record) and "rock" in cyclicity_warning(record)
    lines = standings_csv(record).splitlines()
    assert lines[0].startswith("member,elo,") and len(lines) == 5 and lines[-1].startswith("uniform,")


def test_payoff_table_shows_both_sides_and_missing_pairs(tmp_path):
    path = ladder(tmp_path)
    record = read_record(path)
    assert record.payoffs.cell(("c", "a")).mean == (0.6, -0.6) == record.payoffs.cell(("a", "c")).mean[::-1]
    text = text_of(crossplay_table(record))
    assert "+0.60" in text and "-0.60" in text
    with Run.open(path) as run:
        run.append_line(
            "crossplay.jsonl", crossplay_line(*cell("a", "b", 80, 20))
        )  # 100 games more, with seats swapped
    assert read_record(path).payoffs.cell(("a", "b")).mean[0] == pytest.approx(0.0)
    lonely = made_run(
        tmp_path, [train_line("x"), train_line("y"), play_line("x", cell("x", "uniform", 1, 0))], symmetric("x", "y")
    )
    assert "-" in text_of(crossplay_table(read_record(lonely)))
    assert [row.name for row in standings(read_record(lonely))] == ["x", "uniform"]


def test_large_populations_show_the_newest_members(tmp_path):
    names = [f"m-{i}" for i in range(30)]
    cells = [cell(name, "uniform", 6, 4) for name in names]
    record = read_record(
        made_run(tmp_path, [*(train_line(n) for n in names), play_line("all", *cells)], symmetric(*names))
    )
    text = " ".join(text_of(crossplay_table(record)).split())  # the path of a run may break the line
    assert "newest 16 of 31" in text


def two_players(folder):
    """Matching pennies: two pure members each, so that best responses form a cycle."""
    members = Population(("row", "column"))
    members.add(Member("uniform", ""))
    for name in ("row-1", "row-2", "column-1", "column-2"):
        members.add(Member(name, name.partition("-")[0], f"members/{name}"))
    mean = {("row-1", "column-1"): 1, ("row-2", "column-2"): 1, ("row-1", "column-2"): -1, ("row-2", "column-1"): -1}
    cells = [(pair, PayoffCell(10, (v, -v), (0.0, 0.0), (0, 0), exact=True)) for pair, v in mean.items()]
    snapshot = [(("row-2~1", "column-1"), PayoffCell(10, (9.0, -9.0), (0.0, 0.0), (0, 0)))]
    tasks = [train_line(m.name, m.player) for m in members if m.player] + [
        play_line("all", *cells),
        play_line("try", *snapshot),
    ]
    metrics = [
        (0, "team", {"iteration": 0, "members": 2, "games": 5, "env_steps": 100}),
        (1, "team", {"iteration": 0, "nash_conv": 2.0, "exploitability": 1.0}),
        (2, "team", {"iteration": 1, "members": 4, "games": 50, "env_steps": 300}),
        (2, "row", {"iteration": 1, "value": 0.0, "mix/row-1": 0.25, "mix/row-2": 0.75}),
        (2, "column", {"iteration": 1, "value": 0.0, "mix/column-1": 1.0}),
        (4, "team", {"iteration": 1, "nash_conv": 0.5, "exploitability": 0.25}),
    ]
    return made_run(folder, tasks, members, metrics)


def test_two_populations_are_rows_and_columns(tmp_path):
    record = read_record(two_players(tmp_path))
    assert record.payoffs.seats == ("row", "column")
    assert record.payoffs.members == {
        "row": ["uniform", "row-1", "row-2"],
        "column": ["uniform", "column-1", "column-2"],
    }
    names, answers = best_responses(record)
    after = {names[i]: names[j] for i, j in answers}
    assert after == {"row-1": "column-2", "column-2": "row-2", "row-2": "column-1", "column-1": "row-1"}
    with pytest.raises(ValueError, match="played no games"):
        standings(record)  # exact payoffs are not win rates


def test_best_responses_in_a_symmetric_game_follow_the_cycle(tmp_path):
    names, answers = best_responses(read_record(cycle(tmp_path)))
    after = {names[i]: names[j] for i, j in answers}
    assert (after["rock"], after["paper"], after["scissors"]) == ("paper", "scissors", "rock")


def test_nash_conv_by_env_steps_games_and_seconds(tmp_path):
    assert nash_conv_points(read_record(two_players(tmp_path))) == [
        {"nash_conv": 2.0, "env_steps": 100, "games": 5, "seconds": 2.0},
        {"nash_conv": 0.5, "env_steps": 300, "games": 50, "seconds": 8.0},
    ]


def test_logged_counters_take_precedence(tmp_path):
    metrics = [
        (0, "team", {"iteration": 1, "members": 2, "games": 0, "env_steps": 700}),
        (1, "team", {"iteration": 1, "nash_conv": 1.5, "env_steps": 70, "games": 7}),
    ]
    (point,) = nash_conv_points(
        read_record(made_run(tmp_path, [train_line("a"), train_line("b")], symmetric("a"), metrics))
    )
    assert point == {"nash_conv": 1.5, "env_steps": 70, "games": 7, "seconds": 2.0}


def test_mixtures_are_meta_strategies_or_main_agent_opponents(tmp_path):
    assert mixtures_by_player(read_record(two_players(tmp_path)))["row"] == [{"row-1": 0.25, "row-2": 0.75}]
    order = {"opponents": {"agent": {"uniform": 0.5, "a": 0.5}}, "self_play": 0.4}
    tasks = [
        train_line("main_0-1", learner="main_0", **order),
        train_line("main_exploiter_0-1", learner="main_exploiter_0", **order),
    ]
    assert mixtures_by_player(read_record(made_run(tmp_path, tasks))) == {
        "main_0": [{"itself": 0.4, "uniform": 0.3, "a": 0.3}]
    }


def league_like(folder):
    order = {"opponents": {"agent": {"uniform": 1.0}}, "self_play": 0.5, "settings": {"lr": 1e-3}}
    tasks = [train_line(f"main_0-{i}", learner="main_0", **order) for i in (1, 2)]
    metrics = [(i, "main_0", {"iteration": i + 1, "worst_win_rate": 0.5, "rating": 0.5, "lr": 1e-3}) for i in (0, 1)]
    return made_run(folder, tasks, symmetric("main_0-1", "main_0-2"), metrics)


@pytest.mark.parametrize("make", [ladder, cycle, two_players, league_like])
def test_every_population_run_can_be_plotted(tmp_path, make):
    path = make(tmp_path)
    assert plot_population(path).read_bytes().startswith(b"\x89PNG")
    assert (path / "population.png").exists()


def test_searched_settings_are_found(tmp_path):
    assert searched_settings(read_record(league_like(tmp_path))) == ["lr"]


def test_run_without_population_is_refused(tmp_path):
    with Run.create(tmp_path, "") as run, pytest.raises(ValueError, match="no finished task of a population"):
        read_record(run.path)


def test_foreign_task_lines_are_named(tmp_path):
    path = ladder(tmp_path)
    with Run.open(path) as run:
        run.append_line("crossplay.jsonl", crossplay_line(*cell("a", "b", 80, 20)))
        run.append_line("crossplay.jsonl", crossplay_line(*cell("a", "b", 80, 20)) | {"games": 1})
    with pytest.raises(
        ValueError, match=r'crossplay.jsonl, line 2: key "games" is unknown; there are members, payoffs'
    ):
        read_record(path)
    with Run.open(path) as run:
        run.append_line("tasks.jsonl", {"number": 4, "kind": "train", "task": {}, "files": {}})
    with pytest.raises(ValueError, match=r'tasks.jsonl, line 5: key "result" is missing'):
        read_record(path)


def gains(*means, stderr=0.05, seats=1):
    return [ExploitResult(str(i), seats, 0.1 + mean, stderr, 0.1, {}) for i, mean in enumerate(means)]


def test_lower_bound_on_nash_conv_by_hand():
    """At 95 % one player is bounded at 1.6449 standard errors, each of two at 1.9600; a gain below 0 counts as 0."""
    assert nash_conv_lower_bound(gains(0.2, seats=2)) == pytest.approx(2 * (0.2 - 1.6449 * 0.05), abs=1e-5)
    assert nash_conv_lower_bound(gains(0.2, 0.3)) == pytest.approx(0.5 - 2 * 1.96 * 0.05, abs=1e-5)
    assert nash_conv_lower_bound(gains(0.2, -0.7)) == pytest.approx(0.2 - 1.96 * 0.05, abs=1e-5)
    assert nash_conv_lower_bound(gains(0.25, -0.7, stderr=0.0)) == pytest.approx(0.25)
    unknown = ExploitResult("a", 1, 0.3, 0.1, None, {})
    assert nash_conv_lower_bound([unknown]) is None and describe_lower_bound([unknown]) == ""
    text = describe_lower_bound(gains(0.2, 0.3))
    assert text == "NashConv is at least 0.304 (at 95 % confidence; the responses gain +0.500 in all)"
    shown = text_of(exploits_table("run", [*gains(0.2), unknown]))
    assert "+0.200 ± 0.098" in shown and "+0.300 ± 0.196" in shown


def test_lower_bound_holds_under_noise():
    """The mean of the summed positive gains of responses that gain nothing would be 0.04."""
    rng = np.random.default_rng(0)
    for true in ((0.0, 0.0), (0.02, 0.3), (0.2, 0.3)):
        found = [nash_conv_lower_bound(gains(*(true + rng.normal(0, 0.05, 2)))) for _ in range(2000)]
        assert np.mean(np.array(found) > sum(true)) < 0.05
