"""Who is compared with whom: a group is a set of siblings, answers that started from the same place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from palestra.algorithms.text.base import TextAlgorithm
from palestra.rollouts.figures import member
from palestra.rollouts.play import Branching, Keep
from palestra.types import Episode, Node, Seat


@dataclass(frozen=True)
class Group:
    """Answers of one seat that are compared: what each is worth, and the nodes that share its advantage."""

    seat: Seat
    values: list[float]
    nodes: list[list[Node]]


class SiblingAlgorithm(TextAlgorithm):
    """What compares siblings. With `at: root` they are `k` whole lines from one first step, with `at: turn` the `k`
    answers of one seat to one observation, after which play goes on as `keep` and `epsilon` say, see `Branching`.
    `alpha` mixes rewards as alpha * team + local."""

    at: Literal["root", "turn"] = "turn"
    keep: Keep = "best"
    k: int = Field(8, ge=2, le=4096)
    epsilon: float = Field(0.1, ge=0, le=1)
    alpha: float = Field(1.0, ge=0)

    @property
    def branching(self) -> Branching:
        return Branching(self.at, self.k, "all" if self.at == "root" else self.keep, self.epsilon, self.alpha)

    def groups_of(self, episodes: Sequence[Episode], policy: str) -> list[Group]:
        """The groups of `policy`'s answers in all episodes."""
        return [
            group
            for episode in episodes
            for group in self.groups(episode)
            if any(member(node.answers[group.seat].policy) == policy for node in group.nodes[0])
        ]

    def groups(self, episode: Episode) -> Iterator[Group]:
        """The groups of an episode; none of one that failed."""
        if episode.error is not None:
            return
        if self.at == "root":
            yield from self._lines(episode)
        else:
            yield from self._turns(episode)

    def _lines(self, episode: Episode) -> Iterator[Group]:
        """One group per seat: K lines, each worth its return. A seat's return counts the team's rewards and its own."""
        lines = [episode.line(leaf) for leaf in episode.leaves()]
        for seat in episode.seats:
            nodes = [[node for node in line if seat in node.answers] for line in lines]
            kept = [i for i, own in enumerate(nodes) if own]
            if kept:
                values = [sum(node.reward(seat, self.alpha) for node in lines[i]) for i in kept]
                yield Group(seat, values, [nodes[i] for i in kept])

    def _turns(self, episode: Episode) -> Iterator[Group]:
        """One group per branching point and seat. Full trees (`keep: all`) look ahead; otherwise only one sibling has a
        future, so that comparing futures would be unfair, and the step's own reward decides."""
        families: dict[int | None, list[Node]] = {}
        for node in episode.nodes:
            families.setdefault(node.parent, []).append(node)
        for siblings in families.values():
            for seat in siblings[0].answers:
                values = [self._value(node, seat, families) for node in siblings]
                yield Group(seat, values, [[node] for node in siblings])

    def _value(self, node: Node, seat: Seat, families: dict[int | None, list[Node]]) -> float:
        value = node.reward(seat, self.alpha)
        if self.keep == "all" and node.id in families:
            value += float(np.mean([self._value(child, seat, families) for child in families[node.id]]))
        return value
