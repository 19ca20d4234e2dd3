"""A training process killed at random moments ends byte for byte like an undisturbed one."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import yaml
from helpers.processes import finish, start

from palestra.runs import list_checkpoints, load_episodes, read_lines
from palestra.runs.eval_files import eval_file

LOGS = ("metrics.jsonl", "evals.jsonl")
PARTS = ("checkpoints", "episodes", "eval_episodes")
STEPS = 12


def config(base, steps):
    """Two adapters, one of which has memory, and a pool of instances, with checkpoints every other step; a step takes
    some hundredths of a second."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 3}, "lr": 1e-3}
    return {
        "name": "killed",
        "steps": steps,
        "episodes": 6,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "instance_pool": {"size": 9},
        "policies": {"guide": speech | {"history": "conversation"}, "walker": speech | {"batch_size": 10}},
        "algorithm": {"type": "grpo", "group_size": 4},
        "evals": {"dev": {"episodes": 4, "every": 3}},
        "checkpoint_every": 2,
    }


def new_run(folder, base, steps):
    folder.mkdir()
    (folder / "killed.yaml").write_text(yaml.safe_dump(config(base, steps)))
    return start(folder, "killed.yaml"), folder / "runs" / "killed"


@pytest.fixture(scope="module")
def uninterrupted(base, tmp_path_factory):
    """By number of steps: an uninterrupted run."""
    root, runs = tmp_path_factory.mktemp("whole"), {}

    def get(steps):
        if steps not in runs:
            process, runs[steps] = new_run(root / str(steps), base, steps)
            finish(process)
        return runs[steps]

    return get


def size(run):
    return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0


def is_training(run, process):
    """True if this process, and not an earlier one, has opened the run."""
    lock = run / ".lock"
    return lock.exists() and lock.read_text().startswith(f"process {process.pid} on ")


def kill_in_training(run, process, rng, step_bytes):
    """SIGKILL once the process has logged a random number of bytes (up to three steps beyond the last checkpoint), and
    some milliseconds later: any point of a step, a checkpoint or a resume. Returns False if training ended first."""
    while not is_training(run, process):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    kept = list_checkpoints(run)
    target = (kept[-1].entry["logs"]["metrics.jsonl"]["bytes"] if kept else 0) + rng.uniform(0, 3 * step_bytes)
    while size(run) < target and process.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.06))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def kill_repeatedly(folder, base, uninterrupted, kills):
    """A run like `whole`, killed `kills` times."""
    steps = list_checkpoints(uninterrupted)[-1].step + 1
    rng, done = random.Random(kills), 0
    process, run = new_run(folder, base, steps)
    while kill_in_training(run, process, rng, size(uninterrupted) / steps):
        done += 1
        process = start(folder, "--resume", run, forked=done < kills)  # with another hash seed at the end
        if done == kills:
            finish(process)
            return run
    raise AssertionError(f"the run of {steps} steps ended after {done} kills: give it more steps")


def assert_same(run, uninterrupted):
    for log in LOGS:
        assert (run / log).read_bytes() == (uninterrupted / log).read_bytes(), log
    ours, theirs = ({str(f.relative_to(r)): f for f in contents(r)} for r in (run, uninterrupted))
    assert ours.keys() == theirs.keys()
    for name, file in ours.items():
        assert file.read_bytes() == theirs[name].read_bytes(), name


def contents(run):
    """Weights, optimizers, recorded episodes, and any other files."""
    return [file for part in PARTS for file in (run / part).rglob("*") if file.is_file()]


def test_uninterrupted_run_has_all_compared_files(uninterrupted):
    run = uninterrupted(STEPS)
    assert len(read_lines(run / "metrics.jsonl")) == 3 * STEPS
    assert [line["step"] for line in read_lines(run / "evals.jsonl")] == [-1, 2, 5, 8, 11]
    names = {str(f.relative_to(run)) for f in contents(run)}
    for name in ("guide", "walker"):
        for file in ("adapter_model.safetensors", "optimizer.safetensors", "member.json"):
            assert f"checkpoints/step-000011/{name}/{file}" in names
    updates = [line["updates"] for line in read_lines(run / "metrics.jsonl") if line["policy"] == "walker"]
    assert max(updates) > 1  # several optimizer steps in a training step


def test_each_evaluation_has_its_episodes_in_the_order_of_its_outcomes(uninterrupted):
    run = uninterrupted(STEPS)
    for line in read_lines(run / "evals.jsonl"):
        episodes = load_episodes(run / eval_file("eval_episodes", "dev", line["step"]))
        assert "".join(str(int(episode.success >= 0.5)) for episode in episodes) == line["outcomes"]
        assert all(episode.seats["guide"] == f"guide@{line['step'] + 1}" for episode in episodes)


def test_resume_after_a_kill_is_bit_identical(base, uninterrupted, tmp_path):
    assert_same(kill_repeatedly(tmp_path / "a", base, uninterrupted(STEPS), kills=1), uninterrupted(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resume_after_twenty_kills_is_bit_identical(base, uninterrupted, tmp_path):
    assert_same(kill_repeatedly(tmp_path / "a", base, uninterrupted(70), kills=20), uninterrupted(70))


# a population's Ctrl-C is a fast test: test_run_can_be_resumed_after_ctrl_c
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_writes_a_checkpoint_and_prints_the_resume_command(base, uninterrupted, tmp_path, number):
    process, run = new_run(tmp_path / "a folder", base, steps=STEPS)
    while len(read_lines(run / "metrics.jsonl")) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    os.kill(process.pid, number)
    out = finish(process)
    assert "stopping after this step" in out
    steps = list_checkpoints(run)[-1].step + 1
    assert 0 < steps < STEPS and len(read_lines(run / "metrics.jsonl")) == 3 * steps
    (hint,) = (line for line in out.splitlines() if "palestra train --resume" in line)
    resumed = start(tmp_path / "a folder", "--resume", hint.rsplit("--resume ", 1)[1].strip("'"))
    assert f"resuming after {steps} steps" in finish(resumed)
    assert_same(run, uninterrupted(STEPS))


@pytest.mark.slow
def test_finished_run_is_extended_to_more_steps(base, uninterrupted, tmp_path):
    steps = STEPS * 3 // 5
    process, run = new_run(tmp_path / "a", base, steps)
    finish(process)
    out = finish(start(tmp_path / "a", "--resume", run, "--set", f"steps={STEPS}"))
    assert f"resuming after {steps} steps" in out
    shutil.rmtree(list_checkpoints(run)[0].path)  # the checkpoint of the former last step is kept too
    assert_same(run, uninterrupted(STEPS))
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == STEPS
    (change,) = json.loads((run / "meta.json").read_text())["changed"]
    assert change["step"] == steps - 1 and f"steps={STEPS}" in change["command"]
    assert yaml.safe_load(change["config"])["steps"] == steps


@pytest.mark.slow
def test_second_ctrl_c_exits_at_once_without_loss(base, uninterrupted, tmp_path):
    process, run = new_run(tmp_path / "a", base, steps=STEPS)
    while len(read_lines(run / "metrics.jsonl")) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in out + err
    finish(start(tmp_path / "a", "--resume", run))
    assert_same(run, uninterrupted(STEPS))
