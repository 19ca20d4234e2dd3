"""What episodes say in figures: for logs, progress bars and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.types import Episode, Metrics, Node


def member(policy: str) -> str:
    """The member behind a versioned policy name: "planner@12" -> "planner"."""
    return policy.split("@", 1)[0]


def played(episode: Episode) -> list[Node]:
    """The nodes of the lines that were played on, without the siblings that were only tried."""
    return [node for node in episode.nodes if node.chosen]


def summary(episodes: Sequence[Episode]) -> Metrics:
    """Success, joint steps per line and team return over the episodes that did not fail; the share that failed.

    Means are over episodes; nothing is averaged in silence: `failed` counts what `success` leaves out.
    """
    valid = [e for e in episodes if e.error is None]
    lines = [e.line(leaf) for e in valid for leaf in e.leaves() if leaf.chosen]
    return {
        "success": _mean([e.success for e in valid]),
        "steps_per_episode": _mean([len(line) for line in lines]),
        "team_return": _mean([sum(node.team_reward for node in line) for line in lines]),
        "episodes": float(len(episodes)),
        "failed": float(len(episodes) - len(valid)),
    }


def seat_returns(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """`returns`: each seat's own reward over a line, a mean over the episodes that did not fail; `returns_half`: half
    of its 95 % interval (normal)."""
    valid = [e for e in episodes if e.error is None]
    ends = [(e, leaf) for e in valid for leaf in e.leaves() if leaf.chosen]
    seats = {seat: None for e in valid for seat in e.seats}
    own = {seat: [sum(n.rewards.get(seat, 0.0) for n in e.line(leaf)) for e, leaf in ends] for seat in seats}
    return {
        "returns": {seat: _mean(values) for seat, values in own.items()},
        "returns_half": {
            seat: 1.96 * float(np.std(v, ddof=1)) / len(v) ** 0.5 for seat, v in own.items() if len(v) > 1
        },
    }


def policy_figures(episodes: Sequence[Episode], policy: str) -> Metrics:
    """One policy's answers, tried ones included: local and team reward per answer, share invalid, length, how often it
    ran into the token limit."""
    turns = [
        (node, seat, answer)
        for episode in episodes
        if episode.error is None
        for node in episode.nodes
        for seat, answer in node.answers.items()
        if member(answer.policy) == policy
    ]
    return {
        "answers": float(len(turns)),
        "local_reward": _mean([node.rewards.get(seat, 0.0) for node, seat, _ in turns]),
        "team_reward": _mean([node.team_reward for node, _, _ in turns]),
        "invalid": _mean([bool(node.invalid(seat)) for node, seat, _ in turns]),
        "tokens": _mean([len(answer.token_ids) for _, _, answer in turns]),
        "cut_off": _mean([answer.stop == "length" for _, _, answer in turns]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
