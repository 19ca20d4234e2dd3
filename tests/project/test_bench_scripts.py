"""Every script of bench/, results/ and scripts/ starts with --quick, ends with its figures, and publishes nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ABSENT = 77  # exit code of a script that lacks a GPU or a package of another environment
# Programs that another script starts in a virtual environment of its own, with JSON as argument.
PROGRAMS = {"compare_comlrl", "compare_trl", "trl_grpo"}


def is_script(file: Path) -> bool:
    return file.stem not in PROGRAMS and '__name__ == "__main__"' in file.read_text()


FOLDERS = ("bench", "results", "scripts")
SCRIPTS = sorted(file for pattern in ("bench/*.py", "results/*/*.py", "scripts/*.py") for file in ROOT.glob(pattern))
SCRIPTS = [file for file in SCRIPTS if is_script(file)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like the repository, in which a script may write without harm."""
    for name in ("examples", "palestra", "pyproject.toml", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in (*FOLDERS, "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns(".venv*"))
    for peers in [*ROOT.glob("bench/.venv*"), *ROOT.glob("results/real/.venv*")]:  # such as that of `make test-trl`
        (tmp_path / peers.relative_to(ROOT)).symlink_to(peers)
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    files = [file for name in (*FOLDERS, "docs") for file in (folder / name).rglob("*")]
    return {file: file.read_bytes() for file in files if file.is_file() and "__pycache__" not in file.parts}


def start(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_script_runs_with_quick(file: Path, checkout: Path) -> None:
    before = contents(checkout)
    done = start(checkout, str(file.relative_to(ROOT)), "--quick")
    if done.returncode == ABSENT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if file.parent.name == "bench" or "finish(" in file.read_text():
        result = json.loads(done.stdout.strip().splitlines()[-1])
        assert result["figures"] and isinstance(result["targets"], dict) and result["bench"]
    assert contents(checkout) == before


@pytest.mark.slow
def test_boards_is_trained_on_from_tiny(checkout: Path) -> None:
    done = start(checkout, "scripts/make_tiny.py", "boards", "--quick")
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"step 2/2  loss ([\d.]+)", done.stdout)[1]) < 2  # random weights begin above 6
    made = checkout / "runs/make_tiny/boards"
    shipped = ROOT / "palestra/data/bases/tiny/tokenizer.json"
    assert json.loads((made / "tokenizer.json").read_text()) == json.loads(shipped.read_text())
    assert "sokoban route" in (made / "README.md").read_text()


def test_muon_in_float32_takes_the_steps_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from float32_muon import Float32Muon

    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(24, 40, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = Float32Muon([ours], **options), torch.optim.Muon([theirs], **options)
    start_values = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(24, 40, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours - start_values).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # bfloat16 has eight bits


@pytest.mark.slow
def test_rows_are_measured_beside_published_ones_and_a_second_start_says_so(checkout: Path) -> None:
    script = ("results/grid/run.py", "--only", "two_step/vdn/0")
    published = (checkout / "results/grid/measured/cooperation.jsonl").read_bytes()
    assert start(checkout, *script, "--list").stdout.startswith("published  open ")
    first = start(checkout, *script)
    assert first.returncode == 0, first.stderr
    assert "two_step/vdn/0: return 7 published, return 7 here" in first.stdout
    assert start(checkout, *script, "--list").stdout.startswith("published  measured here ")
    second = start(checkout, *script)
    assert "nothing to do: all 1 rows are in runs/measured/grid/cooperation.jsonl. Use --again" in second.stdout
    again = start(checkout, *script, "--again")
    assert "nothing to do" not in again.stdout and "return 7 here" in again.stdout
    assert (checkout / "results/grid/measured/cooperation.jsonl").read_bytes() == published
    (line,) = (checkout / "runs/measured/grid/cooperation.jsonl").read_text().splitlines()
    assert {"commit", "processor", "seed"} <= json.loads(line).keys()


IN_ONE_PROCESS = """
import json, runpy, sys
script, commands = json.loads(sys.argv[1])
for options in commands:
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end.code)
    print("END")
"""


def printed(checkout: Path, script: str, *commands: list[str]) -> list[str]:
    """What a script prints for each of several command lines, in one process; an error is printed at the end."""
    done = start(checkout, "-c", IN_ONE_PROCESS, json.dumps([script, commands]))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("END\n")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("part", [["--quick"], ["--parts", "envs"]])
@pytest.mark.few(1)
def test_a_page_is_not_written_from_a_part_of_its_figures(part: list[str], checkout: Path) -> None:
    before = contents(checkout)
    done = start(checkout, "results/scaling/run.py", "--report", *part)
    assert done.returncode == 2 and "all parts, at full length" in done.stderr
    assert contents(checkout) == before


def test_published_figures_are_those_of_the_page(checkout: Path) -> None:
    code = (
        "import sys; sys.path.append('.'); from results.ledger import finish; "
        "finish('x', {'a': 2.0}, {}, page='scaling', is_published=%s)"
    )
    for is_published, count in ((False, 1), (True, 2)):
        assert start(checkout, "-c", code % is_published).returncode == 0
        lines = (checkout / "results/scaling/measured/figures.jsonl").read_text().splitlines()
        assert len(lines) == count
    assert json.loads(lines[-1])["figures"] == {"a": 2.0}


@pytest.mark.slow
def test_rows_are_listed_and_a_name_that_matches_none_is_refused(checkout: Path) -> None:
    """Rows that choose a learning rate are not compared with the published score."""
    given = ["--list", "--only", "plan_path/team + GRPO, equal samples/"]
    commands = (given, [*given, "--tune"], ["--only", "plan_path/team + GRPI"])
    rows, tuned, refusal = printed(checkout, "results/reproduction/run.py", *commands)
    assert ["published, mean of 3 seeds" in row for row in rows.splitlines()] == [True] * 3 + [False] * 2
    assert ["published" in row for row in tuned.splitlines()] == [False] * 8
    assert "no row begins with 'plan_path/team + GRPI'" in refusal
    assert "\n  plan_path/team + GRPO, equal samples\n" in refusal


@pytest.mark.slow
def test_configs_of_all_rows_are_checked_before_the_first_begins(checkout: Path) -> None:
    config = checkout / "results/reproduction/configs/sokoban.yaml"
    config.write_text(config.read_text().replace("max_turns: 4", "turns: 4, max_turns: 4"))
    done = start(
        checkout, "results/reproduction/run.py", "--quick", "--only", "plan_path/team, untrained/0", "sokoban/"
    )
    assert done.returncode == 1 and not (checkout / "runs/measured").exists()
    told = done.stderr.strip().splitlines()
    assert any(line.startswith("sokoban/single agent, one turn/0: ") for line in told) and "turns" in told[-1]


@pytest.mark.slow
def test_a_row_that_fails_stops_the_command_with_its_name(checkout: Path) -> None:
    options = ("--quick", "--processes", "1", "--only", "plan_path/AT-GRPO, roles swapped/0", "plan_path/team, untr")
    assert (
        start(checkout, "results/reproduction/run.py", *options, "plan_path/team + AT-GRPO, per role/0").returncode == 0
    )
    (run,) = (checkout / "runs/reproduce/quick").glob("*per-role*")
    shutil.rmtree(run)
    ledger = checkout / "runs/measured/reproduction/rows-quick.jsonl"
    kept = [line for line in ledger.read_text().splitlines() if "per role" in line]
    ledger.write_text("\n".join(kept) + "\n")
    done = start(checkout, "results/reproduction/run.py", *options)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("failed: plan_path/AT-GRPO, roles swapped/0: ")


@pytest.mark.slow
def test_tuning_publishes_learning_rates_only_with_publish(checkout: Path) -> None:
    published = checkout / "results/reproduction/rates.yaml"
    before = published.read_text()
    row = "sokoban/team + AT-GRPO, shared/lr 0.001, seed 100"
    code = (
        "import sys; sys.path.append('.'); from results.reproduction.run import make_ledger; "
        f"make_ledger(False).add('{row}', {{'success': 0.5, 'rate': 0.001}})"
    )
    assert start(checkout, "-c", code).returncode == 0
    tune = ("results/reproduction/run.py", "--tune", "--only", row)
    assert start(checkout, *tune).returncode == 0
    here = yaml.safe_load((checkout / "runs/measured/reproduction/rates.yaml").read_text())
    known = yaml.safe_load(before)
    assert here["sokoban"]["team + AT-GRPO, shared"][0.001][100] == 0.5 and published.read_text() == before
    known.setdefault("sokoban", {}).setdefault("team + AT-GRPO, shared", {}).setdefault(0.001, {})[100] = 0.5
    assert here == known
    assert start(checkout, *tune, "--publish").returncode == 0
    assert yaml.safe_load(published.read_text()) == here


def test_every_result_page_names_its_one_folder() -> None:
    pages = {file.name: re.findall(r"\]\(\.\./results/(\w+)/\)", file.read_text()) for file in DOCS.glob("results*.md")}
    assert {name: folders for name, folders in pages.items() if len(set(folders)) != 1} == {}
    folders = {folder.name for folder in (ROOT / "results").iterdir() if folder.is_dir() and folder.name[0] != "_"}
    assert {folder for own in pages.values() for folder in own} == folders
