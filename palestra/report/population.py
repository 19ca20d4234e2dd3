"""Report sections on a population: distance to equilibrium, payoffs, ratings and opponents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from palestra.population_plots import distances, mixtures
from palestra.population_reports import Record, read_record, standings, warning
from palestra.populations.scheduler import TASKS
from palestra.report.parts import section, table, text
from palestra.report.svg import Curve, chart, heat
from palestra.reports import series
from palestra.types import TEAM

PICTURED = 80  # newest members shown in a heat map


def population_sections(path: Path) -> list[str]:
    """Returns the sections on the population that a run trains; [] if it trains none or has not started."""
    if not (path / TASKS).exists() or not (path / TASKS).stat().st_size:
        return []
    record = read_record(path)
    return [
        section("How far from an equilibrium", _distances(record)),
        section("Who beats whom", payoff_heat(record), *_ranks(record)),
        section("Whom learners met", _mixtures(record), _learners(record)),
    ]


def _distances(record: Record) -> str:
    points = distances(record)
    drawn = []
    for key, title in (("games", "games played for payoffs"), ("env_steps", "env steps"), ("seconds", "seconds")):
        known = [(float(point[key]), point["nash_conv"]) for point in points if key in point]
        if len({x for x, _ in known}) > 1:
            drawn.append(chart("NashConv", [Curve("NashConv", known, marked=True)], x=title, low=0.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def payoff_heat(record: Record) -> str:
    """Returns a heat map of the payoffs of the first seat's members (rows) against the second's, as SVG; "" unless
    there are two seats."""
    payoffs = record.payoffs
    if len(payoffs.seats) != 2:
        return ""
    names = [payoffs.members[seat] for seat in payoffs.seats]
    earned = payoffs.mean()[0][-PICTURED:, -PICTURED:]
    return heat("what the row's member earns from the column's", earned, names[0][-PICTURED:], names[1][-PICTURED:])


def standings_html(record: Record) -> str:
    """Returns the members ranked by Elo, as an HTML table. Raises ValueError if they have not played each other."""
    rows = [
        [
            row.name,
            f"{row.elo:.0f} ± {row.stderr:.0f}",
            f"{row.skill.mu:.1f} ± {row.skill.sigma:.1f}" if row.skill else "-",
            f"{row.win_rate:.1%}",
            f"{row.worst:.1%} by {row.nemesis}",
            row.games,
        ]
        for row in standings(record)
    ]
    return table(["member", "Elo", "OpenSkill", "win rate", "worst", "games"], rows)


def _ranks(record: Record) -> list[str]:
    try:
        told = warning(record)
        return [standings_html(record), f"<p class=soft>{text(told)}</p>" if told else ""]
    except ValueError as error:  # no games yet, or more than two players
        return [f"<p class=soft>No standings: {text(error)}</p>"]


def _mixtures(record: Record) -> str:
    """Heat maps of the members' probabilities (rows) by iteration (columns)."""
    drawn = []
    for player, rows in mixtures(record).items():
        names = list(dict.fromkeys(name for row in rows for name in row))[-PICTURED:]
        shares = np.array([[row.get(name, 0.0) for row in rows] for name in names])
        numbers = [str(i) for i in range(len(rows))]
        drawn.append(heat(f"mixture of {player}, by iteration", shares, names, numbers, top=1.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _learners(record: Record) -> str:
    drawn = []
    learners: dict[str, Any] = {name: own for name, own in series(record.metrics, "policy").items() if name != TEAM}
    for key, title in (("value", "what the learner wins"), ("worst_win_rate", "worst win rate"), ("rating", "rating")):
        curves = [
            Curve(name, [(line["iteration"], line[key]) for line in lines if line.get(key) is not None])
            for name, lines in learners.items()
        ]
        drawn.append(chart(title, curves, x="iteration"))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""
