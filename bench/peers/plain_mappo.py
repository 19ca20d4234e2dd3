"""MAPPO (Yu et al., 2022) in one file, on VMAS, with nothing but PyTorch: one policy plays all agents, and one critic
sees the observations of all of them. Actions are discrete."""

from __future__ import annotations

import torch
import vmas
from peers.learning import CurveRecorder, LearningSpec, print_curve, read_learning_spec
from torch import Tensor, nn


class Games:
    """VMAS games that begin anew as they end. Shapes: `B` games, `N` agents."""

    def __init__(self, spec: LearningSpec, games: int, seed: int) -> None:
        options = {"continuous_actions": False, "max_steps": spec.horizon, "seed": seed} | spec.options
        self.env = vmas.make_env(spec.scenario, num_envs=games, device="cpu", **options)
        self.num_actions = self.env.get_agent_action_space(self.env.agents[0]).n
        self.obs = torch.stack(self.env.reset(), 1)  # [B, N, ...]

    def step(self, actions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rewards [B, N], and which games ended [B]."""
        obs, rewards, done, _ = self.env.step(list(actions_BN[..., None].unbind(1)))
        if done.all():
            obs = self.env.reset()
        elif done.any():
            for game in done.nonzero():
                self.env.reset_at(int(game), return_observations=False)
            obs = self.env.get_from_scenario(True, False, False, False)[0]
        self.obs = torch.stack(obs, 1)
        return torch.stack(rewards, 1), done


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    widths = [inputs, *hidden]
    layers = [layer for a, b in zip(widths, hidden, strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


@torch.no_grad()
def play_return(spec: LearningSpec, policy: nn.Module | None) -> float:
    """Returns the mean return of an agent in one game of each copy, played greedily (None: at random)."""
    games = Games(spec, spec.eval_games, seed=10_000 + spec.seed)
    total, playing = torch.zeros(spec.eval_games), torch.ones(spec.eval_games)
    for _ in range(spec.horizon):
        size = games.obs.shape[:2]
        rewards, done = games.step(policy(games.obs).argmax(-1) if policy else torch.randint(games.num_actions, size))
        total += playing * rewards.mean(1)
        playing[done] = 0
    return total.mean().item()


@torch.no_grad()
def collect(games: Games, policy: nn.Module, critic: nn.Module, spec: LearningSpec) -> list[Tensor]:
    """Plays a batch; returns observations, actions, their log-probabilities, advantages (GAE) and the critic's targets,
    with one row for each joint step. The time limit ends a game like any other end."""
    steps, ends = [], []
    for _ in range(spec.rollout_length):
        obs, choice = games.obs, torch.distributions.Categorical(logits=policy(games.obs))
        actions = choice.sample()
        rewards, done = games.step(actions)
        steps.append((obs, actions, choice.log_prob(actions), rewards, critic(obs.flatten(1))))
        ends.append(done[:, None].float())
    obs, actions, logp, rewards, values = (torch.stack(part) for part in zip(*steps, strict=True))
    advantages, following, after = torch.zeros_like(rewards), critic(games.obs.flatten(1)), 0.0
    for t in reversed(range(spec.rollout_length)):
        going = 1 - ends[t]
        after = rewards[t] + spec.gamma * going * following - values[t] + spec.gamma * spec.gae_lambda * going * after
        advantages[t], following = after, values[t]
    return [part.flatten(0, 1) for part in (obs, actions, logp, advantages, advantages + values)]


def learn(batch: list[Tensor], policy: nn.Module, critic: nn.Module, adams: list, spec: LearningSpec) -> None:
    """Takes the gradient steps of a batch."""
    for _ in range(spec.epochs):
        for rows in torch.randperm(len(batch[0])).chunk(spec.minibatches):
            obs, actions, old_logp, advantages, targets = (part[rows] for part in batch)
            logp = torch.distributions.Categorical(logits=policy(obs)).log_prob(actions)
            ratio = (logp - old_logp).exp()
            surrogate = torch.min(ratio * advantages, ratio.clamp(1 - spec.clip, 1 + spec.clip) * advantages)
            losses = -surrogate.mean(), 0.5 * (critic(obs.flatten(1)) - targets).square().mean()
            for net, adam, loss in zip((policy, critic), adams, losses, strict=True):
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), spec.max_grad_norm)
                adam.step()


def main() -> None:
    spec = read_learning_spec()
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    games = Games(spec, spec.games, spec.seed)
    _, agents, size = games.obs.shape
    policy, critic = mlp(size, spec.hidden, games.num_actions), mlp(agents * size, spec.hidden, 1)
    adams = [torch.optim.Adam(net.parameters(), lr=spec.lr, eps=spec.adam_eps) for net in (policy, critic)]
    recorder = CurveRecorder(spec, lambda: play_return(spec, None if spec.algorithm == "random" else policy))
    recorder.record(0)
    for made in range(spec.batch, spec.env_steps + 1, spec.batch) if spec.algorithm == "mappo" else ():
        learn(collect(games, policy, critic, spec), policy, critic, adams, spec)
        recorder.record(made)
    print_curve(recorder.points, ("torch", "vmas"))


if __name__ == "__main__":
    main()
