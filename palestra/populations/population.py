"""Members of a population, by player of the meta-game, and the sides of a game."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from palestra.core.mappings import key_by_value

Player = str  # player of the meta-game: a seat, a side, or the name of the one population that plays all of them
Mix = dict[str, float]  # members by name -> probability


@dataclass(frozen=True)
class Sides:
    """The sides of a game: seats that one member plays as a whole.

    Sides(("red", "blue"), ((0, 2), (1, 3)))
    """

    owners: tuple[Player, ...]
    """The player of each side."""
    seats: tuple[tuple[int, ...], ...]
    """The seats of each side, by number."""

    @classmethod
    def of(cls, names: Sequence[Player]) -> Self:
        """Returns the sides of a game: seats of one name are a side, whose player has the name."""
        seats: dict[Player, list[int]] = {}
        for number, name in enumerate(names):
            seats.setdefault(name, []).append(number)
        return cls(tuple(seats), tuple(map(tuple, seats.values())))

    def with_owner(self, player: Player) -> Self:
        """Returns the same sides, all played by one population, `player`. Raises ValueError if they differ in size."""
        if len({len(side) for side in self.seats}) > 1:
            sizes = ", ".join(f"{owner} has {len(side)}" for owner, side in zip(self.owners, self.seats, strict=True))
            raise ValueError(
                f"symmetric: true has one population for all sides, which must have equally many seats ({sizes}): "
                "name other sides in seats, or leave symmetric out"
            )
        return type(self)((player,) * len(self.seats), self.seats)

    @property
    def players(self) -> tuple[Player, ...]:
        """The players, each once."""
        return tuple(dict.fromkeys(self.owners))

    @property
    def symmetric(self) -> bool:
        """True if one population plays all sides."""
        return len(self.players) == 1

    @property
    def are_seats(self) -> bool:
        """True if each side is a single seat."""
        return all(len(side) == 1 for side in self.seats)

    def side_of_seat(self) -> list[int]:
        """Returns the side of each seat."""
        by_seat = key_by_value(dict(enumerate(self.seats)))
        return [by_seat[seat] for seat in range(len(by_seat))]

    def seats_of(self, player: Player) -> list[int]:
        """Returns the seats of all sides of a player. Raises KeyError if it has none."""
        if player not in self.owners:
            raise KeyError(player)
        owned = (side for owner, side in zip(self.owners, self.seats, strict=True) if owner == player)
        return list(chain(*owned))


@dataclass(frozen=True)
class Member:
    """A frozen policy. `name` is unique in its run and the name of its folder.

    Member("player_0-3", "player_0", "members/player_0-3", parent=None, info={"iteration": 3})
    """

    name: str
    player: Player
    """The player that it belongs to; "": it is a member of every player."""
    weights: str = ""
    """Its folder, relative to the run's folder; "" for a policy without weights (`uniform`)."""
    parent: str | None = None
    """The member whose weights it was trained from, or None."""
    info: Mapping[str, Any] = field(default_factory=dict)


class Population:
    """Members of each player, oldest first. A symmetric game has one player, whose members play every side."""

    def __init__(self, players: tuple[Player, ...]) -> None:
        self.players = players
        self.members: dict[str, Member] = {}

    def add(self, member: Member) -> Member:
        """Adds and returns a member. Raises ValueError if the name is taken or the player is unknown."""
        if member.name in self.members:
            raise ValueError(f'there is already a member "{member.name}"; names of members must be unique in a run')
        if member.player and member.player not in self.players:
            raise ValueError(f'"{member.player}" is not a player here; there are {", ".join(self.players)}')
        self.members[member.name] = member
        return member

    def names_of(self, player: Player) -> list[str]:
        """Returns the names of a player's members, oldest first."""
        return [name for name, member in self.members.items() if member.player in ("", player)]

    def names_with_files(self, names: Iterable[str | None]) -> tuple[str, ...]:
        """Returns the names, each once, of policies with files: members with weights, and future members."""
        members = self.members
        return tuple(name for name in dict.fromkeys(names) if name and (name not in members or members[name].weights))

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)
