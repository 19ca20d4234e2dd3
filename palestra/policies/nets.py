"""Players that run networks at the seats of vector envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector.base import Frame
from palestra.nets.heads import Head
from palestra.nets.layers import Net
from palestra.nets.seating import Seating

# outputs [P, R, O], legal [P, R, A] or None, a generator -> actions [P, R, ...] and their log-probabilities [P, R]
Choose = Callable[[Tensor, Tensor | None, torch.Generator], tuple[Tensor, Tensor | None]]


class NetPlayer:
    """A stack of networks at its seats. `choose` converts outputs to actions: `sampling(head)`, `greedy(head)`, or an
    algorithm's own exploration. `normalise` is applied to observations before the networks."""

    def __init__(
        self,
        seating: Seating,
        net: Net,
        choose: Choose,
        versions: Sequence[int] = (),
        normalise: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.seating, self.net, self.choose, self.normalise = seating, net, choose, normalise
        self.seats, self.name = seating.flat, "+".join(seating.names)
        versions = versions or [0] * len(seating.names)
        self.names = [f"{name}@{version}" for name, version in zip(seating.names, versions, strict=True)]
        self.generator = torch.Generator()

    def begin(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def empty(self, games: int) -> Tensor | None:
        P, S = len(self.seating.names), len(self.seating.seats[0])
        return self.net.empty(P, games * S) if self.net.memory_units else None

    @torch.no_grad()
    def act(
        self, frame: Frame, memory: Tensor | None, fresh: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None, Tensor | None]:
        obs = self.seating.observe(frame.obs, 1)  # [P, B, S, *view]
        obs = self.normalise(obs) if self.normalise else obs
        P, B, S = obs.shape[:3]
        rows = obs.reshape(P, B * S, *obs.shape[3:])
        if memory is None:
            out = self.net(rows)
        else:
            anew = torch.from_numpy(fresh).repeat_interleave(S).expand(P, 1, B * S)
            unrolled, memories = self.net.unroll(rows[:, None], memory, anew)
            assert memories is not None
            out, memory = unrolled[:, 0], memories[:, 0]
        legal = None if frame.legal is None else self.seating.take(frame.legal, 1).reshape(P, B * S, -1)
        actions, logp = self.choose(out, legal, self.generator)
        put = self.seating.put
        shown = None if logp is None else put(logp.view(P, B, S))
        return put(actions.view(P, B, S, *actions.shape[2:])), shown, memory


def sampling(head: Head) -> Choose:
    """Returns a chooser that samples from the head's distribution."""
    return head.sample


def greedy(head: Head) -> Choose:
    """Returns a chooser that takes the most likely action."""

    def choose(out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, None]:
        return head.mode(out, legal), None

    return choose
