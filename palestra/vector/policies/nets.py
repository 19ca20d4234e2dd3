"""Players that run networks at the seats of vector envs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector_base import VectorStep
from palestra.vector.nets.continuous_heads import LOG_2, BoundedHead
from palestra.vector.nets.exploration_noise import CorrelatedNoise
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.layers import Net, Team
from palestra.vector.nets.normalise import RunningNorm, normalise
from palestra.vector.nets.on_device import as_tensor, make_generator, to_arrays
from palestra.vector.nets.seat_mapping import SeatMapping
from palestra.vector.nets.transformer import MultiAgentTransformer, SeatSelector

# outputs [P, R, O], action mask [P, R, A] or None, a generator -> actions [P, R, ...], log-probabilities [P, R] or None
ActionSelector = Callable[[Tensor, Tensor | None, torch.Generator], tuple[Tensor, Tensor | None]]


class NetVectorPolicy:
    """A stack of networks at its seats. `selector` converts outputs to actions: `head.sample`,
    `greedy_selector(head)`, or an algorithm's own exploration. `norm` normalises observations (None: they are not). It
    acts on the device of the network: observations go there and actions come back in one copy each."""

    def __init__(
        self,
        seat_mapping: SeatMapping,
        net: Net,
        selector: ActionSelector,
        versions: Sequence[int] = (),
        norm: RunningNorm | None = None,
    ) -> None:
        self.seat_mapping = seat_mapping
        self.net = net
        self.selector = selector
        self.norm = norm
        self.seats = list(seat_mapping.all_seats)
        self.name = seat_mapping.label
        versions = versions or [0] * len(seat_mapping.names)
        self.names = [f"{name}@{version}" for name, version in zip(seat_mapping.names, versions, strict=True)]
        self.device = net.head.weight.device
        self.generator = make_generator(self.device, 0)

    def reset_rng(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def initial_state(self, num_envs: int) -> Tensor | None:
        P = len(self.seat_mapping.names)
        S = len(self.seat_mapping.seats[0])
        if not self.net.recurrent_units:
            return None
        return self.net.initial_state(P, num_envs * S)

    @torch.no_grad()
    def act(
        self, vector_step: VectorStep, recurrent_state: Tensor | None, is_first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None, Tensor | None]:
        mapping = self.seat_mapping
        device = self.device
        obs = normalise(self.norm, mapping.network_inputs(as_tensor(vector_step.obs, device), 1))  # [P, B, S, *view]
        masks = None
        acts = None
        if vector_step.action_mask is not None:
            masks = mapping.select_seats(as_tensor(vector_step.action_mask, device), 1)
        if self.net.plays_team:
            acts = mapping.select_seats(as_tensor(vector_step.agent_mask, device), 1)  # [P, B, S]
        if isinstance(self.net, MultiAgentTransformer):
            assert acts is not None
            choose = self._seat_selector(masks)
            rows = acts.flatten(1)
            begun = as_tensor(is_first, device).repeat_interleave(acts.shape[2]).expand(rows.shape)
            actions, logp, recurrent_state = self.net.play(obs, acts, choose, recurrent_state, begun)
        else:
            actions, logp, recurrent_state = self._act_at_once(obs, acts, masks, recurrent_state, is_first)
        if logp is not None:
            logp = mapping.in_seat_order(logp)
        return *to_arrays(mapping.in_seat_order(actions), logp), recurrent_state

    def _act_at_once(
        self,
        obs: Tensor,
        acts: Tensor | None,
        masks: Tensor | None,
        recurrent_state: Tensor | None,
        is_first: np.ndarray,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the actions of all seats [P, B, S, ...], their log-probabilities and the new recurrent state."""
        P, B, S = obs.shape[:3]
        rows = obs.reshape(P, B * S, *obs.shape[3:])
        team = Team(acts.reshape(P, 1, B * S)) if acts is not None else None
        if recurrent_state is None:
            out = self.net(rows, team)
        else:
            anew = as_tensor(is_first, self.device).repeat_interleave(S).expand(P, 1, B * S)
            unrolled, memories = self.net.unroll(rows[:, None], recurrent_state, anew, team)
            assert memories is not None
            out = unrolled[:, 0]
            recurrent_state = memories[:, 0]
        if masks is not None:
            masks = masks.reshape(P, B * S, -1)
        actions, logp = self.selector(out, masks, self.generator)
        if logp is not None:
            logp = logp.view(P, B, S)
        return actions.view(P, B, S, *actions.shape[2:]), logp, recurrent_state

    def _seat_selector(self, masks: Tensor | None) -> SeatSelector:
        """Returns a function that selects actions of one seat; `masks` are [P, B, S, A]."""

        def choose(out: Tensor, seat: int) -> tuple[Tensor, Tensor | None]:
            return self.selector(out, None if masks is None else masks[:, :, seat], self.generator)

        return choose


def greedy_selector(head: ActionHead) -> ActionSelector:
    """Returns an action selector that takes the most likely action."""

    def choose(out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, None]:
        return head.mode(out, action_mask), None

    return choose


def noisy_selector(head: BoundedHead, noise: CorrelatedNoise) -> ActionSelector:
    """Returns an action selector that perturbs the head's actions by `noise`."""

    def choose(out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        unit, logp = head.perturb(out, noise.draw(out[..., : head.width], generator))
        return head.from_unit(unit), logp

    return choose


def uniform_selector(head: ActionHead, noise: CorrelatedNoise) -> ActionSelector:
    """Returns an action selector that samples legal actions uniformly. A continuous action is the
    quantile of a sample of `noise`, so successive actions are correlated as the noise is."""

    def choose(out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if isinstance(head, BoundedHead):
            unit = torch.erf(noise.draw(out[..., : head.width], generator) / math.sqrt(2))
            return head.from_unit(unit), unit.new_full(unit.shape[:-1], -head.width * LOG_2)
        return head.sample(torch.zeros_like(out), action_mask, generator)

    return choose
