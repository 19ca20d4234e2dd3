"""The scripts examples/*_by_hand.py compute what the library computes: the same trees, advantages, losses and gradients
from the same data, and the same updates. Each also runs whole."""

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS

from palestra.core.optimizers import Adam
from palestra.core.types import Answer, Episode, RolloutBatch
from palestra.engine.sampling.request import Completion
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.envs.vector.mpe import SimpleSpread
from palestra.text.algorithms.grpo import GRPO
from palestra.text.build.engines import Engines
from palestra.text.learners.lm import LanguageLearner
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.policies.base import Policy, Query
from palestra.text.rollouts.tree_rollout import EpisodeRunner, EpisodeSpec
from palestra.text.training.update import update_learner
from palestra.vector.algorithms.actor_critic import ActorCriticLearner
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.rollouts.rollout import VectorRollout

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look the module up there
    spec.loader.exec_module(module)
    return module


grpo = load_script("grpo_by_hand")
ppo = load_script("ppo_by_hand")


# ---- grpo_by_hand.py

ALGORITHM = GRPO(group_size=8, scale="none", entropy_coef=grpo.ENTROPY_COEF, clip=grpo.CLIP)


@pytest.fixture
def learners() -> dict[str, LanguageLearner]:
    """The library's learners with the weights of the script's trainers: two adapters on one base."""
    config = LoraPolicyConfig(
        rank=grpo.LORA.rank,
        lr=grpo.LEARNING_RATE,
        batch_size=48,
        sampling=grpo.SAMPLING,
        max_grad_norm=grpo.MAX_GRAD_NORM,
    )
    engines = Engines("cpu", 512)
    return {seat: engines.build_learner(seat, config, seed=i) for i, seat in enumerate(grpo.SEATS)}


def make_game() -> PlanPath:
    return PlanPath(size=7, wall_density=0.1)


def play(policies: dict[str, Policy], instances: Sequence[int]) -> list[Episode]:
    specs = [EpisodeSpec(instance, policies, seed=instance) for instance in instances]
    episodes = asyncio.run(EpisodeRunner(make_game, "plan_path").play_all(specs, ALGORITHM.branching))
    assert not any(episode.error for episode in episodes)
    return episodes


def as_groups(episodes: Sequence[Episode]) -> list[Any]:
    """The siblings of the library's trees, in the script's form."""
    groups = []
    for episode in episodes:
        for parent in dict.fromkeys(node.parent for node in episode.nodes):
            siblings = episode.children(parent)
            (seat,) = siblings[0].answers
            answers = [node.answers[seat] for node in siblings]
            completions = [Completion(a.token_ids, a.logprobs, a.stop_reason) for a in answers]
            groups.append(
                grpo.Group(seat, answers[0].prompt_ids, completions, [node.reward(seat) for node in siblings])
            )
    return groups


def trainers_like(learners: dict[str, LanguageLearner]) -> dict[str, Any]:
    """The script's trainers, on the same base, with the learners' weights."""
    trainers = grpo.make_trainers(learners["planner"].weights.engine, seed=9)
    for seat, learner in learners.items():
        trainers[seat].adapter.copy_from(learner.weights.adapter)
    return trainers


def shift(parameters: Sequence[torch.Tensor], scale: float) -> None:
    """Moves weights away from those of the sampler: ratios differ from 1, and some are clipped."""
    generator = torch.Generator().manual_seed(3)
    for parameter in parameters:
        parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator))


def joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


class SeededPolicy:
    """Answers like another policy, with seeds from a list."""

    def __init__(self, policy: Policy, seeds: random.Random) -> None:
        self.name, self.policy, self.seeds = policy.name, policy, seeds

    async def act(self, query: Query) -> list[Answer]:
        return await self.policy.act(replace(query, seed=self.seeds.getrandbits(63)))


def test_grpo_by_hand_builds_the_trees_of_the_library(learners: dict[str, LanguageLearner]) -> None:
    sampler = learners["planner"].sampler
    for instance in range(2):
        seeds = random.Random(5)
        (episode,) = play({seat: SeededPolicy(x.policy(), seeds) for seat, x in learners.items()}, [instance])
        groups, solved = grpo.play(sampler, trainers_like(learners), [instance], "train", 8, seed=5)
        expected = as_groups([episode])
        assert [group.seat for group in groups] == [group.seat for group in expected]
        assert solved == episode.success
        for ours, theirs in zip(groups, expected, strict=True):
            assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
            assert [a.token_ids.tolist() for a in ours.answers] == [a.token_ids.tolist() for a in theirs.answers]
            assert ours.values == theirs.values


@pytest.mark.parametrize("seat", grpo.SEATS)
def test_grpo_by_hand_has_the_librarys_gradients(learners: dict[str, LanguageLearner], seat: str) -> None:
    episodes = play({name: learner.policy() for name, learner in learners.items()}, range(3))
    learner = learners[seat]
    shift(learner.weights.parameters, 0.05)
    trainer = trainers_like(learners)[seat]

    expected, _ = ALGORITHM.build_samples(episodes, seat)
    samples = grpo.build_samples(as_groups(episodes), seat)
    assert len(samples) == len(expected) > 48
    for ours, theirs in zip(samples, expected, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        np.testing.assert_allclose(ours.advantages, theirs.advantages, rtol=1e-6)

    wanted = asyncio.run(learner.forward_backward(expected, ALGORITHM.loss, **ALGORITHM.loss_options))
    found = trainer.forward_backward(samples, grpo.grpo_loss, entropy=grpo.ENTROPY_COEF)
    assert wanted["clip_fraction"] > 0.02
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-5)
    for ours, theirs in zip(trainer.parameters, learner.weights.parameters, strict=True):
        assert theirs.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, **GRADIENTS)


def test_grpo_by_hand_makes_the_updates_of_the_library(
    learners: dict[str, LanguageLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "BATCH_SIZE", 48)
    episodes = play({name: learner.policy() for name, learner in learners.items()}, range(3))
    learner, trainer = learners["planner"], trainers_like(learners)["planner"]
    before = joined(trainer.parameters)
    wanted = asyncio.run(update_learner(ALGORITHM, learner, episodes, progress=0.0))
    entropy = grpo.update(trainer, grpo.build_samples(as_groups(episodes), "planner"), grpo.LEARNING_RATE)
    assert wanted["updates"] > 1
    assert entropy == pytest.approx(wanted["entropy"], rel=1e-4)
    ours, theirs = (joined(t.parameters) - before for t in (trainer, learner.weights))
    assert theirs.norm() > 0
    # Adam divides by small gradients, so entries are not compared one by one
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.slow
def test_grpo_by_hand_runs_as_a_program() -> None:
    options = ["--steps", "1", "--episodes", "2", "--eval-episodes", "4", "--seed", "3"]
    command = [sys.executable, str(EXAMPLES / "grpo_by_hand.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("solved before training") and lines[-1].startswith("solved after training")
    assert len(lines) == 3 and "step   1   planner value" in lines[1]


# ---- ppo_by_hand.py


def spread_learner(env: SimpleSpread) -> ActorCriticLearner:
    """The library's PPO with the script's settings: one policy for all agents, one update of the whole rollout."""
    config = PPO(
        value_norm=False,
        gamma=ppo.GAMMA,
        gae_lambda=ppo.GAE_LAMBDA,
        clip=ppo.CLIP,
        entropy_coef=ppo.ENTROPY_COEF,
        epochs=1,
        minibatches=1,
    )
    policy = NetPolicyConfig(hidden=[64, 64], lr=ppo.LR, optimizer=Adam(eps=ppo.ADAM_EPS), max_grad_norm=1e9)
    return config.build_learner(env, {"agent": [0, 1, 2]}, {"agent": policy}, {"agent": 4})


def copy_weights(net: Any, target: torch.nn.Sequential) -> None:
    """Copies the library's network, weights [1, in, out], to the script's."""
    layers = [layer for layer in target if isinstance(layer, torch.nn.Linear)]
    for layer, (weight, bias) in zip(layers, pairs(list(net.parameters())), strict=True):
        layer.weight.data.copy_(weight[0].T)
        layer.bias.data.copy_(bias[0, 0])


def pairs(parameters: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [parameters[i : i + 2] for i in range(0, len(parameters), 2)]


def flat_gradient(net: torch.nn.Sequential) -> torch.Tensor:
    """The script's gradient, in the order of the library's flat array."""
    gradients = [parameter.grad for parameter in net.parameters()]
    return torch.cat([(gradient.T if gradient.ndim == 2 else gradient).flatten() for gradient in gradients])


def as_rollout(batch: RolloutBatch) -> Any:
    """The library's rollout, in the script's form."""
    next_obs = batch.obs[1:].copy()
    next_obs[batch.end_index] = batch.final_obs
    tensor = torch.from_numpy
    return ppo.Rollout(
        tensor(batch.obs[:-1]),
        tensor(next_obs),
        tensor(batch.actions).long(),
        tensor(batch.logp),
        tensor(batch.rewards),
        tensor(batch.terminated),
        tensor(batch.done),
    )


def test_ppo_by_hand_has_the_librarys_advantages_losses_and_gradients() -> None:
    env = SimpleSpread(8, max_cycles=7)  # games end within the rollout, and others continue at its end
    learner = spread_learner(env)
    batch = VectorRollout(env, np.arange(8)).collect(learner.rollout_policies(0.0), 17, seed=2)
    (stack,), (critic,) = learner.stacks, learner.critics
    shift(list(stack.net.parameters()), 0.05)
    agent = ppo.Agent(18, 5)
    copy_weights(stack.net, agent.actor)
    copy_weights(critic.net, agent.critic)
    rollout = as_rollout(batch)
    assert len(batch.final_obs) == 16

    advantages, returns = ppo.advantages_and_returns(agent, rollout)
    wanted_advantages, wanted_returns, known = learner._credit(
        RolloutTensors.of(batch), torch.from_numpy(batch.logp), 0.0
    )
    assert known.all()
    torch.testing.assert_close(advantages, wanted_advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, wanted_returns, rtol=1e-5, atol=1e-5)

    policy_loss, value_loss, entropy = ppo.ppo_losses(agent, ppo.flatten(agent, rollout))
    (policy_loss + value_loss - ppo.ENTROPY_COEF * entropy).backward()
    metrics = learner.update(batch, 0.0)["agent"]
    assert metrics["clip_fraction"] > 0.02
    assert policy_loss.item() == pytest.approx(metrics["policy_loss"], rel=1e-4, abs=1e-6)
    assert value_loss.item() == pytest.approx(metrics["value_loss"], rel=1e-5)
    assert entropy.item() == pytest.approx(metrics["entropy"], rel=1e-5)
    for net, optimizer in ((agent.actor, stack.optimizer), (agent.critic, critic.optimizer)):
        # after one step, with a gradient that is not clipped: its norm may be large
        wanted = optimizer.rule.exp_avg[0] / 0.1
        assert wanted.abs().max() > 0
        torch.testing.assert_close(flat_gradient(net), wanted, rtol=1e-4, atol=1e-6)


def test_ppo_by_hand_records_env_transitions() -> None:
    """Its transitions follow one another, and the last of a game leads to the game's own last observation."""
    torch.manual_seed(0)
    env, twin = SimpleSpread(2, max_cycles=10), SimpleSpread(2, max_cycles=10)
    frame = env.reset(np.arange(2)).copy()
    rollout, after = ppo.collect(env, ppo.Agent(18, 5), torch.from_numpy(frame.obs))
    frame = twin.reset(np.arange(2)).copy()
    for t in range(ppo.ROLLOUT_LENGTH):
        np.testing.assert_array_equal(rollout.obs_TBNO[t], frame.obs)
        frame = twin.step(rollout.action_TBN[t].int().numpy()).copy()
        np.testing.assert_array_equal(rollout.next_obs_TBNO[t], frame.final_obs if frame.done.all() else frame.obs)
        np.testing.assert_array_equal(rollout.reward_TBN[t], frame.rewards)
        assert rollout.done_TB[t].tolist() == [(t + 1) % 10 == 0] * 2
    np.testing.assert_array_equal(after, frame.obs)


def test_ppo_by_hand_prints_each_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ppo_by_hand.py", "--steps", "2", "--seed", "1"])
    ppo.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11] for line in lines] == ["step    1  ", "step    2  "]
    assert all("return" in line and "value loss" in line for line in lines)
