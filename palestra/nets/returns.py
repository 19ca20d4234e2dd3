"""Who gets credit for what, from rewards and values: pure functions over `[T, B, N]` (steps, games, seats).

All of them count time in a seat's own decisions: what others do between two of its moves costs no discount, and rewards
that fall meanwhile belong to the earlier move. Where all seats act at every step this is the textbook form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Course:
    """What credit is made of. `values [T+1, B, N]` of each moment's view; `bootstrap [T, B, N]` the value that stands
    for what comes after a step that ended the game for a seat: 0 where it terminated for this seat, that of the last
    view where it was cut off; `over [T, B, N]` marks such steps, and after a seat's own end all those until the game
    ends for the others; `acting [T+1, B, N]`; `rewards [T, B, N]`."""

    rewards: Tensor
    values: Tensor
    bootstrap: Tensor
    over: Tensor
    acting: Tensor


def gae(course: Course, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates [T, B, N] (Schulman et al., 2016, eq. 16) in units of reward, and which of them
    are known [T, B, N].

    `lam=0` trusts the critic and gives one-step errors, `lam=1` trusts the rewards. Not known is the advantage of a
    seat that did not act, and of a move whose next own decision lies beyond the last step.
    """
    ones = torch.ones_like(course.rewards)
    advantages, known, _ = _backwards(course, ones, ones * lam, gamma)
    return advantages, known


def vtrace(
    course: Course, ratio: Tensor, *, gamma: float, lam: float = 1.0, rho: float = 1.0, c: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018, eq. 1): policy-gradient advantages, targets of the value, and which are known,
    each [T, B, N]. `ratio` is the probability of each action under the policy in training over that under the one that
    acted; `rho` and `c` bound it. With ratios of one the targets are those of `gae` (with the same `lam`)."""
    weights, traces = ratio.clamp(max=rho), lam * ratio.clamp(max=c)
    corrections, known, after = _backwards(course, weights, traces, gamma)
    targets = course.values[:-1] + corrections
    return weights * (after - course.values[:-1]), targets, known


def _backwards(course: Course, weights: Tensor, traces: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """x[t] = weights * (reward + gamma V' - V) + gamma * traces * x', where ' is the seat's next own decision; whether
    it is known; and reward + gamma * (V' + x'), the target that an action is judged by."""
    corrections, known = torch.zeros_like(course.rewards), torch.zeros_like(course.acting[:-1])
    after = torch.zeros_like(course.rewards)
    value, certain = course.values[-1], course.acting[-1]
    correction, reward = torch.zeros_like(value), torch.zeros_like(value)
    for t in range(len(course.rewards) - 1, -1, -1):
        over, acting = course.over[t], course.acting[t]
        value = torch.where(over, course.bootstrap[t], value)
        correction, reward = correction.masked_fill(over, 0.0), reward.masked_fill(over, 0.0) + course.rewards[t]
        certain = certain | over
        now = course.values[t]
        step = weights[t] * (reward + gamma * value - now) + gamma * traces[t] * correction
        corrections[t], known[t] = step, acting & certain
        after[t] = reward + gamma * (value + correction)
        value = torch.where(acting, now, value)
        correction = torch.where(acting, torch.where(certain, step, 0.0), correction)  # what is not known ends a chain
        reward, certain = reward.masked_fill(acting, 0.0), certain | acting
    return corrections, known, after
