"""PPO (Schulman et al., 2017) on MPE's simple_spread in one file, to read top to bottom, in the style of CleanRL.

    python examples/ppo_by_hand.py --steps 300 --seed 0

Three agents must cover three landmarks without touching each other. They share one policy and one critic, each a small
network that gets the observation of its own agent: independent PPO with shared weights (de Witt et al., 2020).

Only the env is palestra's: NUM_ENVS games in lock-step on arrays. The library's PPO (`palestra train
configs/games/spread_mappo.yaml`) has what this file leaves out: central critics, several policies, normalised
observations and values, recurrent networks, action masks, agents that act in turns or end early, several processes,
checkpoints, and evaluation on held-out games.

tests/project/test_by_hand.py checks that this file and the library compute the same advantages, losses and gradients.

Shapes: `T` steps, `B` games, `N` agents, `O` size of an observation, `R` transitions of a minibatch.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Discrete

NUM_ENVS = 128
ROLLOUT_LENGTH = 25  # one game
EPOCHS = 4  # passes over each rollout
MINIBATCHES = 2  # gradient steps per pass
LR = 1e-3
ADAM_EPS = 1e-5
MAX_GRAD_NORM = 0.5  # of each network
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2  # clipping distance of the probability ratio from 1
ENTROPY_COEF = 0.01


# ---- networks


def layer(inputs: int, outputs: int, gain: float = 5 / 3) -> nn.Linear:
    """Returns a linear layer with orthogonal weights and zero biases."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


class Agent(nn.Module):
    """The policy, which starts nearly uniform, and the critic."""

    def __init__(self, observation_size: int, num_actions: int) -> None:
        super().__init__()
        self.actor = mlp(observation_size, num_actions, gain=0.01)
        self.critic = mlp(observation_size, 1, gain=1.0)

    def policy(self, obs: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        value: Tensor = self.critic(obs)[..., 0]
        return value


# ---- rollout


@dataclass
class Rollout:
    """Transitions: `obs_TBNO`, `next_obs_TBNO` and `reward_TBN` float32, `action_TBN` int64, `logp_TBN` float32 (under
    the policy that acted), and bool `terminated_TB` and `done_TB` (terminated, or truncated by the time limit). If a
    game ended, the next observation is its last one, not the first of the next game."""

    obs_TBNO: Tensor
    next_obs_TBNO: Tensor
    action_TBN: Tensor
    logp_TBN: Tensor
    reward_TBN: Tensor
    terminated_TB: Tensor
    done_TB: Tensor


@torch.no_grad()
def collect(env: SimpleSpread, agent: Agent, obs_BNO: Tensor) -> tuple[Rollout, Tensor]:
    """Plays ROLLOUT_LENGTH steps of all games; returns the transitions, and the observations [B, N, O] after them."""
    steps = []
    for _ in range(ROLLOUT_LENGTH):
        policy = agent.policy(obs_BNO)
        action_BN = policy.sample()
        frame = env.step(action_BN.int().numpy()).copy()  # the env overwrites its arrays
        done_B = torch.from_numpy(frame.done)
        following = torch.from_numpy(frame.obs)  # in place of a game that ended, a new one has begun
        next_obs_BNO = torch.where(done_B[:, None, None], torch.from_numpy(frame.final_obs), following)
        reward_BN, terminated_B = torch.from_numpy(frame.rewards), torch.from_numpy(frame.terminated)
        steps.append((obs_BNO, next_obs_BNO, action_BN, policy.log_prob(action_BN), reward_BN, terminated_B, done_B))
        obs_BNO = following
    return Rollout(*(torch.stack(column) for column in zip(*steps, strict=True))), obs_BNO


# ---- advantages and loss


@torch.no_grad()
def advantages_and_returns(agent: Agent, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Returns generalised advantage estimates [T, B, N] (Schulman et al., 2016, eq. 16) and the critic's targets.

    A truncated game would have continued: its last step is bootstrapped with the value of the last observation.
    """
    value_TBN, next_value_TBN = agent.value(rollout.obs_TBNO), agent.value(rollout.next_obs_TBNO)
    goes_on_TB1 = (~rollout.terminated_TB).float()[..., None]
    same_game_TB1 = (~rollout.done_TB).float()[..., None]
    delta_TBN = rollout.reward_TBN + GAMMA * goes_on_TB1 * next_value_TBN - value_TBN
    advantage_TBN = torch.zeros_like(delta_TBN)
    advantage_BN = torch.zeros_like(delta_TBN[0])
    for t in reversed(range(len(delta_TBN))):
        advantage_BN = delta_TBN[t] + GAMMA * GAE_LAMBDA * same_game_TB1[t] * advantage_BN
        advantage_TBN[t] = advantage_BN
    return advantage_TBN, advantage_TBN + value_TBN


def standardise(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


class Minibatch(NamedTuple):
    """Transitions of any game, agent and time: observations [R, O], and [R] of everything else."""

    obs_RO: Tensor
    action_R: Tensor
    logp_R: Tensor
    advantage_R: Tensor
    return_R: Tensor


def flatten(agent: Agent, rollout: Rollout) -> Minibatch:
    """Returns the whole rollout as one minibatch with standardised advantages."""
    advantage_TBN, return_TBN = advantages_and_returns(agent, rollout)
    return Minibatch(
        rollout.obs_TBNO.flatten(0, 2),
        rollout.action_TBN.flatten(),
        rollout.logp_TBN.flatten(),
        standardise(advantage_TBN).flatten(),
        return_TBN.flatten(),
    )


def ppo_losses(agent: Agent, batch: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the policy loss (the clipped surrogate of Schulman et al., 2017, eq. 7, negated), the value loss (half
    the mean squared error), and the policy's mean entropy in nats."""
    policy = agent.policy(batch.obs_RO)
    ratio_R = torch.exp(policy.log_prob(batch.action_R) - batch.logp_R)
    clipped_R = ratio_R.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.minimum(ratio_R * batch.advantage_R, clipped_R * batch.advantage_R).mean()
    value_loss = 0.5 * (agent.value(batch.obs_RO) - batch.return_R).square().mean()
    return policy_loss, value_loss, policy.entropy().mean()


def update(agent: Agent, adam: torch.optim.Adam, rollout: Rollout) -> dict[str, float]:
    """Trains on a rollout; returns the metrics of the last minibatch."""
    everything = flatten(agent, rollout)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(everything.action_R)).tensor_split(MINIBATCHES):
            batch = Minibatch(*(x[index] for x in everything))
            policy_loss, value_loss, entropy = ppo_losses(agent, batch)
            adam.zero_grad()
            (policy_loss + value_loss - ENTROPY_COEF * entropy).backward()
            for net in (agent.actor, agent.critic):  # they share no weights
                nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
            adam.step()
    return {"policy loss": policy_loss.item(), "value loss": value_loss.item(), "entropy": entropy.item()}


# ---- the loop


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on simple_spread.")
    parser.add_argument("--steps", type=int, default=300, help="rounds of playing and training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are too small for more
    env = SimpleSpread(NUM_ENVS, max_cycles=ROLLOUT_LENGTH)
    actions = env.action_spaces[0]
    assert isinstance(actions, Discrete)
    agent = Agent(env.observation_shapes[0][0], actions.n)
    adam = torch.optim.Adam(agent.parameters(), LR, eps=ADAM_EPS)
    obs_BNO = torch.from_numpy(env.reset(args.seed * NUM_ENVS + np.arange(NUM_ENVS)).copy().obs)
    start = time.perf_counter()
    for step in range(args.steps):
        adam.param_groups[0]["lr"] = LR * (1 - step / args.steps)
        rollout, obs_BNO = collect(env, agent, obs_BNO)
        metrics = update(agent, adam, rollout)
        if step % 10 == 0 or step + 1 == args.steps:
            game = rollout.reward_TBN.sum(0).mean()  # a rollout is one whole game
            summary = "   ".join(f"{name} {metric:6.3f}" for name, metric in metrics.items())
            print(
                f"step {step + 1:4d}   return {game:7.2f}   {summary}   {time.perf_counter() - start:4.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
