"""Members of a population, by player of the meta-game."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Player = str  # player of the meta-game: a seat, or the name of the one population that plays every seat
Mix = dict[str, float]  # members by name -> probability


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
    """Members of each player, oldest first. A symmetric game has one player, whose members play every seat."""

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
        """Returns the names, without duplicates, of policies that have files: members with weights, and policies in
        training, which are not yet members."""
        members = self.members
        return tuple(name for name in dict.fromkeys(names) if name and (name not in members or members[name].weights))

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)
