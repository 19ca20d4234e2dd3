"""A population's run for display: payoffs, best responses, mixtures, ratings, and the timeline of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.curve_queries import json_numbers
from palestra.evaluation.report.population_data import (
    EXPLOITS_FILE,
    PopulationRecord,
    cyclicity_warning,
    read_record,
    standings,
)
from palestra.evaluation.report.population_plots import best_responses, mixtures_by_player, nash_conv_points
from palestra.populations.payoffs import PayoffTable
from palestra.populations.ratings import cross_play
from palestra.populations.task_json import CROSSPLAY_FILE
from palestra.populations.tasks import Opponents, TrainResult, TrainTask
from palestra.runs import read_lines
from palestra.runs.checkpoints import TASKS_FILE

DEFAULT_MEMBERS = 40  # newest members of each side of the payoff table that are sent by default


def load_record(run: CatalogRun) -> PopulationRecord:
    """Returns the run's record. Raises ValueError if it trains no population or has not started."""
    for name in (TASKS_FILE, "population.json", CROSSPLAY_FILE, "metrics.jsonl", "timings.jsonl", EXPLOITS_FILE):
        run.file(name)
    return read_record(run.path)


def population_view(run: CatalogRun, record: PopulationRecord, last: int = DEFAULT_MEMBERS) -> dict[str, Any]:
    """Returns all that the page draws. Tables hold the `last` newest members of each side."""
    return {
        "members": len(record.members),
        "payoffs": payoff_view(record, last),
        "responses": response_view(record, last),
        "mixtures": [mixture_view(player, rows, last) for player, rows in mixtures_by_player(record).items()],
        "ratings": rating_view(record),
        "distance": nash_conv_points(record),
        "exploits": read_lines(run.file(EXPLOITS_FILE)),
        "timeline": timeline_view(record),
    }


def payoff_view(record: PopulationRecord, last: int) -> dict[str, Any] | None:
    """Returns the payoffs of the newest members of both seats; None unless there are two seats."""
    table = record.payoffs
    if len(table.seats) != 2:
        return None
    rows, columns = (table.members[seat] for seat in table.seats)
    rows = rows[-last:]
    columns = columns[-last:]
    games = [int(table.cell(pair).games) for pair in product(rows, columns)]
    return {
        "seats": table.seats,
        "of": [len(table.members[seat]) for seat in table.seats],
        "rows": rows,
        "columns": columns,
        "mean": list(map(json_numbers, cross_play(table, rows, columns))),
        "games": np.reshape(games, (len(rows), len(columns))).tolist(),
    }


def response_view(record: PopulationRecord, last: int) -> dict[str, Any] | None:
    """Returns the newest members, and by index an edge from each to the member that earns most against it; None unless
    the game has two players and payoffs are known."""
    table = record.payoffs
    if len(table.seats) != 2 or np.isnan(table.mean()[0]).all():
        return None
    if last < max(table.shape):
        record = keep_newest(record, last)
    names, edges = best_responses(record)
    return {"names": names, "edges": edges}


def keep_newest(record: PopulationRecord, last: int) -> PopulationRecord:
    """Returns the record restricted to the newest members of each player."""
    table = PayoffTable(record.payoffs.seats)
    for player, names in record.payoffs.members.items():
        for name in names[-last:]:
            table.add_member(player, name)
    for key in table.cells():
        cell = record.payoffs.cell(key)
        if cell.exact or cell.games:
            table.set_exact(key, cell.mean)
    return replace(record, payoffs=table)


def mixture_view(player: str, rows: Sequence[dict[str, float]], last: int) -> dict[str, Any]:
    """Returns the probabilities of members over time, of the `last` members with the largest sums."""
    total: dict[str, float] = {}
    for row in rows:
        for name, share in row.items():
            total[name] = total.get(name, 0.0) + share
    likely = set(sorted(total, key=lambda name: -total[name])[:last])
    names = [name for name in total if name in likely]
    return {"player": player, "names": names, "shares": [[row.get(name, 0.0) for name in names] for row in rows]}


def rating_view(record: PopulationRecord) -> dict[str, Any]:
    """Returns Elo ratings, best first, and a warning about cycles; `why` if there are none."""
    try:
        ranked = standings(record, with_skills=False)
    except ValueError as error:
        return {"rows": [], "why": str(error), "warning": ""}
    rows = [
        {
            "name": row.name,
            "elo": row.elo,
            "stderr": row.stderr,
            "rate": row.win_rate,
            "worst": row.worst_win_rate,
            "nemesis": row.worst_opponent,
            "games": row.games,
        }
        for row in ranked
    ]
    return {"rows": rows, "why": "", "warning": cyclicity_warning(record)}


def timeline_view(record: PopulationRecord) -> list[dict[str, Any]]:
    """Returns each training task: its learner, start and duration in seconds, and result."""
    clocks = {line["task"]: line for line in record.timings if "task" in line}
    return [
        _training_span(done.task, done.result, clocks.get(done.task.name, {}))
        for done in record.tasks
        if isinstance(done.task, TrainTask) and isinstance(done.result, TrainResult)
    ]


def _training_span(task: TrainTask, result: TrainResult, clock: dict[str, Any]) -> dict[str, Any]:
    seconds = clock.get("seconds")
    ended = clock.get("elapsed_s")
    began = None
    if ended is not None and seconds is not None:
        began = ended - seconds
    return {
        "learner": task.learner or task.player,
        "member": task.output_member,
        "start": task.start,
        "from": began,
        "seconds": seconds,
        "return": result.mean_return,
        "opponents": _most_met(task.opponents),
    }


def _most_met(opponents: Opponents) -> dict[str, float]:
    """Returns the five opponents with the largest probability, over all players."""
    pairs = [(name, p) for mix in opponents.mixes.values() for name, p in mix.items()]
    return dict(sorted(pairs, key=lambda pair: -pair[1])[:5])
