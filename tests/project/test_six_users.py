"""Six kinds of users, outside the checkout, with the wheel and its extras, which `make test-users` installs in
.cache/wheel.

Each does what a page of the docs says, in an empty folder: the code and the commands are read from the page.
"""

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from helpers.documents import Block, blocks_below
from helpers.gguf_files import tiny_llama, write_gguf
from PIL import Image

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".cache" / "wheel" / "bin"
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=1800).execute()
"""
EXPORT = """
import numpy, onnxruntime, palestra
agent = palestra.load_agent("runs/meet", "red", greedy=True)
agent.export("red.onnx")
found = onnxruntime.InferenceSession("red.onnx").run(["action"], {"obs": numpy.eye(9, dtype="f4")})[0]
assert found.tolist() == agent.act(numpy.eye(9))
"""

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(3600)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which the venv's commands are on the PATH and this checkout is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = run(["python", "-c", "import palestra; print(palestra.__file__)"])
    assert where.startswith(str(BIN.parent))
    return tmp_path


def run(command: list[str], typed: str = "") -> str:
    """Returns what a command printed. It must end with exit code 0."""
    done = subprocess.run(command, text=True, input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def follow(page: str, heading: str, *, comment: str = "test") -> str:
    """Does what a page says below a heading, in order; returns what the last command printed. `comment` is how the
    comments begin of the blocks to run."""
    printed = ""
    for block in blocks_below(ROOT / "docs" / page, heading, comment):
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
        else:
            printed = run(words(block))
    return printed


def words(block: Block) -> list[str]:
    if block.language == "python":
        return ["python", "-c", block.code]
    return ["bash", "-euo", "pipefail", "-c", block.code]


def evals(name: str, key: str) -> list[float]:
    """The results of a run's evaluations, first to last."""
    lines = (Path("runs") / name / "evals.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines]


def test_two_agents_on_own_prompts_learn_above_chance_on_a_real_model(home: Path) -> None:
    run(["python", "-c", NOTEBOOK, str(ROOT / "examples/real_model.ipynb")])
    before, *_, after = evals("real_model", "success")
    assert before < 0.3 and after > 0.5  # a guess is right one time in eight


def test_own_pettingzoo_env_is_trained_by_mappo_filmed_and_played(home: Path) -> None:
    total = follow("games.md", "A PettingZoo env of your own")
    first, *_, last = evals("meet", "return")
    assert last > first + 2 and float(total) > 6  # of at most 12 steps
    with Image.open("meet.gif") as film:
        assert film.n_frames > 3
    run(["python", "-c", EXPORT])


def test_official_tinker_client_trains_against_the_service(home: Path) -> None:
    printed = follow("coming-from/tinker.md", "Keep the program, change the address")
    losses = [float(line.split()[1]) for line in printed.splitlines() if line[:2] in ("0 ", "3 ")]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_credit_rule_of_six_lines_is_trained_with_seeds_and_drawn(home: Path) -> None:
    follow("guides/algorithm.md", "A credit rule")
    assert all("median:Median" in Path(f"runs/median-{seed}/config.yaml").read_text() for seed in (0, 1))
    assert "held-out" in Path("median.svg").read_text()


def test_agent_program_of_two_models_learns_above_chance(home: Path) -> None:
    follow("environments/workflow.md", "Workflows: your own agent program")
    lines = [json.loads(line) for line in Path("runs/program/metrics.jsonl").read_text().splitlines()]
    last = {line["policy"]: line["updates"] for line in lines if line["policy"] != "team"}
    assert last.keys() == {"planner", "solver"} and min(last.values()) > 0
    before, after = evals("program", "success")
    assert after > before + 0.1 and evals("program", "failed") == [0, 0]  # 0.37, 0.37 and 0.51 with seeds 0 to 2


def test_gguf_file_plays_tic_tac_toe_and_is_watched(home: Path) -> None:
    write_gguf(home / "model.gguf", tiny_llama(max_position_embeddings=512))
    found = blocks_below(ROOT / "docs/real-models.md", "A model without a hub", "not run")
    (block,) = (block for block in found if "model.gguf" in block.code)
    evaluate, render, watch, play = (line.split("  #")[0].split() for line in block.code.strip().splitlines())
    printed = run(evaluate)
    assert "./model.gguf" in printed and "player_0 says" in printed
    run(render)
    with Image.open("game.gif") as film:
        pictures = []
        for number in range(film.n_frames):
            film.seek(number)
            pictures.append(np.asarray(film.convert("L")))
    assert len(pictures) > 3 and all((picture < 128).any() for picture in pictures)
    with subprocess.Popen([*watch, "--port", "0"], text=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        address = next(line for line in server.stdout if "play at: " in line).split()[-1]
        with urllib.request.urlopen(address) as page:
            assert "<title>" in page.read().decode()
        server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    moves = "\n".join(f"{row}{column}" for row in "abc" for column in "123")
    assert "the end" in run(play, typed=f"{moves}\n" * 9)
