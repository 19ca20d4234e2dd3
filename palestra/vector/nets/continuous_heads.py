"""Differentiable actions (tanh-squashed Gaussian, deterministic, Gumbel-softmax) and the action encoding for critics.

Shapes: outputs `[..., O]`, actions `[..., D]`; `P` members of a stack, `M` transitions, `S` seats of a member, `N`
seats, `A` numbers of a seat's encoded action, `J` numbers of the joint action. A unit is an action scaled so that the
bounds of its space are -1 and 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector_base import Continuous
from palestra.vector.nets.heads import ActionHead, ContinuousHead, mean_and_log_std
from palestra.vector.nets.on_device import constant, exponential_like, normal_like
from palestra.vector.nets.seat_mapping import SeatMapping

LOG_2 = math.log(2)
MAX_UNIT = 1 - 1e-6  # bound of the input of atanh in float32


class BoundedHead(ContinuousHead):
    """Base of heads with bounded continuous actions. Raises ValueError for a space without finite bounds."""

    def __init__(self, space: Continuous) -> None:
        super().__init__(space)
        if not self.bounded.all():
            raise ValueError(
                f"actions from {list(space.low)} to {list(space.high)} cannot be squashed between their bounds: give "
                "the env finite bounds, or train with ppo or a2c"
            )

    @abstractmethod
    def perturb(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns units [..., D] with standard normal `noise` [..., D], and their log-densities [...]."""

    def sample_units(self, out: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns sampled units [..., D], differentiable (Kingma & Welling, 2014), and log-densities [...]."""
        return self.perturb(out, normal_like(out[..., : self.width], generator))

    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns actions with independent noise, and log-densities of their units."""
        unit, logp = self.sample_units(out, generator)
        return self.from_unit(unit), logp


class SquashedHead(BoundedHead):
    """Independent Gaussians squashed by tanh into the space (Haarnoja et al., 2018, appendix C). Log-probabilities are
    log-densities of units, which do not depend on the width of the space: one entropy target fits every space."""

    NODES = 32

    def __init__(self, space: Continuous) -> None:
        super().__init__(space)
        self.outputs = 2 * self.width
        nodes, weights = np.polynomial.hermite.hermgauss(self.NODES)
        self.nodes = torch.tensor(nodes * math.sqrt(2), dtype=torch.float32)
        self.weights = torch.tensor(weights / math.sqrt(math.pi), dtype=torch.float32)

    def perturb(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = mean_and_log_std(out)
        raw = mean + noise * log_std.exp()
        return torch.tanh(raw), self._logp(raw, noise, log_std)

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        """Returns the squashed mean: not the mode of the density, but the usual greedy action."""
        return self.from_unit(torch.tanh(mean_and_log_std(out)[0]))

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = mean_and_log_std(out)
        raw = torch.atanh(self.to_unit(action).clamp(-MAX_UNIT, MAX_UNIT))
        return self._logp(raw, (raw - mean) / log_std.exp(), log_std), self.entropy(out)

    def entropy(self, out: Tensor) -> Tensor:
        """Returns the entropy of units [...] in nats: the Gaussian's entropy plus the mean
        log-slope of tanh, which is computed by Gauss-Hermite quadrature."""
        mean, log_std = mean_and_log_std(out)
        lost = (_log_slope(mean[..., None] + log_std.exp()[..., None] * self.nodes) * self.weights).sum(-1)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e) + lost).sum(-1)

    def _logp(self, raw: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
        normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        return (normal - _log_slope(raw)).sum(-1)


class TanhHead(BoundedHead):
    """Deterministic actions, tanh of the outputs. For exploration, Gaussian noise of deviation
    `noise` (in units) is added and the sum is clipped at the bounds."""

    def __init__(self, space: Continuous, noise: float = 0.1) -> None:
        super().__init__(space)
        self.outputs = self.width
        self.noise = noise

    def perturb(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns noisy units and log-densities of the noise before clipping; 0 without noise."""
        return (torch.tanh(out) + self.noise * noise).clamp(-1, 1), self._logp(noise)

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        return self.from_unit(torch.tanh(out))

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        gap = self.to_unit(action) - torch.tanh(out)
        deviations = torch.zeros_like(gap)
        entropy = 0.0
        if self.noise:
            deviations = gap / self.noise
            entropy = 0.5 * math.log(2 * math.pi * math.e) + math.log(self.noise)
        logp = self._logp(deviations)
        return logp, torch.full_like(logp, entropy * self.width)

    def _logp(self, noise: Tensor) -> Tensor:
        if not self.noise:
            return torch.zeros_like(noise[..., 0])
        return (-0.5 * noise.square() - math.log(self.noise) - 0.5 * math.log(2 * math.pi)).sum(-1)


def _log_slope(raw: Tensor) -> Tensor:
    """Returns log(1 - tanh(raw)^2), without cancellation."""
    return 2 * (LOG_2 - raw - torch.nn.functional.softplus(-2 * raw))


def gumbel_softmax(logits: Tensor, generator: torch.Generator, *, temperature: float = 1.0) -> Tensor:
    """Returns one-hot samples [..., A] of softmax(logits) with the gradient of a softmax of the same noisy logits:
    straight-through Gumbel-softmax (Jang et al., 2017, eq. 2 and section 2.2). Masked logits are never sampled."""
    noise = -exponential_like(logits, generator).log()  # Gumbel noise
    noisy = logits + noise
    soft = torch.softmax(noisy / temperature, -1)
    return one_hot(torch.argmax(noisy, -1), logits.shape[-1]) + (soft - soft.detach())


def one_hot(action: Tensor, choices: int) -> Tensor:
    """Returns one-hot vectors: [...] -> [..., choices] float32."""
    return torch.nn.functional.one_hot(action.long(), choices).float()


class ActionEncoder:
    """Encodes the joint action of all seats that learn as one vector, the concatenation of each
    seat's encoded action: one-hot, or units from -1 to 1. `heads` maps seats to heads. A seat that
    does not act is encoded as action 0 if its actions are discrete, otherwise as zeros."""

    def __init__(self, heads: Mapping[int, ActionHead]) -> None:
        self.heads = dict(sorted(heads.items()))
        self.columns: dict[int, tuple[int, ...]] = {}
        self.size = 0
        for seat, head in self.heads.items():
            width = head.width or head.outputs
            self.columns[seat] = tuple(range(self.size, self.size + width))
            self.size += width

    def encode(self, actions: Tensor, agent_mask: Tensor) -> Tensor:
        """Encodes recorded actions [M, N, ...] with agent mask `agent_mask` [M, N] (bool) -> [M, J] float32."""
        codes = []
        for seat, head in self.heads.items():
            code = encode_action(head, actions[:, seat])
            codes.append(torch.where(agent_mask[:, seat, None], code, idle_code(head, code.device)))
        return torch.cat(codes, -1)

    def own_actions(self, joint: Tensor, seat_mapping: SeatMapping) -> Tensor:
        """Returns each seat's own encoded action: [M, J] -> [P, R, A]."""
        return joint[:, self._at(seat_mapping, joint.device)].movedim(1, 0).flatten(1, 2)

    def other_actions(self, joint: Tensor, seat_mapping: SeatMapping) -> Tensor:
        """Returns the other seats' encoded actions, with zeros for the seat itself: [M, J] -> [P, M, S, J]."""
        at = self._at(seat_mapping, joint.device)
        mask = joint.new_ones(*at.shape[:2], self.size).scatter(2, at, 0.0)
        return joint[None, :, None] * mask[:, None]

    def write(self, joint: Tensor, seat_mapping: SeatMapping, code: Tensor) -> None:
        """Writes the encoded actions of a stack's seats [P, R, A] to their columns of `joint` [M, J]."""
        at = self._at(seat_mapping, joint.device)
        joint[:, at] = code.unflatten(1, (-1, at.shape[1])).movedim(0, 1)

    def _at(self, seat_mapping: SeatMapping, device: torch.device) -> Tensor:
        """Returns the columns of the seats' encoded actions [P, S, A]."""
        return constant(tuple(tuple(map(self.columns.__getitem__, row)) for row in seat_mapping.seats), device)


def encode_action(head: ActionHead, action: Tensor) -> Tensor:
    """Returns encoded actions: [M, ...] -> [M, A], without padding."""
    if isinstance(head, ContinuousHead):
        return head.to_unit(action[:, : head.width])
    if action.dim() > 1:  # other seats have actions of several numbers
        action = action[:, 0]
    return one_hot(action, head.outputs)


def idle_code(head: ActionHead, device: torch.device) -> Tensor:
    """Returns the encoded action of a seat that does not act [A]."""
    code = torch.zeros(head.width or head.outputs, device=device)
    if not head.width:
        code[0] = 1.0
    return code
