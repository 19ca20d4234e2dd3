"""Seats that terminate before the game ends for the others: their value after that is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import ppo

from palestra.core.failures import RunFailed
from palestra.core.types import RolloutBatch
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.vector_check import check_vector_env
from palestra.vector.algorithms.actor_critic import ActorCriticLearner
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.coma import COMA, COMALearner
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.experimental.maven import MAVEN
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.nfsp import NFSP
from palestra.vector.algorithms.ppo import A2C
from palestra.vector.algorithms.pqn import PQN, PQNLearner
from palestra.vector.algorithms.q_learning import QLearner
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.replay import ReplayBuffer
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

ON: dict[str, Any] = {"rollout_length": 10, "gamma": 0.99}
OFF: dict[str, Any] = {
    "rollout_length": 4,
    "gradient_steps": 8,
    "batch_size": 64,
    "learning_starts": 1,
    "gamma": 0.99,
    "tau": 0.2,
}
SEATS = {"early": [0], "late": [1]}
TEAM = {"team": [0, 1]}

ALONE = {
    "ppo": ppo(**ON),
    "ppo one step": ppo(**ON, gae_lambda=0),
    "mappo": ppo(**ON, critic="central", critics="one", value_norm=True),
    "popart": ppo(**ON, value_norm="popart", value_clip=0.2),
    "vtrace": ppo(**ON, off_policy_correction="vtrace"),
    "a2c": A2C(**ON | {"rollout_length": 7}),
    "trpo": TRPO(**ON),
    "hatrpo": TRPO(**ON, sequential=True),
    "happo": ppo(**ON, critic="central", critics="one", sequential=True),
    "mat": MAT(**ON, minibatches=1, value_norm=True),
    "coma": COMA(**ON, target_interval=1),
    "dqn": DQN(**OFF),
    "dqn three steps": DQN(**OFF, n_step=3, priority_exponent=0.5),
    "pqn": PQN(**ON, epochs=16, minibatches=1),
    "nfsp": NFSP(**OFF, eta=1.0),
    "sac": SAC(**OFF),
    "masac": SAC(**OFF, critic="central"),
    "ddpg": DDPG(**OFF),
    "td3": TD3(**OFF),
    "maddpg": DDPG(**OFF, critic="central"),
}
FAST = ("ppo", "vtrace", "trpo", "mat", "coma", "dqn", "pqn", "sac", "maddpg")  # each way to a value; others are slow
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in ALONE]
MEMORY = {"ppo": ALONE["ppo"], "dqn": ALONE["dqn"]}


def value_of_early(
    config: Any,
    options: dict[str, Any],
    updates: int = 10,
    memory: int = 0,
    seats: dict[str, list[int]] = SEATS,
) -> float:
    """The value of the first observation of agent "early" after training."""
    env = PettingZooEnv(4, env="helpers.mortal_games:parting", options=options)
    policy = NetPolicyConfig(hidden=[16], lr=2e-2, gru_units=memory)
    learner = config.build_learner(env, seats, dict.fromkeys(seats, policy), dict(zip(seats, (1, 2), strict=False)))
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(updates):
        batch = sweeper.collect(learner.rollout_policies(0.0), config.rollout_length, i)
        figures = learner.update(batch, 0.0)
    return first_value(learner, batch, figures)


def first_value(learner: Any, batch: RolloutBatch, figures: dict[str, dict[str, float]]) -> float:
    first = torch.from_numpy(batch.is_first)
    if isinstance(learner, ActorCriticLearner):
        return float(learner._values(RolloutTensors.of(batch))[0][first][:, 0].mean())
    if isinstance(learner, COMALearner):
        scene = learner._credit(RolloutTensors.of(batch))[0]
        q = learner._values([judge.net for judge in learner.critics], scene)
        return float(q[first][:, 0].mean())
    if isinstance(learner, PQNLearner):
        return float(learner._best_values(RolloutTensors.of(batch))[0][first][:, 0].mean())
    if isinstance(learner, QLearner) and not learner.counts_env_steps:
        stack = learner.stacks[0]
        return float(learner.heads[0].values(stack.net.unroll(stack.observations(batch.obs))[0]).detach()[0, 0].mean())
    if learner.config.type in ("qmix", "maven", "facmac") or learner.config.critic == "central":  # a mean over steps
        return figures["early"]["q"] * learner.env.inner.single_envs[0].env.length
    return figures["early"]["q"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(4)
def test_terminated_seat_does_not_bootstrap(kind: str, check_score: Any) -> None:
    """The seat is paid 1 and terminates; its partner is truncated nine steps later: the value is 1. If the last
    observation were bootstrapped from, the value would rise by some 1 with every update, to 1 / (1 - gamma) = 100.
    For central critics only the mean over the game is measured: three steps, two of which have the value 0."""
    options = {"length": 3} if kind in ("masac", "maddpg") else {}
    updates = 60 if kind == "a2c" else 10  # it has one gradient step an update
    check_score(abs(value_of_early(ALONE[kind], options, updates) - 1.0))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"flags": "terminated truncated", "length": 1}, marks=pytest.mark.slow)]
)
def test_terminated_seat_of_a_team_does_not_bootstrap(options: dict[str, Any], check_score: Any) -> None:
    """One transformer plays both seats: the one that continues no longer attends to the one that has terminated."""
    check_score(abs(value_of_early(ALONE["mat"], options, seats=TEAM) - 1.0))


@pytest.mark.parametrize(
    "kind",
    [
        *["ppo", "coma", "dqn"],
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("vtrace", "trpo", "mat", "pqn", "sac", "td3", "maddpg")
        ),
    ],
)
def test_terminated_seat_does_not_bootstrap_if_others_are_truncated(kind: str, check_score: Any) -> None:
    """Both ends in one step, and both flags on one agent: then it has terminated."""
    check_score(abs(value_of_early(ALONE[kind], {"flags": "terminated truncated", "length": 1}) - 1.0))


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.few(1)
def test_terminated_seat_does_not_bootstrap_with_recurrence(kind: str, check_score: Any) -> None:
    check_score(abs(value_of_early(MEMORY[kind], {}, memory=4) - 1.0))


HALVED = OFF | {"gamma": 0.5}
MIXED = {
    "vdn": QMIX(**HALVED, mixer="vdn"),
    "qmix": QMIX(**HALVED),
    "qplex": QMIX(**HALVED, mixer="qplex"),
    "maven": MAVEN(**HALVED, latents=2, mi_coef=0.01),
    "facmac": FACMAC(**HALVED),
    "facmac nonmonotonic": FACMAC(**HALVED, mixer="nonmonotonic"),
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.few(3)
def test_team_value_equals_the_team_return(kind: str, check_score: Any) -> None:
    """The team earns the mean of 1 and 0 at its first step, and nothing after. The measured mean is over three steps,
    two of which have the value 0."""
    check_score(abs(value_of_early(MIXED[kind], {"length": 3}) - 0.5))


@pytest.mark.parametrize("kind", ["qmix", "maven", "facmac"])
@pytest.mark.few(1)
def test_team_value_does_not_bootstrap_if_all_seats_terminate(kind: str, check_score: Any) -> None:
    """One agent terminates and is truncated in the same step, in which the other terminates: the value is the mean of 1
    and 0."""
    options = {"flags": "terminated truncated", "length": 1, "dies": True}
    check_score(abs(value_of_early(MIXED[kind], options) - 0.5))


@pytest.mark.parametrize("flags", ["terminated", "truncated"])
def test_team_value_bootstraps_until_the_last_seat_terminates(flags: str) -> None:
    """Games of one step. The partner is truncated, so the team's value of its last observations is added, without the
    seat that has terminated."""
    env = PettingZooEnv(4, env="helpers.mortal_games:parting", options={"flags": flags, "length": 1})
    batch = VectorRollout(env, np.arange(4)).collect([UniformVectorPolicy(env, [0, 1])], 3, 0)
    for team in ([0, 1], [0]):
        replay = ReplayBuffer(100, gamma=0.5, count_env_steps=True, team=team)
        replay.add(batch)
        rows, dead = replay.ring.columns, flags == "terminated"
        assert (rows["discounts"][:12] == (0.0 if dead and team == [0] else 0.5)).all() and rows["known"][:12].all()
        assert (rows["next_agent_mask"][:12] == [not dead, True]).all()


def test_truncated_seat_bootstraps(check_score: Any) -> None:
    """Its last observation equals its first, so that the value is (1 - 0.5) v = 1."""
    check_score(abs(value_of_early(DQN(**HALVED), {"flags": "truncated"}) - 2.0))


def test_last_action_of_a_seat_is_credited_before_the_game_ends() -> None:
    """A rollout that stops in the middle of a game already has the return of a terminated seat's last action."""
    env = PettingZooEnv(4, env="helpers.mortal_games:parting")
    policy = NetPolicyConfig(hidden=[16])
    learner = ppo(**ON).build_learner(env, SEATS, dict.fromkeys(SEATS, policy), {"early": 1, "late": 2})
    batch = VectorRollout(env, np.arange(4)).collect(learner.rollout_policies(0.0), 3, 0)
    assert not batch.done.any()
    _, targets, known = learner._credit(RolloutTensors.of(batch), torch.from_numpy(batch.logp), 0.0)
    assert known[:, :, 0].tolist() == [[True] * 4] + [[False] * 4] * 2
    assert targets[0, :, 0].tolist() == pytest.approx([1.0] * 4)


CENTRAL = {name: ALONE[name] for name in ("mappo", "happo", "coma", "masac", "maddpg")} | MIXED


def state_after_training(config: Any, seats: dict[str, list[int]], **options: Any) -> dict[str, np.ndarray]:
    """The state of a learner without its replay buffer, after three rollouts."""
    env = PettingZooEnv(4, env="helpers.mortal_games:parting", options=options)
    policy = NetPolicyConfig(hidden=[8])
    config = config.model_copy(update={"gradient_steps": 2} if hasattr(config, "gradient_steps") else {})
    learner = config.build_learner(env, seats, dict.fromkeys(seats, policy), dict(zip(seats, (1, 2), strict=False)))
    rollout = VectorRollout(env, np.arange(4))
    for i in range(3):
        learner.update(rollout.collect(learner.rollout_policies(0.0), config.rollout_length, i), 0.0)
    return {name: array.copy() for name, array in learner.state_arrays().items() if not name.startswith("replay")}


@pytest.mark.parametrize("kind", [*CENTRAL, "mat"])
@pytest.mark.few(4)
def test_terminated_seat_may_see_nan(kind: str) -> None:
    """A central critic, mixer or transformer reads the observations of all seats, and learns as if these were zeros."""
    config, seats = (ALONE["mat"], TEAM) if kind == "mat" else (CENTRAL[kind], SEATS)
    nothing, zeros = (state_after_training(config, seats, last=last) for last in (np.nan, 0.0))
    assert any(name.startswith("net.") for name in nothing)
    for name, array in nothing.items():
        assert np.isfinite(array).all() and np.array_equal(array, zeros[name]), name


@pytest.mark.parametrize("kind", ["mappo", "qmix", "maddpg"])
def test_nan_seen_by_a_seat_that_acts_is_named(kind: str) -> None:
    with pytest.raises(RunFailed, match='shows seat "late" observations that are not finite numbers in game 0'):
        state_after_training(CENTRAL[kind], SEATS, broken=np.nan)


def test_check_env_accepts_nan_for_terminated_seats_only() -> None:
    check_vector_env(lambda games: PettingZooEnv(games, env="helpers.mortal_games:parting", options={"last": np.nan}))
    with pytest.raises(ValueError, match="reports obs that are not finite"):
        check_vector_env(
            lambda games: PettingZooEnv(games, env="helpers.mortal_games:parting", options={"broken": np.nan})
        )
