"""`palestra init` and `demo`: every shipped config has a name and a description, and is available from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.command_line import palestra, refused
from helpers.terminal_text import plain

from palestra.api.run_kinds import run_kind
from palestra.core.config import load, validate
from palestra.core.config.shipped import DATA_DIR, find_config, templates

ROOT = Path(__file__).parents[2]
KNOWN = templates()


def test_every_config_is_a_template_with_a_unique_name():
    found = {path.relative_to(DATA_DIR) for path in DATA_DIR.glob("configs/**/*.yaml")}
    assert {template.path for template in KNOWN} == found
    assert len({template.name for template in KNOWN}) == len(KNOWN) and KNOWN[0].name == "demo"


@pytest.mark.parametrize("template", KNOWN, ids=lambda one: one.name)
def test_every_template_has_a_description(template):
    assert 10 < len(template.description) < 200 and not template.description.endswith("et al")


def test_init_lists_them_by_kind():
    text = plain(palestra("init"))
    assert text.index("start here") < text.index("vector envs") < text.index("populations")
    for template in KNOWN:
        assert f"{template.name} " in text


def test_init_writes_a_config_that_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "palestra train demo.yaml" in palestra("init", "demo")
    palestra("init", "kuhn_psro", "--out", "mine.yaml")
    for name in ("demo.yaml", "mine.yaml"):
        tree = load(name)
        validate(run_kind(tree).config_type, tree)
    assert "demo.yaml exists already" in refused("init", "demo")
    assert "did you mean demo?" in refused("init", "demmo")
    assert "cannot write nowhere/a.yaml" in refused("init", "demo", "--out", "nowhere/a.yaml")


def test_shipped_configs_are_found_and_local_files_take_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("configs/demo.yaml")["name"] == "demo" and load("configs/text/math.yaml")["name"] == "math"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("name: mine\n")
    assert load("configs/demo.yaml") == {"name": "mine"}
    for path in ("configs/nope.yaml", "configs/../pyproject.toml", "/configs/demo.yaml", "games/demo.yaml", "demo"):
        assert find_config(Path(path)) == Path(path)


def test_shipped_configs_are_found_by_every_command_and_by_file_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("demo.yaml") == load("configs/demo.yaml")
    expert = ("--seats", "*=expert", "--episodes", 1)
    assert "return of player_0" in palestra("eval", "configs/text/tictactoe.yaml", *expert)
    assert "1 of 1 episodes" in palestra("collect", "tictactoe.yaml", *expert, "--out", "game.parquet")
    assert "EOFError" in refused("play", "tictactoe.yaml", "--seats", "player_1=expert")  # nobody types a move
    assert "did you mean configs/demo.yaml, which" in refused("train", "demmo.yaml")
    assert "did you mean configs/demo.yaml, which" in refused("eval", "configs/demmo.yaml")


@pytest.mark.slow
def test_demo_trains_the_demo(tmp_path):
    assert "what was learned" in plain(palestra("demo", "--steps", 1, "--root", tmp_path))
    assert load(tmp_path / "demo" / "config.yaml")["steps"] == 1


@pytest.mark.slow
def test_wheel_contains_configs_and_demo(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source, folder = tmp_path / "source", tmp_path / "installed"
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    assert [path.name for path in folder.glob("palestra/data/configs/**/*.py")] == ["workflow.py"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    assert len(list(folder.glob("palestra/environments/*/README.md"))) >= 10
    dry_run = ("train", "configs/populations/kuhn_psro.yaml", "--dry-run")
    for command in (("init", "demo"), ("init", "env", "relay"), dry_run):
        done = subprocess.run(
            [sys.executable, "-m", "palestra", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "relay/relay/env.py").is_file()
    assert (tmp_path / "demo.yaml").read_bytes() == (DATA_DIR / "configs/demo.yaml").read_bytes()
