"""Who there is: members of a population, by player of the game that they play among themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Player = str  # of the meta-game: a seat, or the one name of a population that plays every seat
Mix = dict[str, float]  # members by name -> probability


@dataclass(frozen=True)
class Member:
    """A frozen policy. `name` is unique in its run and the name of its folder; `weights` says where it lies: a folder
    below the run's, or "" for one that needs no weights (`uniform`). `parent` is whom it started from. One whose player
    is "" is a member of every player.

        Member("player_0-3", "player_0", "members/player_0-3", parent=None, info={"iteration": 3})
    """

    name: str
    player: Player
    weights: str = ""
    parent: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Population:
    """Members of each player, oldest first. A symmetric game has one player, whose members sit at every seat."""

    def __init__(self, players: tuple[Player, ...]) -> None:
        self.players = players
        self.members: dict[str, Member] = {}

    def add(self, member: Member) -> Member:
        """Raises ValueError for a name that is taken and for a player unknown."""
        if member.name in self.members:
            raise ValueError(f'there is a member "{member.name}" already; names of members are unique in a run')
        if member.player and member.player not in self.players:
            raise ValueError(f'"{member.player}" is no player here; there are {", ".join(self.players)}')
        self.members[member.name] = member
        return member

    def of(self, player: Player) -> list[str]:
        """The names of a player's members."""
        return [name for name, member in self.members.items() if member.player in ("", player)]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(member) for member in self]
