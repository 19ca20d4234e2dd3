"""Runs of small networks start without importing the packages of language models, which takes seconds and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

PROGRAM = """
import json, sys
from palestra.cli.main import app

heavy = {}
for config in sys.argv[1:]:
    app(["train", config], standalone_mode=False)
    heavy[config] = [name for name in ("transformers", "peft") if name in sys.modules]
print(json.dumps(heavy))
"""
ALGORITHM = {"type": "ppo", "rollout_length": 8, "epochs": 1, "minibatches": 1}
VECTOR = {
    "name": "vector",
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "algorithm": ALGORITHM,
    "policies": {"default": {"type": "net", "hidden": [8]}},
    "env_steps": 32,
}
POPULATION = {
    "name": "population",
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "population": {"type": "self_play", "slices": 1, "env_steps": 32},
    "oracle": {"type": "net", "policy": {"hidden": [8]}, "algorithm": ALGORITHM},
    "backend": {"type": "inline"},
}


def test_runs_of_networks_do_not_import_transformers(tmp_path: Path) -> None:
    for tree in (VECTOR, POPULATION):
        (tmp_path / f"{tree['name']}.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-c", PROGRAM, "vector.yaml", "population.yaml"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"vector.yaml": [], "population.yaml": []}
