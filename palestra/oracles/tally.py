"""What came of games: a cell of a payoff table, and what a learner won from each member it met.

Shapes: `F` games, `N` seats, `S` seats of others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.populations.tasks import Result


def cell(returns: np.ndarray) -> Result:
    """A cell of games with these returns [F, N]. A game is won by who has more than all others."""
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


def against(own: np.ndarray, theirs: np.ndarray, members: np.ndarray, names: Sequence[str]) -> Result:
    """A learner's mean return over its games [F] (None where there is none), and `against` each member, by number
    [F, S] and name: games, mean return and mean of its square, games won and drawn against what that member had
    [F, S]."""
    lines: dict[str, Result] = {}
    for place in range(members.shape[1]):
        for number in np.unique(members[:, place]):
            met = members[:, place] == number
            _add(lines.setdefault(names[number], {}), own[met], theirs[met, place])
    for line in lines.values():
        line["return"] /= line["games"]
        line["square"] /= line["games"]
    return {"return": float(own.mean()) if len(own) else None, "against": lines}


def _add(line: Result, own: np.ndarray, theirs: np.ndarray) -> None:
    found = {
        "games": len(own),
        "return": float(own.sum()),
        "square": float(np.square(own).sum()),
        "wins": int((own > theirs).sum()),
        "draws": int((own == theirs).sum()),
    }
    for key, value in found.items():
        line[key] = line.get(key, 0) + value
