"""The compiled surrogate of categorical policies against autograd through `CategoricalHead` and the plain loss."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from palestra.core.losses import LossInputs, clipped_policy_loss
from palestra.envs.vector_base import Discrete
from palestra.vector.algorithms.actor_critic import ActorCriticConfig
from palestra.vector.algorithms.minibatches import PolicyRows, normalise_weights
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.losses import CategoricalInputs, clipped_categorical_loss
from palestra.vector.nets.heads import CategoricalHead


def inputs(members: int, rows: int, actions: int, masked: bool, seed: int) -> CategoricalInputs:
    """Random outputs, legal actions and advantages; some rows have weight 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (members, rows)
    taken = torch.randint(actions, shape, generator=generator)
    mask = torch.rand(*shape, actions, generator=generator) < 0.5
    weight = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.8)
    return CategoricalInputs(
        3 * torch.randn(*shape, actions, generator=generator),
        taken,
        mask.scatter_(-1, taken[..., None], True) if masked else None,
        -math.log(actions) + torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
        weight / weight.sum(1, keepdim=True).clamp(min=1e-8),
    )


def by_autograd(given: CategoricalInputs, clip: float, bonus: float) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
    """Loss, gradient and metrics in float64."""
    out, action, mask, *rest = given
    out = out.double().requires_grad_()
    logp, entropy = CategoricalHead(Discrete(out.shape[-1])).evaluate_actions(out, action, mask)
    total, lines = torch.zeros((), dtype=torch.float64), []
    for own in zip(logp, entropy, *(x.double() for x in rest), strict=True):
        tokens = LossInputs(own[0], own[1], own[2], None, own[3], own[4])
        loss, metrics = clipped_policy_loss(tokens, clip=clip)
        total = total + loss - bonus * (tokens.weight_M * tokens.entropy_M).sum()
        lines.append({key: value.item() for key, value in ({"policy_loss": loss.detach()} | metrics).items()})
    return total.detach(), torch.autograd.grad(total, out)[0], lines


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 3),
    rows=st.integers(1, 40),
    actions=st.integers(1, 9),
    masked=st.booleans(),
    clip=st.sampled_from([0.05, 0.2, 1.5]),
    bonus=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_loss_gradient_and_metrics_equal_autograd(members, rows, actions, masked, clip, bonus, seed):
    drawn = inputs(members, rows, actions, masked, seed)
    out = drawn.outputs.clone().requires_grad_()
    loss, metrics = clipped_categorical_loss(drawn._replace(outputs=out), clip=clip, entropy=bonus)
    (gradient,) = torch.autograd.grad(2 * loss, out)
    right, right_gradient, right_metrics = by_autograd(drawn, clip, bonus)
    scale = 1 + float(right_gradient.abs().max())  # ratios are up to exp(8)
    np.testing.assert_allclose(loss.item(), right.item(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * right_gradient, rtol=1e-4, atol=1e-5 * scale)
    for line, right_line in zip(metrics, right_metrics, strict=True):
        assert line == pytest.approx(right_line, rel=1e-5, abs=1e-5)


def test_one_row_by_hand():
    """Two actions of probability 3/4 and 1/4; the first was sampled with probability 1/2: its ratio of 1.5 is
    clipped."""
    out = torch.tensor([[[math.log(3.0), 0.0]]], requires_grad=True)
    half, one = torch.tensor([[math.log(0.5)]]), torch.ones(1, 1)
    drawn = CategoricalInputs(out, torch.zeros(1, 1, dtype=torch.long), None, half, 2 * one, one)
    loss, (metrics,) = clipped_categorical_loss(drawn, clip=0.2, entropy=0.0)
    assert loss.item() == pytest.approx(-1.2 * 2)
    assert not torch.autograd.grad(loss, out)[0].any()
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    kl = 1.5 - 1 - math.log(1.5)
    assert metrics == pytest.approx({"policy_loss": -2.4, "clip_fraction": 1.0, "kl": kl, "entropy": entropy})
    # a bad action whose probability rose is not clipped: d loss / d out = 1.5 * 2 * (one-hot - p)
    loss, _ = clipped_categorical_loss(drawn._replace(advantage=-2 * one), clip=0.2, entropy=0.0)
    np.testing.assert_allclose(torch.autograd.grad(loss, out)[0], [[[3 * 0.25, -3 * 0.25]]], rtol=1e-5)


@pytest.mark.parametrize("where", ["outputs", "old_logp", "advantage", "weight"])
def test_nonfinite_values_reach_the_gradient(where):
    """A run stops at a gradient that is not finite."""
    drawn = inputs(1, 5, 3, False, 0)._replace(weight=torch.full((1, 5), 0.2))
    getattr(drawn, where)[0, 2] = torch.nan
    out = drawn.outputs.clone().requires_grad_()
    loss, _ = clipped_categorical_loss(drawn._replace(outputs=out), clip=0.2, entropy=0.1)
    assert loss.isnan() and torch.autograd.grad(loss, out)[0].isnan().any()


@pytest.mark.parametrize("masked", [False, True])
def test_ppo_loss_equals_the_plain_loss(masked):
    """Rows of several steps [P, T, M], as recurrent networks have them."""
    drawn = inputs(2, 12, 4, masked, 3)
    out, *rest = (None if x is None else x.unflatten(1, (3, 4)) for x in drawn)
    action, mask, old_logp, advantage, weight = rest
    rows = PolicyRows(out, None, action, old_logp, mask, advantage, weight, None, None)
    share, head, found = normalise_weights(weight), CategoricalHead(Discrete(4)), []
    for method in (PPO.policy_loss, ActorCriticConfig.policy_loss):
        leaf = out.clone().requires_grad_()
        loss, metrics = method(PPO(clip=0.3), head, leaf, rows, share, 0.05)
        found.append((loss.item(), torch.autograd.grad(loss, leaf)[0].flatten().tolist(), metrics))
    (loss, gradient, metrics), (right, right_gradient, right_metrics) = found
    assert loss == pytest.approx(right, rel=1e-5)
    assert gradient == pytest.approx(right_gradient, rel=1e-4, abs=1e-5)
    for line, right_line in zip(metrics, right_metrics, strict=True):
        assert line == pytest.approx({key: float(value) for key, value in right_line.items()}, rel=1e-4, abs=1e-5)


def test_the_loss_of_a_subclass_is_not_replaced():
    class Halved(PPO):
        def loss(self, rows: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = super().loss(rows)
            return loss / 2, metrics

    drawn = inputs(1, 12, 4, False, 3)
    out, action, mask, old_logp, advantage, weight = (None if x is None else x[:, None] for x in drawn)
    rows = PolicyRows(out, None, action, old_logp, mask, advantage, weight, None, None)
    head = CategoricalHead(Discrete(4))
    whole, half = (method(clip=0.3).policy_loss(head, out, rows, weight, 0.0)[0].item() for method in (PPO, Halved))
    assert half == pytest.approx(whole / 2, rel=1e-5)
