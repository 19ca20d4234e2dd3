"""Algorithms learn with default settings: only the env, its steps and the algorithm's name are set."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.runs import read_lines

pytest.importorskip("gymnasium")
CONFIG = Path("configs/games/cartpole_dqn.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "algorithm", "steps", "bar"),
    [
        ("CartPole-v1", "ppo", 200_000, 475),
        ("CartPole-v1", "dqn", 100_000, 475),
        ("FrozenLake-v1", "dqn", 50_000, 0.7),
    ],
)
def test_env_is_solved_untuned(env: str, algorithm: str, steps: int, bar: float, tmp_path: Path) -> None:
    settings = {"env.id": env, "algorithm.type": algorithm, "env_steps": steps, "evals.held_out.episodes": 200}
    settings |= {"evals.held_out.every": 0, "seed": 0}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", str(CONFIG), "--root", str(tmp_path), "--name", "run", *options])
    assert result.exit_code == 0, result.output
    assert read_lines(tmp_path / "run/evals.jsonl")[-1]["return"] >= bar
