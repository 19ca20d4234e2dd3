"""Commands that only read configs answer without numba, which is an extra, as they do with it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # test_wheel.py asks the same in an environment without numba

SCRIPT = """
import json, sys
sys.modules["numba"] = None  # as if it were not installed
from typer.testing import CliRunner
from palestra.cli.main import app
found = [CliRunner(env={"COLUMNS": "200"}).invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.output] for one in found]))
"""
COMMANDS = {  # words: exit code, and what is printed
    "info": (0, "simple_spread"),
    "config grpo": (0, "group_size"),
    "train configs/demo.yaml --set step=10": (2, "did you mean steps?"),
    "train configs/games/spread_mappo.yaml --set env_step=10": (2, "did you mean env_steps?"),
    "train configs/populations/kuhn_psro.yaml --set population.iteration=1": (2, "did you mean iterations?"),
    "train configs/games/spread_mappo.yaml": (2, "pip install 'palestra[games]'"),
    "train configs/populations/kuhn_psro.yaml": (2, "pip install 'palestra[games]'"),
    "train configs/demo.yaml --set policies.planner.type=net": (2, "text env, which language agents play"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The results of all commands, of one process in an empty folder, and that folder."""
    folder = tmp_path_factory.mktemp("without_compiler")
    words = json.dumps([line.split() for line in COMMANDS])
    done = subprocess.run([sys.executable, "-c", SCRIPT, words], cwd=folder, text=True, stdout=-1, check=True)
    return dict(zip(COMMANDS, json.loads(done.stdout.splitlines()[-1]), strict=True)), folder


@pytest.mark.parametrize("words", COMMANDS)
def test_command_answers_as_with_a_compiler(answers, words):
    code, output = answers[0][words]
    assert code == COMMANDS[words][0], output
    assert COMMANDS[words][1] in output and "Traceback" not in output


def test_refused_runs_leave_no_folder(answers):
    assert list(answers[1].iterdir()) == []
