"""Failing runs: exit code 1, one line with the reason, the traceback of the first failure, and a run that resumes once
the cause is fixed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.command_line import invoke
from helpers.terminal_text import plain

from palestra.runs import list_checkpoints, read_lines
from palestra.runs.episodes import load_episodes

SPEECH = {"type": "lora", "sampling": {"max_tokens": 2}}
DEEPEST = 'return nothing["boom'  # the line of toys_failing.py that raises


def text_config(folder, base, **changes):
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    tree = {
        "name": "failing",
        "steps": 3,
        "episodes": 4,
        "env": {"type": "helpers.toys_failing:Cracks"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 3},
    }
    return write_config(folder, tree | changes)


def game_config(folder, **changes):
    tree = {
        "name": "failing",
        "env_steps": 256,
        "env": {"type": "helpers.toys_failing:Breaks", "num_envs": 4},
        "policies": {"all": {"type": "net", "hidden": [8]}},
        "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 4, "minibatches": 4},
    }
    return write_config(folder, tree | changes)


def write_config(folder, tree):
    path = folder / "failing.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def fail_stderr(*arguments):
    """The stderr of a command that ends with exit code 1."""
    done = invoke(*arguments)
    assert done.exit_code == 1, (done.exit_code, done.output, done.exception)
    assert isinstance(done.exception, SystemExit) and "error:" in done.stderr, done.output
    return done.stderr


# ---- language agents


def test_run_with_only_failed_episodes_ends_with_the_traceback(base, tmp_path):
    said = fail_stderr("train", text_config(tmp_path, base), "--root", tmp_path)
    text = plain(said)
    assert "step 1: 4 of 4 episodes failed, the first (instance 0) with KeyError:" in text
    assert "--resume" in text and "max_failed (now 0.5)" in text
    assert "Traceback (most recent call last)" in said and DEEPEST in said and "toys_failing.py" in said
    run = tmp_path / "failing"
    kept = load_episodes(run / "episodes/step-000000.parquet")
    assert len(kept) == 4 and all(e.error.startswith("KeyError") and DEEPEST in e.traceback for e in kept)
    assert DEEPEST in (run / "error.txt").read_text()
    assert not (run / "metrics.jsonl").exists() or read_lines(run / "metrics.jsonl") == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_max_failed_limits_failed_episodes(base, tmp_path, share):
    """About 5 of 16 episodes fail: with 0 that ends the run, with 1 it continues."""
    env = {"type": "helpers.toys_failing:Cracks", "share": 0.3}
    config = text_config(tmp_path, base, env=env, episodes=16, steps=1, max_failed=share)
    done = invoke("train", config, "--root", tmp_path)
    assert done.exit_code == (1 if share == 0.0 else 0), done.output
    assert ("of 16 episodes failed" in plain(done.stderr)) == (share == 0.0)


@pytest.mark.parametrize("most", [2, 6])
def test_joint_steps_of_an_episode_are_limited(base, tmp_path, most):
    """In training and in evaluations; the env itself ends an episode after three turns of two seats."""
    game = {
        "env": {"type": "plan_path", "max_turns": 3, "size": 8},
        "policies": {"default": SPEECH | {"base": str(base)}},
    }
    config = text_config(tmp_path, base, **game, steps=1, max_joint_steps=most)
    done = invoke("train", config, "--root", tmp_path)
    assert ('env "plan_path" has not ended after 2 joint steps' in plain(done.stderr)) == (most == 2), done.output
    assert done.exit_code == 0 or most == 2 or "no update was made" in done.stderr
    done = invoke("eval", config, "--episodes", "2")
    assert ("has not ended after 2 joint steps" in plain(done.output)) == (most == 2), done.output


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.few(1)
def test_resume_after_a_fixed_env_is_bit_identical(base, tmp_path, staleness):
    """The env fails for good after two steps, at a step without a checkpoint; --resume continues with the third."""
    mended = tmp_path / "mended"
    mended.touch()
    env = {"type": "helpers.toys_failing:Cracks", "mended": str(mended)}
    changes = {"env": env, "staleness": staleness, "checkpoint_every": 100, "steps": 4}
    config = text_config(tmp_path, base, **changes)
    assert invoke("train", config, "--root", tmp_path, "--name", "whole").exit_code == 0
    assert invoke("train", config, "--root", tmp_path, "--name", "cut", "--set", "steps=2").exit_code == 0
    mended.unlink()
    assert "step 3: 4 of 4 episodes failed" in plain(
        fail_stderr("train", "--resume", tmp_path / "cut", "--set", "steps=4")
    )
    assert list_checkpoints(tmp_path / "cut")[-1].step == 1
    assert "cut failed: step 3: 4 of 4" in plain(invoke("runs", "--root", tmp_path).output)
    mended.touch()
    done = invoke("train", "--resume", tmp_path / "cut")
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "cut/error.txt").exists()
    assert "failed" not in plain(invoke("runs", "--root", tmp_path).output)
    lines = read_lines(tmp_path / "cut/metrics.jsonl")
    assert lines == read_lines(tmp_path / "whole/metrics.jsonl") if not staleness else len(lines) == 12


def test_failure_between_checkpoints_saves_finished_steps(base, tmp_path):
    """Three steps succeed, then an endpoint is gone: a checkpoint of the third is written before the run ends."""
    (tmp_path / "late_env.py").write_text(
        "from helpers.toys import Whisper\n\n\n"
        "class Late(Whisper):\n"
        "    def reset(self, seed):\n"
        "        if seed % 2**32 >= 12:\n"
        '            raise ConnectionError("endpoint gone")\n'
        "        return super().reset(seed)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        config = text_config(tmp_path, base, env={"type": "late_env:Late"}, steps=6)
        said = fail_stderr("train", config, "--root", tmp_path)
    finally:
        sys.path.remove(str(tmp_path))
    assert "step 4: 4 of 4 episodes failed" in plain(said) and "ConnectionError: endpoint gone" in said
    assert [c.step for c in list_checkpoints(tmp_path / "failing")] == [2]


def test_failed_evaluation_ends_the_run_without_a_score(base, tmp_path):
    evaluation = {"episodes": 5, "env": {"type": "helpers.toys_failing:Cracks"}}
    config = text_config(tmp_path, base, env={"type": "helpers.toys:Whisper"}, evals={"dev": evaluation})
    said = fail_stderr("train", config, "--root", tmp_path)
    assert "evaluation dev: 5 of 5 episodes failed" in plain(said) and DEEPEST in said
    assert read_lines(tmp_path / "failing/evals.jsonl") == []


@pytest.mark.slow
def test_failures_on_workers_end_the_run_with_their_traceback(base, tmp_path):
    said = fail_stderr("train", text_config(tmp_path, base), "--root", tmp_path, "--backend", "local", "--workers", "1")
    assert "step 1: 4 of 4 episodes failed" in plain(said) and DEEPEST in said


def test_run_without_updates_fails_with_the_reason(base, tmp_path):
    config = text_config(tmp_path, base, env={"type": "helpers.toys_failing:Flat"})
    said = plain(fail_stderr("train", config, "--root", tmp_path))
    assert "no update was made in 3 steps: in 100% of the groups all answers earn the same" in said
    assert "algorithm.group_size" in said and len(list_checkpoints(tmp_path / "failing")) == 1
    longer = invoke("train", "--resume", tmp_path / "failing", "--set", "steps=4")
    assert longer.exit_code == 1 and "no update was made in 4 steps" in plain(longer.stderr)
    listed = plain(invoke("runs", "--root", tmp_path).output)
    assert "stopped" not in listed and "failing failed: no update was made in 4 steps: in 100% of" in listed


def test_run_without_learners_succeeds(base, tmp_path):
    policies = {"default": {"type": "random"}}
    config = text_config(tmp_path, base, env={"type": "helpers.toys:Whisper"}, policies=policies)
    done = invoke("train", config, "--root", tmp_path)
    assert done.exit_code == 0, done.output


def test_alarms_that_fired_are_printed_at_the_end(base, tmp_path):
    config = text_config(tmp_path, base, env={"type": "helpers.toys_failing:Flat"}, steps=12)
    done = invoke("train", config, "--root", tmp_path)
    assert "alarm: nothing to learn from: 100% of the groups" in plain(done.stdout)


def test_eval_command_with_only_failed_episodes_fails(base, tmp_path):
    said = fail_stderr("eval", text_config(tmp_path, base), "--episodes", "3", "--seats", "guide=random", "--seats",
                       "walker=random")  # fmt: skip
    assert "eval: 3 of 3 episodes failed" in plain(said) and DEEPEST in said


def test_recorded_tracebacks_are_bounded(tmp_path, base):
    (tmp_path / "deep_env.py").write_text(
        "from helpers.toys import Whisper\n\n\n"
        "class Deep(Whisper):\n"
        "    def step(self, actions):\n"
        "        return self.step(actions) if len(actions) else None\n\n\n"
        "class Wordy(Whisper):\n"
        "    def step(self, actions):\n"
        "        raise RuntimeError('x' * 10**7)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        for number, name in enumerate(("Deep", "Wordy")):
            config = text_config(tmp_path, base, env={"type": f"deep_env:{name}"})
            assert len(fail_stderr("train", config, "--root", tmp_path / name)) < 20_000
            (episode, *_) = load_episodes(tmp_path / name / "failing/episodes/step-000000.parquet")
            assert len(episode.error) < 2100 and len(episode.traceback) < 8100, number
    finally:
        sys.path.remove(str(tmp_path))


# ---- vectorised games


@pytest.mark.parametrize("how", ["raise", "value"])
def test_vector_env_error_ends_the_run_with_its_traceback(tmp_path, how):
    env = {"type": "helpers.toys_failing:Breaks", "num_envs": 4, "how": how}
    said = fail_stderr("train", game_config(tmp_path, env=env), "--root", tmp_path)
    assert f'env "breaks" failed in step: {"KeyError" if how == "raise" else "ValueError: no such move"}' in plain(said)
    assert "Traceback" in said and "toys_failing.py" in said
    assert "toys_failing.py" in (tmp_path / "failing/error.txt").read_text()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reward", 'env "breaks" gives seat "seat1" a reward of nan in game 1: rewards must be finite numbers'),
        ("obs", 'shows seat "seat1" observations that are not finite numbers'),
        ("large", "Rewards are as large as 1e+30: scale them down"),
    ],
)
def test_nonfinite_rewards_and_observations_are_named(tmp_path, how, message):
    env = {"type": "helpers.toys_failing:Breaks", "num_envs": 4, "how": how}
    algorithm = {"type": "ppo", "rollout_length": 8, "normalize_advantages": False}
    said = plain(fail_stderr("train", game_config(tmp_path, env=env, algorithm=algorithm), "--root", tmp_path))
    assert message in said and "learning rate" not in said


@pytest.mark.slow
def test_vector_env_error_in_an_actor_ends_the_run_with_its_traceback(tmp_path):
    algorithm = {"type": "ppo", "rollout_length": 8, "off_policy_correction": "vtrace"}
    config = game_config(tmp_path, algorithm=algorithm, num_actors=2)
    said = fail_stderr("train", config, "--root", tmp_path)
    assert 'env "breaks" failed in step: KeyError' in plain(said) and "toys_failing.py" in said


# ---- populations


@pytest.mark.parametrize("backend", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_env_error_ends_a_population_run_with_its_traceback(tmp_path, backend):
    tree = {
        "name": "failing",
        "env": {"type": "helpers.toys_failing:Breaks", "num_envs": 4},
        "symmetric": True,
        "population": {"type": "league", "slices": 1, "env_steps": 64, "games_per_cell": 8},
        "oracle": {
            "type": "net",
            "policy": {"hidden": [8]},
            "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 4, "minibatches": 4},
        },
    }
    said = fail_stderr(
        "train", write_config(tmp_path, tree), "--root", tmp_path, "--backend", backend, "--workers", "1"
    )
    assert "failed: env " in plain(said) and "KeyError: 'boom'" in said and "toys_failing.py" in said
    assert "toys_failing.py" in (tmp_path / "failing/error.txt").read_text()


@pytest.mark.parametrize("command", ["exploit", "crossplay"])
def test_an_internal_error_of_playing_is_no_damage_of_the_run(tmp_path, monkeypatch, command):
    tree = {
        "name": "fine",
        "env": {"type": "helpers.toys_failing:Unmade", "num_envs": 4},
        "population": {"type": "self_play", "slices": 1, "env_steps": 64, "nash_conv_every": 0},
        "oracle": {
            "type": "net",
            "policy": {"hidden": [8]},
            "algorithm": {"type": "ppo", "rollout_length": 8, "epochs": 1, "minibatches": 4},
        },
        "symmetric": True,
        "backend": {"type": "inline"},
    }
    done = invoke("train", write_config(tmp_path, tree), "--root", tmp_path)
    assert done.exit_code == 0, done.output
    run = tmp_path / "fine"
    words = {"exploit": ("--steps", 64), "crossplay": ("--games", 8)}[command]
    monkeypatch.setenv("UNMADE", "1")
    done = invoke("league", command, run, *words)
    assert done.exit_code == 2 and "env Unmade cannot be made: TypeError: an internal error" in done.stderr, done.output
    assert "is not as palestra writes it" not in done.output


def test_failed_games_end_a_language_population_with_their_traceback(base, tmp_path):
    tree = {
        "name": "failing",
        "env": {"type": "helpers.toys_failing:CrackedCards"},
        "population": {"type": "psro", "iterations": 1, "train_steps": 1, "games_per_cell": 4, "nash_conv_every": 0},
        "oracle": {
            "type": "language",
            "policy": {"base": str(base), "sampling": {"max_tokens": 2}},
            "episodes": 2,
            "imitation_steps": 1,
        },
    }
    said = fail_stderr("train", write_config(tmp_path, tree), "--root", tmp_path, "--backend", "inline")
    assert "the game of seed" in plain(said) and "KeyError: 'cards'" in said and "toys_failing.py" in said


# ---- a real process


@pytest.mark.slow
def test_installed_command_exits_with_code_1(base, tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "helpers", tmp_path / "helpers")
    text_config(tmp_path, base)
    script = Path(sys.executable).parent / "palestra"
    done = subprocess.run([script, "train", "failing.yaml"], cwd=tmp_path, capture_output=True, env=os.environ)
    assert done.returncode == 1, done.stderr.decode()
    assert b"4 of 4 episodes failed" in done.stderr and DEEPEST.encode() in done.stderr
    assert b"\x1b]0;owned" not in done.stdout + done.stderr and "\N{FIRE}" not in (done.stdout + done.stderr).decode()
