"""CQL for continuous actions: the soft maximum beside an integral, the penalty by hand, and learning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Track, mean_return, train
from torch import Tensor

from palestra.envs.vector_base import Continuous, VectorEnv
from palestra.vector.algorithms.experimental.cql_sac import CQLSAC
from palestra.vector.algorithms.experimental.imitation import BC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.losses import sampled_soft_maximum
from palestra.vector.nets.continuous_heads import SquashedHead
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[32], lr=1e-2, max_grad_norm=10)


def build(config: Any, env: VectorEnv) -> Any:
    return config.build_learner(env, {"a": [0]}, {"a": POLICY}, {"a": 5})


def record_uniform_play(env: VectorEnv, steps: int, path: Path) -> str:
    """Writes episodes of uniform play."""
    record_vector_episodes(env, [UniformVectorPolicy(env, [0])], steps, path, seed=3)
    return str(path)


def test_soft_maximum_of_sampled_actions_equals_the_integral() -> None:
    """Values of two bumps over one action, sampled by a uniform and two squashed Gaussian distributions."""

    def value(action: Tensor) -> Tensor:
        return 3 * torch.exp(-20 * (action - 0.4) ** 2) + 2 * torch.exp(-50 * (action + 0.7) ** 2) - 1

    grid = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    integral = torch.log(torch.trapezoid(value(grid).exp(), grid)).item()
    head, generator = SquashedHead(Continuous((-1.0,), (1.0,))), torch.Generator().manual_seed(0)
    n, units, logp = 20_000, [], []
    units.append(torch.empty(n, 1).uniform_(-1, 1, generator=generator))
    logp.append(torch.full((n,), -math.log(2)))
    for mean, log_std in ((0.3, -0.5), (-0.5, 0.3)):
        unit, density = head.sample_units(torch.tensor([[mean, log_std]]).expand(n, 2), generator)
        units.append(unit)
        logp.append(density)
    for which in ([0], [0, 1, 2]):
        actions, densities = (torch.cat([own[k] for k in which]) for own in (units, logp))
        found = sampled_soft_maximum(value(actions[:, 0])[None, None], densities[None, None])
        assert found.item() == pytest.approx(integral, abs=0.02), which
    few = sampled_soft_maximum(value(units[0][:, 0]).view(1, 2000, 10), logp[0].view(1, 2000, 10))
    assert few.exp().mean().log().item() == pytest.approx(integral, abs=0.03)  # unbiased before the logarithm


def test_cql_lowers_values_outside_the_data(tmp_path: Path) -> None:
    """The penalty is the gap of the critics' soft maximum, its gradient that of the coefficient times the gap."""
    env = Track(8)
    data = record_uniform_play(env, 20, tmp_path / "moves.parquet")
    made = build(CQLSAC(data=data, sampled_actions=500, conservative_coef=3), env)
    batch = made.replay.sample(4, np.random.default_rng(0))
    joint = made.action_encoder.encode(batch.actions, batch.agent_mask)
    rows = made.update_batch(made.stacks[0], batch, joint)
    critic = made.critics[0]
    taken = critic.taken_q_values(rows.critic_inputs, rows.action_codes)
    lost = made.penalty(0, rows, batch, torch.Generator().manual_seed(1))(taken)
    grid = torch.linspace(-1, 1, 2001)
    seen = rows.critic_inputs[:, :, None].expand(-1, -1, 2001, -1).flatten(1, 2)
    values = critic.taken_q_values(seen, grid.repeat(4)[None, :, None]).view(2, 4, 2001)
    gap = torch.log(torch.trapezoid(values.exp(), grid)) - taken[:, 0]
    assert lost.item() == pytest.approx(3 * (rows.critic_weights[0] * gap).sum().item(), rel=0.02)


@pytest.mark.slow
def test_cql_of_continuous_actions_beats_clones_of_mixed_players(tmp_path: Path) -> None:
    """A third of the episodes brake towards the target, two thirds push at random."""
    env, rng = Track(32), np.random.default_rng(0)

    def towards(env: VectorEnv, seat: int) -> np.ndarray:
        seen = env.vector_step.obs[:, seat]
        return (np.clip(-seen[:, :1], -1, 1) + 0.3 * rng.normal(size=(env.num_envs, 1))).astype(np.float32)

    paths = [record_uniform_play(env, 40, tmp_path / "random.parquet"), str(tmp_path / "good.parquet")]
    better = ScriptedVectorPolicy(env, [0], towards)
    record_vector_episodes(env, [better], 20, Path(paths[1]))
    best, scores = mean_return(env, [better], 40).item(), []
    cql = CQLSAC(data=paths, gamma=0.7, tau=0.1, batch_size=128, conservative_coef=0.5, alpha=0.05)
    for config in (cql, BC(demonstrations=paths, gradient_steps=32)):
        made = build(config, env)
        train(made, VectorRollout(env, np.arange(32)), 2, 8)
        scores.append(mean_return(env, made.greedy_policies(), 40).item())
    assert scores[0] > 0.5 * scores[1] and scores[0] > best, (scores, best)  # losses


def test_discrete_actions_are_refused(tmp_path: Path) -> None:
    data = record_uniform_play(Track(2), 4, tmp_path / "moves.parquet")
    with pytest.raises(ValueError, match="use type: cql, or iql"):
        build(CQLSAC(data=data), Countdown(seats=1))
