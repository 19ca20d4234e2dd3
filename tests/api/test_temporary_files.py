"""A run leaves no files in the temporary directory."""

import os

import pytest
from helpers.warm_processes import run_palestra

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
    words = ["train", f"configs/{config}", "--root", str(tmp_path)]
    words += [part for change in changes for part in ("--set", change)]
    words += ["--workers", str(WORKERS[name])] if name in WORKERS else []
    done = run_palestra(*words, env=os.environ | {"TMPDIR": str(temporary)}, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # PyTorch's cache of compiled kernels
