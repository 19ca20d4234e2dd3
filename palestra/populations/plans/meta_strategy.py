"""Meta-strategies, and the opponents of a response to one: its marginals, its joint distribution, or part of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from palestra.populations.normal_form.payoff_tensors import joint_distribution, marginals
from palestra.populations.population import Mix, Player
from palestra.populations.tasks import Lineup, Opponents

MIN_PROBABILITY = 1e-6  # smaller probabilities count as 0


@dataclass(frozen=True)
class MetaStrategy:
    """Meta-strategy: a joint distribution `joint` float64 [m_0, ..., m_n-1] over members.

    `names` are the members by seat, `seats` the player at each seat. Players choose independently unless
    `is_correlated`. A player with several seats uses the marginal of its first seat.
    """

    seats: tuple[Player, ...]
    names: tuple[tuple[str, ...], ...]
    joint: np.ndarray
    is_correlated: bool = False

    @classmethod
    def independent(
        cls, seats: tuple[Player, ...], names: Sequence[Sequence[str]], strategies: Sequence[np.ndarray]
    ) -> MetaStrategy:
        """Returns the product of the players' distributions [m_i], each that of the player's first seat."""
        shared = [strategies[seats.index(player)] for player in seats]
        return cls(seats, tuple(map(tuple, names)), joint_distribution(shared))

    def marginal(self, player: Player) -> Mix:
        """Returns a player's marginal, without negligible probabilities."""
        seat = self.seats.index(player)
        return drop_negligible(dict(zip(self.names[seat], marginals(self.joint)[seat].tolist(), strict=True)))

    def all_marginals(self) -> dict[Player, Mix]:
        return {player: self.marginal(player) for player in dict.fromkeys(self.seats)}

    def best_member(self, payoffs: Sequence[np.ndarray], player: Player) -> str:
        """Returns the player's best member against the others' meta-strategy; of equals, the newest."""
        seat = self.seats.index(player)
        rows = np.moveaxis(payoffs[seat], seat, 0).reshape(len(self.names[seat]), -1)
        earned = rows @ self.joint.sum(axis=seat).ravel()
        return self.names[seat][int(np.flatnonzero(earned >= earned.max() - 1e-12)[-1])]

    def pad_to(self, names: Sequence[Sequence[str]]) -> MetaStrategy:
        """Returns the same meta-strategy over longer lists of members, whose last ones have probability 0."""
        more = [(0, len(wide) - len(narrow)) for wide, narrow in zip(names, self.names, strict=True)]
        return MetaStrategy(self.seats, tuple(map(tuple, names)), np.pad(self.joint, more), self.is_correlated)


def drop_negligible(mix: Mix) -> Mix:
    """Returns the mixture without negligible probabilities, normalised."""
    large = {name: p for name, p in mix.items() if p >= MIN_PROBABILITY}
    total = sum(large.values())
    return {name: p / total for name, p in large.items()}


def meta_opponents(meta: MetaStrategy, player: Player, recommended: str | None = None) -> Opponents:
    """Returns the opponents of `player` under the meta-strategy: line-ups if it is correlated, else a mixture of each
    player.

    With `recommended`, the opponents are those of games in which the meta-strategy recommends that member (deviation
    from a correlated equilibrium); else those of all games (from a coarse one).
    """
    if not meta.is_correlated:
        others = [other for other in dict.fromkeys(meta.seats) if other != player]
        return Opponents(mixes={other: meta.marginal(other) for other in others or [player]})
    return Opponents(joint=tuple(_lineups(meta, player, recommended)))


def _lineups(meta: MetaStrategy, player: Player, recommended: str | None) -> Iterator[Lineup]:
    """Yields the members of the other players, with the probability that `player` meets them."""
    seat = meta.seats.index(player)
    if recommended is None:
        shares = meta.joint.sum(axis=seat)
    else:
        shares = meta.joint.take(meta.names[seat].index(recommended), axis=seat)
    shares = np.where(shares < MIN_PROBABILITY * shares.sum(), 0.0, shares)
    rest = [other for other in range(len(meta.seats)) if other != seat]
    for index in np.argwhere(shares).tolist():
        members = {meta.seats[other]: meta.names[other][i] for other, i in zip(rest, index, strict=True)}
        yield Lineup(members, float(shares[tuple(index)] / shares.sum()))


def beaten_opponents(meta: MetaStrategy, payoffs: Sequence[np.ndarray], player: Player, member: str) -> Opponents:
    """Returns the opponents of a response that continues `member`: those that it beats, weighted by the meta-strategy
    (PSRO_rN; Balduzzi et al., 2019, algorithm 4). For games with two seats.

    `member` beats an opponent if its return is at least the seat's value under the meta-strategy (0 in a symmetric
    game). A member that beats none trains against all.
    """
    seat = meta.seats.index(player)
    other = meta.seats[1 - seat]
    earned = payoffs[seat].take(meta.names[seat].index(member), axis=seat)
    par = (meta.joint * payoffs[seat]).sum() - 1e-9
    mix = meta.marginal(other)
    beaten = [name for name, earns in zip(meta.names[1 - seat], earned, strict=True) if earns >= par and name in mix]
    return Opponents(mixes={other: drop_negligible({name: mix[name] for name in beaten}) if beaten else mix})


def equilibrium_gap(meta: MetaStrategy, payoffs: Sequence[np.ndarray], coarse: bool = True) -> float:
    """Returns the sum over players of the gain from deviating from `meta` to the best member in the payoff tensors
    [m_0, ..., m_n-1] of each seat, in units of return.

    If players choose independently, this is NashConv within the table; if they are correlated, the gap to a coarse
    correlated equilibrium. With `coarse=False` a player deviates after it sees its recommendation: this is the gap to a
    correlated equilibrium.
    """
    total = 0.0
    for seat, table in enumerate(payoffs):
        joint, returns = (np.moveaxis(array, seat, 0).reshape(table.shape[seat], -1) for array in (meta.joint, table))
        recommended_played = joint @ returns.T
        played = recommended_played.sum(0).max() if coarse else recommended_played.max(1).sum()
        total += float(played - np.trace(recommended_played))
    return total
