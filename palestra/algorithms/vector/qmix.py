"""Q-learning of a team: the seats' values are mixed into one team value, which is trained on the team's reward. The
mixer is a sum (value decomposition networks, Sunehag et al., 2018) or a monotonic network (QMIX, Rashid et al., 2018).

The team's reward is the mean reward of the seats that learn. A seat that does not act (dead, or not its turn) adds a
value of 0 to the mix; time is counted in env steps. A seat that has terminated earns 0 from then on and takes no part
in later team values, also if the game is truncated for the others; the team's future is worth 0 once all seats that
learn have terminated.

Shapes: as in `palestra.algorithms.vector.q_learning`; `J` seats that learn, `G` numbers of the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.algorithms.vector.q_learning import QLearner, QLearningConfig, rows_by_seat
from palestra.learners.nets import NetLearner, NetLearnerSpec
from palestra.learners.policy_stack import StackedAdam
from palestra.losses.policy import TensorMetrics
from palestra.losses.q import q_loss, q_target
from palestra.nets.mixers import QMIXMixer, VDNMixer
from palestra.nets.replay import TransitionBatch
from palestra.nets.sequence_replay import SequenceBatch
from palestra.seeding import derive_seed


class QMIX(QLearningConfig):
    """QMIX and VDN: Q-learning with a value mixer."""

    type: Literal["qmix"] = "qmix"
    """Selects QMIX."""
    mixer: Literal["vdn", "qmix"] = "qmix"
    """`vdn` adds the seats' values; `qmix` mixes them with a network generated from the env's global state (from all
    observations together if it has none)."""
    mixer_units: int = Field(32, ge=1, le=65_536)
    """Units of the mixing network's hidden layer."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return QMIXLearner


class QMIXLearner(QLearner):
    """Learner of QMIX and VDN. Raises ValueError for `mixer: qmix` on pixel observations without a global state."""

    config: QMIX
    counts_env_steps = True

    def __init__(self, config: QMIX, pupils: NetLearnerSpec) -> None:
        super().__init__(config, pupils)
        self.mixer = self._mixer()
        self.target_mixer = copy.deepcopy(self.mixer).requires_grad_(False)
        names, first = ["+".join(self.names)], self.policies[self.names[0]]
        learns = any(True for _ in self.mixer.parameters())
        self.mixer_adam = StackedAdam(self.mixer, names, first, self.gradient_sync) if learns else None

    def _mixer(self) -> nn.Module:
        env = self.env
        if self.config.mixer == "vdn":
            return VDNMixer()
        if not env.state_size and any(len(view) > 1 for view in env.observation_shapes):
            raise ValueError(
                f'the mixer of qmix cannot see the pixels of env "{env.name}", which has no state beside them: set '
                "mixer: vdn"
            )
        seed = derive_seed(self.seeds[self.names[0]], "mixer")
        return QMIXMixer(len(self.seats), self.global_size, self.config.mixer_units, seed)

    @property
    def uses_global_features(self) -> bool:
        return self.config.mixer == "qmix"

    # ---- learning

    def train_step(
        self, drawn: TransitionBatch | SequenceBatch, progress: float
    ) -> tuple[list[TensorMetrics], Tensor, Tensor]:
        judged = [self.online_and_target_values(i, drawn) for i in range(len(self.stacks))]
        leaves = [taken.detach().requires_grad_() for taken, _ in judged]  # for gradients of the mixer's inputs
        state, next_state = self._states(drawn)
        total = self._mixed(self.mixer, leaves, drawn.agent_mask, state)
        with torch.no_grad():
            after = self._mixed(self.target_mixer, [q for _, q in judged], drawn.next_agent_mask, next_state)
        # with joint time all seats have the same discount and weight
        discount, weight = drawn.discounts[..., self.seats[0]], drawn.weight[..., self.seats[0]]
        target = q_target(drawn.rewards[..., self.seats].mean(-1), discount, after)
        known = weight > 0
        loss, error = q_loss(total, target, weight / known.sum().clamp(min=1))
        slopes = torch.autograd.grad(loss, leaves, retain_graph=True)
        if self.mixer_adam:
            self.mixer_adam.step(loss, progress)
        lines: list[TensorMetrics] = []
        mean = (known * total.detach()).sum() / known.sum().clamp(min=1)
        for stack, (taken, _), slope in zip(self.stacks, judged, slopes, strict=True):
            norms = stack.optimizer.step((taken * slope).sum(), progress)  # the chain rule, member by member
            lines.append({"q_loss": loss.detach().expand(len(norms)), "q": mean.expand(len(norms)), "grad_norm": norms})
        return lines, error.abs() * known, known

    def _mixed(self, mixer: nn.Module, values: list[Tensor], agent_mask: Tensor, state: Tensor) -> Tensor:
        """Returns the team's value [T, M] from the stacks' values [P, T, R]; 0 for seats that do not act."""
        q = torch.cat([rows_by_seat(stack, own) for stack, own in zip(self.stacks, values, strict=True)], -1)
        q = q * agent_mask[..., self.seats]
        mixed: Tensor = mixer(q.flatten(0, 1), state.flatten(0, 1)).view(q.shape[:2])
        return mixed

    def _states(self, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor]:
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
        """Returns all observations concatenated, [..., N, *padded] -> [..., G]; of width 0 for `vdn`, which ignores
        them."""
        if self.config.mixer == "vdn":
            return obs.new_zeros(*obs.shape[: obs.dim() - len(self.env.observation_shapes[0]) - 1], 0)
        return self.global_features(obs, None, obs.dim() - len(self.env.observation_shapes[0]) - 1)

    # ---- state

    def polyak_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [*super().polyak_pairs(), (self.mixer, self.target_mixer)]

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"mixer": self.mixer, "target_mixer": self.target_mixer}

    def optimizers(self) -> dict[str, StackedAdam]:
        mine = {"mixer_adam": self.mixer_adam} if self.mixer_adam else {}
        return super().optimizers() | mine
