"""Advantage estimators (GAE and V-trace) from rewards and values: pure functions over `[T, B, N]` (steps, games,
seats).

Time is counted in a seat's own decisions: the steps of others between two of its actions cost no discount, and rewards
in between belong to the earlier action. If all seats act at every step, this is the textbook form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.core.accel.jit import jit


@dataclass
class AdvantageInputs:
    """Inputs of the advantage estimators: `rewards [T, B, N]`, `values [T+1, B, N]` of each observation and the seats
    that act, `agent_mask [T+1, B, N]` (bool). `done [T, B, N]` (bool) marks steps that ended the game for a seat, and
    all later steps until the game ends for the others. `bootstrap [T, B, N]` is the value after such a step: 0 where
    the seat terminated, the value of its final observation where it was truncated. Floats are float32."""

    rewards: Tensor
    values: Tensor
    bootstrap: Tensor
    done: Tensor
    agent_mask: Tensor


def gae(inputs: AdvantageInputs, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Returns generalised advantage estimates [T, B, N] (Schulman et al., 2016, eq. 16), in units of reward, and a mask
    of the known ones [T, B, N].

    `gae_lambda=0` gives one-step TD errors, which rely on the critic; `gae_lambda=1` relies on the rewards. Advantages
    are unknown for seats that did not act, and for actions whose seat decides again only after the last step.
    """
    ones = torch.ones_like(inputs.rewards)
    advantages, known, _ = _backwards(inputs, ones, ones * gae_lambda, gamma)
    return advantages, known


def vtrace(
    inputs: AdvantageInputs, ratio: Tensor, *, gamma: float, gae_lambda: float = 1.0, rho: float = 1.0, c: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns V-trace (Espeholt et al., 2018, eq. 1) policy-gradient advantages, value targets, and
    a mask of the known ones, [T, B, N] each. `ratio` [T, B, N] is each action's probability under
    the policy in training over that under the policy that acted; `rho` and `c` cap it. With ratios
    of 1 the targets are those of `gae` with the same `gae_lambda`."""
    weights = ratio.clamp(max=rho)
    traces = gae_lambda * ratio.clamp(max=c)
    corrections, known, after = _backwards(inputs, weights, traces, gamma)
    targets = inputs.values[:-1] + corrections
    return weights * (after - inputs.values[:-1]), targets, known


def _backwards(inputs: AdvantageInputs, weights: Tensor, traces: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns corrections x[t] = weights * (reward + gamma V' - V) + gamma * traces * x', where ' is the seat's next
    own decision; a mask of the known ones; and the action targets reward + gamma * (V' + x')."""
    if not inputs.rewards.is_cpu:
        return _backwards_on_device(inputs, weights, traces, gamma)
    corrections = torch.zeros_like(inputs.rewards)
    known = torch.zeros_like(inputs.agent_mask[:-1])
    after = torch.zeros_like(inputs.rewards)
    columns_TB = inputs.rewards, inputs.values, inputs.bootstrap, inputs.done, inputs.agent_mask, weights, traces
    columns = tuple(x.reshape(len(x), -1).numpy() for x in columns_TB)
    results = [x.reshape(len(x), -1).numpy() for x in (corrections, known, after)]
    _scan_backwards(columns[0].dtype.type(gamma), columns, *results)
    return corrections, known, after


def _backwards_on_device(
    inputs: AdvantageInputs, weights: Tensor, traces: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `_backwards` does, by PyTorch operations over all games and seats at once: for GPUs, where the
    compiled scan would wait for the values to be copied to the CPU and its results back."""
    value = inputs.values[-1]
    certain = inputs.agent_mask[-1]
    correction = reward = torch.zeros_like(value)
    steps = []
    for t in range(len(inputs.rewards) - 1, -1, -1):
        done = inputs.done[t]
        acts = inputs.agent_mask[t]
        value = torch.where(done, inputs.bootstrap[t], value)
        certain = certain | done
        correction = correction.masked_fill(done, 0)
        reward = reward.masked_fill(done, 0) + inputs.rewards[t]
        error = reward + gamma * value - inputs.values[t]
        step = weights[t] * error + gamma * traces[t] * correction
        steps.append((step, acts & certain, reward + gamma * (value + correction)))
        value = torch.where(acts, inputs.values[t], value)
        correction = torch.where(acts, torch.where(certain, step, 0.0), correction)
        reward = reward.masked_fill(acts, 0)
        certain = certain | acts
    corrections, known, after = (torch.stack(column[::-1]) for column in zip(*steps, strict=True))
    return corrections, known, after


@jit
def _scan_backwards(
    gamma: np.floating, inputs: tuple[np.ndarray, ...], corrections: np.ndarray, known: np.ndarray, after: np.ndarray
) -> None:
    """Writes the results of `_backwards`, [T, C] each, from its inputs (`values` and `agent_mask` [T+1, C])."""
    rewards, values, bootstrap, done, agent_mask, weights, traces = inputs
    value = values[-1].copy()
    certain = agent_mask[-1].copy()
    correction = np.zeros_like(value)
    reward = np.zeros_like(value)
    for t in range(len(rewards) - 1, -1, -1):
        for c in range(len(value)):
            if done[t, c]:
                value[c], correction[c], reward[c], certain[c] = bootstrap[t, c], 0, 0, True
            reward[c] += rewards[t, c]
            error = reward[c] + gamma * value[c] - values[t, c]
            step = weights[t, c] * error + gamma * traces[t, c] * correction[c]
            corrections[t, c], known[t, c] = step, agent_mask[t, c] and certain[c]
            after[t, c] = reward[c] + gamma * (value[c] + correction[c])
            if agent_mask[t, c]:  # an unknown correction ends a chain
                value[c], correction[c], reward[c] = values[t, c], step if certain[c] else 0, 0
                certain[c] = True
