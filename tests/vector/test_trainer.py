"""Runs in vector envs from the command line: they learn, resume exactly, and explain errors."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.processes import workers_of
from helpers.warm_processes import start_palestra
from typer.testing import CliRunner

from palestra import load_agent
from palestra.cli.main import app
from palestra.core.config import validate
from palestra.runs import read_lines
from palestra.vector.build.build import build_vector_run
from palestra.vector.config import VectorConfig

runner = CliRunner()


def config(**changes: Any) -> dict[str, Any]:
    """Two hundred short rollouts of simple_spread; the policy and the central critic are recurrent."""
    tree: dict[str, Any] = {
        "name": "spread",
        "env_steps": 16 * 5 * 40,
        "env": {"type": "simple_spread", "num_envs": 16, "max_cycles": 7},
        "policies": {"agent": {"type": "net", "hidden": [16], "gru_units": 8, "normalize_observations": True}},
        "algorithm": {
            "type": "ppo",
            "rollout_length": 5,
            "epochs": 1,
            "minibatches": 4,
            "critic": "central",
            "value_norm": True,
        },
        "evals": {"held_out": {"episodes": 8, "every": 16 * 5 * 8}},
        "log_every": 1,
        "checkpoint_every": 16 * 5 * 4,
    }
    return tree | changes


def write(folder: Path, tree: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{tree['name']}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def launch(folder: Path, *arguments: object, forked: bool = True) -> Any:
    return start_palestra("train", *arguments, cwd=folder, forked=forked)


def finish(process: Any) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


def train(folder: Path, tree: dict[str, Any], *arguments: object) -> Path:
    """Trains in a separate process; returns the run's folder."""
    finish(launch(folder, write(folder, tree), *arguments))
    return folder / "runs" / str(tree["name"])


def contents(run: Path) -> dict[str, bytes]:
    """The files determined by the seed: logs, and those of the newest checkpoint."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    files = [run / "metrics.jsonl", run / "evals.jsonl", *(f for f in newest.rglob("*") if f.is_file())]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def kill_at_random(folder: Path, tree: dict[str, Any], kills: int) -> Path:
    """A run that is killed `kills` times, each at a random moment after its first checkpoint, and resumed; of several,
    the last time with another hash seed."""
    rng = random.Random(kills)
    run = folder / "runs" / str(tree["name"])
    process = launch(folder, write(folder, tree))
    for kill in range(kills):
        lines = run / "metrics.jsonl"
        before = len(read_lines(lines)) if lines.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if lines.exists() and len(lines.read_bytes().splitlines()) >= before + 2:
                break
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
        process = launch(folder, "--resume", run, forked=kills == 1 or kill < kills - 1)
    finish(process)
    return run


@pytest.mark.slow
def test_run_learns_and_its_reports_work(tmp_path: Path) -> None:
    tree = config(
        env_steps=250_000,
        env={"type": "simple_spread", "num_envs": 64},
        policies={"agent": {"type": "net", "lr": 2e-3}},
        algorithm={
            "type": "ppo",
            "rollout_length": 25,
            "epochs": 4,
            "minibatches": 4,
            "critic": "central",
            "value_norm": True,
        },
        evals={
            "held_out": {"episodes": 64},
            "drawn": {"episodes": 64, "greedy": False},
            "random": {"episodes": 64, "seats": {"agent_*": "chance"}},
        },
        log_every=0,
    )
    tree["policies"]["chance"] = {"type": "random"}
    tree["seats"] = {"*": "agent"}
    out = finish(launch(tmp_path, write(tmp_path, tree)))
    run = tmp_path / "runs" / "spread"
    assert "what was learned" in out and (run / "curves.png").stat().st_size > 10_000
    evals = read_lines(run / "evals.jsonl")
    learned, drawn, chance = (
        [line["return"] for line in evals if line["name"] == name][-1] for name in ("held_out", "drawn", "random")
    )
    assert chance < -25 and learned > chance + 5
    assert chance + 3 < drawn != learned
    shown = runner.invoke(app, ["eval", str(run), "--episodes", "64", "--temperature", "0", "--json"])
    assert json.loads(shown.stdout)["return"] > chance + 5
    mixed = runner.invoke(app, ["eval", str(run), "--episodes", "64", "--seats", "agent_*=random", "--json"])
    assert json.loads(mixed.stdout)["return"] == pytest.approx(chance, abs=2)
    assert "spread" in runner.invoke(app, ["runs", "--root", str(tmp_path / "runs")]).stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of `config()`."""
    return train(tmp_path_factory.mktemp("whole") / "whole", config())


def test_an_evaluation_called_dev_plays_other_games() -> None:
    """Those of all others are the same, so that evaluations of one policy can be compared."""
    tree = {
        "env": {"type": "simple_spread", "num_envs": 4},
        "policies": {"agent": {"type": "net", "hidden": [8]}},
        "algorithm": {"type": "ppo", "rollout_length": 25},
        "evals": {name: {"episodes": 8, "replays": 0} for name in ("dev", "test", "held_out")},
    }
    trainer = build_vector_run(validate(VectorConfig, tree))
    dev, test, held_out = (trainer.evaluate(-1, each)["returns"] for each in trainer.evals)
    assert test == held_out != dev


def test_resume_after_kill_is_bit_identical(uninterrupted: Path, tmp_path: Path) -> None:
    assert contents(kill_at_random(tmp_path / "killed", config(), kills=1)) == contents(uninterrupted)


def test_resume_after_kill_of_policies_with_algorithms_of_their_own(tmp_path: Path) -> None:
    """Hunters by PPO, prey by DQN, whose replay buffer is a part of the checkpoint."""
    replay = {"type": "dqn", "gradient_steps": 2, "batch_size": 32, "learning_starts": 0, "buffer_size": 1000}
    net = {"type": "net", "hidden": [16]}
    tree = config(
        name="hunt",
        env={"type": "simple_tag", "num_envs": 16, "max_cycles": 7},
        policies={"hunter": net, "prey": net | {"algorithm": replay}},
        seats={"adversary_*": "hunter", "agent_*": "prey"},
    )
    whole = train(tmp_path / "whole", tree)
    assert contents(kill_at_random(tmp_path / "killed", tree, kills=1)) == contents(whole)
    last = {line["policy"]: line for line in read_lines(whole / "metrics.jsonl")}
    assert "policy_loss" in last["hunter"] and "q" in last["prey"]
    agent = load_agent(whole, "prey")
    assert agent.act([0.0] * 14) in range(5)


@pytest.mark.slow
def test_finished_run_is_extended_to_more_steps(uninterrupted: Path, tmp_path: Path) -> None:
    """Equal to a run of that length from the start; the learning rate must be constant."""
    run = train(tmp_path / "short", config(env_steps=16 * 5 * 24))
    finish(launch(tmp_path / "short", "--resume", run, "--set", f"env_steps={16 * 5 * 40}"))
    assert contents(run) == contents(uninterrupted)


@pytest.mark.slow
def test_resume_after_twenty_kills_is_bit_identical(tmp_path: Path) -> None:
    tree = config(env_steps=16 * 5 * 200)
    assert contents(kill_at_random(tmp_path / "killed", tree, 20)) == contents(train(tmp_path / "whole", tree))


@pytest.mark.slow
def test_resume_after_kill_with_the_memory_of_a_transformer_is_bit_identical(tmp_path: Path) -> None:
    policy = {"type": "net", "hidden": [16], "attention_type": "retention", "retention_decay": 0.9}
    algorithm = {"type": "mat", "rollout_length": 5, "epochs": 1, "minibatches": 4}
    tree = config(policies={"agent": policy}, algorithm=algorithm)
    assert contents(kill_at_random(tmp_path / "killed", tree, 2)) == contents(train(tmp_path / "whole", tree))


@pytest.mark.slow
def test_processes_train_one_network_and_reproduce(tmp_path: Path) -> None:
    tree = config(num_processes=2, name="two")
    run = train(tmp_path, tree)
    line = read_lines(run / "metrics.jsonl")[-1]
    assert line["env_steps"] == tree["env_steps"]
    newest = sorted((run / "checkpoints").iterdir())[-1]
    states = [(newest / f"training-{rank}" / "learner.safetensors").read_bytes() for rank in (0, 1)]
    from safetensors.numpy import load

    ours, theirs = map(load, states)
    shared = [name for name in ours if not name.startswith("critic_memory")]
    assert shared and all((ours[name] == theirs[name]).all() for name in shared)
    again = kill_at_random(tmp_path / "killed", tree, kills=1)
    assert contents(again) == contents(run)


def test_killed_process_is_named_in_the_error(tmp_path: Path) -> None:
    tree = config(num_processes=2, env_steps=16 * 5 * 4000)
    process = launch(tmp_path, write(tmp_path, tree))
    run = tmp_path / "runs" / "spread"
    while not (run / "checkpoints.jsonl").exists() or not read_lines(run / "checkpoints.jsonl"):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "training process 1 of 2 died (exit code -9, SIGKILL); resume from the last checkpoint" in err
    assert f"palestra train --resume {run.relative_to(tmp_path)}" in err


def test_nonfinite_loss_stops_the_run_with_advice(tmp_path: Path) -> None:
    tree = config(policies={"agent": {"type": "net", "hidden": [16], "lr": 1e6, "max_grad_norm": 1e30}})
    process = launch(tmp_path, write(tmp_path, tree))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the loss of policy" in err and "agent_0, agent_1, agent_2" in err
    assert "there is no checkpoint yet" in err or "the last good checkpoint is after" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"type": "simple_spred"}}, "did you mean simple_spread"),
        ({"env": {"type": "simple_spread", "num_env": 4}}, 'no option "num_env": did you mean num_envs?'),
        ({"policies": {"a": {"type": "random"}}}, "no policy is trained"),
        ({"policies": {"a": {"type": "net"}, "b": {"type": "random"}}}, 'seat "agent_0" has no policy'),
        ({"seats": {"adversary_*": "agent"}}, 'seats names "adversary_*"'),
        (
            {
                "policies": {"agent": {"type": "net"}, "old": {"type": "frozen", "path": "nowhere:x"}},
                "seats": {"*": "agent", "agent_0": "old"},
            },
            'no policy "x" in the run nowhere',
        ),
        ({"seats": {"*": "nobody"}}, 'gives "*" to "nobody"'),
        ({"algorithm": {"type": "ppo", "rollout_lenght": 3}}, "did you mean rollout_length"),
        ({"algorithm": {"type": "pppo"}}, "did you mean ppo"),
        ({"num_processes": 3}, "16 games cannot be shared by 3 processes"),
        ({"evals": {"x": {"env": {"agents": 5}}}}, "changes the seats or their observations"),
    ],
)
def test_invalid_configs_are_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "evals" not in changes:
        changes = changes | {"evals": {}}
    path = write(tmp_path, config(**changes))
    done = runner.invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 2 and message in done.stderr, done.output


@pytest.mark.slow
def test_behaviour_cloning_of_recorded_play_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted player of the combat game wins, and so does a clone of a few thousand of its actions."""
    monkeypatch.chdir(tmp_path)
    tree = config(
        name="clone",
        env_steps=8 * 16 * 40,
        env={"type": "combat", "map": "3m", "num_envs": 8},
        policies={"unit": {"type": "net", "lr": 3e-3, "seat_one_hot": True}},
        algorithm={"type": "bc", "demonstrations": "focus.parquet", "gradient_steps": 60},
        evals={"held_out": {"episodes": 50}},
        log_every=0,
    )
    path = write(tmp_path, tree)
    missing = runner.invoke(app, ["train", str(path)])
    assert missing.exit_code == 2 and "focus.parquet" in missing.stderr
    script = ["--seats", "unit_*=script:focus", "--num-envs", "32", "--steps", "400"]
    expert = write(tmp_path, tree | {"name": "expert", "algorithm": {"type": "ppo"}})
    done = runner.invoke(app, ["collect", str(expert), "--out", "focus.parquet", *script])
    assert done.exit_code == 0 and "12800 joint steps of unit_0=script:focus" in done.stdout, done.output
    assert runner.invoke(app, ["train", str(path)]).exit_code == 0
    before, after = (line["success"] for line in read_lines(tmp_path / "runs/clone/evals.jsonl"))
    assert before < 0.1 and after > 0.5


@pytest.mark.parametrize("kind", ["iql", "cql_sac"])
@pytest.mark.few(1)
def test_offline_run_learns_from_files_and_resumes_on_the_same_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Files recorded by two commands; a run on both is extended bit for bit as if never stopped, and other data are
    refused."""
    monkeypatch.chdir(tmp_path)
    tree = config(
        env_steps=2 * 8 * 16,
        env={"type": "simple_spread", "num_envs": 8, "max_cycles": 7, "continuous_actions": kind == "cql_sac"},
        policies={"agent": {"type": "net", "hidden": [16], "normalize_observations": True}},
        algorithm={
            "type": kind,
            "data": ["a.parquet", "b.parquet"],
            "rollout_length": 16,
            "gradient_steps": 4,
            "critic": "central",
        },
        evals={},
    )
    path = write(tmp_path, tree)
    missing = runner.invoke(app, ["train", str(path)])
    assert missing.exit_code == 2 and "a.parquet does not hold episodes" in missing.stderr
    random_play = ["--seats", "agent_*=random", "--num-envs", "4", "--steps", "20"]
    for seed, name in enumerate(("a", "b")):
        arguments = ["collect", str(path), "--out", f"{name}.parquet", "--seed", str(seed), *random_play]
        done = runner.invoke(app, arguments)
        assert done.exit_code == 0 and "80 joint steps of agent_0=random/agent_0" in done.stdout, done.output
    for name, updates in (("parts", 2), ("whole", 4)):
        path = write(tmp_path, tree | {"name": name, "env_steps": updates * 8 * 16})
        assert runner.invoke(app, ["train", str(path)]).exit_code == 0
    done = runner.invoke(app, ["train", "--resume", "runs/parts", "--set", f"env_steps={4 * 8 * 16}"])
    assert done.exit_code == 0, done.output
    lines = [read_lines(Path("runs") / name / "metrics.jsonl") for name in ("whole", "parts")]
    assert len(lines[0]) == 8 and lines[0] == lines[1] and lines[0][0]["policy_loss"] != 0
    Path("b.parquet").write_bytes(Path("a.parquet").read_bytes())
    refused = runner.invoke(app, ["train", "--resume", "runs/whole", "--set", f"env_steps={6 * 8 * 16}"])
    assert refused.exit_code == 2 and "not those that the checkpoint was trained on" in refused.stderr, refused.output
