"""`palestra tune` as users run it: a completed search, a killed one, and errors in the file."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.toys_raising import write_bad_env
from helpers.warm_processes import start_palestra

from palestra.api.experiments.study import Search
from palestra.api.experiments.tune import base_tree, load_tuning, scored_eval
from palestra.runs import read_lines

ROOT = Path(__file__).parents[3]
RUN: dict[str, Any] = {
    "env_steps": 128,
    "env": {"type": "two_step", "num_envs": 4},
    "policies": {"agent": {"type": "net", "hidden": [8], "lr": 1e-3}},
    "algorithm": {
        "type": "qmix",
        "rollout_length": 2,
        "gradient_steps": 1,
        "batch_size": 16,
        "learning_starts": 8,
    },
    "evals": {"held_out": {"episodes": 4}},
}
TUNE: dict[str, Any] = {
    "name": "two",
    "config": "run.yaml",
    "trials": 2,
    "seeds": [100],
    "space": {
        "policies.agent.lr": {"low": 1e-4, "high": 1e-1, "log": True},
        "algorithm.gamma": {"choices": [0.9, 0.99]},
        "algorithm.gradient_steps": {"low": 1, "high": 3},
    },
}


def write(folder: Path, run: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The search's file with `changes`, and the config that its trials change."""
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | (run or {})))
    (folder / "tune.yaml").write_text(yaml.safe_dump(TUNE | changes))
    return folder / "tune.yaml"


def start(folder: Path, *arguments: str) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return start_palestra(*arguments, cwd=folder, env=environment, with_stderr=False)


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    printed = process.communicate(timeout=280)[0]
    return process.returncode, printed


def trials(folder: Path) -> list[tuple[Any, ...]]:
    lines = read_lines(folder / "runs/two/trials.jsonl")
    return [(line["number"], line["params"], line["values"], line["score"]) for line in lines]


@pytest.mark.slow
def test_search_scores_its_trials_and_writes_the_best_config(tmp_path: Path) -> None:
    write(tmp_path)
    code, printed = run(tmp_path, "tune", "tune.yaml", "--dry-run")
    assert code == 0 and "every range is valid" in printed and not (tmp_path / "runs").exists(), printed
    code, printed = run(tmp_path, "tune", "tune.yaml")
    assert code == 0, printed
    (_, first, *_), (_, second, *_) = found = trials(tmp_path)
    # the config's value
    assert first == {"policies.agent.lr": 1e-3, "algorithm.gamma": 0.99, "algorithm.gradient_steps": 1}
    assert 1e-4 <= second["policies.agent.lr"] <= 1e-1 and second != first
    for number, params, values, score in found:
        config = yaml.safe_load((tmp_path / f"runs/two/trial-{number}-100/config.yaml").read_text())
        assert config["algorithm"]["gradient_steps"] == params["algorithm.gradient_steps"] and config["seed"] == 100
        last = read_lines(tmp_path / f"runs/two/trial-{number}-100/evals.jsonl")[-1]["return"]
        assert values == [last] and score == last
    best = max(found, key=lambda trial: trial[3])
    assert yaml.safe_load((tmp_path / "runs/two/best.yaml").read_text())["policies"]["agent"]["lr"] == pytest.approx(
        best[1]["policies.agent.lr"]
    )
    page = (tmp_path / "runs/two/results.md").read_text()
    assert "2 trials, seed 100; 0 failed. Score: return of the last evaluation held_out" in page
    assert page.splitlines()[6].startswith(f"| {best[0]} |")


@pytest.mark.slow
def test_best_config_reproduces_its_score_and_search_can_be_extended(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path, "tune", "tune.yaml")[0] == 0
    number, _, _, score = max(trials(tmp_path), key=lambda trial: trial[3])
    code, printed = run(tmp_path, "train", "runs/two/best.yaml", "--set", "seed=100", "--name", "again")
    assert code == 0, printed
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.endswith("_s")} for line in read_lines(tmp_path / path)]
        for path in ("runs/again/evals.jsonl", f"runs/two/trial-{number}-100/evals.jsonl")
    )
    assert ours == theirs and ours[-1]["return"] == score

    before = trials(tmp_path)
    code, printed = run(tmp_path, "tune", "tune.yaml", "--trials", "3")
    assert code == 0 and "3 trials, 2 finished" in printed and "[3/3]" in printed, printed
    assert trials(tmp_path)[:2] == before and len(trials(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_search_resumes_with_the_same_trials(tmp_path: Path, how: signal.Signals) -> None:
    long = {"env_steps": 4000, "checkpoint_every": 200}
    for side in "ab":
        (tmp_path / side).mkdir()
        write(tmp_path / side, long, trials=3)
    assert run(tmp_path / "a", "tune", "tune.yaml")[0] == 0
    process = start(tmp_path / "b", "tune", "tune.yaml")
    until = time.monotonic() + 200
    while not list((tmp_path / "b/runs/two").glob("trial-1-*/checkpoints/*")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(how)
    printed = process.communicate(timeout=120)[0]
    if how != signal.SIGKILL:
        assert process.returncode == 0 and "the same command continues" in printed, printed
    code, printed = run(tmp_path / "b", "tune", "tune.yaml")
    assert code == 0, printed
    assert trials(tmp_path / "b") == trials(tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {"algorithm.clop": {"low": 1, "high": 2}}}, "space.algorithm.clop = 1: .*clop"),
        ({"space": {"policies.agent.lr": {"low": -1.0, "high": 1.0}}}, "space.policies.agent.lr = -1.0: .*lr"),
        ({"space": {"algorithm.gamma": {"low": 1.0, "high": 0.5}}}, "low: 1.0 is not below high: 0.5"),
        ({"space": {"policies.agent.lr": {"low": 0, "high": 1, "log": True}}}, "has no logarithm"),
        ({"space": {"seed": {"low": 0, "high": 9}}}, "a seed is not a hyperparameter"),
        ({"space": {"algorithm": {"choices": [1, 2]}, "algorithm.gamma": {"choices": [0, 1]}}}, "a part of it"),
        ({"seeds": [1, 1]}, "has a seed twice"),
        ({"eval": "tset"}, "the evaluation tset in the config: it has held_out"),
        ({"changes": {"evals": {"held_out": {"env": {"split": "test"}}}}}, "plays test instances"),
    ],
)
def test_errors_in_the_file_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_search(write(tmp_path, **changes))
    assert not (tmp_path / "runs").exists()


def test_evaluation_named_test_is_never_scored_by_default(tmp_path: Path) -> None:
    file = write(tmp_path, {"evals": {"test": {"episodes": 4}}})
    with pytest.raises(ValueError, match="an evaluation of development instances in the config: it has test"):
        open_search(file)


KUHN: dict[str, Any] = {
    "env": {"type": "kuhn_poker"},
    "population": {"type": "psro", "iterations": 1},
    "oracle": {"type": "exact"},
    "backend": {"type": "inline"},
}
FEWEST: dict[str, Any] = {
    "config": "kuhn.yaml",
    "space": {"population.iterations": {"choices": [1, 6]}},
    "direction": "minimize",
}


def test_search_of_a_population_minimizes_its_nash_conv(tmp_path: Path) -> None:
    """More iterations of exact best responses are less exploitable."""
    (tmp_path / "kuhn.yaml").write_text(yaml.safe_dump(KUHN))
    search = open_search(write(tmp_path, **FEWEST, trials=2, seed=0))
    search.run(1, lambda result: None, lambda trial: None)
    scores = {trial.params["population.iterations"]: trial.score for trial in search.trials}
    assert scores.keys() == {1, 6}
    assert search.best is not None and search.best.params == {"population.iterations": 6}
    assert 0 <= scores[6] < scores[1]
    last = read_lines(search.root / f"trial-{search.best.number}-100/metrics.jsonl")
    assert search.best.values == [[line["nash_conv"] for line in last if "nash_conv" in line][-1]]
    page = search.write_results()[-1].read_text()
    assert "2 trials, seed 100; 0 failed. Score: nash_conv of the last assessment, of which less is better." in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"direction": "maximize"}, "of which less is better: set direction: minimize"),
        ({"metric": "success"}, "leave out the task's eval: and metric:"),
        ({"changes": {"population": {"nash_conv_every": 0}}}, "set population.nash_conv_every above 0"),
    ],
)
def test_search_of_a_population_without_a_score_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        (tmp_path / "kuhn.yaml").write_text(yaml.safe_dump(KUHN))
        open_search(write(tmp_path, **FEWEST | changes))


def test_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    open_search(write(tmp_path))
    open_search(write(tmp_path, trials=7))
    with pytest.raises(ValueError, match=r"other settings .*env_steps"):
        open_search(write(tmp_path, changes={"env_steps": 999}))


def test_failed_trials_have_no_score(tmp_path: Path) -> None:
    learner = {"type": "dqn", "rollout_length": 2, "gradient_steps": 1, "batch_size": 16, "learning_starts": 8}
    write(tmp_path, {"env": write_bad_env(tmp_path), "algorithm": learner}, trials=1)
    code, printed = run(tmp_path, "tune", "tune.yaml")
    assert code == 1 and "the simulator broke" in printed and "every trial failed" in printed, printed


def test_refused_settings_and_diverged_runs_fail_one_trial(tmp_path: Path) -> None:
    """A burn-in as long as the rollout is refused. The others are scored by runs that have ended before: one of them
    was better once, but is NaN in its last evaluation."""
    space = {"algorithm.burn_in": {"low": 0, "high": 3}, "algorithm.rollout_length": {"choices": [2, 8]}}
    policy = RUN["policies"]["agent"] | {"gru_units": 4}
    run = {"algorithm": RUN["algorithm"] | {"rollout_length": 8}, "policies": {"agent": policy}}
    search = open_search(write(tmp_path, run, space=space, trials=3, seed=1, sampler="random"))
    asked = [search._ask().params for _ in range(3)]
    assert [params["algorithm.rollout_length"] <= params["algorithm.burn_in"] for params in asked] == [
        False,
        True,
        False,
    ]
    for number, returns in ((0, ["7.0"]), (2, ["7.9", "null"])):
        name = f"trial-{number}-100"
        (search.root / name).mkdir()
        lines = [f'{{"name": "held_out", "step": {step}, "return": {y}}}\n' for step, y in enumerate(returns)]
        (search.root / name / "evals.jsonl").write_text("".join(lines))
        with open(search.root / "cells.jsonl", "a") as file:
            file.write(f'{{"cell": "{name}", "status": "done", "seconds": 1}}\n')
    search.run(1, lambda result: None, lambda trial: None)
    again = open_search(tmp_path / "tune.yaml")
    first, refused, diverged = again.trials
    assert (first.score, first.reason, refused.score, diverged.score) == (7.0, "", None, None)
    assert "trial-1-100: " in refused.reason and "burn_in is" in refused.reason
    assert "trial-2-100: the last evaluation held_out has no number for return" in diverged.reason
    page = again.write_results()[-1].read_text()
    assert "3 trials, seed 100; 2 failed." in page and f"- trial 1: {refused.reason}" in page
    assert again.best == first


def open_search(file: Path) -> Search:
    config = load_tuning(file)
    base = base_tree(config, file.parent)
    return Search(config, base, scored_eval(config, base), file.parent / "runs" / config.name)
