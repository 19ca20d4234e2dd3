"""Advantage estimators (GAE and V-trace) from rewards and values: pure functions over `[T, B, N]` (steps, games,
seats).

Time is counted in a seat's own decisions: the steps of others between two of its actions cost no discount, and rewards
in between belong to the earlier action. If all seats act at every step, this is the textbook form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AdvantageInputs:
    """Inputs of the advantage estimators. `values [T+1, B, N]` of each observation; `bootstrap [T, B, N]` the value
    after a step that ended the game for a seat: 0 where the seat terminated, the value of its final observation where
    it was truncated; `done [T, B, N]` (bool) marks such steps, and after a seat's own end all steps until the game ends
    for the others; agent mask `agent_mask [T+1, B, N]` (bool); `rewards [T, B, N]`. Floats are float32."""

    rewards: Tensor
    values: Tensor
    bootstrap: Tensor
    done: Tensor
    agent_mask: Tensor


def gae(inputs: AdvantageInputs, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Returns generalised advantage estimates [T, B, N] (Schulman et al., 2016, eq. 16), in units of reward, and a mask
    of the known ones [T, B, N].

    `gae_lambda=0` trusts the critic and gives one-step TD errors, `gae_lambda=1` trusts the rewards. Unknown are
    advantages of seats that did not act, and of actions whose next own decision lies beyond the last step.
    """
    ones = torch.ones_like(inputs.rewards)
    advantages, known, _ = _backwards(inputs, ones, ones * gae_lambda, gamma)
    return advantages, known


def vtrace(
    inputs: AdvantageInputs, ratio: Tensor, *, gamma: float, gae_lambda: float = 1.0, rho: float = 1.0, c: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns V-trace (Espeholt et al., 2018, eq. 1) policy-gradient advantages, value targets, and a mask of the known
    ones, [T, B, N] each. `ratio` [T, B, N] is each action's probability under the policy in training over that under
    the policy that acted; `rho` and `c` cap it. With ratios of 1 the targets are those of `gae` with the same
    `gae_lambda`."""
    weights, traces = ratio.clamp(max=rho), gae_lambda * ratio.clamp(max=c)
    corrections, known, after = _backwards(inputs, weights, traces, gamma)
    targets = inputs.values[:-1] + corrections
    return weights * (after - inputs.values[:-1]), targets, known


def _backwards(inputs: AdvantageInputs, weights: Tensor, traces: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns corrections x[t] = weights * (reward + gamma V' - V) + gamma * traces * x', where ' is the seat's next
    own decision; a mask of the known ones; and the action targets reward + gamma * (V' + x')."""
    corrections, known = torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.agent_mask[:-1])
    after = torch.zeros_like(inputs.rewards)
    value, certain = inputs.values[-1], inputs.agent_mask[-1]
    correction, reward = torch.zeros_like(value), torch.zeros_like(value)
    for t in range(len(inputs.rewards) - 1, -1, -1):
        over, agent_mask = inputs.done[t], inputs.agent_mask[t]
        value = torch.where(over, inputs.bootstrap[t], value)
        correction, reward = correction.masked_fill(over, 0.0), reward.masked_fill(over, 0.0) + inputs.rewards[t]
        certain = certain | over
        now = inputs.values[t]
        step = weights[t] * (reward + gamma * value - now) + gamma * traces[t] * correction
        corrections[t], known[t] = step, agent_mask & certain
        after[t] = reward + gamma * (value + correction)
        value = torch.where(agent_mask, now, value)
        correction = torch.where(agent_mask, torch.where(certain, step, 0.0), correction)  # unknown ones end a chain
        reward, certain = reward.masked_fill(agent_mask, 0.0), certain | agent_mask
    return corrections, known, after
