"""The comparison with BenchMARL: published rows are those of its settings, and its page shows all of them."""

from pathlib import Path

import pytest

from results.ledger import Line
from results.pages import read_notes
from results.peers.report import NOTES, task_rows
from results.peers.run import make_ledger, table_rows
from results.peers.tasks import TASKS

PAGE = Path(__file__).parents[2] / "docs/results-peers.md"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Line]:
    monkeypatch.chdir(PAGE.parents[1])
    return make_ledger(quick=False).published


def test_published_rows_are_those_of_the_tasks_and_have_their_settings(published: dict[str, Line]) -> None:
    ledger = make_ledger(quick=False)
    assert published.keys() == table_rows().keys()
    assert [name for name, line in published.items() if not ledger.is_current(name, line)] == []


def test_a_row_of_other_settings_is_not_current(published: dict[str, Line]) -> None:
    name, line = next(iter(published.items()))
    changed = line | {"spec": line["spec"] | {"lr": 0.5}}
    assert not make_ledger(quick=False).is_current(name, changed)


def test_random_play_has_the_same_return_in_all_packages(published: dict[str, Line]) -> None:
    """The deviation of a game's return is about 1, so that of a mean of 4,000 games is about 0.016."""
    for task in TASKS:
        if task.spec.algorithm == "random":
            scores = [published[f"{task.name}/{package}/0"]["score"] for package in task.packages]
            assert max(scores) - min(scores) < 0.08


def test_the_page_has_the_published_rows_and_the_notes(published: dict[str, Line]) -> None:
    page = PAGE.read_text()
    assert read_notes(NOTES).rstrip() in page
    for task in TASKS:
        if task.spec.algorithm != "random":
            for row in task_rows(task, list(published.values())):
                assert f"| {' | '.join(row)} |" in page
