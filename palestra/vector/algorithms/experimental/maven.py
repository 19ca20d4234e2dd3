"""MAVEN (Mahajan et al., 2019): Q-learning of a team with committed exploration. A latent z, one of K values drawn at
the start of each game by a policy that sees the initial state, conditions the seats' values and the mixer for the whole
game, so that the team explores by whole strategies and not only by single random actions.

- Values: a seat's network has one last layer for each z (the paper's linear hypernetwork of a one-hot z).
- Mixer: its input is the state and z.
- Mutual information of z and behaviour (section 4, eq. 7): a variational network predicts z from the state and the
  seats' Boltzmann policies, the softmax of their values. As in the authors' code it sees one step at a time; its
  cross-entropy is a loss of the seats' networks too. Recurrent networks carry the past in their values.
- The policy of z is trained on the team's returns of whole games, by policy gradients with an entropy bonus.

Evaluations and saved policies play the z that this policy prefers on average over recent initial states.

Shapes: as in `palestra.vector.algorithms.qmix`; `K` values of z.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import Discrete, Space
from palestra.vector.algorithms.experimental.latents import LatentPlayer, LatentPolicy
from palestra.vector.algorithms.q_learning import ValueHead, with_last_layer
from palestra.vector.algorithms.qmix import MixingConfig, QMIXLearner
from palestra.vector.learners.nets import NetLearner, NetLearnerSpec
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack, policy_writers
from palestra.vector.nets.dense import MLP
from palestra.vector.nets.heads import ActionHead, mask_illegal
from palestra.vector.nets.layers import make_generators
from palestra.vector.nets.on_device import RolloutTensors, as_tensor
from palestra.vector.nets.replay import TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy, greedy_selector


class MAVEN(MixingConfig):
    """MAVEN: QMIX whose values and mixer depend on a latent that the team commits to for a whole game."""

    type: Literal["maven"] = "maven"
    latents: int = Field(8, ge=2, le=1024)
    """Values of the latent that is drawn for each game: strategies that the team can commit to."""
    mi_coef: float = Field(0.1, ge=0)
    """Weight of the mutual information between the latent and the seats' Boltzmann policies; 0:
    latents need not differ."""
    latent_entropy_coef: float = Field(0.1, ge=0)
    """Coefficient of the entropy bonus of the policy that draws latents; its returns are normalised."""
    latent_lr: float | None = Field(None, gt=0)
    """Learning rate of the policy that draws latents; null: the first policy's."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return MAVENLearner


class LatentHead(ValueHead):
    """ValueHead of networks that have a block of outputs for each of K latents; `single` is the head of one block."""

    def __init__(self, space: Discrete, duelling: bool, latents: int) -> None:
        super().__init__(space, duelling)
        self.single = ValueHead(space, duelling)
        self.latents = latents
        self.outputs *= latents

    def values(self, out: Tensor) -> Tensor:
        """Returns action values for all latents: outputs [..., O] -> [..., K*A]."""
        return self.single.values(out.unflatten(-1, (self.latents, -1))).flatten(-2)

    def select(self, blocks: Tensor, latent: Tensor) -> Tensor:
        """Returns the blocks of given latents: [..., K*D] and [...] int64 -> [..., D]."""
        blocks = blocks.unflatten(-1, (self.latents, -1))
        index = latent[..., None, None].expand(*blocks.shape[:-2], 1, blocks.shape[-1])
        return blocks.gather(-2, index)[..., 0, :]


class MAVENLearner(QMIXLearner):
    """Learner of MAVEN. Raises ValueError for pixel observations without a global state."""

    config: MAVEN
    uses_global_features = True
    mixer_near_sum = False  # latents change a steep mixer's values more, which finds better strategies (docs/games.md)

    def __init__(self, config: MAVEN, spec: NetLearnerSpec) -> None:
        env = spec.env
        if not env.state_size and any(map(env.sees_image, range(len(env.seats)))):
            raise ValueError(
                f'maven draws latents from a global state, and env "{env.name}" has only pixels: give the env a '
                "state, or use qmix with mixer: vdn"
            )
        super().__init__(config, spec)
        name = self.names[0]
        own = self.policies[name]
        seed = self.seeds[name]
        adam = partial(StackedOptimizer, names=["+".join(self.names)], process_group=self.process_group)
        self.latent_policy = LatentPolicy(
            self.global_size, config.latents, config.mixer_units, derive_seed(seed, "latents"), self.device
        )
        self.latent_adam = adam(self.latent_policy.net, config=own.with_lr(config.latent_lr))
        inputs = self.global_size + len(self.seats) * self._num_actions
        generators = make_generators([derive_seed(seed, "variational")])
        self.variational = MLP(inputs, [config.mixer_units], "relu", generators, config.latents).to(self.device)
        self.variational_adam = adam(self.variational, config=own)
        self.extra_modules |= {
            "latents": self.latent_policy.net,
            "returns": self.latent_policy.norm,
            "variational": self.variational,
        }
        self.saved_parts["games"] = self.latent_policy
        self.extra_optimizers |= {"latent_adam": self.latent_adam, "variational_adam": self.variational_adam}

    # ---- networks

    def build_head(self, space: Space) -> ActionHead:
        assert isinstance(space, Discrete)
        return LatentHead(space, self.config.duelling, self.config.latents)

    @property
    def latent_heads(self) -> list[LatentHead]:
        """The heads of the stacks."""
        return [head for head in self.heads if isinstance(head, LatentHead)]

    @property
    def mixer_state_size(self) -> int:
        return self.global_size + self.config.latents

    # ---- play

    def rollout_policies(self, progress: float) -> list[NetVectorPolicy]:
        """Returns players that share the latents of the games; the first player draws them."""
        epsilon = self.epsilon_at(progress)
        policy = self.latent_policy
        policy.drawn.clear()
        players: list[NetVectorPolicy] = []
        for stack, head in zip(self.stacks, self.latent_heads, strict=True):
            selector = self._selector(head, head.single.epsilon_greedy(epsilon), len(stack.seat_mapping.seats[0]))
            players.append(LatentPlayer(stack, selector, None if players else self._draw))
        return players

    def _selector(self, head: LatentHead, choose: ActionSelector, seats: int) -> ActionSelector:
        """Returns a selector that chooses by the outputs of each game's latent."""

        def select(out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
            rows = as_tensor(self.latent_policy.current, out.device).repeat_interleave(seats)
            return choose(head.select(out, rows.expand(out.shape[:-1])), action_mask, generator)

        return select

    def _draw(
        self, obs: np.ndarray, state: np.ndarray | None, is_first: np.ndarray, generator: torch.Generator
    ) -> None:
        if state is None:
            features = self.global_features(as_tensor(obs, self.device), None, 1)
        else:
            features = self.global_features(obs, as_tensor(state, self.device), 1)
        self.latent_policy.draw(features, is_first, generator)

    def sampling_policies(self) -> Sequence[NetVectorPolicy]:
        """Returns epsilon-greedy players of the preferred latent."""
        epsilon = self.epsilon_at(1.0)
        return [stack.build_policy(head.epsilon_greedy(epsilon)) for stack, head in self._plain_stacks()]

    def greedy_policies(self) -> list[NetVectorPolicy]:
        """Returns players that act greedily by the preferred latent."""
        return [stack.build_policy(greedy_selector(head)) for stack, head in self._plain_stacks()]

    def _plain_stacks(self) -> list[tuple[PolicyStack, ValueHead]]:
        """Returns copies of the stacks as plain Q-networks of the preferred latent, and their heads."""
        latent = torch.tensor(self.latent_policy.preferred_latent()).to(self.device)

        def own(head: LatentHead, weights: Tensor) -> Tensor:
            return head.single.values(head.select(weights, latent.expand(weights.shape[:-1])))

        found = []
        for stack, head in zip(self.stacks, self.latent_heads, strict=True):
            plain = ValueHead(Discrete(head.num_actions), duelling=False)
            net = with_last_layer(stack, head.num_actions, partial(own, head))
            found.append((replace(stack, net=net, head=plain), plain))
        return found

    # ---- learning

    def replay_rows(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the rollout with the latents of its games, one-hot, at the end of the state."""
        latent = self.latent_policy.latents_of(batch)
        one_hot = np.eye(self.config.latents, dtype=np.float32)[latent]
        if batch.state is None or batch.final_state is None:
            return replace(batch, state=one_hot, final_state=one_hot[batch.end_index])
        return replace(
            batch,
            state=np.concatenate([batch.state, one_hot], -1),
            final_state=np.concatenate([batch.final_state, one_hot[batch.end_index]], -1),
        )

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        rollout = RolloutTensors.of(batch, self.device)
        features = self.global_features(rollout.obs, rollout.state, 2)
        starts, latents, returns = self.latent_policy.ended_games(
            batch, features, batch.rewards[..., self.seats].mean(-1)
        )
        found = super().update(batch, progress)
        if self._ready():
            coef = self.config.latent_entropy_coef
            sums = self.process_group.all_reduce
            self.latent_adam.step(self.latent_policy.loss(starts, latents, returns, coef, sums), progress)
            entropy = {"latent_entropy": self.latent_policy.entropy()}
            found = {name: line | entropy for name, line in found.items()}
        return found

    def action_values(self, i: int, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the values of the base class, selected by the latents of the games."""
        head = self.latent_heads[i]
        rows = self.stacks[i].rows
        latent = rows(self._latents(drawn).argmax(-1)[..., None].expand(drawn.agent_mask.shape))
        q, target_q, chooser_q = (head.select(values, latent) for values in super().action_values(i, drawn))
        return q, target_q, chooser_q

    def _latents(self, drawn: TransitionBatch | SequenceBatch) -> Tensor:
        """Returns the latents of the games, one-hot [T, M, K]."""
        assert drawn.state is not None
        return drawn.state[..., -self.config.latents :]

    def states(self, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor]:
        latent = self._latents(drawn)  # a transition lies within one game
        now, after = super().states(self._without_latents(drawn))
        return torch.cat([now, latent], -1), torch.cat([after, latent], -1)

    def _without_latents(self, drawn: Any) -> Any:
        """Returns the batch with the env's own state."""
        if not self.env.state_size:
            return replace(drawn, state=None, next_state=None)
        size = self.env.state_size
        return replace(drawn, state=drawn.state[..., :size], next_state=drawn.next_state[..., :size])

    def penalties(
        self, q: list[Tensor], drawn: TransitionBatch | SequenceBatch, share: Tensor, progress: float
    ) -> tuple[list[Tensor], TensorMetrics]:
        """Takes a step of the variational network; returns each stack's loss from the bound of the
        mutual information, and the metric `mi_loss`, the network's cross-entropy in nats."""
        leaves = [values.detach().requires_grad_() for values in q]
        latent = self._latents(drawn)
        known = (share > 0).to(share.dtype)
        prediction = self.variational(self.variational_inputs(leaves, drawn).flatten(0, 1)[None])[0]
        errors = nn.functional.cross_entropy(prediction, latent.flatten(0, 1).argmax(-1), reduction="none")
        loss = (known.flatten() * errors).sum() / known.sum().clamp(min=1)
        slopes = torch.autograd.grad(self.config.mi_coef * loss, leaves, retain_graph=True)
        self.variational_adam.step(loss, progress)
        return [(values * slope).sum() for values, slope in zip(q, slopes, strict=True)], {"mi_loss": loss.detach()}

    def variational_inputs(self, q: list[Tensor], drawn: TransitionBatch | SequenceBatch) -> Tensor:
        """Returns the state and the seats' Boltzmann policies [T, M, G + J*A], zeros for seats that do not act."""
        parts = []
        for stack, values in zip(self.stacks, q, strict=True):
            values = mask_illegal(values, stack.optional_rows(drawn.action_mask))
            acts = stack.rows(drawn.agent_mask)[..., None]
            chances = nn.functional.pad(values.softmax(-1) * acts, (0, self._num_actions - values.shape[-1]))
            parts.append(stack.seat_mapping.by_seat(chances))
        now = super().states(self._without_latents(drawn))[0]
        return torch.cat([now, torch.cat(parts, 2).flatten(2)], -1)

    def _together(self, obs: Tensor) -> Tensor:
        return self.global_features(obs, None, obs.dim() - 2)

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        """Returns writers of the policies as plain Q-networks of the preferred latent."""
        return policy_writers(stack for stack, _ in self._plain_stacks())
