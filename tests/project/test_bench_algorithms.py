"""The comparison of language algorithms as a user runs it: parallel runs, a failed run, and a second start."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.core.config import validate
from palestra.runs import Run, read_lines
from palestra.text.config import TextConfig
from results.algorithms import jobs, methods
from results.ledger import Ledger

ROOT = Path(__file__).parents[2]
METHODS = ["GRPO", "distillation", "GRPO, learned reward", "SFT, own wins"]


def run_bench(folder, *options):
    command = [sys.executable, str(ROOT / "results/algorithms/run.py"), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parallel_runs_with_teacher_and_reward_model_and_a_second_start(tmp_path):
    rows = [f"duel/{method}/" for method in METHODS]
    options = ["--quick", "--processes", "2", "--only", *rows]
    first = run_bench(tmp_path, *options)
    assert first.returncode == 0, first.stdout + first.stderr
    ledger = tmp_path / "runs/measured/algorithms/rows-quick.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    runs = sorted((line["method"], line["seed"]) for line in lines)
    learned = [("GRPO, learned reward", 0), ("SFT, own wins", 0), ("distillation", 0), ("reward model", 100)]
    assert runs == [("GRPO", 0), ("GRPO", 100), *learned, ("untrained", 0)]
    assert all(line["cpu"] > 0 and line["kl"] is not None for line in lines if line["seed"] == 0 and "cpu" in line)
    order = [line["method"] for line in lines]
    assert order.index("distillation") > [(line["method"], line["seed"]) for line in lines].index(("GRPO", 100))
    assert order.index("GRPO, learned reward") > order.index("reward model")
    trained = read_lines(tmp_path / "runs/algorithms/quick/duel-grpo__learned_reward-0.002-0/metrics.jsonl")
    assert all(line["reward/reward_model"] != 0 for line in trained if line["policy"] == "speaker")

    second = run_bench(tmp_path, *options)
    assert second.returncode == 0 and "nothing to do: all 5 rows are in " in second.stdout
    assert len(ledger.read_text().splitlines()) == 7

    report = run_bench(tmp_path, "--quick", "--report")
    assert report.returncode == 0, report.stderr
    assert "### duel" in report.stdout and "| distillation | 1 |" in report.stdout
    assert (tmp_path / "runs/algorithms/quick.png").stat().st_size > 10_000


def test_schedule_orders_teachers_rates_and_seeds(tmp_path, monkeypatch):
    Job, Place = jobs.Job, jobs.Place
    duel = methods.TASKS[1]
    some = [methods.find_method(duel, name) for name in ("GRPO", "distillation")]
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("algorithms", str)
    schedule = jobs.Schedule([duel], some, 2, Place(tmp_path), True, ledger)
    rate = methods.tuned_rates()["duel"]["GRPO"]
    first = [Job("duel", "untrained", 0.0, 0), Job("duel", "GRPO", rate, 100)]
    grpo = [Job("duel", "GRPO", rate, seed) for seed in (0, 1)]
    assert schedule.open_jobs() == ([*first, *grpo], True)  # distillation has neither a teacher nor a rate

    schedule.have[first[1]] = {"dev": 0.2}
    assert schedule.open_jobs() == ([*first, *grpo], True)  # measured on another machine: its weights are not here
    folder = schedule.place.folder(first[1])
    with Run.create(folder.parent, "seed: 100\n", folder.name) as run:
        run.checkpoint(15, lambda checkpoint: (checkpoint / "weights").write_bytes(b"1"), {})
    tuning = [Job("duel", "distillation", each, seed) for each in duel.rates for seed in (100, 101)]
    assert schedule.open_jobs() == ([first[0], *tuning, *grpo], True)
    schedule.have |= dict(zip(tuning, ({"dev": dev} for dev in (0.3, 0.1, 0.1, 0.4)), strict=True))
    distilled = [Job("duel", "distillation", duel.rates[1], seed) for seed in (0, 1)]
    assert schedule.open_jobs() == ([first[0], grpo[0], distilled[0], grpo[1], distilled[1]], False)

    schedule.have |= {job: {"score": 0.3} for job in distilled}
    shutil.rmtree(folder)
    assert schedule.open_jobs() == ([first[0], *grpo], False)  # no run needs the teacher any longer
    for job in distilled:
        del schedule.have[job]
    del schedule.have[first[1]]  # the teacher's run fails: no run waits for it any longer
    schedule.failed[first[1]] = "out of memory"
    assert schedule.open_jobs() == ([first[0], *grpo], False)


def test_data_of_a_reward_model_that_is_here_are_not_made_again(tmp_path, monkeypatch):
    duel = methods.TASKS[1]
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("algorithms", str)
    learned_reward = methods.find_method(duel, "GRPO, learned reward")
    schedule = jobs.Schedule([duel], [learned_reward], 1, jobs.Place(tmp_path), False, ledger)
    untrained, learned = (
        jobs.Job("duel", "untrained", 0.0, 0),
        jobs.Job("duel", "GRPO, learned reward", duel.rates[0], 0),
    )
    data, judge = jobs.needed_runs(learned)
    assert (data.method, judge.method) == ("GRPO", "reward model")
    assert schedule.open_jobs() == ([untrained, data], True)
    schedule.running.add(data)
    assert schedule.open_jobs() == ([untrained], True)
    for run in (data, judge):  # measured on another machine
        schedule.have[run] = {"dev": 0.2}
    schedule.running.clear()
    assert schedule.open_jobs() == ([untrained, data], True)
    folder = schedule.place.folder(judge)
    with Run.create(folder.parent, "seed: 100\n", folder.name) as run:
        run.checkpoint(15, lambda checkpoint: (checkpoint / "weights").write_bytes(b"1"), {})
    assert schedule.open_jobs() == ([untrained, learned], False)


def test_methods_are_valid_configs_and_one_policy_plays_all_seats():
    for task in methods.TASKS:
        for method in methods.METHODS:
            if task.name in method.tasks:
                validate(TextConfig, methods.settings_of(task, method, 1e-3, 0))
    sums = methods.TASKS[0]
    tree = methods.settings_of(sums, methods.find_method(sums, "MATPO"), 1e-3, 0)
    assert tree["seats"] == {"reasoner": "reasoner", "tool": "reasoner"}
    assert set(tree["policies"]) == {"reasoner", "expert"} and tree["policies"]["reasoner"]["batch_size"] == 512


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failed_run_is_reported_and_does_not_stop_the_others(tmp_path):
    (tmp_path / "runs/algorithms/quick/duel-grpo-0.002-0").mkdir(parents=True)  # a run without its config
    done = run_bench(tmp_path, "--quick", "--only", "duel/GRPO/", "duel/SFT, own wins/")
    assert done.returncode == 1, done.stderr
    assert "failed: duel/GRPO/0/lr 0.002: " in done.stderr.splitlines()[-1]
    lines = (tmp_path / "runs/measured/algorithms/rows-quick.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["untrained", "SFT, own wins"]
