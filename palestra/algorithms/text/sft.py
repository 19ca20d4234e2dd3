"""Supervised fine-tuning: imitate what was said in lines worth it, and foretell what the world says next.

With a teacher at the seat (`policies.NAME.teacher`), or on recorded play (`data:`), imitation is behaviour cloning;
without either a policy imitates its own successes, which is rejection-sampling fine-tuning (expert iteration, Anthony
et al., 2017). A world model foretells each next observation from what came before it, answer included (Ha &
Schmidhuber, 2018; in the weights of a language agent Zhang et al., 2025, arXiv:2510.08558, "implicit world modeling").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.algorithms.text.base import TextAlgorithm
from palestra.losses.policy import LOSSES
from palestra.rollouts.figures import member
from palestra.rollouts.play import Branching
from palestra.types import Answer, Episode, Memory, Metrics, Node, Sample, Seat


@dataclass(frozen=True)
class Part:
    """One seat's part in a line: the nodes where it answered, what it earned in all, and whether the line succeeded."""

    seat: Seat
    nodes: list[Node]
    value: float
    success: bool


class SFT(TextAlgorithm):
    """Imitates the answers of every line (`imitate: all`) or of those that ended in success, and with weight `world`
    (to imitation's 1, per token) foretells what the same seat is shown next; `imitate: none` foretells alone, in every
    line. `least` leaves out lines in which a seat's return, alpha * team + local, is smaller. `k` lines a start.

    What a line shares with another one counts once.
    """

    type: Literal["sft"] = "sft"
    imitate: Literal["success", "all", "none"] = "success"
    world: float = Field(0.0, ge=0)
    least: float | None = None
    k: int = Field(1, ge=1, le=4096)
    alpha: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.imitate == "none" and not self.world:
            raise ValueError("imitate: none leaves nothing to learn: set world: 1 for a world model, or imitate: all")
        return self

    @property
    def branching(self) -> Branching:
        return Branching("root", self.k)

    @property
    def reads_sampler(self) -> bool:
        return False

    @property
    def loss(self) -> Callable:
        return LOSSES["cross_entropy"]

    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]:
        """The answers to imitate, noted at their nodes with advantage 1, then the observations to foretell.

        `imitated` is the share of the policy's parts in lines whose answers are learned; `foretold`, where there is a
        world model, that of the turns in lines to learn from which are followed by an observation that says anything
        new.
        """
        parts = [part for episode in episodes for part in _parts(episode, policy, self.alpha)]
        kept = [part for part in parts if self._worthy(part)]
        copied = [] if self.imitate == "none" else kept
        samples = _imitations(copied)
        figures = {"imitated": len(copied) / len(parts) if parts else 0.0}
        if self.world:
            foretold = _foretold(kept, self.world)
            samples += [sample for _, sample in foretold]
            turns = {id(node.answers[part.seat]) for part in kept for node in part.nodes}
            figures["foretold"] = len({id(answer) for answer, _ in foretold}) / len(turns) if turns else 0.0
        return samples, figures

    def _worthy(self, part: Part) -> bool:
        return (self.imitate != "success" or part.success) and (self.least is None or part.value >= self.least)


def _parts(episode: Episode, policy: str, alpha: float) -> Iterator[Part]:
    """What `policy` did at each of its seats in each line of an episode; nothing of one that failed."""
    for leaf in [] if episode.error is not None else episode.leaves():
        line = episode.line(leaf)
        for seat in dict.fromkeys(seat for node in line for seat in node.answers):
            if own := [node for node in line if seat in node.answers and _is_of(node.answers[seat], policy)]:
                value = sum(node.reward(seat, alpha) for node in line)
                yield Part(seat, own, value, bool(leaf.info.get("success")))


def _is_of(answer: Answer, policy: str) -> bool:
    return member(answer.policy) == policy and len(answer.token_ids) > 0


def _imitations(parts: Sequence[Part]) -> list[Sample]:
    """The answers, noted at their nodes with advantage 1; one that several lines or siblings share once."""
    answers: dict[int, Answer] = {}
    for part in parts:
        for node in part.nodes:
            node.advantages[part.seat] = 1.0
            answers[id(node.answers[part.seat])] = node.answers[part.seat]
    return [
        Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, np.ones(len(answer.token_ids), np.float32))
        for answer in answers.values()
    ]


def _foretold(parts: Sequence[Part], weight: float) -> list[tuple[Answer, Sample]]:
    """Each new observation that came after an answer, with that answer. What siblings were shown is foretold once."""
    found: dict[tuple[int, int | None], tuple[Answer, Sample]] = {}
    for part in parts:
        for node, later in zip(part.nodes, part.nodes[1:], strict=False):
            answer = node.answers[part.seat]
            new = news(answer, later.answers[part.seat])
            if len(new):
                known = np.concatenate([answer.prompt_ids, answer.token_ids])
                blank, ones = np.zeros(len(new), np.float32), np.ones(len(new), np.float32)
                found[id(answer), later.parent] = answer, Sample(known, new, blank, ones, weight=weight)
    return list(found.values())


def news(answer: Answer, later: Answer) -> np.ndarray:
    """The token ids of what `later`'s prompt adds to what was known at the end of `answer`.

    A conversation's next prompt begins with prompt and answer, and all the rest is new. Where each prompt stands alone,
    new is what follows the part that both begin with: role and template are in every prompt.
    """
    known = np.concatenate([answer.prompt_ids, answer.token_ids])
    after = shared(known, later.prompt_ids)
    if after < len(known):
        after = shared(answer.prompt_ids, later.prompt_ids)
    return later.prompt_ids[after:]


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many elements both begin with."""
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n
