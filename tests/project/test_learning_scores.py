"""The table of learning tests: bars far from what other seeds reach, and no entry without its test."""

import ast
import json
from pathlib import Path

import pytest
from helpers import learning
from helpers.learning import Entry, check_score, read_table

ROOT = Path(__file__).parents[2]
GOOD = {"bar": 0.7, "reached": "above", "mean": 0.9, "deviation": 0.04, "seeds": 10}


@pytest.mark.parametrize("name", read_table())
def test_bars_are_four_deviations_from_the_mean_of_ten_seeds(name: str) -> None:
    assert read_table()[name].problem() == ""


@pytest.mark.parametrize("name", read_table())
def test_entries_are_of_tests_that_compare_a_score(name: str) -> None:
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    asks = {node.name: [arg.arg for arg in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "check_score" in asks[test.partition("[")[0].partition(" ")[0]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": 9}, "measured with 9 seeds"),
        ({"deviation": 0.06}, "nearer than 4 deviations"),
        ({"mean": 0.5}, "nearer than 4 deviations"),
        ({"reached": "below"}, "nearer than 4 deviations"),
    ],
)
def test_near_bars_and_few_seeds_are_problems(changes: dict[str, object], says: str) -> None:
    assert Entry(**GOOD).problem() == ""
    assert says in Entry(**GOOD | changes).problem()


def test_scores_are_compared_with_the_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(learning.RECORDS, raising=False)
    monkeypatch.setattr(learning, "TABLE", tmp_path / "table.json")
    near = GOOD | {"deviation": 0.1}
    learning.TABLE.write_text(
        json.dumps({"t.py::test": GOOD, "t.py::test loss": GOOD | {"reached": "below", "mean": 0.1}, "near": near})
    )
    check_score("t.py::test", "", 0.71)
    check_score("t.py::test", "loss", 0.69)
    for test, name, value, says in (
        ("t.py::test", "", 0.69, "0.69 is not above 0.7"),
        ("t.py::test", "loss", 0.71, "0.71 is not below 0.7"),
        ("near", "", 0.9, "nearer than 4 deviations"),
        ("t.py::new", "", 0.9, "t.py::new is not in table.json"),
    ):
        with pytest.raises(AssertionError, match=says):
            check_score(test, name, value)
