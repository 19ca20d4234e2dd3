"""Report sections on a population: distance to equilibrium, payoffs, ratings and opponents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from palestra.populations.task_json import TASKS_FILE
from palestra.report.html import escape_text, html_table, section
from palestra.report.population_data import PopulationRecord, cyclicity_warning, read_record, standings
from palestra.report.population_plots import mixtures_by_player, nash_conv_points
from palestra.report.run_report import group_lines
from palestra.report.svg import ChartCurve, chart, heat_map
from palestra.types import TEAM

MAX_MEMBERS = 80  # newest members shown in a heat map


def population_sections(path: Path) -> list[str]:
    """Returns the sections on the population that a run trains; [] if it trains none or has not started."""
    if not (path / TASKS_FILE).exists() or not (path / TASKS_FILE).stat().st_size:
        return []
    record = read_record(path)
    return [
        section("How far from an equilibrium", _distances(record)),
        section("Who beats whom", payoff_heat_map(record), *_ranks(record)),
        section("Whom learners met", _mixtures(record), _learners(record)),
    ]


def _distances(record: PopulationRecord) -> str:
    points = nash_conv_points(record)
    drawn = []
    for key, title in (("games", "games played for payoffs"), ("env_steps", "env steps"), ("seconds", "seconds")):
        known = [(float(point[key]), point["nash_conv"]) for point in points if key in point]
        if len({x for x, _ in known}) > 1:
            drawn.append(chart("NashConv", [ChartCurve("NashConv", known, has_markers=True)], x_title=title, low=0.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def payoff_heat_map(record: PopulationRecord) -> str:
    """Returns a heat map of the payoffs of the first seat's members (rows) against the second's, as SVG; "" unless
    there are two seats."""
    payoffs = record.payoffs
    if len(payoffs.seats) != 2:
        return ""
    names = [payoffs.members[seat] for seat in payoffs.seats]
    earned = payoffs.mean()[0][-MAX_MEMBERS:, -MAX_MEMBERS:]
    return heat_map(
        "what the row's member earns from the column's", earned, names[0][-MAX_MEMBERS:], names[1][-MAX_MEMBERS:]
    )


def standings_table(record: PopulationRecord) -> str:
    """Returns the members ranked by Elo, as an HTML table. Raises ValueError if they have not played each other."""
    rows = [
        [
            row.name,
            f"{row.elo:.0f} ± {row.stderr:.0f}",
            f"{row.skill.mu:.1f} ± {row.skill.sigma:.1f}" if row.skill else "-",
            f"{row.win_rate:.1%}",
            f"{row.worst_win_rate:.1%} by {row.worst_opponent}",
            row.games,
        ]
        for row in standings(record)
    ]
    return html_table(["member", "Elo", "OpenSkill", "win rate", "worst", "games"], rows)


def _ranks(record: PopulationRecord) -> list[str]:
    try:
        told = cyclicity_warning(record)
        return [standings_table(record), f"<p class=soft>{escape_text(told)}</p>" if told else ""]
    except ValueError as error:  # no games yet, or more than two players
        return [f"<p class=soft>No standings: {escape_text(error)}</p>"]


def _mixtures(record: PopulationRecord) -> str:
    """Heat maps of the members' probabilities (rows) by iteration (columns)."""
    drawn = []
    for player, rows in mixtures_by_player(record).items():
        names = list(dict.fromkeys(name for row in rows for name in row))[-MAX_MEMBERS:]
        shares = np.array([[row.get(name, 0.0) for row in rows] for name in names])
        numbers = [str(i) for i in range(len(rows))]
        drawn.append(heat_map(f"mixture of {player}, by iteration", shares, names, numbers, max_value=1.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _learners(record: PopulationRecord) -> str:
    drawn = []
    learners: dict[str, Any] = {
        name: own for name, own in group_lines(record.metrics, "policy").items() if name != TEAM
    }
    for key, title in (("value", "what the learner wins"), ("worst_win_rate", "worst win rate"), ("rating", "rating")):
        curves = [
            ChartCurve(name, [(line["iteration"], line[key]) for line in lines if line.get(key) is not None])
            for name, lines in learners.items()
        ]
        drawn.append(chart(title, curves, x_title="iteration"))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""
