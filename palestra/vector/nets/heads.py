"""Action distributions from network outputs, one for each kind of action space.

Shapes: outputs `[..., O]`, action masks `[..., A]` (bool) or None; discrete actions `[...]` (int64), multi-discrete
`[..., M]` (int64), continuous `[..., D]` (float32); log-probabilities and entropies `[...]` (float32).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space
from palestra.vector.nets.on_device import exponential_like, normal_like

MASKED_LOGIT = -1e9  # log-probability of illegal actions: finite, so that products with a zero probability are not nan


def mask_illegal(values: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns values or logits [..., A] with the lowest finite number of their dtype in place of
    those of illegal actions (`action_mask` [..., >= A]; None: all are legal): no legal action has
    less. Infinity would make rows without a legal action, of seats that do not act, NaN."""
    if action_mask is None:
        return values
    return values.masked_fill(~action_mask[..., : values.shape[-1]], torch.finfo(values.dtype).min)


class ActionHead(ABC):
    """Base of distributions with `outputs` parameters over actions of `width` numbers (0: an index)."""

    outputs: int
    width: int

    def to(self, device: torch.device) -> Self:
        """Moves the head's own tensors to a device; returns the head."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    @abstractmethod
    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns sampled actions and their log-probabilities."""

    @abstractmethod
    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        """Returns the most likely actions."""

    @abstractmethod
    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of given actions, and entropies (nats)."""


class CategoricalHead(ActionHead):
    """Categorical distribution over n actions."""

    width = 0

    def __init__(self, space: Discrete) -> None:
        self.outputs = space.n

    def logits(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        """Returns normalised log-probabilities [..., n]."""
        out = mask_illegal(out, action_mask)
        out = out - out.detach().amax(-1, keepdim=True)
        logp = out - out.exp().sum(-1, keepdim=True).log()  # four times as fast as log_softmax over so few numbers
        return logp if action_mask is None else logp.clamp(min=MASKED_LOGIT)

    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logp = self.logits(out, action_mask)
        race = exponential_like(logp, generator)  # exponential clocks: the first is a sample
        action = torch.argmax(logp.exp() / race, -1)
        return action, logp.gather(-1, action[..., None])[..., 0]

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        return torch.argmax(self.logits(out, action_mask), -1)

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        logp, entropy = CategoricalScore.apply(self, out, action, action_mask)
        return logp, entropy


class CategoricalScore(torch.autograd.Function):
    """`CategoricalHead.evaluate_actions` as one autograd node. PyTorch would create twelve nodes, which take most of
    the time of a policy's loss when there are few actions. Supports first derivatives only."""

    @staticmethod
    def forward(
        ctx: Any, head: CategoricalHead, out: Tensor, action: Tensor, action_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logp = head.logits(out, action_mask)
        index = action[..., None]
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        ctx.save_for_backward(logp, p, entropy, index, action_mask)
        return logp.gather(-1, index)[..., 0], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor) -> tuple[None, Tensor, None, None]:
        """With outputs x: d logp / d x = one-hot action - p, and d entropy / d x = -p (logp + entropy)."""
        logp, p, entropy, index, action_mask = ctx.saved_tensors
        g_logp = g_logp[..., None]
        g_entropy = g_entropy[..., None]
        g = (logp + entropy[..., None]).mul_(g_entropy).add_(g_logp).mul_(p).neg_().scatter_add_(-1, index, g_logp)
        if action_mask is not None:
            g.masked_fill_(~action_mask[..., : p.shape[-1]], 0.0)
        return None, g, None, None


class MultiCategoricalHead(ActionHead):
    """Several independent categorical distributions."""

    def __init__(self, space: MultiDiscrete) -> None:
        self.parts = [CategoricalHead(Discrete(size)) for size in space.sizes]
        self.outputs = sum(space.sizes)
        self.width = len(space.sizes)

    def split(self, out: Tensor) -> list[tuple[CategoricalHead, Tensor]]:
        """Returns the parts and their outputs."""
        return list(zip(self.parts, out.split([part.outputs for part in self.parts], -1), strict=True))

    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = [part.sample(x, None, generator) for part, x in self.split(out)]
        return torch.stack([action for action, _ in drawn], -1), torch.stack([logp for _, logp in drawn]).sum(0)

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        return torch.stack([part.mode(x, None) for part, x in self.split(out)], -1)

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = [part.evaluate_actions(x, action[..., i], None) for i, (part, x) in enumerate(self.split(out))]
        return torch.stack([logp for logp, _ in scores]).sum(0), torch.stack([entropy for _, entropy in scores]).sum(0)


LOG_STD_BOUNDS = (-5.0, 2.0)


def mean_and_log_std(out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and bounded log standard deviation [..., D] each of outputs [..., 2D]."""
    mean, log_std = out.chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD_BOUNDS)


class ContinuousHead(ActionHead):
    """Base of distributions over continuous actions. A unit is an action in half-widths of the space around its middle;
    unbounded numbers are not scaled."""

    def __init__(self, space: Continuous) -> None:
        self.width = len(space.low)
        low = torch.tensor(space.low)
        high = torch.tensor(space.high)
        self.bounded = torch.isfinite(high - low)
        self.middle = torch.where(self.bounded, (low + high) / 2, 0.0)
        # where both bounds are equal, the env clips an action to its only value
        self.half_width = torch.where(self.bounded & (high > low), (high - low) / 2, 1.0)

    def to_unit(self, action: Tensor) -> Tensor:
        """Returns actions of the space [..., D] as units, clamped to its bounds, as the env does."""
        unit = (action - self.middle) / self.half_width
        return torch.where(self.bounded, unit.clamp(-1, 1), unit)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Returns actions of the space from units [..., D]."""
        return self.middle + self.half_width * unit


class GaussianHead(ContinuousHead):
    """Independent Gaussians over units. The env clips actions outside the space."""

    def __init__(self, space: Continuous) -> None:
        super().__init__(space)
        self.outputs = 2 * self.width

    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mean, log_std = mean_and_log_std(out)
        noise = normal_like(mean, generator)
        return self.from_unit(mean + noise * log_std.exp()), self._logp(noise, log_std)

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        return self.from_unit(mean_and_log_std(out)[0])

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = mean_and_log_std(out)
        noise = ((action - self.middle) / self.half_width - mean) / log_std.exp()
        return self._logp(noise, log_std), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def _logp(self, noise: Tensor, log_std: Tensor) -> Tensor:
        """Returns log-densities before scaling to the space, which differ from the action's by a constant."""
        return (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def make_head(space: Space) -> ActionHead:
    """Returns the distribution for an action space."""
    if isinstance(space, Discrete):
        return CategoricalHead(space)
    if isinstance(space, MultiDiscrete):
        return MultiCategoricalHead(space)
    return GaussianHead(space)


def encode_actions(space: Space, actions: Tensor) -> Tensor:
    """Returns actions [...] as float32 vectors [..., A']: one-hot, or for continuous actions scaled
    to -1 to 1 and clamped to the bounds of the space."""
    if isinstance(space, Discrete):
        return torch.nn.functional.one_hot(actions.long(), space.n).float()
    if isinstance(space, MultiDiscrete):
        vectors = [encode_actions(Discrete(size), actions[..., i]) for i, size in enumerate(space.sizes)]
        return torch.cat(vectors, -1)
    head = GaussianHead(space).to(actions.device)
    return head.to_unit(actions[..., : head.width])


def encoding_size(space: Space) -> int:
    """Returns the length of the vectors that `encode_actions` returns."""
    if isinstance(space, Continuous):
        return len(space.low)
    if isinstance(space, Discrete):
        return space.n
    return sum(space.sizes)


def kl_divergence(head: ActionHead, old: Tensor, new: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the Kullback-Leibler divergence KL(old || new) [...] in nats of two distributions with the outputs `old`
    and `new` [..., O]. Raises ValueError for a head whose divergence has no closed form."""
    if isinstance(head, CategoricalHead):
        before = head.logits(old, action_mask)
        after = head.logits(new, action_mask)
        return (before.exp() * (before - after)).sum(-1)
    if isinstance(head, MultiCategoricalHead):
        pairs = zip(head.split(old), head.split(new), strict=True)
        return torch.stack([kl_divergence(part, x, y, None) for (part, x), (_, y) in pairs]).sum(0)
    if isinstance(head, GaussianHead):
        (mean, log_std), (new_mean, new_log_std) = mean_and_log_std(old), mean_and_log_std(new)
        spread = (2 * (log_std - new_log_std)).exp() + ((mean - new_mean) / new_log_std.exp()).square()
        return (new_log_std - log_std + 0.5 * (spread - 1)).sum(-1)
    raise ValueError(f"the Kullback-Leibler divergence of {type(head).__name__} has no closed form")
