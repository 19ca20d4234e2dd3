"""Writes docs/results-grid.md and its figure from the published rows."""

from __future__ import annotations

from pathlib import Path

from palestra.api.experiments.grid import GridConfig, cell_name
from palestra.api.experiments.results import GridResults, draw_results, results_data, results_section
from results.ledger import Line, provenance
from results.pages import read_notes

PAGE_GRID = "cooperation"  # the grid that the page shows
NOTES = Path(__file__).parent / "notes.md"  # the text of the page, above and below the mark <!-- results -->


def results_of(grid: GridConfig, lines: list[Line]) -> GridResults:
    """Returns the results that the page and its figure show."""
    values: dict[str, dict[str, dict[int, float]]] = {a: {t: {} for t in grid.tasks} for a in grid.algorithms}
    scored = [line for line in lines if line["value"] is not None]
    for line in scored:
        values[line["algorithm"]][line["task"]][line["seed"]] = line["value"]
    found = {line["task"]: line["metric"] for line in scored}
    unscored = [cell_name(line["task"], line["algorithm"], line["seed"]) for line in lines if line["value"] is None]
    return GridResults(grid, values, {task: found[task] for task in grid.tasks if task in found}, unscored)


def write_page(grid: GridConfig, lines: list[Line], docs: Path) -> Path:
    """Writes the page and its figure to `docs`; returns the page."""
    page = docs / "results-grid.md"
    results, notes = results_of(grid, lines), read_notes(NOTES)
    intro, _, rest = notes.partition("<!-- results -->\n")
    section = results_section(results, results_data(results), page.with_suffix(".svg").name)
    section += [
        "",
        f"Made by `python results/grid/run.py {PAGE_GRID} --report` from the published rows; without `--report` it",
        f"measures them again. {provenance(lines)}",
        f"The runs took {sum(line['cpu'] for line in lines) / 60:.0f} CPU minutes of rollouts and updates; script,",
        "config, and the scores and curves of all runs are in [results/grid/](../results/grid/).",
    ]
    page.write_text(intro + "\n".join(section) + "\n" + (f"\n{rest.strip()}\n" if rest.strip() else ""))
    if results.complete:
        draw_results(results.complete, page.with_suffix(".svg"))
    return page
