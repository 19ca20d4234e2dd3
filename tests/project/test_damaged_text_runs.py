"""Every file of a text run, damaged in every way: resume, report and eval end as with the undamaged run, or say in one
line what is wrong."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from helpers.command_line import invoke
from helpers.damages import cut, flip, remove

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DAMAGES: dict[str, Callable[[str, int], Callable[[Path], object]]] = {
    "empty": lambda name, _: cut(name, 0),
    "cut": lambda name, size: cut(name, size // 2),
    "a byte": lambda name, size: flip(name, size // 2),
    "missing": lambda name, _: remove(name),
}


@dataclass
class Made:
    """A run that stopped after four of six steps, what it is once resumed undisturbed, and what eval says of it."""

    run: Path
    whole: dict[str, bytes]
    evaluated: str


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("text")
    speech = {"type": "lora", "base": str(base), "lr": 1e-3, "sampling": {"max_tokens": 2}}
    tree = {
        "name": "run",
        "steps": 4,
        "episodes": 2,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 2},
        "evals": {"dev": {"episodes": 2, "every": 2}},
        "checkpoint_every": 2,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    assert invoke("train", folder / "run.yaml", "--root", folder).exit_code == 0
    shutil.copytree(folder / "run", folder / "whole")
    assert extend(folder / "whole") == (0, "")
    return Made(folder / "run", results(folder / "whole"), evaluate(folder / "run")[1])


def run_command(*words: object) -> tuple[int, str, str]:
    """The exit code, stdout, and stderr, which has at most one error, in one line, and no traceback."""
    done = invoke(*words)
    assert isinstance(done.exception, SystemExit | None), (words, done.exception)
    assert "Traceback" not in done.output + done.stderr, (words, done.output)
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    if done.exit_code:
        assert done.exit_code in (1, 2) and len(errors) == 1 and errors[0].startswith("error: "), (words, done.stderr)
    return done.exit_code, done.stdout, done.stderr


def extend(run: Path) -> tuple[int, str]:
    code, _, error = run_command("train", "--resume", run, "--set", "steps=6")
    return code, error


def evaluate(run: Path) -> tuple[int, str, str]:
    code, out, error = run_command("eval", run, "--episodes", 2, "--json")
    return code, out.replace(str(run.parent), ""), error


def results(run: Path) -> dict[str, bytes]:
    """What the seed determines: logs, weights, and the answers of all episodes."""
    files = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "evals.jsonl")}
    newest = max((run / "checkpoints").glob("step-*"))
    files |= {str(file.relative_to(run)): file.read_bytes() for file in newest.rglob("*") if file.is_file()}
    return files


def names(run: Path) -> list[str]:
    """The files, without those that are like others: of the second policy, the later episodes, the older checkpoint."""
    found = sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    alike = re.compile(r".*/walker/.*|episodes/.*[1-3]\.parquet|checkpoints/step-000001/.*(json|optimizer.*)")
    return [name for name in found if not alike.fullmatch(name)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_survived_or_named(made: Made, tmp_path: Path, damage: str) -> None:
    outcomes, wrong = [], []
    for number, name in enumerate(names(made.run)):
        size = (made.run / name).stat().st_size
        if not size and damage != "missing":
            continue
        run = tmp_path / str(number) / "run"
        shutil.copytree(made.run, run)
        DAMAGES[damage](name, size)(run)
        try:
            reported = run_command("report", run)
            evaluated = evaluate(run)
            resumed = extend(run)
            right = resumed[0] or results(run) == made.whole
            right_score = evaluated[0] or evaluated[1] == made.evaluated
            outcomes.append((name, reported[0], evaluated[0], resumed[0], resumed[1] or evaluated[2] or reported[2]))
            if not right or not right_score:
                wrong.append((name, "another result", resumed, evaluated))
        except AssertionError as error:
            wrong.append((name, error))
        shutil.rmtree(run.parent)
    print(f"\n{damage}:", *outcomes, sep="\n")
    assert not wrong, "\n".join(map(str, wrong))
    assert len(outcomes) > 10
