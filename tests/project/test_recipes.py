"""The numbers of docs/recipes.md and of the README's table are those of the pages of results, which ledgers make."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes.md"
NUMBER = re.compile(r"-?\d[\d.]*(?: ± [\d.]+)?")
ROW = re.compile(r"^\| .*\.yaml\).* \|$", re.MULTILINE)
ROWS = ROW.findall(RECIPES.read_text(encoding="utf-8"))


def lines_of(page: Path, name: str) -> str:
    """The lines of a page that have a row's name, without links and emphasis."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if re.search(rf"(?<![\w+]){re.escape(name)}(?![\w,])", line))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.search(r"\[(\w+)\.yaml\]", row)[1])
def test_a_recipe_has_the_number_of_its_page(row: str) -> None:
    _, file, result, cpu, source, _ = (cell.strip() for cell in row.split(" |"))
    assert (RECIPES.parent / re.search(r"\(([^)]+\.yaml)\)", file)[1]).is_file()
    link, name = re.search(r'\(([^)#]+)[^)]*\), "([^"]+)"', source).groups()
    found = lines_of(RECIPES.parent / link, name)
    value = NUMBER.search(result.partition(" (")[0])[0]
    assert value in found, f"{value} is not in {link}, {name}"
    assert not cpu or re.search(rf"\| {cpu} \|", found), f"{cpu} s are not in {link}, {name}"


@pytest.mark.parametrize(
    ("row", "sources", "chain"),
    [
        ("team, untrained", [("results", "team, untrained"), ("results-real", "team, 8 examples")], "team"),
        (
            "one agent that",
            [("results", "single agent, one turn"), ("results-real", "single agent + GRPO")],
            "single agent + GRPO",
        ),
        (
            "one agent with",
            [("results", "single agent, multi-turn"), ("results-real", "")],
            "single agent, a turn for each calculation + AT-GRPO",
        ),
        (
            "team, one shared",
            [("results", "team + AT-GRPO, shared"), ("results-real", "team + AT-GRPO, shared")],
            "team + AT-GRPO, shared",
        ),
        (
            "team, an adapter",
            [("results", "team + AT-GRPO, per role"), ("results-real", "team + AT-GRPO")],
            "team + AT-GRPO",
        ),
        ("the same, roles", [("results", "AT-GRPO, roles swapped"), ("real-models", "trained, message blank")], ""),
    ],
)
def test_readme_has_the_numbers_of_the_pages(row: str, sources: list[tuple[str, str]], chain: str) -> None:
    (line,) = re.findall(rf"^\| {row}.* \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    _, plan_path, sokoban, story, chains, _ = (cell.strip() for cell in line.split(" |"))
    (page, name), (real_page, real_name) = sources
    shown = lines_of(ROOT / "docs" / f"{page}.md", name)
    assert plan_path in shown and sokoban in shown
    assert (story == "–") == (not real_name)
    assert not real_name or story in lines_of(ROOT / "docs" / f"{real_page}.md", real_name).replace("%", "")
    page_text = (ROOT / "docs" / "results-real.md").read_text(encoding="utf-8")
    table = page_text.partition("## A story in four parts")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if chain and line.startswith(f"| {chain} |")]
    assert len(rows) == bool(chain)
    assert chains.replace(",", "") in (rows[0].replace("%", "") if rows else "–")
