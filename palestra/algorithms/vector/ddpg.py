"""Deep deterministic policy gradients (Lillicrap et al., 2016) and TD3 (Fujimoto et al., 2018); with a central critic
MADDPG (Lowe et al., 2017) and MATD3. Discrete actions are sampled with straight-through Gumbel-softmax gradients (Jang
et al., 2017), as in Lowe et al."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.algorithms.vector.critics import copy_of
from palestra.algorithms.vector.off_policy import Answer, OffPolicy, OffPolicyConfig, Scene
from palestra.envs.vector.base import Continuous, Discrete, Space
from palestra.learners.nets import NetLearner, Stack
from palestra.losses.critics import ascent_loss
from palestra.losses.policy import Figures
from palestra.nets.heads import CategoricalHead, Head
from palestra.nets.layers import Net
from palestra.nets.squashed import TanhHead, straight_through
from palestra.policies.nets import Choose, sampling


class DeterministicConfig(OffPolicyConfig, ABC):
    """Base config of DDPG and TD3. Continuous actions explore with Gaussian noise; discrete actions are sampled."""

    noise: float = Field(0.1, ge=0)
    """Standard deviation of the exploration noise, in half-widths of the action bounds."""
    noise_end: float | None = Field(None, ge=0)
    """Exploration noise after the decay; null keeps `noise`."""
    noise_share: float = Field(1.0, gt=0, le=1)
    """Share of the run over which the noise decays, linearly."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of the Gumbel-softmax gradient, for discrete actions."""
    decay: float = Field(1e-2, ge=0)
    """Weight of the mean square of the policy's outputs in its loss, which keeps it from saturation. The code of Lowe
    et al. has 1e-3, at which discrete policies more often converge too early."""

    def noise_at(self, progress: float) -> float:
        """Returns the standard deviation of the exploration noise at `progress` in [0, 1]."""
        end = self.noise if self.noise_end is None else self.noise_end
        return self.noise + (end - self.noise) * min(1.0, progress / self.noise_share)


class DDPG(DeterministicConfig):
    """DDPG: one critic per policy."""

    type: Literal["ddpg"] = "ddpg"
    """Selects DDPG."""

    def teacher(self) -> Callable[..., NetLearner]:
        return Deterministic


class TD3(DeterministicConfig):
    """TD3: twin critics with the lesser value as target, delayed policy updates and target policy smoothing."""

    type: Literal["td3"] = "td3"
    """Selects TD3."""
    smoothing: float = Field(0.2, ge=0)
    """Standard deviation of the noise on target actions, in half-widths; discrete actions get none, since they are
    sampled."""
    smoothing_clip: float = Field(0.5, ge=0)
    """Bound of that noise, in half-widths."""
    delay: int = Field(2, ge=1)
    """Critic steps per step of the policies and target networks."""

    def teacher(self) -> Callable[..., NetLearner]:
        return TwinDelayed


class Deterministic(OffPolicy):
    """Learner of DDPG."""

    config: DeterministicConfig
    twins = 1

    def prepare(self) -> None:
        self.copies = [copy_of(stack.net) for stack in self.stacks]

    def head(self, space: Space) -> Head:
        if isinstance(space, Continuous):
            return TanhHead(space)
        assert isinstance(space, Discrete)
        return CategoricalHead(space)

    def outputs(self, head: Head) -> int:
        return head.width or head.outputs

    def explore(self, stack: Stack, progress: float) -> Choose:
        if isinstance(stack.seating.space, Continuous):
            return sampling(TanhHead(stack.seating.space, self.config.noise_at(progress)))
        return sampling(stack.head)

    def answer(self, i: int, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        return self._of(self.stacks[i].net, self.stacks[i].head, views, legal, generator)

    def foresee(self, i: int, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        """Returns the actions of the target policies."""
        return self._of(self.copies[i], self.stacks[i].head, views, legal, generator)

    def _of(self, net: Net, head: Head, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        out = net(views)
        if isinstance(head, TanhHead):
            return Answer(out, torch.tanh(out))
        assert isinstance(head, CategoricalHead)
        return Answer(out, straight_through(head.logits(out, legal), generator, temperature=self.config.temperature))

    def worth(self, i: int, q: Tensor, answer: Answer) -> Tensor:
        return q.amin(0)[..., 0]

    def loss(self, i: int, q: Tensor, answer: Answer, scene: Scene) -> tuple[Tensor, Figures]:
        """Returns the deterministic policy gradient loss, by the first critic alone as in Fujimoto et al."""
        size = (scene.share[..., None] * answer.out.square()).sum(1).mean(-1)
        return ascent_loss(q[0][..., 0], scene.share) + self.config.decay * size, {"outputs": size.detach()}

    def followed(self) -> list[tuple[Net, Net]]:
        nets = [stack.net for stack in self.stacks]
        return super().followed() + list(zip(nets, self.copies, strict=True))

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {f"copy.{i}": net for i, net in enumerate(self.copies)}


class TwinDelayed(Deterministic):
    """Learner of TD3."""

    config: TD3
    twins = 2

    def prepare(self) -> None:
        super().prepare()
        self.delay = self.config.delay

    def foresee(self, i: int, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        """Returns the actions of the target policies with clipped noise, which smooths sharp peaks of the critics."""
        answer, clip = super().foresee(i, views, legal, generator), self.config.smoothing_clip
        if isinstance(self.stacks[i].head, TanhHead):
            noise = self.config.smoothing * torch.empty_like(answer.code).normal_(generator=generator)
            answer.code = (answer.code + noise.clamp(-clip, clip)).clamp(-1, 1)
        return answer
