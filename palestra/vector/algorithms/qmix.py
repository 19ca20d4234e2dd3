"""Q-learning of a team: the seats' values are mixed into one team value, which is trained on the team's reward. The
mixer is a sum (value decomposition networks, Sunehag et al., 2018), a monotonic network (QMIX, Rashid et al., 2018), or
a sum of values and weighted advantages (QPLEX, Wang et al., 2021).

The team's reward is the mean reward of the seats that learn. A seat that does not act (dead, or not its turn) enters
the mix with a value of 0, to which QPLEX adds a shift that depends on seat and state; time is counted in env steps. A
seat that has terminated earns 0 from then on and enters later team values like a seat that does not act, also if the
game is truncated for the others; the team's next value is 0 once all seats that learn have terminated.

Shapes: as in `palestra.vector.algorithms.q_learning`; `J` seats that learn, `G` numbers of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.vector.algorithms.critics import frozen_copy
from palestra.vector.algorithms.q_learning import QLearner, QLearningConfig
from palestra.vector.algorithms.team_mixing import check_mixer_sees_state, mix_values
from palestra.vector.learners.nets import WEIGHT_KEY, NetLearner, NetLearnerSpec
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.losses import best_action, gather_values, next_value, q_loss, td_target
from palestra.vector.nets.mixers import QMIXMixer, QPLEXMixer, SeatValues, VDNMixer
from palestra.vector.nets.on_device import constant
from palestra.vector.nets.replay import TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch


class MixingConfig(QLearningConfig):
    """Base config of Q-learning with a value mixer."""

    combines: ClassVar[Literal["nothing", "seats", "networks"]] = "seats"
    mixer: Literal["vdn", "qmix", "qplex"] = "qmix"
    """`vdn` adds the seats' values; `qmix` mixes them with a network generated from the env's global state (from all
    observations together if it has none); `qplex` adds the values, and the advantages with weights computed from state
    and joint action: it can represent every team value whose best joint action consists of each seat's best action."""
    mixer_units: int = Field(32, ge=1, le=65_536)
    """Units of the mixing network's hidden layers."""
    mixer_heads: int = Field(4, ge=1, le=1_024)
    """Attention heads of `mixer: qplex`."""


class QMIX(MixingConfig):
    """QMIX, VDN and QPLEX: Q-learning with a value mixer."""

    type: Literal["qmix"] = "qmix"

    def learner_class(self) -> Callable[..., NetLearner]:
        return QMIXLearner


class QMIXLearner(QLearner):
    """Learner of QMIX, VDN and QPLEX. Raises ValueError for a mixer other than `vdn` on pixel
    observations without a global state."""

    config: MixingConfig
    counts_env_steps = True
    mixer_near_sum = True  # the mixing network of qmix begins near the sum of the seats' values

    def __init__(self, config: MixingConfig, spec: NetLearnerSpec) -> None:
        super().__init__(config, spec)
        self.mixer = self._mixer().to(self.device)
        self.target_mixer = frozen_copy(self.mixer)
        names = ["+".join(self.names)]
        first = self.policies[self.names[0]]
        learns = any(True for _ in self.mixer.parameters())
        self.mixer_adam = StackedOptimizer(self.mixer, names, first, self.process_group) if learns else None
        self.extra_modules |= {"mixer": self.mixer, "target_mixer": self.target_mixer}
        self.polyak_pairs.append((self.mixer, self.target_mixer))
        if self.mixer_adam:
            self.extra_optimizers["mixer_adam"] = self.mixer_adam

    def _mixer(self) -> nn.Module:
        config = self.config
        if config.mixer == "vdn":
            return VDNMixer()
        check_mixer_sees_state(config.mixer, self.env)
        seed = derive_seed(self.seeds[self.names[0]], "mixer")
        seats = len(self.seats)
        state = self.mixer_state_size
        if config.mixer == "qmix":
            return QMIXMixer(seats, state, config.mixer_units, seed, near_sum=self.mixer_near_sum)
        return QPLEXMixer(seats, self._num_actions, state, config.mixer_units, config.mixer_heads, seed)

    @property
    def mixer_state_size(self) -> int:
        """The number of features of the mixer's state."""
        return self.global_size

    @property
    def _num_actions(self) -> int:
        """The largest number of actions of a seat that learns."""
        return max(head.num_actions for head in self.heads)

    @property
    def uses_global_features(self) -> bool:
        return self.config.mixer != "vdn"

    # ---- learning

    def train_step(
        self, drawn: TransitionBatch | SequenceBatch, progress: float
    ) -> tuple[list[TensorMetrics], Tensor, Tensor]:
        judged = [self._online_and_next(i, drawn) for i in range(len(self.stacks))]
        leaves = [now.q.detach().requires_grad_() for now, _, _ in judged]  # for gradients of the mixer's inputs
        online = [replace(now, q=leaf) for (now, _, _), leaf in zip(judged, leaves, strict=True)]
        state, next_state = self.states(drawn)
        total = mix_values(self.mixer, self.stacks, online, drawn.agent_mask, state)
        following = [then for _, then, _ in judged]
        with torch.no_grad():
            after = mix_values(self.target_mixer, self.stacks, following, drawn.next_agent_mask, next_state)
        # with joint time all seats have the same discount and weight
        discount = drawn.discounts[..., self.seats[0]]
        weight = drawn.weight[..., self.seats[0]]
        target = td_target(drawn.rewards[..., constant(tuple(self.seats), self.device)].mean(-1), discount, after)
        known = weight > 0
        share = weight / known.sum().clamp(min=1)
        loss, error = q_loss(total, target, share)
        slopes = torch.autograd.grad(loss, leaves, retain_graph=True)
        if self.mixer_adam:
            self.mixer_adam.step(loss, progress)
        penalties, more = self.penalties([q for _, _, q in judged], drawn, share, progress)
        lines: list[TensorMetrics] = []
        mean = (known * total.detach()).sum() / known.sum().clamp(min=1)
        for stack, (now, _, _), slope, penalty in zip(self.stacks, judged, slopes, penalties, strict=True):
            norms = stack.optimizer.step((now.q * slope).sum() + penalty, progress)  # the chain rule
            line = {"q_loss": loss.detach(), "q": mean, WEIGHT_KEY: known.sum()} | more
            lines.append({name: value.expand(len(norms)) for name, value in line.items()} | {"grad_norm": norms})
        return lines, error.abs() * known, known

    def penalties(
        self, q: list[Tensor], drawn: TransitionBatch | SequenceBatch, share: Tensor, progress: float
    ) -> tuple[list[Tensor], TensorMetrics]:
        """Returns a further loss of each stack (scalars), and metrics (scalars); zeros here. `q` [P, T, R, A] are the
        stacks' values of all actions, `share` [T, M] the weights of the steps."""
        return [values.new_zeros(()) for values in q], {}

    def _online_and_next(self, i: int, drawn: TransitionBatch | SequenceBatch) -> tuple[SeatValues, SeatValues, Tensor]:
        """Returns the mixer's inputs from stack i (`q` and `best` [P, T, R], `actions [P, T, R,
        A]`): of the actions taken by the online network, and of the following decisions by the
        target network; then the online network's values of all actions [P, T, R, A]."""
        if self.config.mixer != "qplex":
            q, taken, following = self.online_and_target_values(i, drawn)
            return SeatValues(taken), SeatValues(following), q
        stack = self.stacks[i]
        q, target_q, chooser_q = self.action_values(i, drawn)
        next_mask = stack.optional_rows(drawn.next_action_mask)
        chosen = best_action(chooser_q, next_mask)
        return (
            self._seat_values(q, stack.action_rows(drawn.actions), stack.optional_rows(drawn.action_mask)),
            self._seat_values(target_q, chosen, next_mask),
            q,
        )

    def _seat_values(self, q: Tensor, action: Tensor, action_mask: Tensor | None) -> SeatValues:
        """Returns the inputs of QPLEX's mixer from values [P, T, R, A] and actions [P, T, R]."""
        one_hot = nn.functional.one_hot(action, self._num_actions).to(q.dtype)
        return SeatValues(gather_values(q, action), next_value(q.detach(), q, action_mask), one_hot)

    def states(self, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor]:
        """Returns the mixer's state inputs, current and next [T, M, G]."""
        if drawn.state is not None and drawn.next_state is not None:
            return self.global_features(drawn.obs, drawn.state, 2), self.global_features(drawn.obs, drawn.next_state, 2)
        if isinstance(drawn, TransitionBatch):
            return self._together(drawn.obs), self._together(drawn.next_obs)
        every = self._together(drawn.obs)
        now = every[:-1]
        ends = torch.zeros_like(now)
        ends[drawn.truncations] = self._together(drawn.final_obs)
        step_index = drawn.step_index[..., self.seats[0], None].expand(now.shape)
        return now, torch.cat([every, ends]).gather(0, step_index)

    def _together(self, obs: Tensor) -> Tensor:
        """Returns all observations concatenated, [..., N, *padded] -> [..., G]; of width 0 for
        `vdn`, which ignores them."""
        lead = obs.dim() - len(self.env.observation_shapes[0]) - 1
        if self.config.mixer == "vdn":
            return obs.new_zeros(*obs.shape[:lead], 0)
        return self.global_features(obs, None, lead)
