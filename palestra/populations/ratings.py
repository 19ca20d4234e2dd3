"""How good members are, in one number each, and how much such a number hides.

Ratings order members; a population in which each is beaten by another has no order. `cyclicity` measures how much of
the payoff table no rating can say, and Nash averaging and relative performance weigh members by the opponents that
matter instead. `points_MM[a, b]` is how often `a` has beaten `b`, a draw counting half: `Payoffs.points` makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from palestra.populations.normal_form.zero_sum import maximin, value
from palestra.populations.payoffs import Payoffs

ELO = 400 / np.log(10)  # points per unit of log-odds


class Ratings(NamedTuple):
    """Elo points and their standard errors, [M] each."""

    elo_M: np.ndarray
    stderr_M: np.ndarray


class Skill(NamedTuple):
    """A normal distribution of what a member is worth. The lower end of what is likely is `mu - 3 * sigma`."""

    mu: float
    sigma: float


class Cyclicity(NamedTuple):
    """`share` (0 to 1) of the variance of log-odds that no rating can explain; groups of members in which each is
    beaten by another; and a text that says so, empty where there are none.

    Cyclicity(share=1.0, groups=[["rock", "paper", "scissors"]], warning="each of rock, paper, scissors ...")
    """

    share: float
    groups: list[list[str]]
    warning: str


def elo_update(one: float, other: float, score: float, k: float = 32.0) -> tuple[float, float]:
    """Both players' Elo after a game in which the first scored `score`: 1 for a win, 0.5 for a draw (Elo, 1978)."""
    gain = k * (score - 1 / (1 + 10 ** ((other - one) / 400)))
    return one + gain, other - gain


def fit_elo(points_MM: np.ndarray, *, mean: float = 1200.0, prior: float = 1.0) -> Ratings:
    """The Elo under which all games are most likely, whatever their order (Bradley & Terry, 1952), of average `mean`.

    Pairs that met are taken to have drawn `prior` games besides, which keeps those finite who never lost. Standard
    errors are of the distance to the average. Raises ValueError where games do not link all members, and for no prior
    where some group never lost to the rest.
    """
    met = points_MM + points_MM.T
    points = points_MM + np.where(met > 0, prior / 2, 0)
    if len(_groups(points > 0)) > 1:
        raise ValueError(
            "these games rate only members of one group at a time: some never met the rest, or never lost to them. "
            "Play more pairs, or give a prior above 0"
        )
    games = points + points.T
    worth = np.zeros(len(points))
    for _ in range(1000):
        odds = 1 / (1 + np.exp(worth[None, :] - worth[:, None]))
        bend = np.linalg.pinv(_laplacian(games * odds * (1 - odds)), hermitian=True)
        step = bend @ (points - games * odds).sum(axis=1)
        worth += np.clip(step, -2, 2)  # far from the answer the likelihood is almost straight, and steps too long
        if np.abs(step).max(initial=0) < 1e-10:
            break
    return Ratings(mean + ELO * (worth - worth.mean()), ELO * np.sqrt(np.maximum(bend.diagonal(), 0)))


def log_odds(points_MM: np.ndarray, prior: float = 1.0) -> np.ndarray:
    """The log-odds [M, M] of a win, antisymmetric, with `prior` games drawn besides; 0 for pairs that never met."""
    met = points_MM + points_MM.T > 0
    smooth = np.where(met, points_MM + prior / 2, 1)
    return np.where(met, np.log(smooth) - np.log(smooth.T), 0)


def cyclicity(names: Sequence[str], points_MM: np.ndarray, *, sure: float = 2.0) -> Cyclicity:
    """How far the members are from an order: the share of the squared log-odds, weighed by games, that is left when the
    best rating is taken out (Jiang et al., 2011: HodgeRank, eq. 28).

    Sampling errors count as cycles there. In `groups` only wins count that are `sure` standard errors from even.
    """
    games = points_MM + points_MM.T
    flow = log_odds(points_MM)
    worth = np.linalg.pinv(_laplacian(games), hermitian=True) @ (games * flow).sum(axis=1)
    left = flow - (worth[:, None] - worth[None, :])
    total = float((games * flow**2).sum())
    share = float((games * left**2).sum()) / total if total > 0 else 0.0
    beats = points_MM - points_MM.T > sure * np.sqrt(games)
    groups = [[names[one] for one in group] for group in _groups(beats) if len(group) > 1]
    return Cyclicity(share, groups, _warning(share, groups))


def _warning(share: float, groups: list[list[str]]) -> str:
    if not groups:
        return ""
    listed = "; ".join(", ".join(group) for group in groups)
    return (
        f"ratings are blind to cycles, and here are some: each of {listed} is beaten by another of them. "
        f"No rating explains {share:.0%} of the results: read the payoff table, or Nash averaging"
    )


def _groups(edge_MM: np.ndarray) -> list[list[int]]:
    """The strongly connected components of a graph, by reachability."""
    reach = edge_MM | np.eye(len(edge_MM), dtype=bool)
    for _ in range(max(len(reach) - 1, 1).bit_length()):
        reach = reach @ reach
    both = reach & reach.T
    return [np.flatnonzero(row).tolist() for number, row in enumerate(both) if number == row.argmax()]


def _laplacian(weight_MM: np.ndarray) -> np.ndarray:
    return np.diag(weight_MM.sum(axis=1)) - weight_MM


def openskill(games: Iterable[tuple[Sequence[str], Sequence[float]]]) -> dict[str, Skill]:
    """Skills after games in their order, each the members and their scores, higher being better; any number of members
    (Weng & Lin, 2011, by the `openskill` package's PlackettLuce). Games of a member with itself say nothing and are
    left out."""
    from openskill.models import PlackettLuce

    model = PlackettLuce()
    skills: dict[str, Skill] = {}
    for names, scores in games:
        if len(set(names)) == len(names):
            known = (skills.get(name, Skill(model.mu, model.sigma)) for name in names)
            teams = [[model.rating(mu=skill.mu, sigma=skill.sigma)] for skill in known]
            for name, (after,) in zip(names, model.rate(teams, scores=list(scores)), strict=True):
                skills[name] = Skill(after.mu, after.sigma)
    return skills


def nash_averaging(table_MM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most random Nash equilibrium [M] of an antisymmetric table, such as `log_odds`, and what each member earns
    against it [M] (Balduzzi et al., 2018, sec. 3): at most 0, and the same whoever else is added twice. Raises
    ValueError for a table that is not antisymmetric."""
    if not np.allclose(table_MM, -table_MM.T):
        raise ValueError("Nash averaging is for antisymmetric tables: what one wins the other loses; take log_odds")
    strategy = maximin(table_MM, "entropy")
    return strategy, table_MM @ strategy


def cross_play(payoffs: Payoffs, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Mean returns [rows, columns] of members at the first of two seats against others at the second; NaN for those who
    never met."""
    cells = [[payoffs.cell((row, column)) for column in columns] for row in rows]
    return np.array([[cell.mean[0] if cell.known or cell.games else np.nan for cell in line] for line in cells])


def relative_performance(table: np.ndarray) -> float:
    """What one population [rows] is worth against another [columns] when both play their best mixture: the value of
    the zero-sum table of the first's payoffs (Balduzzi et al., 2019, def. 3). Above 0 the first is ahead."""
    return value(table)
