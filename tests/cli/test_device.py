"""`device` of a run of small networks on a machine without a GPU: cpu, auto, and error messages for missing devices."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import palestra, refused

from palestra.core.config import load, validate
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

CONFIG = """
name: run
env: {type: kuhn_poker, num_envs: 8}
policies: {default: {type: net, hidden: [8], gru_units: 4}}
algorithm: {type: mappo, rollout_length: 16, epochs: 2, minibatches: 2}
evals: {held_out: {episodes: 32}}
env_steps: 512
checkpoint_every: 256
"""
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def trained(config: Path, name: str, *arguments: str) -> Path:
    palestra("train", config, "--root", config.parent, "--name", name, *arguments)
    return config.parent / name


def digests(run: Path) -> dict[str, str]:
    """Digests of a run's metrics and evaluations, and of the weights and training state of its checkpoints."""
    files = [run / "metrics.jsonl", run / "evals.jsonl", *sorted(run.glob("checkpoints/*/*/*.safetensors"))]
    assert len(files) > 4
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def pretend_run_of_a_gpu(run: Path) -> None:
    """Turns a run into one that was started with `device: cuda`."""
    meta = json.loads((run / "meta.json").read_text())
    meta["config"] = meta["config"].replace("device: cpu", "device: cuda")
    (run / "meta.json").write_text(json.dumps(meta))
    (run / "config.yaml").write_text(meta["config"])
    assert load(run / "config.yaml")["device"] == "cuda"


@pytest.mark.slow
def test_all_spellings_of_the_cpu_give_equal_bytes(config: Path) -> None:
    default = digests(trained(config, "default"))
    assert digests(trained(config, "explicit", "--set", "device=cpu")) == default
    if not torch.cuda.is_available():
        assert digests(trained(config, "auto", "--set", "device=auto")) == default


@NO_CUDA
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device: cuda is not there: torch sees 0 cuda devices"),
        ("cuda:1", "device: cuda:1 is not there"),
        ("gpu", "unknown device 'gpu': write auto, cpu, cuda, cuda:1"),
        ("mps", "device: mps is for language models: small networks train on cpu or cuda"),
    ],
)
def test_missing_devices_are_refused_before_the_start(config: Path, device: str, message: str) -> None:
    assert message in refused("train", config, "--root", config.parent / "runs", "--set", f"device={device}")
    assert not (config.parent / "runs").exists()


@NO_CUDA
def test_run_of_a_gpu_is_evaluated_and_resumes_without_one(config: Path) -> None:
    whole = digests(trained(config, "whole", "--set", "env_steps=1024"))
    run = trained(config, "half")
    pretend_run_of_a_gpu(run)
    played = palestra("eval", run, "--episodes", 32, "--json")
    assert json.loads(played.splitlines()[-1])["episodes"] == 32
    assert "device: cuda is not there" in refused("train", "--resume", run, "--set", "env_steps=1024")
    palestra("train", "--resume", run, "--set", "env_steps=1024", "--set", "device=cpu")
    assert load(run / "config.yaml")["device"] == "cpu"
    assert digests(run)["metrics.jsonl"] == whole["metrics.jsonl"]
    last = [name for name in whole if name.startswith("checkpoints/step-000007")]
    assert last and all(digests(run)[name] == whole[name] for name in last)


def test_actors_and_processes_use_the_device_of_the_run(config: Path) -> None:
    tree = load(config) | {"device": "cpu", "num_processes": 2}
    with pytest.raises(ValueError, match="cuda:99 is not there"):  # before any process starts
        build_vector_run(validate(VectorConfig, tree | {"device": "cuda:99"}))
