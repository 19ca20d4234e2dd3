"""Teams: opponents are never trained as one team, whatever algorithm combines seats."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import Countdown

import palestra as pl
from palestra.core.config import validate
from palestra.envs.vector.matrix import MatrixGame
from palestra.envs.vector_base import Continuous, VectorEnv
from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.vector.build.build import build_players, team_by_seat
from palestra.vector.config import VectorConfig
from palestra.vector.learners.teams import TeamLearners
from palestra.vector.rollouts.rollout import VectorRollout

NET = {"type": "net", "hidden": [8], "lr": 1e-2}
SMALL_REPLAY = {"rollout_length": 4, "gradient_steps": 2, "batch_size": 16, "learning_starts": 0, "buffer_size": 500}
ON_POLICY = {"rollout_length": 8, "epochs": 1, "minibatches": 1}
COMBINING = {
    "vdn": {"type": "vdn", **SMALL_REPLAY},
    "qmix": {"type": "qmix", **SMALL_REPLAY},
    "qplex": {"type": "qplex", **SMALL_REPLAY},
    "maven": {"type": "maven", **SMALL_REPLAY},
    "facmac": {"type": "facmac", **SMALL_REPLAY | {"learning_starts": 16}},
    "pqn_vdn": {"type": "pqn_vdn", **ON_POLICY},
    "mat": {"type": "mat", **ON_POLICY},
    "happo": {"type": "happo", **ON_POLICY},
    "hatrpo": {"type": "hatrpo", "rollout_length": 8},
}


class Opposed(Countdown):
    """Seats 0 and 1 are paid as in `Countdown`, each the same; seats 2 and 3 lose what they earn."""

    name = "opposed"

    def step(self, actions: np.ndarray) -> Any:
        step = super().step(actions)
        step.rewards[:, :2] = step.rewards.sum(1, keepdims=True)
        step.rewards[:, 2:] = -step.rewards[:, :2]
        return step


def config(algorithm: dict[str, Any], **changes: Any) -> VectorConfig:
    """Two policies of two seats each."""
    tree = {
        "name": "teams",
        "env": {"type": "two_step"},
        "policies": {"red": NET, "blue": NET},
        "seats": {"seat0": "red", "seat1": "red", "seat2": "blue", "seat3": "blue"},
        "algorithm": algorithm,
    }
    return validate(VectorConfig, tree | changes)


def build(settings: VectorConfig, env: VectorEnv) -> Any:
    return build_players(settings, env, SINGLE_PROCESS)[0]


def state_of(learner: TeamLearners, team: str) -> dict[str, np.ndarray]:
    found = next(own for each, own in zip(learner.teams, learner.learners, strict=True) if each.name == team)
    return {name: array.copy() for name, array in found.state_arrays().items()}


@pytest.mark.parametrize("name", COMBINING)
@pytest.mark.few(3)
def test_each_team_is_trained_as_if_alone_against_a_fixed_opponent(name: str) -> None:
    """Bit for bit: red beside blue that learns too, and red alone against that blue as a part of the env."""
    share = {"share_network": False} if name in ("happo", "hatrpo") else {}
    policies = {"red": NET | share, "blue": NET | share}
    envs = [Opposed(4, seats=4) for _ in range(2)]
    both = build(config(COMBINING[name], policies=policies), envs[0])
    alone = build(config(COMBINING[name], policies=policies | {"blue": {"type": "random"}}), envs[1])
    rollouts = [VectorRollout(env, np.arange(4)) for env in envs]
    for step in range(6):
        blue = copy.deepcopy(both.learners[1])  # its players may keep a state of the games
        opponents = blue.rollout_policies(0.0)
        against = rollouts[1].collect(
            [*alone.rollout_policies(0.0), *opponents], both.learners[0].config.rollout_length, step
        )
        beside = rollouts[0].collect(both.rollout_policies(0.0), both.learners[0].config.rollout_length, step)
        np.testing.assert_array_equal(beside.actions, against.actions)
        both.update(beside, 0.0)
        alone.update(against, 0.0)
        red, expected = state_of(both, "red"), state_of(alone, "red")
        assert red.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(red[key], value, err_msg=key)


def test_teams_are_saved_and_restored(tmp_path: Path) -> None:
    env = Opposed(4, seats=4)
    one, other = (build(config(COMBINING["qmix"]), env) for _ in range(2))
    rollout = VectorRollout(env, np.arange(4))
    for step in range(3):
        one.update(rollout.collect(one.rollout_policies(0.0), 4, step), 0.0)
    one.write_state(tmp_path)
    other.read_state(tmp_path)
    for team in ("red", "blue"):
        for key, value in state_of(one, team).items():
            np.testing.assert_array_equal(state_of(other, team)[key], value, err_msg=key)
    assert one.names == ["red", "blue"] and set(one.member_writers()) == {"red", "blue"}


def test_seats_of_one_policy_are_a_team_and_teams_joins_policies() -> None:
    env = Opposed(2, seats=4)
    settings = config({"type": "vdn"}, teams={"seat[01]": "left", "seat1": "right"})
    assert team_by_seat(settings, env) == {"seat0": "left", "seat1": "right", "seat2": "blue", "seat3": "blue"}
    with pytest.raises(ValueError, match='teams names "unit", but env "opposed" plays seat0'):
        team_by_seat(config({"type": "vdn"}, teams={"unit": "left"}), env)
    with pytest.raises(ValueError, match='cannot be called "team"'):
        config({"type": "vdn"}, teams={"*": "team"})


def collect(settings: VectorConfig, env: VectorEnv) -> Any:
    learner = build(settings, env)
    return learner, VectorRollout(env, np.arange(env.num_envs)).collect(learner.rollout_policies(0.0), 8, 0)


@pytest.mark.parametrize("algorithm", ["vdn", "pqn_vdn", "happo"])
def test_policies_of_a_team_that_earn_different_rewards_are_refused(algorithm: str) -> None:
    learner, batch = collect(config({"type": algorithm}, teams={"*": "all"}), Opposed(4, seats=4))
    message = (
        f"{algorithm} trains team all on one reward, and its policies earn different ones in env .opposed. "
        ".red .*, blue .*"
        "give opponents teams of their own in teams:, or let one policy with share_network: false"
    )
    with pytest.raises(ValueError, match=message):
        learner.update(batch, 0.0)


def test_a_dead_policy_of_a_team_earns_nothing_without_being_refused() -> None:
    learner, batch = collect(config({"type": "vdn"}, teams={"*": "all"}), Opposed(4, seats=4))
    batch.rewards[..., :2], batch.rewards[..., 2:] = 1.0, 0.0
    batch.terminated[:], batch.seat_terminated = False, np.zeros(batch.rewards.shape, bool)
    batch.seat_terminated[..., 2:] = True
    learner.check_rewards(batch)


@pytest.mark.parametrize("algorithm", ["vdn", "qmix", "mat", "happo"])
def test_opponents_that_share_a_policy_are_refused(algorithm: str) -> None:
    """Their mean reward is 0 whatever they do, so that a mixer would learn nothing, in silence."""
    policies = {"both": NET | ({"share_network": False} if algorithm == "happo" else {})}
    env = MatrixGame(4, game="rock_paper_scissors")
    learner, batch = collect(config({"type": algorithm}, policies=policies, seats={}), env)
    with pytest.raises(
        ValueError, match=r"what one of them earns the others lose.*give opponents policies of their own"
    ):
        learner.update(batch, 0.0)


def test_own_rewards_of_a_team_of_one_policy_are_accepted() -> None:
    learner, batch = collect(config({"type": "vdn"}, policies={"all": NET}, seats={}), Countdown(4, seats=4))
    assert (batch.rewards[..., 0] != batch.rewards[..., 1]).any()
    learner.update(batch, 0.0)


@pytest.mark.parametrize(("algorithm", "what"), [("qmix", "seats"), ("happo", "networks"), ("facmac", "seats")])
def test_teams_with_nothing_to_combine_are_refused(algorithm: str, what: str) -> None:
    """The remedy of the message works."""
    env = Countdown(4, seats=2, space=Continuous((-1.0,), (1.0,))) if algorithm == "facmac" else Countdown(4, seats=2)
    seats = {"seat0": "red", "seat1": "blue"}
    with pytest.raises(ValueError, match=f"{algorithm} combines the {what} of a team, and every"):
        build(config({"type": algorithm}, seats=seats), env)
    assert build(config({"type": algorithm}, seats=seats, teams={"*": "both"}), env).names == ["red", "blue"]


def test_policy_of_two_teams_is_refused() -> None:
    with pytest.raises(ValueError, match="policy red plays seats of the teams red and other, and vdn trains"):
        build(config({"type": "vdn"}, teams={"seat1": "other"}), Opposed(4, seats=4))


def test_metrics_are_reported_by_team(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean over opponents is 0 in a zero-sum game, whatever they learn."""
    run = pl.train(
        env={"type": "simple_tag", "num_envs": 4},
        policies={"hunter": NET, "prey": NET},
        seats={"adversary_*": "hunter", "agent_*": "prey"},
        teams={"adversary_*": "hunters"},
        algorithm={"type": "vdn", **SMALL_REPLAY, "learning_starts": 64},
        steps=800,
        evals={"test": {"episodes": 8, "replays": 0}},
        root=tmp_path,
        name="tag",
    )
    last = run.evals.iloc[-1]
    hunters = np.mean([last[f"returns.adversary_{i}"] for i in range(3)])
    assert last["return.hunters"] == pytest.approx(hunters) and last["return.prey"] == last["returns.agent_0"]
    team = run.metrics[run.metrics["policy"] == "team"].iloc[-1]
    hunter = run.metrics[run.metrics["policy"] == "hunter"].iloc[-1]
    assert team["return.hunters"] == pytest.approx(hunter["return"])
    assert f"hunters {last['return.hunters']:.2f}, prey {last['return.prey']:.2f}" in capsys.readouterr().out


@pytest.mark.slow
def test_mixers_do_not_train_the_prey_to_be_caught(tmp_path: Path) -> None:
    """Prey that was mixed with its hunters was caught for a return of 18; random prey is for about 5."""
    run = pl.train(
        env={"type": "simple_tag", "num_envs": 32},
        policies={
            "hunter": NET | {"hidden": [64, 64], "lr": 1e-3},
            "prey": NET | {"hidden": [64, 64], "lr": 1e-3},
            "chance": {"type": "random"},
        },
        seats={"adversary_*": "hunter", "agent_*": "prey"},
        algorithm={"type": "vdn"},
        steps=40_000,
        evals={"test": {"episodes": 200, "replays": 0}, "random": {"episodes": 200, "seats": {"agent_*": "chance"}}},
        root=tmp_path,
        name="tag",
    )
    evals = run.evals.groupby("name").last()
    assert evals.loc["test", "return.hunter"] < 10
    assert evals.loc["test", "return.prey"] > evals.loc["random", "return.prey"] + 2
