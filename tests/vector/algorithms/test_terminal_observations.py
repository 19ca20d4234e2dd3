"""The last observation of a terminated game has the value 0, whatever its numbers: also NaN, which an env may return if
it has nothing to show."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, ppo

from palestra.envs.vector_base import Continuous, VectorStep
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.coma import COMA
from palestra.vector.algorithms.experimental.cql import CQL
from palestra.vector.algorithms.experimental.cql_sac import CQLSAC
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.experimental.maven import MAVEN
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.nfsp import NFSP
from palestra.vector.algorithms.pqn import PQN
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.algorithms.sac import SAC
from palestra.vector.algorithms.team_mixing import mix_values
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.mixers import SeatValues
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout, nonfinite_loss_advice

OFF: dict[str, Any] = {"rollout_length": 4, "gradient_steps": 4, "batch_size": 32, "learning_starts": 1}
OFFLINE: dict[str, Any] = {"gradient_steps": 4, "batch_size": 32}

DISCRETE = {
    "ppo": ppo(rollout_length=8),
    "mappo": ppo(rollout_length=8, critic="central", value_norm=True),
    "vtrace": ppo(rollout_length=8, off_policy_correction="vtrace"),
    "trpo": TRPO(rollout_length=8),
    "mat": MAT(rollout_length=8, minibatches=1),
    "coma": COMA(rollout_length=8),
    "pqn": PQN(rollout_length=8, minibatches=2),
    "pqn vdn": PQN(rollout_length=8, minibatches=2, mixer="vdn"),
    "dqn": DQN(**OFF, n_step=2, priority_exponent=0.5),
    "nfsp": NFSP(**OFF, eta=0.5),
    "vdn": QMIX(**OFF, mixer="vdn"),
    "qmix": QMIX(**OFF),
    "qplex": QMIX(**OFF, mixer="qplex"),
    "maven": MAVEN(**OFF, latents=2),
    "sac": SAC(**OFF),
    "masac": SAC(**OFF, critic="central"),
    "maddpg": DDPG(**OFF, critic="central"),
    "facmac": FACMAC(**OFF),
    "iql": IQL(data=["moves.parquet"], **OFFLINE),
    "cql": CQL(data=["moves.parquet"], **OFFLINE),
}
CONTINUOUS = {
    "ppo": DISCRETE["ppo"],
    "sac": DISCRETE["sac"],
    "ddpg": DDPG(**OFF),
    "td3": TD3(**OFF),
    "facmac": DISCRETE["facmac"],
    "iql": DISCRETE["iql"],
    "cql_sac": CQLSAC(data=["moves.parquet"], **OFFLINE),
}
SPACE = Continuous((-1.0, -2.0), (1.0, 2.0))


class Ending(Countdown):
    """Countdown whose last observations and states are filled with a number where games terminate."""

    last = math.nan

    def step(self, actions: np.ndarray) -> VectorStep:
        frame = super().step(actions)
        assert frame.final_state is not None
        frame.final_obs[frame.terminated] = frame.final_state[frame.terminated] = self.last
        return frame


def state_after_training(config: Any, env: Ending, last: float, policy: NetPolicyConfig) -> dict[str, np.ndarray]:
    """The state of a learner without its replay buffer, after three rollouts of games that end with `last`."""
    env.last = last
    if hasattr(config, "data"):
        players = [UniformVectorPolicy(env, [0, 1])]
        record_vector_episodes(env, players, 40, config.data[0], seed=3)
    seats = {"one": [0], "two": [1]}
    learner = config.build_learner(env, seats, dict.fromkeys(seats, policy), {"one": 1, "two": 2})
    rollout = VectorRollout(env, np.arange(4))
    for i in range(3):
        batch = rollout.collect(learner.rollout_policies(0.5), config.rollout_length, i)
        assert np.isnan(last) == np.isnan(batch.final_obs).any()
        learner.update(batch, 0.5)
    return {name: array.copy() for name, array in learner.state_arrays().items() if not name.startswith("replay")}


def check(config: Any, env: Ending, policy: NetPolicyConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # a file of recorded episodes
    nothing, something = (state_after_training(config, env, last, policy) for last in (math.nan, 0.25))
    assert any(name.startswith("net.") for name in nothing)
    for name, array in nothing.items():
        assert np.array_equal(array, something[name]), name


@pytest.mark.parametrize("kind", DISCRETE)
@pytest.mark.few(4)
def test_terminal_observations_change_no_update(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = NetPolicyConfig(hidden=[8], normalize_observations=kind != "coma")
    check(DISCRETE[kind], Ending(4), policy, tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", CONTINUOUS)
@pytest.mark.few(2)
def test_terminal_observations_change_no_update_of_continuous_actions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(CONTINUOUS[kind], Ending(4, space=SPACE), NetPolicyConfig(hidden=[8]), tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["ppo", "dqn", "qmix", "pqn"])
def test_terminal_observations_change_no_update_of_recurrent_policies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(DISCRETE[kind], Ending(4), NetPolicyConfig(hidden=[8], gru_units=4), tmp_path, monkeypatch)


@pytest.mark.parametrize("mixer", ["vdn", "qmix", "qplex"])
def test_seats_that_do_not_act_enter_a_team_value_with_zeros(mixer: Any) -> None:
    """Also those whose value is NaN, like a seat that has terminated while others continue."""
    policy = NetPolicyConfig(hidden=[8])
    learner = QMIX(**OFF, mixer=mixer).build_learner(
        Countdown(seats=3), {"all": [0, 1, 2]}, {"all": policy}, {"all": 1}
    )
    acts = torch.tensor([[[True, False, True]] * 5])  # [T, M, N]
    state, found = torch.ones(1, 5, learner.mixer_state_size), []
    for fill in (0.5, math.nan):
        q = torch.tensor([0.1, fill, 0.3]).repeat(5)[None, None]  # [P, T, M*N]
        values = SeatValues(q, 2 * q, q[..., None].expand(1, 1, 15, 3))
        found.append(mix_values(learner.mixer, learner.stacks, [values], acts, state))
    assert torch.isfinite(found[1]).all() and torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_advice_on_a_diverged_loss_names_last_observations_that_are_evaluated(kind: str) -> None:
    """Those of truncated games, from which critics bootstrap; those of terminated games are not the cause."""
    env = Ending(4)
    env.last = 0.0
    players = [UniformVectorPolicy(env, [0, 1])]
    batch = VectorRollout(env, np.arange(4)).collect(players, 16, 0)
    ended = getattr(batch, kind)[batch.end_index]
    assert ended.any()
    batch.final_obs[ended, 1, 2] = np.inf
    advice = nonfinite_loss_advice(env, batch)
    if kind == "truncated":
        assert 'shows seat "seat1" observations at the end of a truncated game that are not finite' in advice
    else:
        assert advice.startswith("A smaller learning rate")
