"""Does a trained team beat one agent? The figures of the results pages that answer it, from their published rows.

    python bench/headline.py            measures nothing: it reads results/*/measured/
    python bench/headline.py --quick    the same

On the boards: success of the best AT-GRPO row and of the best row of a single agent, and what a team loses when its two
trained roles are swapped. With a real model, for each task (stories, sums, chains of four): the best trained team minus
the best single agent, in points, with the lower end of its bootstrap 95 % interval over seeds; and the spread of teams
with one adapter for each role: half the 95 % interval of their mean (Student's t), the wider one of two tasks.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from palestra.core.files import read_lines
from results.ledger import PUBLISHED, finish
from results.pages import half_interval

TARGETS = {
    "sokoban_at_grpo": 0.9,
    "plan_path_at_grpo": 0.99,
    "sokoban_single_agent": None,
    "swap_drop_points": 50.0,
    "team_minus_single_points_task1": 10.0,
    "team_minus_single_points_task1_low": 0.0,
    "team_minus_single_points_task2": 10.0,
    "team_minus_single_points_task2_low": 0.0,
    "team_minus_single_points_task3": 10.0,
    "team_minus_single_points_task3_low": 0.0,
    "role_spread_points": 5.0,
}
REAL_TASKS = ("story", "sums", "chain")  # tasks 1 to 3
SPREAD_TASKS = ("story", "sums")  # with several runs of a team with an adapter for each role
PER_ROLE = "team + AT-GRPO"
RESAMPLES = 10_000

Scores = Mapping[str, Sequence[float]]


def scores_by_method(page: str, column: str) -> dict[str, dict[str, list[float]]]:
    """Returns the success of each seed by the task in `column` and method, of rows on test instances. A row that is the
    mean of several seeds counts as one score."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(PUBLISHED / page / "measured" / "rows.jsonl"):
        last = line["name"].rpartition("/")[2]
        if "success" in line and not last.startswith("lr ") and not last.endswith(" shots"):
            scores[line[column]][line["method"]].append(line["success"])
    return scores


def best(scores: Scores, start: str, part: str = "") -> Sequence[float]:
    """Returns the scores of the method with the highest mean, of those that begin with `start` and have `part`."""
    chosen = [name for name in scores if name.startswith(start) and part in name]
    return scores[max(chosen, key=lambda name: np.mean(scores[name]))]


def points_between(team: Sequence[float], single: Sequence[float]) -> tuple[float, float]:
    """Returns the difference of the means in points, and the lower end of its bootstrap 95 % interval."""
    rng = np.random.default_rng(0)
    means = [rng.choice(np.array(own), (RESAMPLES, len(own))).mean(1) for own in (team, single)]
    return 100 * float(np.mean(team) - np.mean(single)), 100 * float(np.quantile(means[0] - means[1], 0.025))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: nothing is measured")
    parser.parse_args()
    boards = scores_by_method("reproduction", "game")
    real = scores_by_method("real", "task")
    figures = {f"{game}_at_grpo": float(np.mean(best(boards[game], "team + AT-GRPO"))) for game in boards}
    figures["sokoban_single_agent"] = float(np.mean(best(boards["sokoban"], "single agent")))
    together, swapped = (boards["plan_path"][name] for name in ("team + AT-GRPO, per role", "AT-GRPO, roles swapped"))
    figures["swap_drop_points"] = 100 * float(np.mean(together) - np.mean(swapped))
    for number, task in enumerate(REAL_TASKS, 1):
        points, low = points_between(best(real[task], "team", "GRPO"), best(real[task], "single agent"))
        figures[f"team_minus_single_points_task{number}"] = points
        figures[f"team_minus_single_points_task{number}_low"] = low
    figures["role_spread_points"] = 100 * max(half_interval(real[task][PER_ROLE]) for task in SPREAD_TASKS)
    for name, target in TARGETS.items():
        print(f"{name}: {figures[name]:.3g}" + ("" if target is None else f" (goal: {target:g})"))
    finish("headline", figures, TARGETS, is_stored=False)


if __name__ == "__main__":
    main()
