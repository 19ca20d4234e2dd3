"""How often the rules find failed runs and fire on good ones: generated curves of every length, and recorded ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from palestra.dashboard.alarms import find_alarms

LENGTHS = [8, 10, 12, 16, 20, 24, 32, 40, 60, 80]
RECORDED = Path(__file__).parents[2] / "results/algorithms/measured/rows.jsonl"
GROUPS = 16  # of a log line
INSTANCES = 300.0  # of an evaluation


def falling(n, first, last, rng, begin=0.0):
    """A metric that falls exponentially from `first` to `last` after the share `begin` of the run, with noise."""
    share = np.clip((np.arange(n) / (n - 1) - begin) / (1 - begin), 0, 1)
    return first * (last / first) ** share * rng.lognormal(0, 0.1, n)


def flat_groups(n, first, last, rng):
    """Shares of flat groups, of a chance that rises from `first` to `last` by the last quarter of the run."""
    chance = first + (last - first) * np.clip(np.arange(n) / (0.75 * n), 0, 1)
    return rng.binomial(GROUPS, chance) / GROUPS


def held_out(rates, rng):
    """An evaluation with these chances of success."""
    success = rng.binomial(int(INSTANCES), rates) / INSTANCES
    return {"success": success, "episodes": np.full(len(success), INSTANCES)}


def run(n, rng, entropy, flat, success, evals):
    """The alarms of a run of two policies with these chances of flat groups at its ends, and these held-out rates."""
    policies = {name: {"entropy": entropy, "zero_std_fraction": flat_groups(n, *flat, rng)} for name in "ab"}
    return find_alarms(policies, {"success": success}, {"dev": held_out(evals, rng)})


def failed_run(kind, n, rng):
    """The alarms of a run that failed: its policy became deterministic at the end without solving the task, its groups
    became flat, or its held-out success fell."""
    flat, low = (0.4, 0.6), rng.uniform(0.02, 0.3, n)
    steady = [0.1, 0.12, 0.14]
    if kind == "entropy":
        return run(n, rng, falling(n, 0.7, 0.03, rng, 0.2), flat, low, steady)
    if kind == "flat":
        return run(n, rng, falling(n, 0.7, 0.2, rng), (0.5, 0.97), low, steady)
    return run(n, rng, falling(n, 0.7, 0.2, rng), flat, low, [0.2, 0.35, 0.2])


def good_run(kind, n, rng):
    """The alarms of a run that learns: slowly, quickly, or until the task is solved and its answers are all alike."""
    learning = np.linspace(0.1, {"slow": 0.3, "quick": 0.8, "solved": 1.0}[kind], n)
    if kind == "solved":
        learning = np.clip(np.linspace(0.1, 1.5, n), 0, 0.99)
        return run(n, rng, falling(n, 0.7, 0.02, rng), (0.4, 0.98), learning, [0.1, 0.7, 0.98])
    last = {"slow": (0.4, 0.5), "quick": (0.15, 0.7)}[kind]
    return run(n, rng, falling(n, 0.7, last[0], rng), (0.4, last[1]), learning, learning[[0, n // 2, -1]])


def count_alarms(make, kinds, seeds=range(2)):
    """Returns the runs with an alarm by kind, and the number of runs of each kind."""
    found = {
        kind: sum(bool(make(kind, n, np.random.default_rng([seed, n]))) for n in LENGTHS for seed in seeds)
        for kind in kinds
    }
    return found, len(LENGTHS) * len(seeds)


def test_failed_runs_of_every_length_are_found():
    found, of = count_alarms(failed_run, ["entropy", "flat", "held-out"])
    assert of == 20 and found == {"entropy": 20, "flat": 20, "held-out": 16}


def test_good_runs_of_every_length_raise_no_alarm():
    found, of = count_alarms(good_run, ["slow", "quick", "solved"])
    assert of == 20 and found == {"slow": 0, "quick": 0, "solved": 0}


def judged_run(right, passes_wrong, rng, passes_right=0.9):
    """The first line after which a judge's verdicts raise the alarm; None if none does. Of 32 problems a line, with 8
    answers each, these shares are right, and of the wrong ones these shares pass; siblings are alike."""
    verdicts, grades = [], []
    for share, wrong in zip(right, passes_wrong, strict=True):
        num_right = rng.binomial(8, rng.beta(share, 1 - share, 32))
        num_passed = rng.binomial(num_right, passes_right) + rng.binomial(8 - num_right, rng.beta(wrong, 1 - wrong, 32))
        verdicts.append(num_passed.mean() / 8)
        grades.append(num_right.mean() / 8)
    for lines in range(8, len(verdicts) + 1):
        series = {"reward/verdict": np.array(verdicts[:lines]), "exact_grade": np.array(grades[:lines])}
        if find_alarms({"a": series}, {}, {}):
            return lines
    return None


@pytest.mark.parametrize("end", [0.2, 0.4, 0.9])
def test_verdicts_that_rise_with_the_truth_raise_no_alarm(end):
    right = np.linspace(0.2, end, 40)
    assert [judged_run(right, [0.1] * 40, np.random.default_rng(seed)) for seed in range(20)] == [None] * 20


def test_charmed_judges_are_found_in_twenty_steps():
    found = [
        judged_run([0.2] * 20, np.linspace(0.2, 0.9, 20), np.random.default_rng(seed), passes_right=0.9)
        for seed in range(20)
    ]
    assert None not in found and np.median(found) <= 12


def test_recorded_evaluations_that_fell_are_found():
    """Five evaluations of 100 instances each in 267 published runs: what fell is MADPO with too large a rate."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    curves = {
        line["name"]: [rate for _, rate in line["curve"]]
        for line in lines
        if line["task"] != "duel" and "answers" in line
    }
    fell = [
        name
        for name, rates in curves.items()
        if find_alarms({}, {}, {"dev": {"success": np.array(rates), "episodes": np.full(len(rates), 100.0)}})
    ]
    assert len(curves) == 267
    assert sorted(fell) == [f"sums/MADPO/{seed}/lr 0.005" for seed in (0, 1, 100, 101)]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_fall_of_a_collapsed_run_is_named(length):
    rng = np.random.default_rng(length)
    assert {alarm.name for alarm in failed_run("entropy", length, rng)} == {"entropy collapse"}


@pytest.fixture(scope="module")
def recorded():
    """The alarms of twenty good and twenty failed runs of the demo's game, by kind, as record_alarm_curves.py made
    them."""
    found = {}
    for line in json.loads(Path(__file__).with_name("alarm_curves.json").read_text()):
        logs = {}
        for kind in ("metrics", "evals"):
            logs[kind] = {
                name: {key: np.array(values) for key, values in columns.items()} for name, columns in line[kind].items()
            }
        team = logs["metrics"].pop("team", {})
        alarms = find_alarms(logs["metrics"], team, logs["evals"])
        found.setdefault(line["kind"], []).append({alarm.name for alarm in alarms})
    return found


def test_recorded_good_runs_raise_no_alarm(recorded):
    assert recorded["good"] == [set()] * 20


def test_recorded_failed_runs_are_found(recorded):
    """But for a temperature of 0.01 in the longest run, and an env that pays for nonsense, which does not fall yet."""
    expected = {
        "a learning rate of 0.3": ("nothing to learn from", 4),
        "a temperature of 0.01": ("nothing to learn from", 3),
        "max_tokens: 1": ("answers are cut off", 4),
        "an env that fails on some instances": ("episodes fail", 4),
    }
    found = {kind: sum(alarm in alarms for alarms in recorded[kind]) for kind, (alarm, _) in expected.items()}
    assert found == {kind: count for kind, (_, count) in expected.items()}
    assert recorded["an env that pays for nonsense"] == [set()] * 4
