"""Targets and losses of Q-learning with discrete actions: pure functions.

Shapes: `A` actions; `...` are rows of any shape; values are float32, actions int64, masks bool. `weight` is the weight
of a row. Gradients do not flow through targets.
"""

from __future__ import annotations

from torch import Tensor

from palestra.vector.losses.critics import td_target
from palestra.vector.nets.heads import mask_illegal


def best_action(q: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the legal action with the highest value [...], the first of equals (`action_mask` [..., >= A]; None: all
    actions are legal)."""
    return mask_illegal(q, action_mask).argmax(-1)


def gather_values(q: Tensor, action: Tensor) -> Tensor:
    """Returns the values of given actions: [..., A], [...] -> [...]."""
    return q.gather(-1, action[..., None])[..., 0]


def dueling_values(out: Tensor) -> Tensor:
    """Combines a value and advantages [..., 1 + A] into action values [..., A]: the value plus each action's advantage
    over the mean (Wang et al., 2016, eq. 9)."""
    return out[..., :1] + out[..., 1:] - out[..., 1:].mean(-1, keepdim=True)


def next_value(target_q: Tensor, online_q: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the value in `target_q` [..., A] of the best legal action by `online_q` [..., A].

    If both come from one network, this is Q-learning's maximum (Watkins, 1989). If the online network chooses the
    action and the target network evaluates it, it is double Q-learning (van Hasselt et al., 2016, eq. 4).
    """
    return gather_values(target_q, best_action(online_q, action_mask))


def q_target(reward: Tensor, discount: Tensor, next_values: Tensor) -> Tensor:
    """One-step TD target [...] as `td_target` of `palestra.vector.losses.critics`, without gradients."""
    return td_target(reward, discount, next_values).detach()


def q_loss(q: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns half the squared error, weighted and summed over all rows (scalar), and the TD errors [...], target minus
    value."""
    error = target.detach() - q
    return 0.5 * (weight * error.square()).sum(), error.detach()


def sequence_priority(error: Tensor, mask: Tensor, eta: float = 0.9) -> Tensor:
    """Returns the replay priority of sequences, [T, M] -> [M]: `eta` times the largest absolute error plus 1 - `eta`
    times the mean over known steps (Kapturowski et al., 2019, section 2.3)."""
    size = error.abs() * mask
    mean = size.sum(0) / mask.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1 - eta) * mean
