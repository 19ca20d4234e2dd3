"""Every recipe of tinker-cookbook 0.6.1, unmodified and offline, for a few steps. The table is
docs/client-recipes.md."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cookbook_recipes import ON_SMOLLM2, RECIPES, NotRun, Ran
from helpers.official import CLIENTS, Official

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
PAGE = Path(__file__).parents[2] / "docs" / "client-recipes.md"
RUN = [name for name, recipe in RECIPES.items() if isinstance(recipe, Ran)]
REFUSED = [name for name, recipe in RECIPES.items() if isinstance(recipe, NotRun)]
HEAD = """# Recipes of the cookbook

Every recipe of `tinker-cookbook` 0.6.1 on tinker 0.38, unmodified, for a few steps against `palestra serve` on a CPU,
by `make test-clients`, which wrote this page. Seconds are those of the whole program, with its imports. The base is the
tiny one under the names of the recipes, for those that ask for more than its 2,048 tokens with a longer context; the
last column is SmolLM2-135M-Instruct. Datasets of the Hub are a few invented rows with the same columns. Flags set
sizes, the model's name, and `loss_fn=importance_sampling` where the default is `stable_reinforce`, whose formula is not
public.

"""


@pytest.fixture(scope="module")
def seconds() -> Iterator[dict[str, float]]:
    """Seconds by recipe, followed by " on SmolLM2" there; not a number while it has not succeeded. At the end they are
    written to the page, where the rows of recipes that were not started this time stay."""
    taken: dict[str, float] = {}
    yield taken
    PAGE.write_text(HEAD + page(earlier() | taken))


def earlier() -> dict[str, float]:
    """The seconds in the page."""
    known: dict[str, float] = {}
    rows = re.findall(r"^\| `(.+)` \| runs \| (\d+) \| (\d*) \|$", PAGE.read_text(), re.MULTILINE)
    for name, tiny, smollm2 in rows:
        known[name] = float(tiny)
        if smollm2:
            known[f"{name} on SmolLM2"] = float(smollm2)
    return known


def page(taken: dict[str, float]) -> str:
    rows = ["| recipe | result | seconds | on SmolLM2 |", "|---|---|---|---|"]
    for name, recipe in RECIPES.items():
        if isinstance(recipe, NotRun):
            rows.append(f"| `{name}` | not run: needs {recipe.reason} | | |")
            continue
        tiny = taken.get(name, math.nan)
        smollm2 = taken.get(f"{name} on SmolLM2", math.nan)
        result = "runs" if tiny >= 0 else "fails" if name in taken else "not tried yet"
        rows.append(f"| `{name}` | {result} | {written(tiny)} | {written(smollm2)} |")
    return "\n".join(rows) + "\n"


def written(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{seconds:.0f}"


def package() -> Path:
    (found,) = (CLIENTS / "c" / "lib").glob("python3*/site-packages/tinker_cookbook")
    return found


def words_of(flags: str, log: Path) -> list[str]:
    return flags.format(log=log, package=package()).split()


def start(official: Official, name: str, folder: Path, log: Path) -> float:
    """Runs a recipe and checks that it did what it should; returns its seconds."""
    recipe = RECIPES[name]
    assert isinstance(recipe, Ran)
    before = time.monotonic()
    module = f"tinker_cookbook.recipes.{name}"
    words = words_of(recipe.flags, log)
    said = official.run("c", "-m", module, *words, seconds=900, folder=folder, typed=recipe.typed)
    taken = time.monotonic() - before
    if recipe.metric:
        rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        assert len([row for row in rows if recipe.metric in row]) >= recipe.steps, (rows, said[-3000:])
    else:
        assert re.search(recipe.words, said), said[-5000:]
    return taken


@pytest.mark.parametrize("name", RUN)
def test_recipe_runs(
    official: Official, recipe_data: Path, tmp_path: Path, name: str, seconds: dict[str, float]
) -> None:
    recipe = RECIPES[name]
    assert isinstance(recipe, Ran)
    if recipe.first:
        start(official, recipe.first, recipe_data, tmp_path / "first")
    seconds[name] = math.nan
    seconds[name] = start(official, name, recipe_data, tmp_path / "log")


@pytest.mark.parametrize("name", ON_SMOLLM2)
def test_recipe_runs_on_smollm2(
    official: Official,
    smollm2: Official,
    recipe_data: Path,
    tmp_path: Path,
    name: str,
    seconds: dict[str, float],
) -> None:
    datasets = smollm2.home / "datasets"
    if not datasets.exists():
        datasets.symlink_to(official.home / "datasets")
    seconds[f"{name} on SmolLM2"] = start(smollm2, name, recipe_data, tmp_path / "log")


@pytest.mark.parametrize("name", REFUSED)
def test_recipe_says_what_it_needs(official: Official, tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    assert isinstance(recipe, NotRun)
    words = words_of(recipe.flags, tmp_path / "log")
    said = official.run("c", "-m", f"tinker_cookbook.recipes.{recipe.program}", *words, folder=tmp_path, fails=True)
    assert re.search(recipe.words, said), said[-5000:]


def test_table_has_every_program_of_the_package() -> None:
    folder = package() / "recipes"
    programs = [file for file in folder.rglob("*.py") if "__main__" in file.read_text() or file.name == "__main__.py"]
    names = {".".join(file.relative_to(folder).with_suffix("").parts) for file in programs}
    known = {name for name in names if any(f"{name}.".startswith(f"{row}.") for row in RECIPES)}
    assert names - known == set()
    assert len(names) > 50
