"""One file of a user's adds an algorithm, a network, an optimizer or an env, each trained in a fresh process that has
only that file and the installed package."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import palestra as pl
from palestra.core.files import read_arrays
from palestra.runs import list_checkpoints, read_lines
from palestra.vector.learners.policy_stack import read_policy

OWN = Path(__file__).parents[1] / "helpers" / "own_things.py"
ENV = "{type: 'own_things:Echo', num_envs: 32}"
VECTOR = f"""
env_steps: 20_000
env: {ENV}
evals: {{test: {{episodes: 64, every: 20_000}}}}
log_every: 5_000
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copy(OWN, tmp_path / "own_things.py")
    return tmp_path


def run_palestra(folder, *arguments: str) -> str:
    """Runs the command in a process of its own in `folder`; returns what it wrote."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "OMP_NUM_THREADS")}
    kept["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-m", "palestra", *arguments]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_vector(folder, *parts: str) -> dict[str, float]:
    """Trains the user's env with the lines `parts` of a config; returns the last result of the evaluation."""
    (folder / "config.yaml").write_text("\n".join([VECTOR, *parts]))
    run_palestra(folder, "train", "config.yaml", "--name", "own")
    return read_lines(folder / "runs" / "own" / "evals.jsonl")[-1]


@pytest.mark.parametrize("name", ["Reinforce", pytest.param("UnclippedPPO", marks=pytest.mark.slow)])
def test_own_algorithm_of_networks_learns_in_own_env(folder, name) -> None:
    algorithm = f"algorithm: {{type: 'own_things:{name}', entropy_coef: 0.02}}"
    result = train_vector(folder, "policies: {default: {type: net, lr: 1e-2}}", algorithm)
    assert result["return"] > 0.9  # chance is 0.25


@pytest.fixture
def own_things(folder, monkeypatch):
    """The user's module, imported here."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    module = importlib.import_module("own_things")
    yield module
    del sys.modules["own_things"]


def train_echo(**parts):
    policies = parts.pop("policies", {"default": pl.vector.Net(lr=1e-2)})
    env = {"type": "own_things:Echo", "num_envs": 32}
    return pl.train(env=env, policies=policies, evals={"test": {"episodes": 64, "every": 20_000}}, **parts)


def test_own_algorithm_is_given_as_an_object_and_resumed_to_the_same_weights(own_things) -> None:
    parts = {"algorithm": own_things.Reinforce(entropy_coef=0.02), "checkpoint_every": 5_120}
    whole = train_echo(steps=10_240, name="whole", **parts)
    part = train_echo(steps=5_120, name="part", **parts)
    part = pl.train(resume=part, steps=10_240)
    settings = {"type": "own_things:Reinforce", "entropy_coef": 0.02, "rollout_length": 16, "time_limit": "cuts"}
    assert part.config["algorithm"] == settings
    one, other = (load_policy(run) for run in (whole, part))
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def load_policy(run) -> dict[str, np.ndarray]:
    return read_arrays(list_checkpoints(run.path)[-1].path / "default" / "policy.safetensors")


def test_package_registers_an_algorithm_by_an_entry_point(own_things, folder) -> None:
    facts = folder / "own_things-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own_things\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[palestra.algorithms]\nmy_reinforce = own_things:Reinforce\n")
    run = train_echo(algorithm={"type": "my_reinforce"}, steps=512)
    assert run.config["algorithm"]["type"] == "own_things:Reinforce"


@pytest.mark.parametrize(
    "algorithm, says",
    [
        ({"type": "own_things:Nobody"}, 'algorithm "own_things:Nobody" cannot be loaded'),
        (
            {"type": "own_things:Echo"},
            "own_things:Echo is not a subclass of palestra.vector.learners.nets.AlgorithmConfig",
        ),
        ({"type": "own_things:Reinforce", "entropy": 1}, "unknown key entropy: did you mean entropy_coef?"),
        ({"type": "own_things:Median"}, "own_things:Median is not a subclass of palestra.vector"),
        ({"type": "pppo"}, "unknown algorithm.type 'pppo': did you mean ppo?"),
    ],
)
def test_algorithm_that_does_not_fit_is_refused_in_one_line(own_things, algorithm, says) -> None:
    with pytest.raises(ValueError) as caught:
        train_echo(algorithm=algorithm)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("network", ["Layers", pytest.param("Memory", marks=pytest.mark.slow)])
def test_own_network_learns_and_is_played_from_its_folder(own_things, network) -> None:
    policies = {"default": pl.vector.Net(lr=3e-3, network={"type": getattr(own_things, network), "units": 24})}
    algorithm = pl.vector.PPO(rollout_length=4, minibatches=4, epochs=4, entropy_coef=0.05)
    run = train_echo(policies=policies, algorithm=algorithm, steps=10_240)
    assert run.config["policies"]["default"]["network"] == {"type": f"own_things:{network}", "units": 24}
    assert any("weights" in key for key in load_policy(run))
    assert run.evaluate(episodes=64).metrics["return"] > 0.95  # 1.0 with each of twenty seeds of Layers; chance is 0.25
    frozen = {
        "default": {"type": "frozen", "path": f"{run.path}:default", "greedy": True},
        "new": pl.vector.Net(lr=1e-2),
    }
    other = train_echo(policies=frozen, seats={"left": "default", "right": "new"}, steps=512, name="other")
    assert other.evals["returns.left"].iloc[-1] > 0.95


def test_own_optimizer_trains_networks(own_things) -> None:
    policies = {"default": pl.vector.Net(lr=3e-3, optimizer={"type": own_things.SignDescent, "beta": 0.8})}
    run = train_echo(policies=policies, algorithm=own_things.Reinforce(), steps=10_240)
    assert run.config["policies"]["default"]["optimizer"] == {"type": "own_things:SignDescent", "beta": 0.8}
    assert run.evals["return"].iloc[-1] > 0.9
    folder = list_checkpoints(run.path)[-1].path / "default"
    sent = (folder / "member.json").read_text()
    (folder / "member.json").write_text(sent.replace("own_things:SignDescent", "own_things:Missing"))
    env = own_things.Echo(2)
    assert read_policy(folder, env, [0, 1]).names == ["default@20"]  # a policy is played without its optimizer


def test_own_algorithm_optimizer_and_env_of_language_agents(own_things) -> None:
    sampling = {"max_tokens": 1, "temperature": 1.5}
    policy = pl.Lora("tiny", lr=1e-2, optimizer={"type": "own_things:SignDescent"}, sampling=sampling)
    algorithm = own_things.Median(group_size=4, branch_at="root")
    evals = {"test": {"episodes": 64, "every": 8}}
    parts = {"policies": {"default": policy}, "algorithm": algorithm, "episodes": 16, "steps": 8, "evals": evals}
    run = pl.train(env=own_things.Letters, **parts)
    assert run.config["env"]["type"] == "own_things:Letters" and run.config["algorithm"]["type"] == "own_things:Median"
    assert run.config["policies"]["default"]["optimizer"] == {"type": "own_things:SignDescent"}
    first, *_, last = run.evals["success"]
    assert first < 0.6 and last > 0.9


def test_own_sink_gets_an_own_metric_of_every_step(own_things) -> None:
    sink = {"type": "own_things:LinesConfig", "metric": "default/reward_of_rollout"}
    run = train_echo(algorithm=own_things.Reinforce(), steps=2_560, log_every=1, sinks=[sink])
    logged = [line for line in read_lines(run.path / "metrics.jsonl") if "reward_of_rollout" in line]
    written = (run.path / "lines.txt").read_text().splitlines()
    assert written == [f"{line['step'] + 1} {line['reward_of_rollout']}" for line in logged] and len(written) == 5
