"""Communication between the seats of a team: messages by hand, their recipients, and a game that needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, mean_return, train

from palestra.envs.vector_base import Discrete, VectorEnv, VectorStep, empty_step
from palestra.vector.algorithms.actor_critic import ActorCriticConfig, ActorCriticLearner
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_policy
from palestra.vector.nets.layers import Communication, make_generators, mean_of_others
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.rollouts.rollout import VectorRollout


class Polls(VectorEnv):
    """Each of three seats observes its own bit, and is paid 1 for the number of the other two bits that are 1. Without
    messages the best answer is 1, right in half of all games. A game is one step."""

    name = "polls"
    seats = ("seat0", "seat1", "seat2")

    def __init__(self, num_envs: int = 64) -> None:
        self.num_envs, self.observation_shapes, self.action_spaces = num_envs, ((1,),) * 3, (Discrete(3),) * 3
        self.vector_step = empty_step(num_envs, 3, (1,))
        self.vector_step.agent_mask[:] = True

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self.rng = np.random.default_rng(seeds)
        self.vector_step.rewards[:], self.vector_step.terminated[:] = 0, False
        return self.draw()

    def draw(self) -> VectorStep:
        self.bits = self.rng.integers(2, size=(self.num_envs, 3))
        self.vector_step.obs[..., 0] = 2 * self.bits - 1
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        others = self.bits.sum(1, keepdims=True) - self.bits
        self.vector_step.rewards[:], self.vector_step.terminated[:] = actions == others, True
        self.vector_step.final_obs[:] = self.vector_step.obs
        return self.draw()


def learner(
    config: ActorCriticConfig, env: VectorEnv, seats: dict[str, list[int]], **policy: Any
) -> ActorCriticLearner:
    settings = NetPolicyConfig(**{"hidden": [8], "communication_rounds": 2} | policy)
    seeds = {name: number + 7 for number, name in enumerate(seats)}
    made = config.build_learner(env, seats, dict.fromkeys(seats, settings), seeds)
    assert isinstance(made, ActorCriticLearner)
    for stack in made.stacks:  # larger than at initialisation, so that every input matters
        stack.net.head.weight.data.mul_(50)
    return made


def test_mean_of_others_by_hand() -> None:
    x = torch.tensor([[[1.0], [2.0], [6.0], [10.0], [20.0], [30.0]]])  # two teams of three
    assert mean_of_others(x, None, 3)[0, :, 0].tolist() == [4, 3.5, 1.5, 25, 20, 15]
    acts = torch.tensor([[True, False, True, False, False, True]])
    assert mean_of_others(x, acts, 3)[0, :, 0].tolist() == [6, 3.5, 1, 30, 30, 0]
    assert mean_of_others(x, None, 1).eq(0).all()


def test_two_rounds_by_hand() -> None:
    net = Communication(1, 2, "relu", make_generators([0]))
    for layer, (own, others, bias) in zip(net.rounds, [(1.0, 2.0, 0.0), (-1.0, 1.0, 0.5)], strict=True):
        layer.weight.data[:], layer.bias.data[:] = torch.tensor([[[own], [others]]]), bias
    found = net(torch.tensor([[[1.0], [2.0], [3.0]]]), None, 3)
    # 1 + 2 * 2.5 = 6, 2 + 2 * 2 = 6, 3 + 2 * 1.5 = 6; then 6 - 6 + 0.5
    assert found[0, :, 0].tolist() == [0.5, 0.5, 0.5]
    found = net(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[True, True, False]]), 3)
    # 1 + 2 * 2 = 5, 2 + 2 * 1 = 4, 3 + 2 * 1.5 = 6; then 4 - 5 + 0.5 < 0, 5 - 4 + 0.5, 4.5 - 6 + 0.5 < 0
    assert found[0, :, 0].tolist() == [0, 1.5, 0]


@pytest.mark.parametrize("kind", ["ppo", "memory", "turns", "trpo"])
def test_log_probabilities_of_training_equal_those_of_acting(kind: str) -> None:
    """For two teams in one stack, also in minibatches, which keep teams whole."""
    env = Countdown(6, seats=6, turns=kind == "turns")
    config = TRPO() if kind == "trpo" else PPO(epochs=1, minibatches=3)
    made = learner(config, env, {"a": [0, 2, 4], "b": [1, 3, 5]}, gru_units=4 if kind == "memory" else 0)
    batch = VectorRollout(env, np.arange(6)).collect(made.rollout_policies(0), 12, 0)
    acts = batch.agent_mask[:-1]
    np.testing.assert_allclose(made._logp(RolloutTensors.of(batch))[acts], batch.logp[acts], atol=1e-5)
    (stack,), ones = made.stacks, torch.ones(12, 6, 6)
    rows = made.policy_rows(stack, RolloutTensors.of(batch), ones, ones, torch.from_numpy(acts.copy()))
    made.shuffle = torch.Generator().manual_seed(0)
    for minibatch in made._minibatches(rows.weight, stack.net):
        part = rows.minibatch(minibatch)
        out, _ = stack.net.unroll_with_values(part.observations, part.recurrent_state, part.is_first, part.team)
        logp, _ = stack.head.evaluate_actions(out, part.actions, part.action_mask)
        torch.testing.assert_close(logp[part.acts], part.logp[part.acts], atol=1e-5, rtol=0)
    made.update(batch, 0.0)


def test_messages_reach_the_own_team_only(tmp_path: Path) -> None:
    """Also for policies loaded from files, where a single seat gets no messages."""
    env = Countdown(4, seats=4)
    made = learner(PPO(), env, {"a": [0, 1], "b": [2, 3]})
    stack, step = made.stacks[0], env.reset(np.arange(4))
    made.member_writers()["a"](tmp_path)
    for player, seats in [(stack.build_policy(lambda out, *_: (out[..., 0], None)), [0, 1, 2, 3])]:
        before = player.act(step, None, np.ones(4, bool))[0]
        step.obs[:, 0] += 1
        moved = np.abs(player.act(step, None, np.ones(4, bool))[0] - before).max(0)
        assert moved[seats[1]] > 1e-4 and (moved[[2, 3]] == 0).all()
    alone = read_policy(tmp_path, env, [1], best=True)
    assert alone.net.team_size == 1 and alone.net.plays_team


def test_incompatible_settings_are_refused() -> None:
    policy = NetPolicyConfig(communication_rounds=1)
    with pytest.raises(ValueError, match="communication_rounds: seats that communicate must be trained together"):
        DQN().build_learner(Polls(4), {"a": [0, 1, 2]}, {"a": policy}, {"a": 0})


def test_communication_wins_a_game_of_private_bits(check_score: Any) -> None:
    """Nearly always right with one round of messages, in half of all games without."""
    for rounds in (1, 0):
        env = Polls(64)
        config = PPO(rollout_length=4, gamma=0.0, minibatches=2)
        settings = {"hidden": [16], "lr": 1e-2, "communication_rounds": rounds}
        made = learner(config, env, {"team": [0, 1, 2]}, **settings)
        train(made, VectorRollout(env, np.arange(64)), 4, 30)
        check_score(mean_return(env, made.greedy_policies(), 8).mean(), f"rounds={rounds}")
