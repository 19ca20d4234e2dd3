"""A new user's first hour with the wheel alone: install, demo, an own env on a real model, dashboard, publish.

The commands are those of the documentation, run in an empty folder, in a new venv with the wheel and, instead of
downloads, the packages of this venv.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENV = '''
import random

from palestra.envs import Env
from palestra.core.types import Step

ANIMALS = ("cat", "dog", "fish", "bird", "horse", "cow", "frog", "bee")


class DescribeAndGuess(Env):
    """The describer sees an animal and must not name it; the guesser reads the description."""

    name = "describe_and_guess"
    seats = ("describer", "guesser")

    def reset(self, seed):
        self.animal, self.told = random.Random(seed).choice(ANIMALS), None
        return Step({"describer": f"In a few words, what does a {self.animal} do? Do not write '{self.animal}'."})

    def step(self, actions):
        if self.told is None:
            self.told = actions["describer"]
            named = self.animal in self.told.lower()
            told = "(nothing, as it named the animal)" if named else self.told
            question = f"{told}\\nWhich animal is it? Answer with one of: {', '.join(ANIMALS)}."
            return Step({"guesser": question}, rewards={"describer": -1.0 if named else 0.0})
        answer = actions["guesser"].lower()
        right = [animal for animal in ANIMALS if animal in answer] == [self.animal]
        return Step({}, team_reward=float(right), info={"success": right, "animal": self.animal})
'''
CONFIG = """
name: animals
steps: 2
episodes: 2
env: {type: "describe_and_guess:DescribeAndGuess"}
policies:
  describer: {type: lora, base: smollm2, sampling: {max_tokens: 12}}
  guesser: {type: lora, base: smollm2, sampling: {max_tokens: 6}}
algorithm: {type: grpo, branch_at: turn, group_size: 4}
save_episodes_every: 1
evals:
  held_out: {episodes: 4}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands' folder of a new venv with palestra's wheel."""
    folder = tmp_path_factory.mktemp("newcomer")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY], check=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("palestra-*.whl")
    subprocess.run([python, *pip[1:], "install", "--no-deps", wheel], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    there = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "packages_of_the_tests.pth").write_text("\n".join(there) + "\n")
    return python.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty working folder."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def palestra(installed: Path, home: Path):
    """Runs a command; returns its output."""

    def run(*words: str, **variables: str) -> str:
        command = [installed / "palestra", *words]
        environment = clean() | variables
        done = subprocess.run(command, cwd=home, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "160"}


def test_package_is_imported_from_the_wheel(installed: Path, home: Path):
    where = "import palestra; print(palestra.__file__)"
    found = subprocess.run([installed / "python", "-c", where], cwd=home, env=clean(), text=True, stdout=-1, check=True)
    assert found.stdout.startswith(str(installed.parent))


def test_demo(palestra, home: Path):
    printed = palestra("demo", "--steps", "2")
    assert "what was learned" in printed and (home / "runs" / "demo" / "curves.png").is_file()
    assert "spread_mappo" in palestra("init")


def test_own_env_is_trained_on_a_real_model_and_published(palestra, installed: Path, home: Path):
    (home / "describe_and_guess.py").write_text(ENV)
    (home / "animals.yaml").write_text(CONFIG)
    check = "from palestra.envs import *; check_env(lambda: make_env('describe_and_guess:DescribeAndGuess'))"
    subprocess.run([installed / "python", "-c", check], cwd=home, env=clean(), check=True)
    palestra("train", "animals.yaml", "--dry-run")
    printed = palestra("train", "animals.yaml")
    assert "held_out" in printed.replace("held out", "held_out")
    assert "animals" in palestra("runs")
    # the packaged base is a quantised copy, whose config does not have the name
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    palestra("publish", "runs/animals", "--member", "guesser", "--base-name", hub, "--out", "published", PYTHONPATH=".")
    card = (home / "published" / "README.md").read_text()
    assert "describe_and_guess" in card and f"base_model: {hub}" in card
    adapter = json.loads((home / "published" / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA" and (home / "published" / "adapter_model.safetensors").stat().st_size > 1e5


def test_dashboard_shows_both_runs(installed: Path, home: Path):
    command = [installed / "palestra", "dashboard", "--port", "0"]
    server = subprocess.Popen(command, cwd=home, env=clean(), text=True, stdout=subprocess.PIPE)
    try:
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        runs = {run["name"]: run for run in ask(address, "api/runs")["runs"]}
        assert runs.keys() == {"demo", "animals"}
        assert runs["animals"]["status"] == "done" and runs["animals"]["evals"].keys() == {"held_out"}
        assert runs["animals"]["headline"].startswith("held_out ")
        episodes = ask(address, "api/runs/animals/episodes")
        assert episodes["of"] == 4
        row = episodes["rows"][0]
        tree = ask(address, f"api/runs/animals/episodes/{row['step']}/{row['episode']}?line=played")
        assert "Which animal is it?" in json.dumps(tree["line"])
    finally:
        server.terminate()
        server.communicate(timeout=60)


def ask(address: str, path: str) -> dict:
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        return json.load(answer)
