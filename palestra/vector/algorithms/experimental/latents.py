"""The latents of MAVEN: a policy draws one at the start of each game and learns from the returns of whole games. All
players of a game use the same latent.

Shapes: `T` steps, `B` parallel games, `G` numbers of the state, `K` values of a latent, `E` games that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Arrays, VectorStep
from palestra.parallel.process_group import SumOverProcesses
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.nets.dense import MLP
from palestra.vector.nets.layers import make_generators
from palestra.vector.nets.normalise import RunningNorm
from palestra.vector.nets.on_device import CPU, as_tensor
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy

RETURN_DECAY = 0.99  # per update, of the running mean and deviation of returns
OUTPUT_GAIN = 0.01  # small, so that the initial policy is nearly uniform

# observations [B, N, *view], state [B, S] or None, the games at their first step [B], a generator
DrawLatents = Callable[[np.ndarray, np.ndarray | None, np.ndarray, torch.Generator], None]


def categorical_entropy(logp: Tensor) -> Tensor:
    """Returns the entropy in nats of distributions with log-probabilities [..., K]."""
    return -(logp.exp() * logp).sum(-1)


class LatentPlayer(NetVectorPolicy):
    """A stack at its seats, with a selector that reads the games' latents; `draw`, if given, draws
    those of new games before every step."""

    def __init__(self, stack: PolicyStack, selector: ActionSelector, draw: DrawLatents | None) -> None:
        versions = [stack.version] * len(stack.seat_mapping.names)
        super().__init__(stack.seat_mapping, stack.net, selector, versions, stack.norm)
        self.draw = draw

    def act(
        self, vector_step: VectorStep, recurrent_state: Tensor | None, is_first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None, Tensor | None]:
        if self.draw:
            self.draw(vector_step.obs, vector_step.state, is_first, self.generator)
        return super().act(vector_step, recurrent_state, is_first)


class LatentPolicy:
    """A policy from initial states to latents, and the latents of the games being played.

    `current [B]` int64 are the latents of the games, `drawn` one such array for every step since the list was cleared,
    `starts [B, G]` the games' initial states and `returns [B]` their rewards so far (float64); all empty before the
    first step.
    """

    def __init__(self, state: int, latents: int, units: int, seed: int, device: torch.device = CPU) -> None:
        self.net = MLP(state, [units], "relu", make_generators([seed]), latents, OUTPUT_GAIN).to(device)
        self.norm = RunningNorm(1, 1, decay=RETURN_DECAY).to(device)
        self.device = device
        self.drawn: list[np.ndarray] = []
        self.current: np.ndarray = np.zeros(0, np.int64)
        self.starts = torch.zeros(0, state, device=device)
        self.returns = np.zeros(0)

    @torch.no_grad()
    def draw(self, features: Tensor, is_first: np.ndarray, generator: torch.Generator) -> None:
        """Draws the latents of games at their first step, by their states `features` [B, G]."""
        if len(self.current) != len(is_first):
            self.current = np.zeros(len(is_first), np.int64)
        if is_first.any():
            chances = self.net(features[as_tensor(is_first, self.device)][None])[0].softmax(-1)
            drawn = torch.multinomial(chances.to(generator.device), 1, generator=generator)
            self.current[is_first] = drawn[:, 0].cpu().numpy()
        self.drawn.append(self.current.copy())

    def latents_of(self, batch: RolloutBatch) -> np.ndarray:
        """Returns the latents of a rollout's steps, int64 [T+1, B]. Raises ValueError if they were not drawn for it."""
        if len(self.drawn) != len(batch.rewards):
            raise ValueError(
                f"latents were drawn for {len(self.drawn)} steps, the rollout has {len(batch.rewards)}: train on the "
                "rollout that rollout_policies() have just played"
            )
        return np.stack([*self.drawn, self.current])

    def ended_games(self, batch: RolloutBatch, features: Tensor, rewards: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the initial states [E, G], latents [E] and returns [E] of the games that ended in
        the rollout, from its states `features` [T+1, B, G] and the team's rewards [T, B]; stores
        the initial states and returns so far of the other games."""
        latent = self.latents_of(batch)
        games = len(self.current)
        if len(self.returns) != games:
            self.starts = features.new_zeros(games, features.shape[-1])
            self.returns = np.zeros(games)
        ended: list[tuple[Tensor, Tensor, Tensor]] = []
        for t, done in enumerate(batch.done):
            first = as_tensor(batch.is_first[t], self.device)
            self.starts = torch.where(first[:, None], features[t], self.starts)
            self.returns = np.where(batch.is_first[t], 0.0, self.returns) + rewards[t]
            over = as_tensor(done, self.device)
            drawn = as_tensor(latent[t][done], self.device)
            ended.append((self.starts[over], drawn, as_tensor(self.returns[done], self.device)))
        starts, latents, returns = (torch.cat(parts) for parts in zip(*ended, strict=True))
        return starts, latents, returns.float()

    def loss(
        self, starts: Tensor, latents: Tensor, returns: Tensor, entropy_coef: float, total: SumOverProcesses
    ) -> Tensor:
        """Returns the policy gradient loss on ended games (Williams, 1992), with returns normalised
        by running statistics and an entropy bonus; 0 without games."""
        self.norm.update(returns[None, :, None], returns.new_ones(1, len(returns)), total)
        advantages = self.norm.normalise(returns[None, :, None])[0, :, 0]
        logp = self.net(starts[None])[0].log_softmax(-1)
        gains = advantages * logp.gather(1, latents[:, None])[:, 0] + entropy_coef * categorical_entropy(logp)
        return -gains.sum() / max(1, len(returns))

    @torch.no_grad()
    def entropy(self) -> float:
        """Returns the mean entropy in nats over the games being played."""
        return float(categorical_entropy(self.net(self.starts[None])[0].log_softmax(-1)).mean())

    @torch.no_grad()
    def preferred_latent(self) -> int:
        """Returns the latent with the largest mean probability over the initial states of the games
        being played; 0 before the first game."""
        if not len(self.starts):
            return 0
        return int(self.net(self.starts[None])[0].softmax(-1).mean(0).argmax())

    def arrays(self) -> Arrays:
        """Returns the state of the games that `load` needs."""
        return {"current": self.current, "starts": self.starts.cpu().numpy(), "returns": self.returns}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Restores what `arrays` returned."""
        self.current = np.array(arrays["current"])
        self.returns = np.array(arrays["returns"])
        self.starts = torch.from_numpy(np.array(arrays["starts"])).to(self.device)
