"""`palestra grid` as users run it: trained, interrupted, killed, changed and failed cells, and errors in the file."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import ray_cluster
from helpers.toys_raising import write_bad_env
from helpers.warm_processes import start_palestra

import palestra as pl
from palestra.api.experiments.grid import grid_cells, load_grid
from palestra.api.experiments.results import (
    GridResults,
    NotANumber,
    collect_results,
    describe_cell,
    final_value,
    results_data,
    results_page,
)
from palestra.api.experiments.schedule import check_cells, finished_cells, run_cells
from palestra.parallel.ray.process import max_processes, ray_processes
from palestra.runs import read_lines
from palestra.runs.series import RunLogs
from results.grid.report import results_of
from results.grid.run import collect

ROOT = Path(__file__).parents[3]
Q: dict[str, Any] = {"rollout_length": 2, "gradient_steps": 1, "batch_size": 16, "learning_starts": 8}
KUHN = "configs/populations/kuhn_psro.yaml"
GRID: dict[str, Any] = {
    "name": "teams",
    "seeds": [0, 1],
    "tasks": {
        "sure": {"config": "two.yaml", "changes": {"env": {"type": "matrix", "game": "coordination"}}},
        "two": {"config": "two.yaml", "score_range": [0, 8], "algorithms": {"dqn": {"algorithm": {"gamma": 0.9}}}},
    },
    "algorithms": {"dqn": {"algorithm": {"type": "dqn", **Q}}, "vdn": {"algorithm": {"type": "vdn", **Q}}},
}
RUN: dict[str, Any] = {
    "env_steps": 64,
    "env": {"type": "two_step", "num_envs": 4},
    "policies": {"agent": {"type": "net", "hidden": [8], "lr": 1e-3}},
    "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 2, "minibatches": 2, "clip": 0.3},
    "evals": {"held_out": {"episodes": 4}},
}


def write(folder: Path, **changes: Any) -> Path:
    """The grid's file with `changes`, and the config that its tasks are based on."""
    (folder / "two.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "grid.yaml").write_text(yaml.safe_dump(GRID | changes))
    return folder / "grid.yaml"


def start(file: Path, *options: str) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return start_palestra("grid", file.name, *options, cwd=file.parent, env=environment, with_stderr=False)


def grid(file: Path, *options: str) -> tuple[int, str]:
    process = start(file, *options)
    printed = process.communicate(timeout=240)[0]
    return process.returncode, printed


@pytest.mark.slow
def test_grid_trains_its_cells_once_and_aggregates_them(tmp_path: Path) -> None:
    file, folder = write(tmp_path), tmp_path / "runs/teams"
    code, printed = grid(file, "--workers", "2")
    assert code == 0, printed
    names = [
        f"{task}-{algorithm}-{seed}" for seed in (0, 1) for task in ("sure", "two") for algorithm in ("dqn", "vdn")
    ]
    assert sorted(path.parent.name for path in folder.glob("*/config.yaml")) == sorted(names)
    assert "[8/8]" in printed and "8 of 8 cells" in printed

    data = json.loads((folder / "results.json").read_text())
    last = {name: read_lines(folder / name / "evals.jsonl")[-1]["return"] for name in names}
    values = data["values"]
    assert {f"{t}-{a}-{s}": v for a in values for t in values[a] for s, v in values[a][t].items()} == last
    vdn = [last[f"sure-vdn-{seed}"] for seed in (0, 1)] + [last[f"two-vdn-{seed}"] / 8 for seed in (0, 1)]
    assert data["aggregates"]["vdn"]["mean"]["value"] == pytest.approx(np.mean(vdn))
    assert data["missing"] == [] and "dqn > vdn" in data["probability_of_improvement"]
    assert (folder / "results.svg").read_text().count("performance profiles") == 1
    assert "| vdn |" in (folder / "results.md").read_text()
    assert yaml.safe_load((folder / "two-dqn-1/config.yaml").read_text())["algorithm"]["gamma"] == 0.9
    assert yaml.safe_load((folder / "two-dqn-1/config.yaml").read_text())["seed"] == 1

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/evals.jsonl")}
    code, printed = grid(file)
    assert code == 0 and "8 done" in printed
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/evals.jsonl")} == before

    write(tmp_path, tasks=GRID["tasks"] | {"two": GRID["tasks"]["two"] | {"changes": {"env_steps": 128}}})
    code, printed = grid(file)
    assert code == 2 and "two-dqn-0 was made with other settings: env_steps is 64 there and 128 in the grid" in printed


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


ON_RAY = ("--backend", "ray", "--workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options"), [(signal.SIGKILL, ()), (signal.SIGTERM, ()), (signal.SIGKILL, ON_RAY), (signal.SIGINT, ON_RAY)]
)
def test_interrupted_grid_resumes(tmp_path: Path, how: signal.Signals, options: tuple[str, ...]) -> None:
    """The runs equal those of an uninterrupted grid, also the one that was being trained."""
    long = {"tasks": {"two": {"config": "two.yaml", "changes": {"env_steps": 6000, "checkpoint_every": 200}}}}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, file = write(tmp_path / "a", **long), write(tmp_path / "b", **long)
    assert grid(whole, "--workers", "2")[0] == 0
    process, folder = start(file, *(options or ("--workers", "2"))), tmp_path / "b/runs/teams"
    wait_for(lambda: list(folder.glob("*/checkpoints/*")))
    process.send_signal(how)
    printed = process.communicate(timeout=120)[0]
    if how != signal.SIGKILL:
        assert process.returncode == 0 and "the same command continues" in printed, printed
    code, printed = grid(file, *(options or ("--workers", "2")))
    assert code == 0, printed
    names = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    assert names == sorted(f"two-{algorithm}-{seed}" for algorithm in ("dqn", "vdn") for seed in (0, 1))
    for name in names:
        ours, theirs = (read_lines(tmp_path / side / f"runs/teams/{name}/evals.jsonl")[-1] for side in "ab")
        assert ours == theirs


@pytest.mark.slow
def test_grid_on_two_ray_nodes_reports_failed_cells_and_unshared_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell on each node; a cell fails with a message if the runs' folder does not exist on its node."""
    monkeypatch.chdir(tmp_path)
    bad = {"config": "bad.yaml"}
    file = write(tmp_path, seeds=[0], tasks={"two": GRID["tasks"]["two"], "bad": bad}, algorithms={"dqn": {}})
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(RUN | {"env": write_bad_env(tmp_path)}))
    cells = grid_cells(load_grid(file), tmp_path)
    with ray_cluster.cluster({"num_cpus": 1}, {"num_cpus": 1}), ray_processes("auto", {"num_cpus": 1}, 2) as start:
        assert max_processes({"num_cpus": 1}) == 2
        ended = {end.cell.name: end for end in run_cells(cells, Path("runs"), 2, start=start)}
        assert ended["two-dqn-0"].status == "done"
        assert ended["bad-dqn-0"].status == "failed" and "the simulator broke" in ended["bad-dqn-0"].reason
        away = partial(start_elsewhere, start)
        bad_cells = [cell for cell in cells if cell.name == "bad-dqn-0"]
        (lost,) = run_cells(bad_cells, Path("runs"), 2, start=away)
        assert "needs a file system that all nodes share" in lost.reason


def start_elsewhere(start: Callable[..., Any], target: Callable[..., object], arguments: tuple[Any, ...]) -> Any:
    """Starts a cell whose folders do not exist on its node."""
    tree, name, root, folder = arguments
    return start(target, (tree, name, root / "nowhere", folder))


def test_options_of_ray_are_refused_without_it(tmp_path: Path) -> None:
    code, printed = grid(write(tmp_path), "--num-gpus", "1")
    assert code == 2 and "are for --backend ray" in printed


@pytest.mark.slow
def test_failed_cell_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    bad = write_bad_env(tmp_path)
    tasks = {"two": GRID["tasks"]["two"], "bad": {"config": "bad.yaml"}}
    file = write(tmp_path, seeds=[0], tasks=tasks, algorithms={"dqn": GRID["algorithms"]["dqn"]})
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(RUN | {"env": bad}))
    code, printed = grid(file)
    assert code == 1, printed
    assert "the simulator broke" in printed and "1 cells failed: bad-dqn-0" in printed
    assert "two-dqn-0 done" in printed and "results of 1 of 2 cells" in printed
    assert "Traceback" in (tmp_path / "runs/teams/logs/bad-dqn-0.txt").read_text()


def test_selected_cells_only(tmp_path: Path) -> None:
    file = load_grid(write(tmp_path))
    assert [cell.name for cell in grid_cells(file, tmp_path, ["two-*-1", "sure-vdn-0"])] == [
        "sure-vdn-0",
        "two-dqn-1",
        "two-vdn-1",
    ]
    with pytest.raises(ValueError, match='no cell of the grid matches "nope"'):
        grid_cells(file, tmp_path, ["nope"])


def test_algorithm_is_replaced_and_other_changes_are_merged(tmp_path: Path) -> None:
    (cell, *_) = grid_cells(load_grid(write(tmp_path)), tmp_path)
    assert cell.tree["algorithm"] == {"type": "dqn", **Q}  # no clip
    assert cell.tree["env"] == {"type": "matrix", "num_envs": 4, "game": "coordination"}


def test_changes_of_a_task_leave_algorithms_different(tmp_path: Path) -> None:
    """Settings of an algorithm override the changes of the task, its `algorithm` replaces theirs, and changes
    of the algorithm on the task override both."""
    task = {"config": "two.yaml", "changes": {"policies": {"agent": {"lr": 5e-4}}, "algorithm": {"clip": 0.4}}}
    algorithms: dict[str, Any] = {
        "plain": {},
        "slow": {"policies": {"agent": {"lr": 1e-4}}},
        "dqn": {"algorithm": {"type": "dqn", **Q}},
    }
    task["algorithms"] = {"dqn": {"policies": {"agent": {"lr": 1e-2}}, "algorithm": {"gamma": 0.9}}}
    file = load_grid(write(tmp_path, seeds=[0], tasks={"two": task}, algorithms=algorithms))
    trees = {cell.algorithm: cell.tree for cell in grid_cells(file, tmp_path)}
    rates = {name: tree["policies"]["agent"]["lr"] for name, tree in trees.items()}
    assert rates == {"plain": 5e-4, "slow": 1e-4, "dqn": 1e-2}
    assert trees["plain"]["algorithm"] == trees["slow"]["algorithm"] == {**RUN["algorithm"], "clip": 0.4}
    assert trees["dqn"]["algorithm"] == {"type": "dqn", "gamma": 0.9, **Q}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 1]}, "has a seed twice"),
        ({"algorithms": {}}, "algorithms"),
        ({"tasks": {"two": {"config": "two.yaml", "score_range": [1, 1]}}}, "both ends of score_range are equal"),
        ({"tasks": {"two": {"config": "two.yaml", "algorithms": {"sac": {}}}}}, "changes sac, but algorithms: has"),
        ({"tasks": {"a-b": {"config": "two.yaml"}, "a": {"config": "two.yaml"}},
          "algorithms": {"c": {}, "b-c": {}}}, "two cells of the grid would be the run a-b-c-0"),
        ({"tasks": {"two": {"config": "nope.yaml"}}}, "cannot read config nope.yaml"),
        ({"algorithms": {"dqn": {"algorithm": {"type": "dqm"}}}}, "sure-dqn-0: .*dqm"),
        ({"tasks": {"two": {"config": "two.yaml", "eval": "tset"}}}, "no evaluation tset; it has held_out"),
        ({"tasks": {"kuhn": {"config": KUHN, "eval": "test"}}, "algorithms": {"psro": {}}}, "leave out .* eval:"),
        ({"tasks": {"kuhn": {"config": KUHN, "metric": "return"}}, "algorithms": {"psro": {}}}, "eval: and metric:"),
        ({"tasks": {"kuhn": {"config": KUHN}}, "algorithms": {"psro": {"population": {"nash_conv_every": 0}}}},
         "kuhn-psro-0: .*set population.nash_conv_every above 0"),
    ],
)  # fmt: skip
def test_errors_are_explained_before_training(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        file = load_grid(write(tmp_path, **changes))
        check_cells(grid_cells(file, tmp_path), tmp_path, file.tasks)


def test_cell_whose_run_was_removed_is_trained_again(tmp_path: Path) -> None:
    """It does not count as done, also not once its new run has a folder."""
    cells = grid_cells(load_grid(write(tmp_path)), tmp_path, ["two-dqn-*"])
    for cell in cells:
        (tmp_path / cell.name).mkdir()
    (tmp_path / "cells.jsonl").write_text(
        "".join(f'{{"cell": "{cell.name}", "status": "done", "seconds": 1}}\n' for cell in cells)
    )
    assert finished_cells(tmp_path) == {"two-dqn-0", "two-dqn-1"}
    (tmp_path / "two-dqn-0").rmdir()
    assert finished_cells(tmp_path) == {"two-dqn-1"}
    assert list(run_cells(cells, tmp_path, 1, lambda: True)) == []  # stopped before it starts a process
    (tmp_path / "two-dqn-0").mkdir()
    assert finished_cells(tmp_path) == {"two-dqn-1"}


def test_population_is_scored_by_its_last_nash_conv(tmp_path: Path) -> None:
    changes = {"oracle": None, "population": {"iterations": 2}, "backend": {"type": "inline"}}
    task = {"config": KUHN, "changes": changes, "score_range": [1, 0]}
    file = load_grid(
        write(tmp_path, tasks={"kuhn": task}, seeds=[0], algorithms={"psro": {"oracle": {"type": "exact"}}})
    )
    (cell,) = grid_cells(file, tmp_path)
    check_cells([cell], tmp_path, file.tasks)
    run = pl.train(cell.tree, name=cell.name, root=tmp_path)
    (tmp_path / "cells.jsonl").write_text('{"cell": "kuhn-psro-0", "status": "done", "seconds": 1}\n')
    results = collect_results(file, tmp_path)
    last = run.metrics["nash_conv"].dropna().iloc[-1]
    assert results.metrics == {"kuhn": "nash_conv"} and results.values["psro"]["kuhn"] == {0: last}
    assert 0 < last < 11 / 12 and describe_cell(cell, tmp_path, file) == f"nash_conv {last:.4g}"


def test_cell_without_a_score_is_described(tmp_path: Path) -> None:
    file = load_grid(write(tmp_path))
    (cell, *_) = grid_cells(file, tmp_path)
    assert describe_cell(cell, tmp_path, file).startswith("without a score: ")


def test_unfinished_algorithms_have_no_aggregate(tmp_path: Path) -> None:
    file = load_grid(write(tmp_path))
    folder = tmp_path / "runs"
    folder.mkdir()
    lines = []
    for name, value in {"sure-dqn-0": 1.0, "two-dqn-0": 4.0, "sure-vdn-0": 0.0}.items():
        (folder / name).mkdir()
        (folder / name / "evals.jsonl").write_text(json.dumps({"name": "held_out", "step": 3, "return": value}) + "\n")
        lines.append(json.dumps({"cell": name, "status": "done", "seconds": 1}) + "\n")
    (folder / "cells.jsonl").write_text("".join(lines))
    data = results_data(collect_results(file, folder))
    assert list(data["aggregates"]) == ["dqn"] and data["aggregates"]["dqn"]["iqm"] == {"value": 0.75, "interval": None}
    assert len(data["missing"]) == 5 and data["probability_of_improvement"] == {}


def test_nan_in_the_last_evaluation_is_no_score(tmp_path: Path) -> None:
    """Logs have NaN as null. The value of an earlier evaluation is not taken in its place."""
    file, folder = load_grid(write(tmp_path, seeds=[0], tasks={"two": GRID["tasks"]["two"]})), tmp_path / "runs"
    for name, last in (("two-dqn-0", "null"), ("two-vdn-0", "3.0")):
        (folder / name).mkdir(parents=True)
        lines = [f'{{"name": "held_out", "step": {step}, "return": {y}}}\n' for step, y in ((0, 7.9), (100, last))]
        (folder / name / "evals.jsonl").write_text("".join(lines))
        with open(folder / "cells.jsonl", "a") as cells:
            cells.write(f'{{"cell": "{name}", "status": "done", "seconds": 1}}\n')
    results = collect_results(file, folder)
    data = results_data(results)
    assert data["values"] == {"dqn": {"two": {}}, "vdn": {"two": {0: 3.0}}}
    assert data["unscored"] == ["two-dqn-0"] and data["missing"] == [] and list(data["aggregates"]) == ["vdn"]
    assert "Left out, since the last value of their metric is not a number: two-dqn-0." in results_page(results, data)
    with pytest.raises(NotANumber, match="two-dqn-0: the last evaluation held_out has no number for return"):
        final_value(RunLogs(folder / "two-dqn-0"), None, None)


def test_opponents_have_no_score_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = '{"name": "held_out", "step": 9, "return": 0.0, "return.hunters": 1.0, "return.prey": -1.0}\n'
    (folder / "evals.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"has a value for each team: .* metric: return\.hunters or return\.prey"):
        final_value(RunLogs(folder), None, None)
    assert final_value(RunLogs(folder), None, "return.prey") == ("return.prey", -1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {"two": {"config": "two.yaml", "changes": {"seed": 7}}}}, "tasks.two.changes sets seed"),
        ({"tasks": {"two": {"config": "two.yaml", "algorithms": {"dqn": {"seed": 7}}}}}, "algorithms.dqn sets seed"),
        ({"algorithms": {"dqn": {"algorithm": {"type": "dqn"}, "seed": 3}}}, "algorithms.dqn sets seed, which differs"),
        (
            {"tasks": {"two": {"config": "two.yaml", "changes": {"algorithm": {"gamma": 0.5}}}}},
            "changes sets algorithm, which all of algorithms: replace as a whole: set it in tasks.two.algorithms.dqn",
        ),
    ],
)
def test_changes_that_no_cell_would_have_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_grid(write(tmp_path, **changes))


def test_shipped_results_name_runs_without_a_score(tmp_path: Path) -> None:
    file, folder = load_grid(write(tmp_path, seeds=[0], tasks={"two": GRID["tasks"]["two"]})), tmp_path / "runs"
    for name, last in (("two-dqn-0", "null"), ("two-vdn-0", "3.0")):
        (folder / name).mkdir(parents=True)
        (folder / name / "evals.jsonl").write_text(f'{{"name": "held_out", "step": 9, "return": {last}}}\n')
        (folder / name / "metrics.jsonl").write_text('{"policy": "team", "step": 9, "env_steps": 640}\n')
        (folder / name / "timings.jsonl").write_text('{"policy": "team", "step": 9, "update_cpu_s": 2}\n')
        with open(folder / "cells.jsonl", "a") as cells:
            cells.write(f'{{"cell": "{name}", "status": "done", "seconds": 1}}\n')
    lines = collect(file, folder)
    assert [(line["value"], line["curve"], line["cpu"]) for line in lines] == [(None, [], 2), (3, [[640, 3]], 2)]
    results = results_of(file, lines)
    assert results.unscored == ["two-dqn-0"] and results.missing == [] and results.metrics == {"two": "return"}
    assert results.values == {"dqn": {"two": {}}, "vdn": {"two": {0: 3}}}


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.few(1)
def test_page_says_that_intervals_of_few_seeds_are_too_narrow(seeds: int, tmp_path: Path) -> None:
    file = load_grid(write(tmp_path, seeds=list(range(seeds))))
    values = {
        algorithm: {task: {s: float(s) for s in range(seeds)} for task in file.tasks} for algorithm in ("dqn", "vdn")
    }
    results = GridResults(file, values, dict.fromkeys(file.tasks, "return"))
    page = results_page(results, results_data(results))
    assert ("Of 2 seeds a bootstrap makes too narrow intervals." in page) == (seeds == 2)
