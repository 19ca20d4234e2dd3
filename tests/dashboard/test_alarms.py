"""Each alarm's rule, at cases just inside and just outside it."""

import json

import numpy as np
import pytest

from palestra.dashboard.alarms import RULES, cyclic_alarms, find_alarms
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_status import run_alarms
from palestra.populations.ratings import cyclicity

FLAT = np.full(40, 0.5)


def line(start, end, n=40):
    """A metric that is `start` in the first half of `n` lines and `end` in the rest."""
    return np.concatenate([np.full(n // 2, float(start)), np.full(n - n // 2, float(end))])


def names(policies, team=None, evals=None):
    return [
        (alarm.name, alarm.policy)
        for alarm in find_alarms(policies, {"success": FLAT} if team is None else team, evals or {})
    ]


@pytest.mark.parametrize(("own", "others", "fires"), [(0.9, 0.5, True), (0.89, 0.5, False), (0.9, 0.51, False)])
def test_alarm_on_a_lazy_seat(own, others, fires):
    policies = {"lazy": {"zero_std_fraction": line(own, own)}, "busy": {"zero_std_fraction": line(others, others)}}
    assert (("lazy seat", "lazy") in names(policies)) == fires
    assert names(policies, {"success": line(1, 1)}) == []  # the task is solved: no alarm


@pytest.mark.parametrize(("now", "fires"), [(0.09, True), (0.11, False)])
def test_alarm_on_entropy_collapse(now, fires):
    assert (names({"red": {"entropy": line(1.5, now)}}) == [("entropy collapse", "red")]) == fires
    assert names({"red": {"entropy": line(0.09, 0.09)}}) == []  # its entropy was never higher
    assert names({"red": {"entropy": line(1.5, -0.01)}}) == []  # of a density, which may be above 1
    assert names({"red": {"entropy": line(1.5, -1e-8)}}) == [("entropy collapse", "red")]  # 0 up to rounding


def test_success_by_team_counts_as_its_mean():
    flat = {"red": {"zero_std_fraction": line(0.95, 0.95)}}
    assert names(flat, {"success.red": line(0.1, 0.1), "success.blue": line(0.3, 0.3)}) == [
        ("nothing to learn from", "")
    ]
    assert names(flat, {"success.red": line(0.1, 1.0), "success.blue": line(0.3, 0.98)}) == []  # solved


def hacking(tokens=(10, 15), reward=(0.1, 0.3), invalid=(0.1, 0.1)):
    return {"red": {"tokens": line(*tokens), "local_reward": line(*reward), "invalid": line(*invalid)}}


@pytest.mark.parametrize(("value", "paid", "fires"), [(27e3, 27, True), (-26e3, 27, False), (1001, 0.1, True)])
def test_alarm_on_values_that_diverge(value, paid, fires):
    series = {"q": line(-5, value), "return": line(-paid, -paid / 2)}
    assert (names({"red": series}) == [("values diverge", "red")]) == fires
    assert names({"red": {"q": line(-5, value)}}) == []  # no episode has ended


def test_alarm_on_longer_answers_without_success():
    assert names(hacking()) == [("reward hacking by length?", "red")]
    assert names(hacking(tokens=(10, 14))) == []
    assert names(hacking(reward=(0.1, 0.19))) == []
    assert names(hacking(), {"success": line(0.3, 0.5)}) == []  # success rises too
    held_out = {"dev": {"success": np.array([0.3, 0.31])}}
    assert names(hacking(), {"success": line(0.3, 0.5)}, held_out) == [("reward hacking by length?", "red")]


def test_alarm_on_format_without_success():
    assert names(hacking(tokens=(10, 10), invalid=(0.3, 0.01))) == [("reward hacking by format?", "red")]
    assert names(hacking(tokens=(10, 10), invalid=(0.3, 0.05))) == []


@pytest.mark.parametrize(("form", "fires"), [((-0.1, 0.0), True), ((-0.1, -0.01), False), ((0.0, 0.0), False)])
def test_alarm_on_a_rising_format_reward_term(form, fires):
    """At most half of the rise of 0.2 is reward for form."""
    policies = hacking(tokens=(10, 10), invalid=(0.1, 0.1))
    policies["red"]["reward/form"] = line(*form)
    assert (names(policies) == [("reward hacking by format?", "red")]) == fires
    assert names(policies, {"success": line(0.5, 0.6)}) == []


def test_alarm_on_one_seat_carrying_the_team():
    policies = {"star": {"local_reward": line(0.9, 0.9)}, "rest": {"local_reward": line(0.1, 0.1)}}
    assert names(policies) == [("one seat carries the team", "star")]
    policies["rest"] = {"local_reward": line(0.11, 0.11)}
    assert names(policies) == []
    policies["rest"] = {"local_reward": line(0.02, 0)}  # it fell behind
    assert names(policies) == [("one seat carries the team", "star")]
    policies["rest"] = {"local_reward": line(0, 0)}  # its only reward from the env is the team's
    assert names(policies) == []


def judged(paid, grade, n=40):
    """The log of a judged policy: means of 64 answers that the judge passes, and that are right."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.02, n)
    return {"reward/verdict": line(*paid, n) + noise, "exact_grade": line(*grade, n) + noise / 2}


@pytest.mark.parametrize(
    ("paid", "grade", "fires"),
    [
        ((0.2, 0.9), (0.2, 0.2), True),
        ((0.2, 0.9), (0.2, 0.5), True),
        ((0.2, 0.9), (0.2, 0.6), False),  # most of the rise is true
        ((0.2, 0.26), (0.2, 0.1), False),  # hardly a rise
        ((0.9, 0.9), (0.2, 0.2), False),  # passes wrong answers from the start: no rise
    ],
)
def test_alarm_on_verdicts_that_rise_without_truth(paid, grade, fires):
    expected = [("reward hacking by verdict?", "red")] if fires else []
    assert names({"red": judged(paid, grade)}) == expected
    series = judged(paid, grade, 8)
    assert names({"red": series}, {}) == expected
    success = series.pop("exact_grade")  # where the env grades the team alone
    assert names({"red": series}, {"success": success}) == expected
    assert names({"red": series}, {}) == [] and names({"red": series}, {"success": success[1:]}) == []


def test_alarm_on_verdicts_needs_a_rise_beyond_their_noise():
    quiet = judged((0.3, 0.5), (0.2, 0.2), 12)
    assert names({"red": quiet}) == [("reward hacking by verdict?", "red")]
    loud = quiet | {"reward/verdict": quiet["reward/verdict"] + 0.2 * np.array([1, -1] * 6)}
    assert names({"red": loud}) == []


def test_short_run_raises_no_alarm_by_overlap():
    assert names({"red": {"entropy": line(1.5, 0.05, 12)}}) == [("entropy collapse", "red")]


def test_alarms_on_no_signal_truncation_and_failures():
    assert ("nothing to learn from", "") in names({"red": {"zero_std_fraction": line(0.5, 0.95)}})
    flat = {"red": {"zero_std_fraction": line(0.5, 0.95)}}
    (alarm,) = find_alarms(flat, {}, {})  # an env that reports no success
    assert alarm.message == "95% of the groups of every policy have zero advantage"
    assert names({"red": {"truncated_fraction": line(0, 0.4)}}) == [("answers are cut off", "red")]
    assert names({}, {"failed": line(0, 1), "episodes": line(20, 20)}) == [("episodes fail", "")]
    assert names({}, {"failed": line(0, 1), "episodes": line(30, 30)}) == []


def test_too_few_lines_raise_no_alarm():
    assert names({"red": {"entropy": line(1.5, 0.01, 7), "truncated_fraction": line(1, 1, 7)}}) == []


@pytest.mark.parametrize(("now", "episodes", "fires"), [(0.38, 100, True), (0.42, 100, False), (0.38, 50, False)])
def test_alarm_on_a_fall_of_held_out_success(now, episodes, fires):
    """From 60 % of 100 instances, whose interval begins at 50 %; the latest counts, not the lowest."""
    rates = np.array([0.2, 0.6, 0.1, now])
    log = {"success": rates, "episodes": np.full(4, float(episodes)), "failed": np.zeros(4)}
    assert (names({}, evals={"dev": log}) == [("held-out success fell", "")]) == fires
    assert names({}, evals={"dev": {"return": rates, "episodes": log["episodes"]}}) == []


def test_alarms_state_their_values_and_rule():
    (alarm,) = find_alarms({"red": {"entropy": line(1.5, 0.05)}}, {"success": FLAT}, {})
    assert (
        "0.05" in alarm.message
        and "1.5" in alarm.message
        and "50%" in alarm.message
        and "0.1 nats" in RULES[alarm.name].rule
    )


def test_rules_name_their_thresholds():
    assert not [rule for rule in RULES.values() if "{" in rule.rule]


def test_alarm_on_a_cyclic_population():
    wins = np.array([[0.0, 90, 10], [10, 0, 90], [90, 10, 0]])
    (alarm,) = cyclic_alarms(cyclicity(["rock", "paper", "scissors"], wins))
    assert alarm.name == "cyclic population" and "rock" in alarm.policy and "100%" in alarm.message
    assert cyclic_alarms(cyclicity(["good", "fair", "poor"], np.array([[0.0, 90, 99], [10, 0, 90], [1, 10, 0]]))) == []


@pytest.mark.parametrize(("stages", "fires"), [("", False), ("stages: [{steps: 20}, {}]\n", True)])
def test_alarms_compare_lines_of_the_newest_stage(tmp_path, stages, fires):
    """In the first stage an expert's answers all pass; in the second the policy learns to convince the judge."""
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"name: judged\nsteps: 20\nenv: {{type: math_judge}}\n{stages}")
    (folder / "meta.json").write_text("{}")
    passed = [1.0] * 20 + np.linspace(0.2, 0.9, 20).tolist()
    rows = [
        {"step": step, "policy": "red", "reward/verdict": value, "exact_grade": 0.2}
        for step, value in enumerate(passed)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = CatalogRun(tmp_path, "judged")
    run.refresh()
    assert ([alarm.name for alarm in run_alarms(run)] == ["reward hacking by verdict?"]) == fires
