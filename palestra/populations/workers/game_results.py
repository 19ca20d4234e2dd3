"""Statistics of finished games: cells of a payoff table, and a learner's results against each opponent.

Shapes: `F` games, `N` sides of the game (a seat, or several that one member plays), `S` sides of opponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.populations.payoffs import PayoffCell
from palestra.populations.tasks import OpponentResult


def check_cells(cells: Sequence[Sequence[str]], sides: int) -> None:
    """Raises ValueError for a cell that does not name one member for each of `sides` sides."""
    for cell in cells:
        if len(cell) != sides:
            raise ValueError(f"the cell {', '.join(cell)} names {len(cell)} members, and the game has {sides} seats")


def returns_by_side(returns: np.ndarray, sides: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the mean return of each side's seats, float [F, N], from the returns of all seats."""
    return np.stack([returns[:, list(side)].mean(1) for side in sides], 1)


def payoff_cell(returns: np.ndarray) -> PayoffCell:
    """Returns the statistics of games with these returns, float [F, N]. The side with the highest return wins a game;
    if several have it, the game is a draw."""
    mean = returns.mean(0)
    ahead = returns == returns.max(1, keepdims=True)
    alone = ahead.sum(1) == 1
    return PayoffCell(
        games=len(returns),
        mean=tuple(mean.tolist()),
        m2=tuple(np.square(returns - mean).sum(0).tolist()),
        wins=tuple((ahead & alone[:, None]).sum(0).tolist()),
        draws=int((~alone).sum()),
    )


def opponent_results(
    ours: np.ndarray, theirs: np.ndarray, members: np.ndarray, names: Sequence[str]
) -> dict[str, OpponentResult]:
    """Returns a learner's results against each opponent, by name.

    `ours` [F] are the learner's returns, `theirs` [F, S] the opponents', `members` int [F, S] the opponents' indices in
    `names`. A game is won or drawn against each opponent by comparing the two returns.
    """
    totals: dict[str, dict[str, float]] = {}
    for place in range(members.shape[1]):
        for number in np.unique(members[:, place]):
            against = members[:, place] == number
            _add(totals.setdefault(names[number], {}), ours[against], theirs[against, place])
    return {name: _opponent_result(total) for name, total in totals.items()}


def mean_return(returns: np.ndarray) -> float | None:
    """Returns the mean of returns [F]; None without games."""
    return float(returns.mean()) if len(returns) else None


def _opponent_result(total: Mapping[str, float]) -> OpponentResult:
    games = int(total["games"])
    return OpponentResult(
        games=games,
        mean_return=total["return"] / games,
        mean_squared_return=total["square"] / games,
        wins=total["wins"],
        draws=total["draws"],
    )


def _add(total: dict[str, float], ours: np.ndarray, theirs: np.ndarray) -> None:
    sums = {
        "games": len(ours),
        "return": float(ours.sum()),
        "square": float(np.square(ours).sum()),
        "wins": int((ours > theirs).sum()),
        "draws": int((ours == theirs).sum()),
    }
    for key, value in sums.items():
        total[key] = total.get(key, 0) + value
