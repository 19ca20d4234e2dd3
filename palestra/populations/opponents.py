"""A meta-strategy, and whom a response to it trains against: its marginals, a joint distribution, or a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.populations.normal_form.tables import joint_of, marginals
from palestra.populations.population import Mix, Player

LEAST = 1e-6  # a probability below is none


@dataclass(frozen=True)
class Meta:
    """How often members play each other: `joint` [m_0, ..., m_n-1] over `names` by seat; `seats` names the player at
    each. Choices are independent unless `correlated`. A player of several seats uses its first one's marginal."""

    seats: tuple[Player, ...]
    names: tuple[tuple[str, ...], ...]
    joint: np.ndarray
    correlated: bool = False

    @classmethod
    def independent(
        cls, seats: tuple[Player, ...], names: Sequence[Sequence[str]], strategies: Sequence[np.ndarray]
    ) -> Meta:
        """That of a distribution for each seat; seats of one player share its first one's."""
        shared = [strategies[seats.index(player)] for player in seats]
        return cls(seats, tuple(map(tuple, names)), joint_of(shared))

    def mix(self, player: Player) -> Mix:
        """A player's marginal, without members that have next to nothing."""
        seat = self.seats.index(player)
        return normal(dict(zip(self.names[seat], marginals(self.joint)[seat].tolist(), strict=True)))

    def mixes(self) -> dict[Player, Mix]:
        return {player: self.mix(player) for player in dict.fromkeys(self.seats)}

    def best(self, payoffs: Sequence[np.ndarray], player: Player) -> str:
        """The player's member that earns most against the others, the newest of equals."""
        seat = self.seats.index(player)
        rows = np.moveaxis(payoffs[seat], seat, 0).reshape(len(self.names[seat]), -1)
        earned = rows @ self.joint.sum(axis=seat).ravel()
        return self.names[seat][int(np.flatnonzero(earned >= earned.max() - 1e-12)[-1])]

    def widened(self, names: Sequence[Sequence[str]]) -> Meta:
        """The same over more members, who come after its own and never play."""
        more = [(0, len(wide) - len(own)) for wide, own in zip(names, self.names, strict=True)]
        return Meta(self.seats, tuple(map(tuple, names)), np.pad(self.joint, more), self.correlated)


def normal(mix: Mix) -> Mix:
    """The mixture without members that have next to nothing."""
    kept = {name: p for name, p in mix.items() if p >= LEAST}
    total = sum(kept.values())
    return {name: p / total for name, p in kept.items()}


def opponents(meta: Meta, player: Player, told: str | None = None) -> dict[str, Any]:
    """The part of a train task's order that says whom `player` meets: `opponents`, or `joint` where correlated.

    `told` is the member that the meta-strategy recommends in the games that count (a deviation from a correlated
    equilibrium); without it all games do (coarse).
    """
    if not meta.correlated:
        others = [other for other in dict.fromkeys(meta.seats) if other != player]
        return {"opponents": {other: meta.mix(other) for other in others or [player]}}
    return {"joint": [[members, p] for members, p in _others(meta, player, told)]}


def _others(meta: Meta, player: Player, told: str | None) -> Iterator[tuple[dict[Player, str], float]]:
    """The others' members together, and how often `player` meets them."""
    seat = meta.seats.index(player)
    shares = meta.joint.sum(axis=seat) if told is None else meta.joint.take(meta.names[seat].index(told), axis=seat)
    shares = np.where(shares < LEAST * shares.sum(), 0.0, shares)
    rest = [other for other in range(len(meta.seats)) if other != seat]
    for index in np.argwhere(shares).tolist():
        members = {meta.seats[other]: meta.names[other][i] for other, i in zip(rest, index, strict=True)}
        yield members, float(shares[tuple(index)] / shares.sum())


def rectified(meta: Meta, payoffs: Sequence[np.ndarray], player: Player, member: str) -> dict[str, Any]:
    """`opponents` for a response that goes on from `member`: whom it beats, as often as the meta-strategy plays them
    (PSRO_rN; Balduzzi et al., 2019, algorithm 4). For two seats.

    To beat is to earn no less than the seat does in the meta-game: than 0, where the game is symmetric. One who beats
    nobody trains against all.
    """
    seat = meta.seats.index(player)
    other = meta.seats[1 - seat]
    earned = payoffs[seat].take(meta.names[seat].index(member), axis=seat)
    par = (meta.joint * payoffs[seat]).sum() - 1e-9
    mix = meta.mix(other)
    beaten = [name for name, earns in zip(meta.names[1 - seat], earned, strict=True) if earns >= par and name in mix]
    return {"opponents": {other: normal({name: mix[name] for name in beaten}) if beaten else mix}}


def gap(meta: Meta, payoffs: Sequence[np.ndarray], coarse: bool = True) -> float:
    """What the players could gain by leaving `meta` for their best member in a table over the same names, summed.

    NashConv within the table where players choose independently, the gap to a coarse correlated equilibrium where they
    do not; with `coarse` false a player may choose by what it was told, and the gap is that to a correlated one.
    """
    total = 0.0
    for seat, table in enumerate(payoffs):
        joint, own = (np.moveaxis(array, seat, 0).reshape(table.shape[seat], -1) for array in (meta.joint, table))
        told_played = joint @ own.T
        played = told_played.sum(0).max() if coarse else told_played.max(1).sum()
        total += float(played - np.trace(told_played))
    return total


def members_of(order: Mapping[str, Any]) -> list[str]:
    """The members that an order names as opponents."""
    mixes = [members.values() for members, _ in order["joint"]] if "joint" in order else order["opponents"].values()
    return list(dict.fromkeys(name for names in mixes for name in names))
