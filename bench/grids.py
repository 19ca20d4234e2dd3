"""Results of a shipped grid: collects the scores of its runs in bench/measured/grids and writes a docs page from them.

    palestra grid configs/grids/cooperation.yaml --workers 16
    python bench/grids.py cooperation --collect runs/cooperation   scores and curves of its finished runs, then the page
    python bench/grids.py cooperation                              the page from scores collected before

The page is docs/results-grid.md with docs/results-grid.svg, and for another grid docs/results-NAME.md. Its text is in
bench/grid-notes/NAME.md, above and below the mark <!-- results -->.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from palestra.experiments.grid import GridConfig, cell_name, load_grid
from palestra.experiments.results import (
    GridResults,
    NotANumber,
    draw_results,
    final_value,
    results_data,
    results_section,
)
from palestra.experiments.schedule import finished_cells
from palestra.runs import read_lines
from palestra.runs.headline import headline_eval
from palestra.runs.series import RunLogs, series_of

PAGES = {"cooperation": "grid"}  # grids whose page docs/results-PAGE.md has another name than the grid
Line = dict[str, Any]


def collect(grid: GridConfig, runs: Path) -> list[Line]:
    """Returns a line for each finished run: task, algorithm, seed, metric, the metric's last value, CPU seconds of
    rollouts and updates, and the metric's curve as [env steps, value] for each evaluation. The value is None, without a
    curve, if the metric ended as NaN."""
    lines, done = [], finished_cells(runs)
    for task, algorithm, seed in grid.keys:
        run = runs / cell_name(task, algorithm, seed)
        if run.name in done:
            logs, own = RunLogs(run), grid.tasks[task]
            score: Line = {"metric": own.metric, "value": None}
            curve: list[list[float]] = []
            try:
                score["metric"], score["value"] = final_value(logs, own.eval, own.metric)
            except NotANumber as error:
                print(f"without a score: {error}")
            else:
                curve = metric_curve(logs, own.eval or headline_eval(list(logs.evals)), score["metric"])
            cpu = round(cpu_seconds(run), 1)
            lines.append({"task": task, "algorithm": algorithm, "seed": seed, **score, "cpu": cpu, "curve": curve})
    return lines


def metric_curve(logs: RunLogs, evaluation: str | None, metric: str) -> list[list[float]]:
    """Returns [env steps, value] of a metric for each line of an evaluation."""
    series = series_of(logs.evals[evaluation], metric)
    steps = (series.x + 1).astype(int) * env_steps_per_step(logs)
    return [[step, float(f"{y:.5g}")] for step, y in zip(steps.tolist(), series.y, strict=True)]


def env_steps_per_step(logs: RunLogs) -> int:
    """Returns the joint steps in one training step of a run."""
    line = next(line for line in logs.metrics if "env_steps" in line)
    return round(line["env_steps"] / (line["step"] + 1))


def cpu_seconds(run: Path) -> float:
    """Returns the CPU seconds of a run's rollouts and updates."""
    lines = [line for line in read_lines(run / "timings.jsonl") if line["policy"] == "team"]
    return float(sum(value for line in lines for key, value in line.items() if key.endswith("cpu_s")))


def results_of(grid: GridConfig, lines: list[Line]) -> GridResults:
    """Returns the results that the page and its figure show."""
    values: dict[str, dict[str, dict[int, float]]] = {a: {t: {} for t in grid.tasks} for a in grid.algorithms}
    scored = [line for line in lines if line["value"] is not None]
    for line in scored:
        values[line["algorithm"]][line["task"]][line["seed"]] = line["value"]
    found = {line["task"]: line["metric"] for line in scored}
    unscored = [cell_name(line["task"], line["algorithm"], line["seed"]) for line in lines if line["value"] is None]
    return GridResults(grid, values, {task: found[task] for task in grid.tasks if task in found}, unscored)


def write_page(name: str, grid: GridConfig, lines: list[Line], docs: Path) -> Path:
    """Writes the page and its figure to `docs`; returns the page."""
    page = docs / f"results-{PAGES.get(name, name)}.md"
    results, notes = results_of(grid, lines), Path(f"bench/grid-notes/{name}.md").read_text()
    intro, _, rest = notes.partition("<!-- results -->\n")
    section = results_section(results, results_data(results), page.with_suffix(".svg").name)
    section += [
        "",
        f"Made by `palestra grid configs/grids/{name}.yaml` and `python bench/grids.py {name} --collect runs/{name}`.",
        f"The runs took {sum(line['cpu'] for line in lines) / 60:.0f} CPU minutes of rollouts and updates; scores and",
        f"curves of all are in [bench/measured/grids/{name}.jsonl](../bench/measured/grids/{name}.jsonl).",
    ]
    page.write_text(intro + "\n".join(section) + "\n" + (f"\n{rest.strip()}\n" if rest.strip() else ""))
    if results.complete:
        draw_results(results.complete, page.with_suffix(".svg"))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a file in configs/grids, without .yaml")
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="folder of the grid's runs")
    parser.add_argument("--measured", type=Path, help="another file of scores; no page is written")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the page")
    options = parser.parse_args()
    grid = load_grid(Path(f"configs/grids/{options.name}.yaml"))
    measured = options.measured or Path(f"bench/measured/grids/{options.name}.jsonl")
    if options.collect:
        measured.parent.mkdir(parents=True, exist_ok=True)
        measured.write_text("".join(json.dumps(line) + "\n" for line in collect(grid, options.collect)))
    lines = read_lines(measured)
    print(f"{len(lines)} of {len(grid.keys)} runs: {measured}")
    if not options.measured:
        print(write_page(options.name, grid, lines, options.docs))


if __name__ == "__main__":
    main()
