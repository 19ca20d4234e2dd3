"""`palestra init env`: the package that it writes is installed, passes its own test, and trains by its entry point."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from helpers.command_line import palestra, refused

ROOT = Path(__file__).parents[2]
FEW = ("--set", "evals={}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new venv that finds this checkout and the packages of this venv."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    there = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "packages_of_the_tests.pth").write_text("\n".join([str(ROOT), *there]) + "\n")
    return folder / "bin" / "python"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(python: Path, folder: Path, *words: str) -> str:
    """Runs a Python program that must succeed, away from this checkout; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [("relay", (), "steps=2"), ("relay_race", ("--vector",), "env_steps=1536")],
)
def test_written_package_is_installed_tested_and_trained(here, python, name, options, steps):
    assert f"pip install -e {name}" in palestra("init", "env", name, *options)
    pip = ("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(Path(sys.executable), here, *pip, "-e", name)
    assert "2 passed" in run(python, here, "-m", "pytest", "-q", name)
    printed = run(python, here, "-m", "palestra", "train", f"{name}/{name}.yaml", "--set", steps, *FEW)
    assert "curves" in printed and (here / "runs" / name / "metrics.jsonl").is_file(), printed


def test_name_is_used_everywhere(here):
    palestra("init", "env", "two_words", "--out", "elsewhere")
    text = "".join(path.read_text() for path in here.rglob("*") if path.is_file())
    assert "class TwoWords(Env)" in text and "my_env" not in text and "MyEnv" not in text
    points = tomllib.loads((here / "elsewhere/pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"palestra.envs": {"two_words": "two_words.env:TwoWords"}}
    palestra("init", "env", "step")
    assert "class StepEnv(Env)" in (here / "step/step/env.py").read_text()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["env"], "the env has no name"),
        (["env", "Relay-Race"], 'error: "Relay-Race" cannot name a package: .* such as relay_race'),
        (["env", "class"], '"class" cannot name a package'),
        (["env", "../up"], '"../up" cannot name a package'),
        (["env", "sudoku"], "palestra has an env sudoku"),
        (["env", "json"], "there is a module json already"),
        (["env", "tests"], "there is a module tests already"),
        (["env", "taken"], "taken exists already"),
        (["env", "fine", "--out", "no/where"], "cannot write no/where: No such file or directory"),
        (["demo", "more"], "go with env"),
        (["demo", "--vector"], "go with env"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(here, words, answer):
    (here / "taken").mkdir()
    message = refused("init", *words)
    assert re.search(answer, message), message
    assert [path.name for path in here.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("page", "options"),
    [("environments.md", ()), ("games.md", ("--vector",))],
)
def test_docs_show_the_env_that_is_written(here, page, options):
    palestra("init", "env", "relay", *options)
    written = (here / "relay/relay/env.py").read_text()
    assert f"```python\n{written}```" in (ROOT / "docs" / page).read_text(encoding="utf-8")
