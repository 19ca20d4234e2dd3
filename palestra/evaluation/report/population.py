"""Report sections on a population: distance to equilibrium, payoffs, ratings and opponents."""

from __future__ import annotations

from pathlib import Path

from palestra.evaluation.report.charts import figure_html, figures_html
from palestra.evaluation.report.html import escape_text, html_table, section
from palestra.evaluation.report.population_data import PopulationRecord, cyclicity_warning, read_record, standings
from palestra.evaluation.report.population_plots import (
    learner_charts,
    mixture_heat_maps,
    nash_conv_charts,
    payoff_heat_map,
)
from palestra.runs.checkpoints import TASKS_FILE


def population_sections(path: Path) -> list[str]:
    """Returns the sections on the population that a run trains; [] if it trains none or has not started."""
    if not (path / TASKS_FILE).exists() or not (path / TASKS_FILE).stat().st_size:
        return []
    record = read_record(path)
    return [
        section("How far from an equilibrium", figures_html(nash_conv_charts(record))),
        section("Who beats whom", payoff_figure(record), *_ranks(record)),
        section("Whom learners met", figures_html(mixture_heat_maps(record)), figures_html(learner_charts(record))),
    ]


def payoff_figure(record: PopulationRecord) -> str:
    """Returns `payoff_heat_map` as HTML; "" without one."""
    heat = payoff_heat_map(record)
    return "" if heat is None else figure_html(heat)


def standings_table(record: PopulationRecord) -> str:
    """Returns the members ranked by Elo, as an HTML table. Raises ValueError if they have not played each other."""
    rows = []
    for row in standings(record):
        *ratings, worst = row.ratings_as_text()
        rows.append([row.name, *ratings, f"{worst} by {row.worst_opponent}", row.games])
    return html_table(["member", "Elo ± 95 %", "OpenSkill ± 95 %", "win rate", "worst", "games"], rows)


def _ranks(record: PopulationRecord) -> list[str]:
    try:
        parts = [standings_table(record)]
        if warning := cyclicity_warning(record):
            parts.append(f"<p class=soft>{escape_text(warning)}</p>")
        return parts
    except ValueError as error:  # no games yet, or more than two players
        return [f"<p class=soft>No standings: {escape_text(error)}</p>"]
