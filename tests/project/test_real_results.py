"""results/real/contributions.py on a small run: every row is measured once, on the same instances."""

import subprocess
import sys
from pathlib import Path

import pytest

from palestra.core.config import dump, validate
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig

SCRIPT = Path(__file__).parents[2] / "results/real/contributions.py"
ROWS = [
    "untrained, no example",
    "untrained, 2 examples",
    "trained",
    "trained, first untrained",
    "trained, second untrained",
    "trained, seats swapped",
    "trained, message blank",
    "trained, message of another instance",
]


@pytest.mark.slow
def test_every_row_is_measured_once(tmp_path):
    lora = {"type": "lora", "base": "tiny", "sampling": {"max_tokens": 4}}
    config = validate(
        TextConfig,
        {
            "steps": 1,
            "episodes": 2,
            "env": {"type": "math_relay", "shots": 2},
            "policies": {"first": lora, "second": lora},
            "algorithm": {"type": "grpo", "branch_at": "turn", "continue_from": "best", "group_size": 2},
        },
    )
    with Run.create(tmp_path, dump(config), "small") as run:
        assert run_training(build(config), run)

    def table(*options: str) -> list[str]:
        command = [sys.executable, str(SCRIPT), str(tmp_path / "small"), "--episodes", "3", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    some = table("--only", "untrained", "trained, message blank", "--processes", "2")
    assert [line.split(" | ")[0] for line in some[-3:]] == [f"| {row}" for row in [*ROWS[:2], ROWS[6]]]
    assert len(table()) == 5 + 2 + 8  # the remaining rows, and the whole table
    lines = read_lines(tmp_path / "small/real_results.jsonl")
    assert sorted(line["row"] for line in lines) == sorted(ROWS)
    assert all(line["episodes"] == 3 and len(line["examples"]) == 3 for line in lines)
    assert len(table("--report")) == len(table()) == 2 + 8
