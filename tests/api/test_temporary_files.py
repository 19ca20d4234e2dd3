"""A run leaves no files in the temporary directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VECTOR = ("games/kuhn_ppo.yaml", "env_steps=8192", "evals.held_out.episodes=8")
PSRO = ("populations/kuhn_psro.yaml", "population.iterations=1", "population.env_steps=2000")
TEXT = ("demo.yaml", "steps=1", "episodes=2", "evals={}")
RUNS = {
    "processes": (*VECTOR, "num_processes=2"),
    "actors": (*VECTOR, "num_actors=1", "algorithm.off_policy_correction=vtrace"),
    "population": (*PSRO, "population.games_per_cell=100"),
    "text": TEXT,
}
WORKERS = {"population": 2, "text": 1}


@pytest.mark.parametrize(
    "name", ["processes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("actors", "population", "text"))]
)
def test_a_run_leaves_no_temporary_files(name, tmp_path):
    config, *changes = RUNS[name]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "palestra", "train", f"configs/{config}", "--root", str(tmp_path)]
    command += [part for change in changes for part in ("--set", change)]
    command += ["--workers", str(WORKERS[name])] if name in WORKERS else []
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # PyTorch's cache of compiled kernels
