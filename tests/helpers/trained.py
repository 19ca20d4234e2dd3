"""Small trained runs, for tests of commands and pages that read runs."""

import json
from pathlib import Path

import yaml
from helpers.command_line import palestra


def two_agents(base: Path, root: Path, name: str = "two", **changes: object) -> Path:
    """A run of three steps of a guide and a walker with adapters on `base`."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    tree = {
        "name": name,
        "steps": 3,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 3},
        "evals": {"dev": {"episodes": 5}},
    }
    config = root / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree | changes))
    palestra("train", config, "--root", root / "runs")
    return root / "runs" / name


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
