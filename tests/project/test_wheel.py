"""The wheel with its core dependencies alone, outside the checkout: `make test-wheel` installs it in .cache/wheel."""

import os
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
from helpers.command_line import LINK

INSTALLED = Path(__file__).parents[2] / ".cache" / "wheel"
EXTRAS = ("numba", "starlette", "httptools", "gymnasium", "langgraph")
FEW_EPISODES = ("--set", "evals.dev.episodes=10", "--set", "evals.test.episodes=10")

pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty working folder."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(home: Path):
    """Runs a program of the venv; returns its exit code and all that it printed."""

    def call(program: str, *words: str) -> tuple[int, str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
        done = subprocess.run(
            [INSTALLED / "bin" / program, *words],
            cwd=home,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout

    return call


def test_venv_has_the_wheel_and_no_extra(run, home):
    status, printed = run("python", "-c", "import palestra; print(palestra.__file__)")
    assert status == 0 and printed.startswith(str(INSTALLED)), printed
    for package in EXTRAS:
        assert run("python", "-c", f"from importlib.util import find_spec; assert not find_spec('{package}')")[0] == 0


def test_description_has_no_relative_link():
    """PyPI shows it, and resolves none."""
    (packages,) = INSTALLED.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("palestra-*.dist-info")
    description = distribution("palestra").at(metadata).metadata.get_payload()
    assert "make demo" in description
    links = [one or other for one, other in LINK.findall(description)]
    assert [link for link in links if not link.startswith(("http", "#"))] == []


def test_info_lists_what_is_there(run):
    status, printed = run("palestra", "info")
    assert status == 0 and "simple_spread" in printed and "grpo" in printed, printed


def test_config_describes_an_algorithm(run):
    status, printed = run("palestra", "config", "grpo")
    assert status == 0 and "group_size" in printed, printed


def test_init_lists_and_copies(run, home):
    status, printed = run("palestra", "init")
    assert status == 0 and "spread_mappo" in printed and "kuhn_psro" in printed, printed
    assert run("palestra", "init", "demo")[0] == 0 and (home / "demo.yaml").is_file()


def test_demo_trains_and_is_evaluated(run, home):
    status, printed = run("palestra", "train", "configs/demo.yaml", "--set", "steps=2", *FEW_EPISODES)
    assert status == 0 and "what was learned" in printed and (home / "runs" / "demo" / "curves.png").is_file(), printed
    status, printed = run("palestra", "eval", "runs/demo", "--episodes", "5")
    assert status == 0 and "success" in printed, printed


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train configs/demo.yaml --set step=10", "unknown key step: did you mean steps?"),
        ("train configs/games/spread_mappo.yaml --set env_step=10", "unknown key env_step: did you mean env_steps?"),
        (
            "train configs/populations/kuhn_psro.yaml --set population.iteration=3",
            "unknown key population.iteration: did you mean iterations?",
        ),
        ("grid typo.yaml --dry-run", "unknown key seed: did you mean seeds?"),
        ("train configs/games/spread_mappo.yaml", "pip install 'palestra[games]'"),
        ("train configs/text/workflow.yaml", "pip install 'palestra[workflow]' langgraph langchain-openai"),
    ],
)
def test_mistakes_and_missing_extras_are_named(run, home, words, answer):
    (home / "typo.yaml").write_text(
        "name: typo\nseed: [0]\ntasks: {one: {config: configs/games/two_step_qmix.yaml}}\nalgorithms: {dqn: {}}\n"
    )
    status, printed = run("palestra", *words.split())
    assert status == 2 and answer in printed, printed
