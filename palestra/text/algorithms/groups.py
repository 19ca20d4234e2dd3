"""Groups of siblings, the answers whose values are compared: they share one starting point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.core.config import is_changed
from palestra.core.types import Answer, Episode, Node, Seat
from palestra.text.algorithms.base import TextAlgorithm
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.tree_rollout import Branching, Keep


@dataclass(frozen=True)
class SiblingGroup:
    """Siblings of one seat: `values` [K], and for each sibling the nodes that receive its advantage (none for a
    trajectory in which the seat did not act). With `branch_at: root`, `turn_rewards` has the reward of each of these
    nodes, counted until the seat's next one. Lost siblings are left out; `lost` is their number. `is_flat`: the values
    differ by a KL penalty only."""

    seat: Seat
    values: list[float]
    nodes: list[list[Node]]
    turn_rewards: list[list[float]] = field(default_factory=list)
    lost: int = 0
    is_flat: bool = False

    @property
    def answers(self) -> list[Answer]:
        """The seat's answers at all nodes."""
        return [node.answers[self.seat] for node in chain.from_iterable(self.nodes)]

    @property
    def policies(self) -> set[str]:
        """The names, without versions, of the policies that gave the answers."""
        return {member_name(answer.policy) for answer in self.answers}


Reward = Callable[[Node, Seat], float]  # of a seat at a node
Penalty = Callable[[Node, Seat], float]  # of a seat's answer at a node, in units of reward


class GroupAlgorithm(TextAlgorithm):
    """Base config of algorithms that compare siblings: whole trajectories or answers to one observation."""

    branch_at: Literal["root", "turn"] = "turn"
    """`root`: siblings are `group_size` whole trajectories from one first step. `turn`: they are `group_size` answers
    of one seat to one observation."""
    continue_from: Keep = "best"
    """With `branch_at: turn`, the siblings that the episode continues from: `best`, `random`, `epsilon` (best, but
    random with probability `epsilon`) or `all`."""
    group_size: int = Field(8, ge=2, le=4096)
    """Siblings per group (group size)."""
    epsilon: float = Field(0.1, ge=0, le=1)
    """With `continue_from: epsilon`, the probability of continuing from a random sibling."""
    team_weight: float = Field(1.0, ge=0)
    """Weight of the team's reward: rewards are team_weight * team + local."""

    @model_validator(mode="after")
    def _explores_where_epsilon_is_set(self) -> Self:
        explores = self.branch_at == "turn" and self.continue_from == "epsilon"
        if not explores and is_changed(self, "epsilon"):
            raise ValueError(
                f"epsilon: {self.epsilon:g} has no effect: it is the probability of a random sibling with "
                "branch_at: turn and continue_from: epsilon: set these, or remove it"
            )
        return self

    @property
    def branching(self) -> Branching:
        return Branching(
            self.branch_at,
            self.group_size,
            "all" if self.branch_at == "root" else self.continue_from,
            self.epsilon,
            self.team_weight,
        )

    def reward(self, node: Node, seat: Seat) -> float:
        """Returns the node's part of the value of a seat's answers: team_weight * team reward + the seat's own."""
        return node.reward(seat, self.team_weight)

    @property
    def penalties(self) -> list[Penalty]:
        """Functions of a node and a seat whose values are subtracted from the rewards of answers."""
        return []

    def policy_groups(
        self, episodes: Sequence[Episode], policy: str, penalties: Sequence[Penalty] | None = None
    ) -> list[SiblingGroup]:
        """Returns the groups of `policy`'s answers in all episodes."""
        groups = chain.from_iterable(self.groups(episode, penalties) for episode in episodes)
        return [group for group in groups if policy in group.policies]

    def groups(self, episode: Episode, penalties: Sequence[Penalty] | None = None) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode; none if it failed. `penalties` are subtracted from the rewards (None: those
        of the config)."""
        if episode.error is not None:
            return
        subtracted = self.penalties if penalties is None else penalties

        def reward(node: Node, seat: Seat) -> float:
            value = self.reward(node, seat)
            for penalty in subtracted:
                value -= penalty(node, seat)
            return value

        yield from self._trajectories(episode, reward) if self.branch_at == "root" else self._turns(episode, reward)

    @property
    def compares_trajectories(self) -> bool:
        """True if the siblings of a group are compared by one value for each whole trajectory."""
        return True

    def _trajectories(self, episode: Episode, reward: Reward) -> Iterator[SiblingGroup]:
        """Yields one group per seat: the trajectories in which it acted, with their returns (the sum of `reward` over
        the nodes).

        If the seat's policy plays other seats too, trajectories in which the seat did not act are siblings as well,
        since it was the policy's own choice not to call that seat (MATPO, Mo et al., 2025).
        """
        trajectories = [episode.trajectory(leaf) for leaf in episode.leaves()]
        lost = sum(node.is_lost for node in episode.children(None))
        players = Counter(map(member_name, episode.seats.values()))
        for seat, policy in episode.seats.items():
            nodes = [[node for node in trajectory if seat in node.answers] for trajectory in trajectories]
            with_all = self.compares_trajectories and players[member_name(policy)] > 1
            compared = [i for i, seat_nodes in enumerate(nodes) if seat_nodes or with_all]
            if any(nodes):
                values = [sum(reward(node, seat) for node in trajectories[i]) for i in compared]
                rewards = [_turn_rewards(trajectories[i], seat, reward) for i in compared]
                yield SiblingGroup(seat, values, [nodes[i] for i in compared], rewards, lost)

    def _turns(self, episode: Episode, reward: Reward) -> Iterator[SiblingGroup]:
        """Yields one group per branching point and seat. In full trees (`continue_from: all`) a sibling's value
        includes its subtree; otherwise only one sibling has a continuation, so values are the step's own rewards."""
        families: dict[int | None, list[Node]] = {}
        for node in episode.valid_nodes:
            families.setdefault(node.parent, []).append(node)
        for parent, siblings in families.items():
            lost = len(episode.children(parent)) - len(siblings)
            for seat in siblings[0].answers:
                values = [self._value(node, seat, families, reward) for node in siblings]
                yield SiblingGroup(seat, values, [[node] for node in siblings], lost=lost)

    def _value(self, node: Node, seat: Seat, families: dict[int | None, list[Node]], reward: Reward) -> float:
        value = reward(node, seat)
        if self.continue_from == "all" and node.id in families:
            value += float(np.mean([self._value(child, seat, families, reward) for child in families[node.id]]))
        return value


def _turn_rewards(trajectory: Sequence[Node], seat: Seat, reward: Reward) -> list[float]:
    """Returns the reward of each of a seat's turns, counted until its next turn. Rewards before its first turn are
    dropped, since none of its answers caused them."""
    rewards: list[float] = []
    for node in trajectory:
        if seat in node.answers:
            rewards.append(0.0)
        if rewards:
            rewards[-1] += reward(node, seat)
    return rewards
