"""Credit of crossed joint answers. Siblings are all combinations of the answers of the seats that acted at once; this
module turns them into groups of one seat's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from palestra.core.types import Metrics, Node
from palestra.text.algorithms.groups import SiblingGroup
from palestra.text.credit.estimators import (
    Array,
    counterfactual_credit,
    credit_in_context,
    known_mean,
    shapley_credit,
    total_effect_index,
)

Credit = Literal["group", "counterfactual", "shapley"]
CREDIT_FUNCTIONS: dict[str, Callable[[Array, int], Array]] = {
    "counterfactual": counterfactual_credit,
    "shapley": shapley_credit,
}


def credit_group(group: SiblingGroup, credit: Credit) -> SiblingGroup:
    """Returns a seat's crossed siblings as a group that contains every answer once. With `credit: group` the value of
    an answer is the mean over the joint answers that contain it; otherwise it is the answer's mean credit with the
    other seats' answers fixed to those that the episode continued from. An answer without a known value, since joint
    answers were lost, is left out. Raises ValueError if the siblings are not all combinations."""
    siblings, places, seat = _answers_by_seat(group)
    q = value_table(places, group.values)
    if credit == "group":
        values = known_mean(q, tuple(axis for axis in range(q.ndim) if axis != seat))
    else:
        values = credit_in_context(CREDIT_FUNCTIONS[credit](q, seat), seat, places[[node.chosen for node in siblings]])
    known = np.flatnonzero(~np.isnan(values)).tolist()
    nodes = [[siblings[i] for i in np.flatnonzero(places[:, seat] == answer)] for answer in known]
    return SiblingGroup(group.seat, values[known].tolist(), nodes, lost=group.lost)


def contribution_metrics(group: SiblingGroup, score: Callable[[Node], float]) -> Metrics:
    """Returns `counterfactual` and `shapley`, the credit of a seat's answer in the joint answers that the episode
    continued from, and the seat's `influence`; `score` gives the value of a joint answer to the team. Raises ValueError
    if the siblings are not all combinations."""
    siblings, places, seat = _answers_by_seat(group)
    q = value_table(places, [score(node) for node in siblings])
    kept = tuple(places[[node.chosen for node in siblings]].T)
    due = {name: float(credit(q, seat)[kept].mean()) for name, credit in CREDIT_FUNCTIONS.items()}
    return due | {"influence": total_effect_index(q, seat)}


def _answers_by_seat(group: SiblingGroup) -> tuple[list[Node], np.ndarray, int]:
    """Returns the siblings, their answer indices [J, N], and the axis of the group's seat."""
    siblings = [node for (node,) in group.nodes]
    return siblings, answer_indices(siblings, group.lost), list(siblings[0].answers).index(group.seat)


def answer_indices(siblings: Sequence[Node], lost: int = 0) -> np.ndarray:
    """Returns the answer index of each seat in each sibling [J, N] int64, numbered by first appearance. Raises
    ValueError if the siblings are not all combinations of the seats' answers; up to `lost` may be missing."""
    places = np.zeros((len(siblings), len(siblings[0].answers)), np.int64)
    for axis, seat in enumerate(siblings[0].answers):
        seen: dict[int, int] = {}
        places[:, axis] = [seen.setdefault(id(node.answers[seat]), len(seen)) for node in siblings]
    missing = int(np.prod(places.max(axis=0) + 1)) - len(siblings)
    if len(np.unique(places, axis=0)) != len(siblings) or not 0 <= missing <= lost:
        raise ValueError(
            f"{len(siblings)} siblings are not every combination of what {', '.join(siblings[0].answers)} answered: "
            "credit across seats needs episodes played with joints: crossed"
        )
    return places


def value_table(places: np.ndarray, values: Sequence[float]) -> Array:
    """Returns the value of each joint answer [K, ..., K] float64, from the values of siblings at indices `places` [J,
    N]; NaN for those that were lost."""
    q = np.full(places.max(axis=0) + 1, np.nan)
    q[tuple(places.T)] = values
    return q
