"""Presets named after papers equal the general algorithms with the documented settings."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.config import validate
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.presets import TEXT_PRESETS
from palestra.text.config import TextConfig
from palestra.vector.algorithms.presets import VECTOR_PRESETS
from palestra.vector.config import VectorConfig

ROOT = Path(__file__).parents[3]
NAMES = {"AT-GRPO": "at_grpo", "Dr. GRPO": "dr_grpo", "DAPO": "dapo", "RLOO": "rloo", "REINFORCE++": "reinforce_pp"}
NAMES |= {"MAGRPO": "magrpo", "MARLOO": "marloo", "MAREINFORCE": "mareinforce", "MAReMax": "maremax"}


def text(algorithm: dict[str, object]) -> TextConfig:
    env = {"type": "plan_path", "team": "single"}
    return validate(TextConfig, {"env": env, "policies": {"agent": {"type": "lora"}}, "algorithm": algorithm})


def vector(algorithm: dict[str, object]) -> VectorConfig:
    env, policies = {"type": "simple_spread"}, {"agent": {"type": "net"}}
    return validate(VectorConfig, {"env": env, "policies": policies, "algorithm": algorithm})


@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_text_presets_equal_the_general_algorithm(name: str) -> None:
    assert text({"type": name}).algorithm == text(TEXT_PRESETS[name]).algorithm
    assert (
        text({"type": name, "team_weight": 0.5}).algorithm == text(TEXT_PRESETS[name] | {"team_weight": 0.5}).algorithm
    )


@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_vector_presets_equal_the_general_algorithm(name: str) -> None:
    assert vector({"type": name}).algorithm == vector(VECTOR_PRESETS[name]).algorithm
    assert vector({"type": name, "gamma": 0.5}).algorithm.gamma == 0.5


def test_presets_match_the_documented_settings() -> None:
    page = (ROOT / "docs" / "algorithms" / "grpo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|(]+?)(?: \([^|]*)? \| `(\{[^`]+\})`", page, re.MULTILINE)
    documented = {NAMES[name]: yaml.safe_load(config) for name, config in rows if name in NAMES}
    assert documented.keys() == {name for name, own in TEXT_PRESETS.items() if own["type"] == "grpo"}
    for name, settings in documented.items():
        assert text({"type": name} | settings).algorithm == GRPO.model_validate(settings), name


def test_setting_that_contradicts_the_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="type: rloo is type: grpo with scale: none"):
        text({"type": "rloo", "scale": "std"})
    with pytest.raises(ValueError, match="type: mappo is type: ppo with critic: central"):
        vector({"type": "mappo", "critic": "own"})


def test_dry_run_prints_the_resolved_preset() -> None:
    config = "configs/games/spread_mappo.yaml"
    changes = ["--set", "algorithm.type=mappo", "--set", "algorithm.critic=central", "--dry-run"]
    done = CliRunner().invoke(app, ["train", config, *changes])
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.stdout)["algorithm"]
    assert printed["type"] == "ppo" and printed["critic"] == "central"
