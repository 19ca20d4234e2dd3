"""Trust region policy optimisation (Schulman et al., 2015), and with it HATRPO (Kuba et al., 2022): one natural
gradient step of each policy per rollout, the largest that a bound on the divergence from the policy that played allows.

With `sequential` the policies step one after another, and the advantages of each are weighted by the ratio of new to
old probabilities of the actions of those before it, which makes every step an improvement of the joint policy (Kuba et
al., 2022, lemma 1 and theorem 1).

Shapes: `P` members of a stack, `T` steps, `C` columns (a seat of a parallel game each), `N` seats, `D` parameters of a
member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from palestra.core.losses import LossInputs, TensorMetrics, importance_sampling_loss
from palestra.core.types import Metrics
from palestra.vector.algorithms.actor_critic import ActorCriticConfig, ActorCriticLearner
from palestra.vector.algorithms.minibatches import PolicyRows, normalise_weights
from palestra.vector.learners.nets import NetLearner, metrics_by_policy
from palestra.vector.learners.optimizers import NonFiniteGradient
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.nets.heads import kl_divergence


class TRPO(ActorCriticConfig):
    """TRPO: one natural gradient step of the policies per rollout, bounded in divergence; HATRPO with `sequential` and
    `critic: central`. The `lr` of the policies only sets the learning rate of the critics."""

    type: Literal["trpo"] = "trpo"
    epochs: int = Field(4, ge=1)
    """Passes of the critics over each rollout; the policies take one step on all of it."""
    minibatches: int = Field(4, ge=1)
    """Gradient steps of the critics per pass."""
    kl_bound: float = Field(0.01, gt=0)
    """Bound of the mean divergence of a policy from the one that played, in nats, for each step."""
    cg_steps: int = Field(10, ge=1)
    """Conjugate gradient iterations for the direction of a step."""
    cg_damping: float = Field(0.1, ge=0)
    """Multiple of the identity that is added to the Fisher matrix."""
    line_search_steps: int = Field(10, ge=1)
    """Step sizes to try, from the largest that the bound allows to second order; a policy stays as
    it is if none of them improves the surrogate within the bound."""
    backtrack: float = Field(0.8, gt=0, lt=1)
    """Ratio of a step size to the one before it."""

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.aux_value_coef:
            raise ValueError("aux_value_coef: steps of trpo follow the policy's own loss only: set 0, or use ppo")
        return self

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return importance_sampling_loss(rows)

    def learner_class(self) -> Callable[..., NetLearner]:
        return TRPOLearner


class Surrogate(NamedTuple):
    """Surrogate objective, mean KL divergence and entropy of a step, [P] each, and the outputs of the networks. The
    objective is the mean advantage under the new policy plus the entropy bonus; the divergence is from the old one."""

    value: Tensor
    divergence: Tensor
    entropy: Tensor
    outputs: Tensor


class TRPOLearner(ActorCriticLearner):
    """Learner of TRPO."""

    config: TRPO

    def _train_policies(
        self, stack: PolicyStack, rows: PolicyRows, scaled_targets: Tensor, progress: float
    ) -> dict[str, Metrics]:
        bonus = self.config.entropy_at(progress)
        before = self.surrogate(stack, rows, bonus)
        slope = self._mean(flat_gradient(before.value.sum(), stack.optimizer.parameters, retain_graph=True))
        norms = torch.linalg.vector_norm(slope, dim=1)
        if not torch.isfinite(norms).all():
            raise NonFiniteGradient(stack.seat_mapping.names[int(torch.argmin(torch.isfinite(norms).int()))])
        step = self.natural_step(stack, slope, before.divergence)
        after, share = self._line_search(stack, rows, bonus, step, before)
        stack.version += 1
        metrics = {
            "policy_loss": -after.value,
            "improvement": after.value - self._mean(before.value.detach()),
            "kl": after.divergence,
            "step_size": share,
            "entropy": after.entropy,
            "grad_norm": norms,
        }
        return metrics_by_policy(stack.seat_mapping.names, [metrics])

    def surrogate(
        self, stack: PolicyStack, rows: PolicyRows, bonus: float, old_outputs: Tensor | None = None
    ) -> Surrogate:
        """Returns the surrogate of a stack's policies as they are; `old_outputs` [P, T, C, O] are
        those of the policies before the step (None: these)."""
        with sdpa_kernel(SDPBackend.MATH):  # the only attention kernel that has second derivatives
            out, _ = stack.net.unroll(rows.observations, rows.recurrent_state, rows.is_first, rows.team)
        logp, entropy = stack.head.evaluate_actions(out, rows.actions, rows.action_mask)
        if old_outputs is None:
            old_outputs = out.detach()
        divergence = kl_divergence(stack.head, old_outputs, out, rows.action_mask)
        share = normalise_weights(rows.weight)
        spread = (share * entropy).sum((1, 2))
        gained = (share * (logp - rows.logp).exp() * rows.advantage).sum((1, 2))
        return Surrogate(gained + bonus * spread, (share * divergence).sum((1, 2)), spread.detach(), out.detach())

    def natural_step(self, stack: PolicyStack, slope: Tensor, divergence: Tensor) -> Tensor:
        """Returns the largest step [P, D] along the natural gradient that keeps `divergence` [P] within the bound, to
        second order (Schulman et al., 2015, appendix C); 0 for a member without a gradient."""
        fisher = fisher_product(divergence, stack.optimizer.parameters)

        def product(vector: Tensor) -> Tensor:
            return self._mean(fisher(vector)) + self.config.cg_damping * vector

        direction = conjugate_gradient(product, slope, self.config.cg_steps)
        curvature = dot(direction, product(direction))
        scale = torch.where(curvature > 0, (2 * self.config.kl_bound / curvature).sqrt(), 0.0)
        return scale * direction

    @torch.no_grad()
    def _line_search(
        self, stack: PolicyStack, rows: PolicyRows, bonus: float, step: Tensor, before: Surrogate
    ) -> tuple[Surrogate, Tensor]:
        """Moves each member by the largest of the shares 1, `backtrack`, ... of its step that
        improves the surrogate within the bound; returns the surrogate there, and the shares [P]."""
        weights = stack.optimizer.flat
        start = stack.optimizer.flat.clone()
        share = torch.ones_like(before.value)
        open_members = torch.ones_like(before.value, dtype=torch.bool)
        base = self._mean(before.value)
        for _ in range(self.config.line_search_steps):
            weights.copy_(start + share[:, None] * step)
            reached = self._mean_surrogate(stack, rows, bonus, before)
            good = (reached.value > base) & (reached.divergence <= self.config.kl_bound)
            open_members &= ~good
            if not open_members.any():
                return reached, share
            share = torch.where(open_members, share * self.config.backtrack, share)
        share = torch.where(open_members, 0.0, share)
        weights.copy_(start + share[:, None] * step)
        return self._mean_surrogate(stack, rows, bonus, before), share

    def _mean_surrogate(self, stack: PolicyStack, rows: PolicyRows, bonus: float, before: Surrogate) -> Surrogate:
        """Returns the surrogate of the policies as they are, over all processes."""
        found = self.surrogate(stack, rows, bonus, before.outputs)
        value, divergence, entropy = (self._mean(x) for x in found[:3])
        return Surrogate(value, divergence, entropy, found.outputs)

    def _mean(self, x: Tensor) -> Tensor:
        """Returns the mean of a tensor over all processes."""
        group = self.process_group
        return x if group.world_size == 1 else group.all_reduce(x) / group.world_size


# ---- natural gradients of stacked networks by conjugate gradients, without building a Fisher matrix


Product = Callable[[Tensor], Tensor]


def flat_gradient(
    of: Tensor, parameters: Sequence[nn.Parameter], *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """Returns the gradient [P, D] of a sum over members with respect to stacked parameters [P, ...]."""
    found = torch.autograd.grad(
        of, parameters, create_graph=create_graph, retain_graph=create_graph or retain_graph, materialize_grads=True
    )
    return torch.cat([part.flatten(1) for part in found], 1)


def fisher_product(divergence_P: Tensor, parameters: Sequence[nn.Parameter]) -> Product:
    """Returns the function that multiplies vectors [P, D] by the Fisher matrix of each member.

    `divergence_P` [P] is the mean Kullback-Leibler divergence of the policy from itself, differentiable in the
    parameters of its second argument only. Its value and its gradient are 0, and the Fisher matrix is its second
    derivative (Schulman et al., 2015, appendix C).
    """
    slope = flat_gradient(divergence_P.sum(), parameters, create_graph=True)

    def multiply(vector: Tensor) -> Tensor:
        return flat_gradient((slope * vector).sum(), parameters, retain_graph=True)

    return multiply


def conjugate_gradient(product: Product, b: Tensor, steps: int, tolerance: float = 1e-10) -> Tensor:
    """Returns approximate solutions x [P, D] of A x = `b` [P, D], one for each member; `product` multiplies by the
    positive definite matrices A (Hestenes & Stiefel, 1952). A member stops after `steps` iterations, or once its
    squared residual is at most `tolerance` times the squared norm of its `b`."""
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = residual.clone()
    size = dot(residual, residual)
    enough = tolerance * size
    for _ in range(steps):
        going = size > enough
        if not going.any():
            break
        image = product(direction)
        rate = torch.where(going, size / dot(direction, image), 0.0)
        x = x + rate * direction
        residual = residual - rate * image
        smaller = dot(residual, residual)
        direction = torch.where(going, residual + smaller / size * direction, direction)
        size = torch.where(going, smaller, size)
    return x


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner product of each member's vectors: [P, D], [P, D] -> [P, 1]."""
    return (a * b).sum(1, keepdim=True)
