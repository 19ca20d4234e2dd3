"""Ratings of members, and measures of cycles, which ratings cannot express.

Ratings order members; if each member of a group is beaten by another member of it, there is no order. `cyclicity`
measures the share of the results that no rating can explain. `points_MM[a, b]` float64 counts how often `a` has beaten
`b`, a draw counting half; `PayoffTable.pairwise_scores` computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from palestra.populations.payoffs import PayoffTable

ELO_PER_LOG_ODDS = 400 / np.log(10)  # Elo points per unit of log-odds


class Ratings(NamedTuple):
    """Elo points and their standard errors, float64 [M] each."""

    elo_M: np.ndarray
    stderr_M: np.ndarray


class SkillRating(NamedTuple):
    """Normal distribution of a member's skill (OpenSkill). `mu - 3 * sigma` is a conservative estimate."""

    mu: float
    sigma: float


class Cyclicity(NamedTuple):
    """Result of `cyclicity`: the `share` (0 to 1) of the squared log-odds that no rating can explain; `groups` of
    members in which each is beaten by another; and a `warning`, empty if there are no such groups.

        Cyclicity(share=1.0, groups=[["rock", "paper", "scissors"]], warning="each of rock, paper, scissors ...")
    """

    share: float
    groups: list[list[str]]
    warning: str


def fit_elo(points_MM: np.ndarray, *, mean: float = 1200.0, prior_draws: float = 1.0) -> Ratings:
    """Returns the maximum-likelihood Elo ratings with mean `mean`, independent of the order of games (Bradley & Terry,
    1952).

    `points_MM` is float64 [M, M]. Each pair that met gets `prior_draws` additional drawn games, which keeps ratings of
    unbeaten members finite. Standard errors are those of the difference from the mean. Raises ValueError if the games
    do not connect all members, or, without a prior, if some group of members never lost to the rest.
    """
    played = points_MM + points_MM.T
    points = points_MM + np.where(played > 0, prior_draws / 2, 0)
    if len(_groups(points > 0)) > 1:
        raise ValueError(
            "these games do not connect all members: some never met the others, or never lost to them. Play more "
            "pairs, or set prior_draws above 0"
        )
    games = points + points.T
    worth = np.zeros(len(points))
    for _ in range(1000):
        odds = 1 / (1 + np.exp(worth[None, :] - worth[:, None]))
        bend = _inverse_laplacian(_laplacian(games * odds * (1 - odds)))
        step = bend @ (points - games * odds).sum(axis=1)
        worth += np.clip(step, -2, 2)  # Newton steps are too long where the likelihood is almost linear
        if np.abs(step).max(initial=0) < 1e-10:
            break
    return Ratings(
        mean + ELO_PER_LOG_ODDS * (worth - worth.mean()), ELO_PER_LOG_ODDS * np.sqrt(np.maximum(bend.diagonal(), 0))
    )


def _inverse_laplacian(laplacian_MM: np.ndarray) -> np.ndarray:
    """Returns the pseudo-inverse of the Laplacian of a connected graph. Its only null vector, equal values for all, is
    excluded exactly: by their size, rounding errors cannot be told from small eigenvalues."""
    scale = laplacian_MM.trace() / len(laplacian_MM) ** 2 or 1.0  # on the order of the eigenvalues
    return np.linalg.inv(laplacian_MM + scale) - 1 / (scale * len(laplacian_MM) ** 2)


def log_odds(points_MM: np.ndarray, prior_draws: float = 1.0) -> np.ndarray:
    """Returns the log-odds of a win [M, M] with `prior_draws` drawn games each; 0 for pairs that never met."""
    have_met = points_MM + points_MM.T > 0
    smooth = np.where(have_met, points_MM + prior_draws / 2, 1)
    return np.where(have_met, np.log(smooth) - np.log(smooth.T), 0)


def cyclicity(names: Sequence[str], points_MM: np.ndarray, *, z_threshold: float = 2.0) -> Cyclicity:
    """Returns how far the results [M, M] are from an order: the share of the squared log-odds, weighted by games, that
    remains after the best rating is subtracted (Jiang et al., 2011: HodgeRank, eq. 28).

    `share` contains sampling errors too. `groups` use only results that differ from even by more than `z_threshold`
    standard errors.
    """
    games = points_MM + points_MM.T
    flow = log_odds(points_MM)
    worth = np.linalg.pinv(_laplacian(games), hermitian=True) @ (games * flow).sum(axis=1)
    left = flow - (worth[:, None] - worth[None, :])
    total = float((games * flow**2).sum())
    share = float((games * left**2).sum()) / total if total > 0 else 0.0
    beats = points_MM - points_MM.T > z_threshold * np.sqrt(games)
    groups = [[names[one] for one in group] for group in _groups(beats) if len(group) > 1]
    return Cyclicity(share, groups, _warning(share, groups))


def _warning(share: float, groups: list[list[str]]) -> str:
    if not groups:
        return ""
    listed = "; ".join(", ".join(group) for group in groups)
    return (
        f"ratings cannot express cycles, and here are some: each of {listed} is beaten by another of them. "
        f"No rating explains {share:.0%} of the results: see the payoff table"
    )


def _groups(edge_MM: np.ndarray) -> list[list[int]]:
    """Returns the strongly connected components of a graph [M, M] bool, by reachability."""
    reach = edge_MM | np.eye(len(edge_MM), dtype=bool)
    for _ in range(max(len(reach) - 1, 1).bit_length()):
        reach = reach @ reach
    both = reach & reach.T
    return [np.flatnonzero(row).tolist() for number, row in enumerate(both) if number == row.argmax()]


def _laplacian(weight_MM: np.ndarray) -> np.ndarray:
    return np.diag(weight_MM.sum(axis=1)) - weight_MM


def openskill_ratings(games: Iterable[tuple[Sequence[str], Sequence[float]]]) -> dict[str, SkillRating]:
    """Returns the members' skills after `games`, in order. A game is a list of members, of any number, and their scores
    (higher is better).

    The method is Weng & Lin's (2011), computed by `PlackettLuce` of the package `openskill`. Games of a member against
    itself are skipped.
    """
    from openskill.models import PlackettLuce

    model = PlackettLuce()
    skills: dict[str, SkillRating] = {}
    for names, scores in games:
        if len(set(names)) == len(names):
            known = (skills.get(name, SkillRating(model.mu, model.sigma)) for name in names)
            teams = [[model.rating(mu=skill.mu, sigma=skill.sigma)] for skill in known]
            for name, (after,) in zip(names, model.rate(teams, scores=list(scores)), strict=True):
                skills[name] = SkillRating(after.mu, after.sigma)
    return skills


def cross_play(payoffs: PayoffTable, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Returns mean returns, float64 [rows, columns], of the members `rows` at the first of two seats against the
    members `columns` at the second; NaN for pairs that never met."""
    cells = [payoffs.cell(pair) for pair in product(rows, columns)]
    means = [cell.mean[0] if cell.exact or cell.games else np.nan for cell in cells]
    return np.array(means, float).reshape(len(rows), len(columns))
