"""Slow runs, evaluations and grids, as processes that write into a pipe: something is heard every ten seconds."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

LONGEST_S = 12.0  # ten seconds, and two for a busy machine
SOURCE = """
import time

from palestra import Env, Step
from palestra.envs.vector.matrix import MatrixGame


class Slow(Env):
    seats = ("a",)

    def reset(self, seed):
        return Step({"a": "hi"})

    def step(self, actions):
        time.sleep(6)
        return Step({}, team_reward=float(len(actions["a"])))


class SlowGame(MatrixGame):
    def step(self, actions):
        time.sleep(1)
        return super().step(actions)
"""
TEXT = {
    "name": "slow",
    "steps": 1,
    "episodes": 1,
    "env": {"type": "slow_envs:Slow"},
    "policies": {"default": {"type": "lora", "base": "tiny", "rank": 2, "sampling": {"max_tokens": 3}}},
    "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4},
}
GAME = {
    "name": "slow",
    "env": {"type": "slow_envs:SlowGame", "num_envs": 2},
    "env_steps": 64,
    "policies": {"all": {"type": "net"}},
    "algorithm": {"type": "ppo", "rollout_length": 32},
}
GRID = {
    "name": "both",
    "seeds": [0],
    "tasks": {"slow": {"config": "slow.yaml", "changes": {"evals": {"test": {"episodes": 2}}}}},
    "algorithms": {"ppo": {}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "command", "words"),
    [
        (TEXT, "train", ["loading tiny", "run runs/slow", "training 0/1, playing 0/1, 0:00:"]),
        (TEXT, "eval", ["evaluating slow.yaml, 0:00:", "evaluating slow.yaml 1/4"]),
        (GAME, "train", ["run runs/slow", "training 0/1, starting, 0:00:"]),
        (GAME, "grid", ["grid both: 1 cells", "grid both 0/1, 0:0", "[1/1] slow-ppo-0 done"]),
    ],
)
def test_no_silence_is_longer_than_ten_seconds(tmp_path, config, command, words):
    (tmp_path / "slow_envs.py").write_text(SOURCE)
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID))
    typed = [Path(sys.executable).parent / "palestra", command, "grid.yaml" if command == "grid" else "slow.yaml"]
    typed += ["--episodes", "4"] if command == "eval" else []
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "bufsize": 1}
    times = [time.monotonic()]
    lines = []
    with subprocess.Popen(typed, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": ""}, **options) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            times.append(time.monotonic())
    times.append(time.monotonic())
    said = "\n".join(lines)
    assert process.returncode == 0 and all(word in said for word in words), said
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[-1] - times[0] > 2 * LONGEST_S and max(gaps) < LONGEST_S, said
