"""Neural fictitious self-play: choice of policy per game, imitation targets, state, and convergence to an
equilibrium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import snapshot, train

from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector_base import VectorEnv
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tabular.game_tree import build_game_tree
from palestra.populations.workers.member_loader import MemberLoader, rules_of_env
from palestra.vector.algorithms.nfsp import BEST_RESPONSE_LOGP, NFSP, NFSPLearner, Reservoir
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.rollouts.rollout import VectorRollout

POLICY = NetPolicyConfig(hidden=[32], lr=3e-3, max_grad_norm=10)
SEATS = ("player_0", "player_1")


def learner(env: VectorEnv, policy: NetPolicyConfig = POLICY, **settings: Any) -> NFSPLearner:
    config = NFSP.model_validate(
        {"rollout_length": 4, "batch_size": 32, "learning_starts": 0, "reservoir_size": 5000} | settings
    )
    seats = {name: [number] for number, name in enumerate(env.seats)}
    made = config.build_learner(env, seats, dict.fromkeys(seats, policy), {name: n + 5 for n, name in enumerate(seats)})
    assert isinstance(made, NFSPLearner)
    return made


def test_reservoir_samples_rows_uniformly() -> None:
    kept = np.zeros(40)
    for seed in range(4000):
        reservoir, rng = Reservoir(10), np.random.default_rng(seed)
        for first, last in ((0, 7), (7, 7), (7, 25), (25, 40)):
            reservoir.add({"row": np.arange(first, last)}, rng)
        assert len(set(reservoir.columns["row"])) == len(reservoir) == 10
        kept[reservoir.columns["row"]] += 1
    assert abs(kept / 4000 - 10 / 40).max() < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert set(reservoir.sample(1000, np.random.default_rng(0))["row"]) == set(reservoir.columns["row"])


@pytest.mark.parametrize("eta", [0.2, 1.0])
def test_policy_of_a_seat_is_fixed_within_a_game(eta: float) -> None:
    env = KuhnPoker(512)
    made = learner(env, eta=eta, epsilon=0.0)
    batch = VectorRollout(env, np.arange(512)).collect(made.rollout_policies(0.0), 40, 0)
    responded, agent_mask = batch.logp == BEST_RESPONSE_LOGP, batch.agent_mask[:-1]
    games = np.cumsum(batch.is_first[:-1], 0)  # the number of the current game at each step
    shares = []
    for seat in range(2):
        for b in range(512):
            for game in range(1, games[-1, b]):
                own = responded[games[:, b] == game, b, seat][agent_mask[games[:, b] == game, b, seat]]
                assert len(set(own)) <= 1
                shares += [own[0]] if len(own) else []
    assert abs(np.mean(shares) - eta) < 4 * (eta * (1 - eta) / len(shares)) ** 0.5 + 1e-9
    assert (batch.logp[~responded & agent_mask] <= 0).all()


def test_average_policy_learns_best_response_actions_only() -> None:
    env = KuhnPoker(64)
    made = learner(env, eta=0.3)
    batch = VectorRollout(env, np.arange(64)).collect(made.rollout_policies(0.0), 8, 0)
    made.update(batch, 0.0)
    for seat, name in enumerate(SEATS):
        chosen = (batch.logp[..., seat] == BEST_RESPONSE_LOGP) & batch.agent_mask[:-1, :, seat]
        kept = made.reservoirs[name]
        assert len(kept) == chosen.sum() > 0
        assert np.array_equal(kept.columns["obs"][: len(kept)], batch.obs[:-1, :, seat][chosen])
        assert np.array_equal(kept.columns["actions"][: len(kept)], batch.actions[..., seat][chosen])


def test_resume_is_bit_identical() -> None:
    env = KuhnPoker(16)
    made, again = learner(env), learner(env)
    sweeper = VectorRollout(env, np.arange(16))
    train(made, sweeper, 4, 5)
    again.load_arrays(snapshot(made))
    saved = sweeper.save()
    assert saved is not None
    train(made, sweeper, 4, 3)
    other = VectorRollout(KuhnPoker(16), np.arange(16))
    other.load(saved, again.rollout_policies(0.0))
    train(again, other, 4, 3)
    for key, value in made.state_arrays().items():
        assert np.array_equal(value, again.state_arrays()[key]), key


def test_recurrent_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="does not train recurrent policies"):
        learner(KuhnPoker(4), NetPolicyConfig(hidden=[8], gru_units=8))


@pytest.mark.slow
def test_average_policies_approach_a_nash_equilibrium(tmp_path: Path) -> None:
    """Uniform play in Kuhn poker has a NashConv of 11/12; the best responses themselves stay far from 0."""
    env = KuhnPoker(64)
    made = learner(
        env,
        rollout_length=8,
        batch_size=128,
        gradient_steps=4,
        average_updates=4,
        average_lr=3e-3,
        reservoir_size=200_000,
    )
    train(made, VectorRollout(env, np.arange(64)), 8, 800)
    rules = rules_of_env({"type": "kuhn_poker"})
    assert rules is not None
    tree = build_game_tree(rules)
    members = {name: tmp_path / name for name in SEATS}
    for name, write in made.member_writers().items():
        members[name].mkdir()
        write(members[name])
    reader = MemberLoader(env, tree)
    policy = np.where(tree.state_player[:, None] == 0, *(reader.policy(name, members) for name in SEATS))
    assert nash_conv(tree, policy) < 0.5
