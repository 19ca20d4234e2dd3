"""`torchrun -m palestra train` as users start it: equal to one process, also when stopped, killed and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from palestra.core.config import validate
from palestra.engine.bases.model import Engine
from palestra.engine.training.checkpoints import load_full_model
from palestra.runs import list_checkpoints, read_lines
from palestra.text.config import TextConfig

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
SHORT = ["steps=4", "episodes=6", "checkpoint_every=1", "evals.dev.episodes=6", "evals.dev.every=2"]
SHORT += ["evals.test.episodes=5", "algorithm.group_size=4"]
FULL = {
    "planner": "{type: full, base: tiny, lr: 1e-4, batch_size: 40, micro_batch_tokens: 900, sampling: {max_tokens: 9}}"
}


def start(folder, ranks, *arguments):
    """`palestra train`, under torchrun if there is more than one rank."""
    command = [
        str(BIN / "torchrun"),
        "--nproc-per-node",
        str(ranks),
        "--log-dir",
        str(folder / "torchrun"),
        "-m",
        "palestra",
    ]
    if ranks == 1:
        command = [sys.executable, "-m", "palestra"]
    return subprocess.Popen(
        [*command, "train", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def demo(*changes, name):
    settings = [part for change in [*SHORT, *changes] for part in ("--set", change)]
    return ["configs/demo.yaml", "--name", name, *settings]


def finish(process, code=0):
    said = process.communicate(timeout=240)[0]
    assert process.returncode == code, said
    return said


def assert_same_run(run, whole):
    """The same metrics to float tolerance."""
    for log in ("metrics.jsonl", "evals.jsonl"):
        found, expected = read_lines(run / log), read_lines(whole / log)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            numbers = {k: v for k, v in theirs.items() if isinstance(v, float)}
            assert {k: ours[k] for k in numbers} == pytest.approx(numbers, abs=2e-4, rel=2e-3), (run.name, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder, 1, *demo(name="one")))
    return folder / "runs" / "one"


@pytest.mark.slow
@pytest.mark.parametrize("ranks,mode", [(2, None), (2, "fsdp"), (4, "fsdp")])
def test_several_ranks_equal_one_process(tmp_path, whole, ranks, mode):
    said = finish(start(tmp_path, ranks, *demo(*([f"parallel={mode}"] if mode else []), name="many")))
    assert said.count("curves:") == 1 and said.count("run runs/many") == 1  # only one rank prints
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["many"]
    assert_same_run(tmp_path / "runs" / "many", whole)


def logged(run):
    return len(read_lines(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def once(met, process):
    for _ in range(2400):
        if met():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_resume_with_another_number_of_ranks(tmp_path, whole, sent):
    process, run = start(tmp_path, 2, *demo("parallel=fsdp", name="stopped")), tmp_path / "runs" / "stopped"
    once(lambda: logged(run) >= 3, process)
    os.kill(process.pid, sent)  # to torchrun, which forwards it
    said = process.communicate(timeout=120)[0]
    assert "stopping after this step" in said and "palestra train --resume runs/stopped" in said
    assert 1 <= len(read_lines(run / "checkpoints.jsonl")) < 4
    finish(start(tmp_path, 1, "--resume", run))
    assert_same_run(run, whole)


@pytest.mark.slow
def test_killed_rank_ends_the_job_and_the_run_resumes(tmp_path, whole):
    process, run = start(tmp_path, 2, *demo(name="killed")), tmp_path / "runs" / "killed"
    once(lambda: logged(run) >= 6, process)
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    began = time.monotonic()
    assert process.wait(timeout=120) != 0 and time.monotonic() - began < 60
    process.communicate()
    assert list_checkpoints(run)
    finish(start(tmp_path, 4, "--resume", run))
    assert_same_run(run, whole)


@pytest.mark.slow
def test_sharded_full_models_are_saved_whole(tmp_path):
    changes = [f"policies.planner={FULL['planner']}", "algorithm={type: ppo}"]
    finish(start(tmp_path, 1, *demo(*changes, name="one")))
    finish(start(tmp_path, 2, *demo(*changes, "parallel=fsdp", name="parted")))
    run = tmp_path / "runs" / "parted"
    assert_same_run(run, tmp_path / "runs" / "one")
    engine, folder = Engine.load("tiny", device="cpu"), list_checkpoints(run)[-1].path / "planner"
    load_full_model(folder, engine)
    said = subprocess.run(
        [sys.executable, "-m", "palestra", "eval", str(run), "--episodes", "4"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["type: ppo, critic: separate", "type: maac"])
def test_ranks_train_a_separate_critic_as_one_process_does(tmp_path, algorithm):
    """The critic is an adapter beside the policy's, with its own optimizer, learning rate and clip."""
    rates = ["policies.planner.critic_lr=0.01", "policies.planner.critic_max_grad_norm=0.1"]
    changes = [f"algorithm={{{algorithm}, group_size: 2}}", "policies.planner.batch_size=10", *rates, "steps=3"]
    finish(start(tmp_path, 1, *demo(*changes, name="one")))
    whole = tmp_path / "runs" / "one"
    learned = load_file(list_checkpoints(whole)[-1].path / "planner/critic/critic.safetensors")
    assert all(tensor.abs().max() > 0 for tensor in learned.values())
    for mode in ("ddp", "fsdp"):
        finish(start(tmp_path, 2, *demo(*changes, f"parallel={mode}", name=mode)))
        run = tmp_path / "runs" / mode
        assert_same_run(run, whole)
        assert read_lines(run / "metrics.jsonl")[0]["critic_grad_norm"] > 0
        for file in ("critic/critic.safetensors", "critic/adapter_model.safetensors", "adapter_model.safetensors"):
            ours, theirs = (load_file(list_checkpoints(r)[-1].path / "planner" / file) for r in (run, whole))
            for name, expected in theirs.items():
                torch.testing.assert_close(ours[name], expected, atol=2e-4, rtol=2e-3)


@pytest.mark.slow
def test_config_errors_are_printed_by_one_rank_only(tmp_path):
    said = finish(start(tmp_path, 2, *demo("parallel=dpp", name="wrong")), code=1)
    assert "error" in said and "parallel" in said and "most recent call" not in said.split("ChildFailedError")[0][:200]
    assert "staleness" in finish(start(tmp_path, 2, *demo("staleness=1", name="wrong")), code=1)
    assert "among its workers" in finish(start(tmp_path, 2, *demo("backend.type=local", name="wrong")), code=1)
    said = finish(start(tmp_path, 2, "configs/games/kuhn_ppo.yaml"), code=1)
    assert "torchrun is for language agents" in said


@pytest.mark.parametrize("line", [{"staleness": 1}, {"engine": "http://127.0.0.1:1"}])
def test_async_rollouts_and_remote_training_are_refused_with_ranks(line):
    policies = {"default": {"type": "lora"}}
    with pytest.raises(ValueError, match="parallel: ddp"):
        validate(TextConfig, {"env": {"type": "plan_path"}, "policies": policies, "parallel": "ddp"} | line)
