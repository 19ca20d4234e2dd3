"""Who beats whom, of late, among members and those who still learn."""

from __future__ import annotations

from palestra.populations.population import Mix


class WinRates:
    """Counts that shrink by `decay` with each game of a pair (AlphaStar's pseudocode has 0.99: about 100 games)."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.counts: dict[tuple[str, str], tuple[float, float]] = {}  # games, and wins + draws / 2

    def rate(self, home: str, away: str) -> float:
        """The share of their games that `home` won, a draw counting half; 0.5 where there were none."""
        games, wins = self.counts.get((home, away), (0.0, 0.0))
        return min(wins / games, 1.0) if games else 0.5  # rounding may take it above

    def add(self, home: str, away: str, games: int, wins: float) -> None:
        """Notes `games` games, of which `home` won `wins` (a draw is half of one), as if evenly spread over them."""
        if not games:
            return
        kept = self.decay**games
        fresh = float(games) if self.decay == 1 else (1 - kept) / (1 - self.decay)
        for pair, share in (((home, away), wins / games), ((away, home), 1 - wins / games)):
            old = self.counts.get(pair, (0.0, 0.0))
            self.counts[pair] = (old[0] * kept + fresh, old[1] * kept + share * fresh)

    def forget(self, name: str) -> None:
        """Drops what is known of `name`."""
        self.counts = {pair: count for pair, count in self.counts.items() if name not in pair}


def blend(*parts: tuple[float, Mix]) -> Mix:
    """The mixture of mixtures, each with its weight; who has no probability is left out."""
    whole: Mix = {}
    for weight, mix in parts:
        for name, p in mix.items():
            whole[name] = whole.get(name, 0.0) + weight * p
    return {name: p for name, p in whole.items() if p > 0}
