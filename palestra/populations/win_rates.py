"""Recent win rates between members and policies in training."""

from __future__ import annotations

from palestra.populations.population import Mix


class WinRates:
    """Win rates from game counts that decay by the factor `decay` with each game of a pair (AlphaStar's pseudocode has
    0.99: about 100 games)."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.counts: dict[tuple[str, str], tuple[float, float]] = {}  # decayed: games, and wins + draws / 2

    def rate(self, home: str, away: str) -> float:
        """Returns the share of their games that `home` won, a draw counting half; 0.5 if there were none."""
        games, wins = self.counts.get((home, away), (0.0, 0.0))
        return min(wins / games, 1.0) if games else 0.5  # rounding may exceed 1

    def add(self, home: str, away: str, games: int, points: float) -> None:
        """Adds `games` games, of which `home` won `points` (a draw is half of one), as if wins were spread evenly over
        them."""
        if not games:
            return
        kept = self.decay**games
        fresh = float(games) if self.decay == 1 else (1 - kept) / (1 - self.decay)
        for pair, share in (((home, away), points / games), ((away, home), 1 - points / games)):
            old = self.counts.get(pair, (0.0, 0.0))
            self.counts[pair] = (old[0] * kept + fresh, old[1] * kept + share * fresh)

    def remove(self, name: str) -> None:
        """Removes all results of `name`."""
        self.counts = {pair: count for pair, count in self.counts.items() if name not in pair}


def combine_mixes(*parts: tuple[float, Mix]) -> Mix:
    """Returns the mixture of mixtures, each with its weight; names with probability 0 are left out."""
    whole: Mix = {}
    for weight, mix in parts:
        for name, p in mix.items():
            whole[name] = whole.get(name, 0.0) + weight * p
    return {name: p for name, p in whole.items() if p > 0}
