"""Statistics of finished games: cells of a payoff table, and a learner's results against each opponent.

Shapes: `F` games, `N` seats, `S` seats of opponents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.populations.tasks import ResultDict


def cell_result(returns: np.ndarray) -> ResultDict:
    """Returns the statistics of games with these returns, float [F, N]. A game is won by the seat with more than all
    others; else it is a draw."""
    mean = returns.mean(0)
    ahead = returns == returns.max(1, keepdims=True)
    alone = ahead.sum(1) == 1
    return {
        "games": len(returns),
        "mean": mean.tolist(),
        "m2": np.square(returns - mean).sum(0).tolist(),
        "wins": (ahead & alone[:, None]).sum(0).tolist(),
        "draws": int((~alone).sum()),
    }


def opponent_results(own: np.ndarray, theirs: np.ndarray, members: np.ndarray, names: Sequence[str]) -> ResultDict:
    """Returns a learner's mean return over its games (None without games), and its results `against` each opponent by
    name.

    `own` [F] are the learner's returns, `theirs` [F, S] the opponents', `members` int [F, S] their numbers in `names`.
    A result holds games, mean return, mean squared return, and games won and drawn by comparison of returns.
    """
    lines: dict[str, ResultDict] = {}
    for place in range(members.shape[1]):
        for number in np.unique(members[:, place]):
            met = members[:, place] == number
            _add(lines.setdefault(names[number], {}), own[met], theirs[met, place])
    for line in lines.values():
        line["return"] /= line["games"]
        line["square"] /= line["games"]
    return {"return": float(own.mean()) if len(own) else None, "against": lines}


def _add(line: ResultDict, own: np.ndarray, theirs: np.ndarray) -> None:
    found = {
        "games": len(own),
        "return": float(own.sum()),
        "square": float(np.square(own).sum()),
        "wins": int((own > theirs).sum()),
        "draws": int((own == theirs).sum()),
    }
    for key, value in found.items():
        line[key] = line.get(key, 0) + value
