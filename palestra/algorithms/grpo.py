"""Group-relative policy optimisation (Shao et al., 2024), for single agents and for teams.

A group is a set of siblings: answers that were compared because they started from the same place. With `at: root` that
is K whole lines from one first step, each scored by its return (MAS + GRPO for a team). With `at: turn, keep: best` it
is the K answers of one seat to one observation, scored by the mixed reward of that step, with play going on from the
best: AT-GRPO (Zhao et al., 2025, arXiv:2510.11062). A group never spans two episodes, two seats or two observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from palestra.config import Strict
from palestra.losses.policy import LOSSES
from palestra.rollouts.figures import member
from palestra.rollouts.play import Branching, Keep
from palestra.types import Episode, Metrics, Node, Sample, Seat


@dataclass(frozen=True)
class Group:
    """Answers of one seat that are compared: what each is worth, and the nodes that share its advantage."""

    seat: Seat
    values: list[float]
    nodes: list[list[Node]]


class GRPO(Strict):
    """GRPO and AT-GRPO. `alpha` mixes rewards as alpha * team + local; `scale: std` divides advantages by the group's
    standard deviation, `none` does not (Dr. GRPO, Liu et al., 2025). A group without differences teaches
    nothing and is skipped."""

    type: Literal["grpo"] = "grpo"
    at: Literal["root", "turn"] = "turn"
    keep: Keep = "best"
    k: int = Field(8, ge=2)
    epsilon: float = Field(0.1, ge=0, le=1)
    alpha: float = Field(1.0, ge=0)
    scale: Literal["std", "none"] = "std"
    clip: float = Field(0.2, gt=0)
    clip_high: float | None = Field(None, gt=0)
    kl: float = Field(0.0, ge=0)
    entropy: float = 0.0

    @property
    def branching(self) -> Branching:
        return Branching(self.at, self.k, "all" if self.at == "root" else self.keep, self.epsilon, self.alpha)

    @property
    def loss(self) -> Callable:
        return LOSSES["clipped_policy"]

    @property
    def loss_options(self) -> dict[str, float | None]:
        options = {"clip": self.clip, "clip_high": self.clip_high, "kl": self.kl, "entropy": self.entropy}
        return {name: value for name, value in options.items() if value}

    def samples(self, episodes: Sequence[Episode], policy: str) -> tuple[list[Sample], Metrics]:
        """What `policy` learns from: its answers in groups whose values differ. Writes every answer's advantage to its
        node. The figures say how many groups there were and which share had nothing to teach."""
        samples: list[Sample] = []
        count = flat = 0
        for episode in episodes:
            for group in self.groups(episode):
                if not any(member(n.answers[group.seat].policy) == policy for n in group.nodes[0]):
                    continue
                advantages = group_advantages(group.values, scale=self.scale)
                count, flat = count + 1, flat + (not any(advantages))
                samples += _annotate(group, advantages)
        return samples, {"groups": float(count), "zero_variance": flat / count if count else 0.0}

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


def group_advantages(values: Sequence[float], *, scale: Literal["std", "none"] = "std") -> list[float]:
    """Each value's distance from the group's mean, in standard deviations with `scale: std` (Shao et al., 2024, sec.
    4.1.2). All zero where the values do not differ.

    The standard deviation is the population form. [1, 0, 0, 0] gives [1.73, -0.58, -0.58, -0.58].
    """
    array = np.asarray(values, np.float64)
    centred = array - array.mean()
    spread = centred.std()
    if spread < 1e-8:
        return [0.0] * len(array)
    return (centred / spread if scale == "std" else centred).tolist()


def _annotate(group: Group, advantages: Sequence[float]) -> list[Sample]:
    """Notes the advantages on the group's nodes; returns samples where they teach something."""
    samples = []
    for nodes, advantage in zip(group.nodes, advantages, strict=True):
        for node in nodes:
            node.advantages[group.seat] = advantage
            answer = node.answers[group.seat]
            if advantage and len(answer.token_ids):
                weights = np.full(len(answer.token_ids), advantage, np.float32)
                samples.append(
                    Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, weights, answer.temperature)
                )
    return samples
