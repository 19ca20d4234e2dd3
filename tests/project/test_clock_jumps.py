"""A clock that jumps an hour forward and back while a run trains: `time.time` is shifted in the real process, as the
system's clock is when it is set."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.processes import finish
from helpers.warm_processes import start_palestra

from palestra.runs import list_checkpoints, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JUMPING = """
import os, time
real = time.time
def jumped():
    try:
        with open(os.environ["CLOCK_SHIFT"]) as file:
            return real() + float(file.read() or 0)
    except OSError:
        return real()
time.time = jumped
time.time_ns = lambda: int(jumped() * 1e9)
"""
TESTS = Path(__file__).parents[1]


def start_jumping(folder: Path, *words: object) -> Any:
    (folder / "clock").mkdir(exist_ok=True)
    (folder / "clock/sitecustomize.py").write_text(JUMPING)
    paths = os.pathsep.join(map(str, (folder / "clock", TESTS, TESTS.parent)))
    shift = {"CLOCK_SHIFT": str(folder / "shift"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return start_palestra("train", *words, cwd=folder, env=os.environ | shift, forked=False)


def tree_of(kind: str, base: Path) -> dict[str, Any]:
    speech = {"type": "lora", "base": str(base), "lr": 1e-3, "sampling": {"max_tokens": 2}}
    text = {
        "steps": 30,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 2},
        "evals": {"dev": {"episodes": 4, "every": 5}},
        "checkpoint_every": 5,
    }
    nets = {
        "env": {"type": "simple_spread", "num_envs": 4, "max_cycles": 7},
        "policies": {"agent": {"type": "net", "hidden": [8]}},
        "algorithm": {"type": "ppo", "rollout_length": 5, "epochs": 1, "minibatches": 1},
        "env_steps": 6_000,
        "log_every": 1,
        "num_processes": 2,
        "checkpoint_every": 100,
    }
    return {"text": text, "samplers": text | {"sampler": {"type": "processes", "count": 1}}, "nets": nets}[kind]


def assert_equal_lines(one: Path, other: Path, *, up_to_rounding: bool) -> None:
    """Samplers batch what arrives together, and a batch rounds otherwise, in two undisturbed runs as well."""
    lines, others = read_lines(one / "metrics.jsonl"), read_lines(other / "metrics.jsonl")
    assert len(lines) == len(others) > 0
    for line, same in zip(lines, others, strict=True):
        numbers = {key for key, value in line.items() if isinstance(value, float) and up_to_rounding}
        assert {**same, **dict.fromkeys(numbers, 0)} == {**line, **dict.fromkeys(numbers, 0)}
        for key in numbers:
            assert same[key] == pytest.approx(line[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("kind", ["text", "samplers", "nets"])
def test_a_run_under_a_jumping_clock_is_the_undisturbed_one(base: Path, tmp_path: Path, kind: str) -> None:
    runs = {}
    for name in ("still", "jumping"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(tree_of(kind, base) | {"name": "run"}))
        process, shift, jumps = start_jumping(folder, "run.yaml"), 0, 0
        while process.poll() is None:
            time.sleep(0.3)
            if name == "jumping":
                shift, jumps = (3600, -3600)[jumps % 2], jumps + 1
                (folder / "shift.new").write_text(str(shift))
                (folder / "shift.new").replace(folder / "shift")
        assert "Traceback" not in finish(process)
        runs[name] = folder / "runs/run"
        assert name == "still" or jumps > 5
    still, jumping = runs["still"], runs["jumping"]
    assert_equal_lines(still, jumping, up_to_rounding=kind == "samplers")
    assert [each.step for each in list_checkpoints(still)] == [each.step for each in list_checkpoints(jumping)]
    for line in read_lines(jumping / "timings.jsonl"):
        seconds = {key: value for key, value in line.items() if key.endswith("_s") and not key.endswith("_per_s")}
        assert all(0 <= value < 600 for value in seconds.values()), seconds
