"""Modules that lie in the working folder: never run by commands that look, never instead of an installed package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from palestra.core.config.user_modules import FOLDERS_VARIABLE

SCRIPT = ["-P", "-c", "from palestra.cli.main import app; app()"]  # as the installed script, whose path has no folder
MODULE = ["-m", "palestra"]
STARTED_BY_MODULE = {"pkgutil", "runpy"}  # `python -m` imports them, before it runs anything of palestra
LOOKING = [
    ["runs", "--root", "."],
    ["report", "run"],
    ["plot", "run"],
    ["publish", "run", "--out", "out"],
    ["sync", "run", "--to", "file:///tmp/nowhere"],
    ["fetch", "file:///tmp/nowhere/run"],
    ["keys", "list", "keys.txt"],
    ["info"],
]
ENV = """
from palestra.envs import Env

class Mine(Env):
    'A game of mine.'
    def __init__(self, size: int = 3) -> None: ...
    def reset(self, seed): ...
    def step(self, actions): ...
"""


def plant(folder: Path, *names: str) -> None:
    """Writes modules that leave a file named ran-NAME when they are imported."""
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran-')!r} + {name!r}, 'w')\n")


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    variables.pop(FOLDERS_VARIABLE, None)
    return subprocess.run([sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True)


def received(folder: Path) -> Path:
    """A folder with a run whose config names a module beside it, and a module for each name that may be imported."""
    optional = ["wandb", "trackio", "mlflow", "datasets", "sitecustomize", "usercustomize", "matplotlibrc", "mine"]
    installed = [name for name in sys.modules if "." not in name and name != "palestra"]
    plant(folder, *{*sys.stdlib_module_names, *installed, *optional} - {"__main__"} - set(sys.builtin_module_names))
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text(yaml.safe_dump({"env": {"type": "mine:Mine"}, "steps": 1}))
    (folder / "run/meta.json").write_text("{}")
    entry_points = folder / "mine-1.0.dist-info"
    entry_points.mkdir()
    (entry_points / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = ("pydantic", "torch.backends", "palestra.envs", "fsspec.specs")
    (entry_points / "entry_points.txt").write_text("".join(f"[{group}]\nmine = mine:Mine\n" for group in groups))
    return folder


def test_commands_that_look_run_no_module_of_the_working_folder(tmp_path: Path) -> None:
    """All in one process, which saves the imports."""
    code = (
        "from typer.testing import CliRunner\nfrom palestra.cli.main import app\n"
        f"for words in {LOOKING!r}:\n    done = CliRunner().invoke(app, words)\n"
        "    print(words[0], done.exit_code, repr(done.exception))\n"
    )
    done = start(received(tmp_path), "-P", "-c", code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(LOOKING) and ran(tmp_path) == []


AS_PROCESSES = [
    pytest.param(how, words, id=f"{name}-{words[0]}", marks=[pytest.mark.slow] * (words is not LOOKING[0]))
    for name, how in (("script", SCRIPT), ("module", MODULE))
    for words in LOOKING
]


@pytest.mark.parametrize(("how", "words"), AS_PROCESSES)
def test_each_command_that_looks_as_a_process(tmp_path: Path, how: list[str], words: list[str]) -> None:
    received(tmp_path)
    for name in STARTED_BY_MODULE:
        (tmp_path / f"{name}.py").unlink()
    assert "Traceback" not in start(tmp_path, *how, *words).stderr
    assert ran(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [SCRIPT, MODULE], ids=["script", "module"])
def test_commands_that_play_import_what_a_config_names_and_nothing_else(tmp_path: Path, how: list[str]) -> None:
    plant(tmp_path, "yaml", "json", "typer", "numpy", "random", "wandb")
    (tmp_path / "mine.py").write_text(ENV)
    done = start(tmp_path, *how, "config", "mine:Mine")
    assert done.returncode == 0 and "mine:Mine" in done.stdout, done.stderr
    assert ran(tmp_path) == []


def test_a_module_in_the_working_folder_comes_after_installed_ones(tmp_path: Path) -> None:
    plant(tmp_path, "yaml", "json", "numpy", "random")
    (tmp_path / "mine.py").write_text("import yaml, random\nkind = yaml.SafeLoader, random.Random\n")
    code = (
        "from palestra.core.config import allow_modules_in, load_object\n"
        "allow_modules_in('.'); print(load_object('mine:kind', 'it'))\n"
    )
    assert "SafeLoader" in start(tmp_path, "-P", "-c", code).stdout
    assert ran(tmp_path) == []


def test_a_child_process_imports_no_module_of_the_working_folder(tmp_path: Path) -> None:
    """Its first import is `multiprocessing`, before it has its parent's path. Its environment stays the parent's."""
    plant(tmp_path, "multiprocessing", "socket", "struct", "pickle")
    code = (
        "import os; from palestra.parallel.processes import start_process, SAFE_PATH\n"
        "child = start_process(os._exit, [7]); child.join(); print(child.exitcode, SAFE_PATH in os.environ)\n"
    )
    assert start(tmp_path, "-P", "-c", code).stdout == "7 False\n"
    assert ran(tmp_path) == []


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_module_that_registers_an_env_is_imported(tmp_path: Path, num_processes: int) -> None:
    pytest.importorskip("gymnasium")
    cart_pole = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    (tmp_path / "mine.py").write_text(f"import gymnasium\ngymnasium.register('Mine-v0', {cart_pole!r})\n")
    code = (
        "import os; from palestra.core.config import allow_modules_in; allow_modules_in(os.getcwd())\n"
        "from palestra.envs.adapters.gymnasium import GymnasiumEnv\n"
        f"env = GymnasiumEnv(2, id='mine:Mine-v0', num_processes={num_processes}); env.reset([1, 2]); env.close()\n"
    )
    done = start(tmp_path, "-P", "-c", code)
    assert done.returncode == 0, done.stderr


def test_publish_says_how_to_import_an_env_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENV)
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "mine.py").write_text(ENV)
    for path in ("mine:Mine", "games.mine:Mine"):
        code = f"from palestra.envs import load_env_class; load_env_class('{path}')"
        assert "PYTHONPATH=." in start(tmp_path, "-P", "-c", code).stderr
