"""The configs that ship: each builds, the demo's team learns, and nothing it learns from is what it is tested on."""

from pathlib import Path

import pytest

from palestra.config import dump, load, override, validate
from palestra.envs import make_env
from palestra.envs.text.splits import split_of
from palestra.runs import Run, read_lines
from palestra.setup import Config, build
from palestra.train import run_training

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def success(folder, settings=()):
    """(before, after) on the config's test layouts."""
    config = validate(Config, override(load(ROOT / "configs/demo.yaml"), settings))
    with Run.create(folder, dump(config), "demo") as run:
        assert run_training(build(config), run)
    scores = [line["success"] for line in read_lines(folder / "demo/evals.jsonl") if line["name"] == "test"]
    return scores[0], scores[-1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_builds(path):
    config = validate(Config, load(path))
    assert build(config).learners and validate(Config, load(path)) == config


def test_the_demos_team_learns_in_a_few_steps(tmp_path):
    """A fifth of the demo: 16 of its steps, fewer episodes."""
    settings = ["steps=16", "episodes=24", "exams.dev.episodes=1", "exams.dev.every=0", "exams.test.episodes=150"]
    before, after = success(tmp_path, settings)
    assert before <= 0.30 and after >= before + 0.25, (before, after)


@pytest.mark.slow
def test_the_demos_team_solves_what_it_mostly_failed(tmp_path):
    before, after = success(tmp_path)
    assert before <= 0.30 and after >= 0.90, (before, after)


def test_the_demos_layouts_are_apart():
    """Instances of each split lie in that split, and no canonical layout in two."""
    options = load(ROOT / "configs/demo.yaml")["env"]
    seen = {}
    for split in ("base", "train", "dev", "test"):
        env = make_env(**(options | {"split": split}))
        for seed in range(100):
            env.reset(seed)
            assert split_of(env.size, env.instance.groups) == split
            seen.setdefault(split, set()).add(env.instance.groups)
    train = seen["train"]
    assert not train & seen["test"] and not train & seen["dev"] and not seen["base"] & seen["test"]
