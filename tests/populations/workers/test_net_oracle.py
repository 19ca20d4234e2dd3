"""Networks as workers: they learn best responses, play payoff cells without bias, and are assessed exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.core.files import read_arrays
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Sides
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tasks import (
    AssessResult,
    AssessTask,
    Lineup,
    Opponents,
    PlayResult,
    PlayTask,
    TrainResult,
    TrainTask,
)
from palestra.populations.workers.member_loader import write_table
from palestra.populations.workers.net_oracle import TRAINING_FILE, NetOracle, NetWorker, apply_settings
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.ppo import A2C, PPO
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.mixture import IndependentSampler, SideSampler

KUHN = {"type": "kuhn_poker", "num_envs": 64}
SEATS = ("player_0", "player_1")
SIDES = Sides.of(SEATS)
FAST = PPO(rollout_length=16, gamma=1.0, epochs=2, minibatches=2)
SMALL = NetPolicyConfig(hidden=[32], lr=3e-3)


def oracle(**changes: Any) -> NetOracle:
    return NetOracle(**{"env": KUHN, "algorithm": FAST, "policy": SMALL, "env_steps": 2048} | changes)


@cache
def worker(**changes: Any) -> NetWorker:
    return NetWorker(oracle(**changes), SIDES, seed=1)


def train(
    given: NetWorker, out: Path, members: Mapping[str, Path] | None = None, name: str = "it", **changes: Any
) -> TrainResult:
    order = {"player": "player_0", "opponents": Opponents({"player_1": {"uniform": 1.0}})} | changes
    out.mkdir(exist_ok=True)
    result = given.run_task(TrainTask(f"train/{name}", output_member=name, **order), members or {}, out)
    assert isinstance(result, TrainResult)
    return result


def play(
    given: NetWorker, name: str, cells: Sequence[tuple[str, str]], games: int, members: Mapping[str, Path]
) -> tuple[PayoffCell, ...]:
    result = given.run_task(PlayTask(name, cells=tuple(cells), games_per_cell=games), members, None)
    assert isinstance(result, PlayResult)
    return result.payoffs


def assess(given: NetWorker, first: str, second: str, members: Mapping[str, Path]) -> AssessResult:
    strategies = {"player_0": {first: 1.0}, "player_1": {second: 1.0}}
    result = given.run_task(AssessTask("assess/it", iteration=1, strategies=strategies), members, None)
    assert isinstance(result, AssessResult)
    return result


@pytest.mark.parametrize(
    ("algorithm", "env_steps"),
    [
        pytest.param(FAST, 8_000, id="ppo"),
        pytest.param(A2C(rollout_length=16, gamma=1.0), 30_000, id="a2c"),
        pytest.param(DQN(rollout_length=16, gradient_steps=8, gamma=1.0), 8_000, id="dqn"),
        pytest.param(SAC(rollout_length=16), 12_000, id="sac"),
    ],
)
@pytest.mark.few(2)
def test_every_algorithm_learns_to_beat_uniform_play(
    algorithm: Any, env_steps: int, tmp_path: Path, check_score: Any
) -> None:
    """The best response to uniform play earns 1/2 as first player of Kuhn poker, uniform play 1/8."""
    given = NetWorker(oracle(algorithm=algorithm, env_steps=env_steps), SIDES, seed=2)
    result = train(given, tmp_path)
    value = assess(given, "it", "uniform", {"it": tmp_path}).values[0]
    check_score(value)
    assert result.env_steps >= env_steps
    met = result.opponents["uniform"]
    assert met.mean_return == pytest.approx(result.mean_return)
    assert 0 < met.wins < met.games and met.draws == 0
    metrics = [value for value in result.metrics.values() if value is not None]
    assert len(metrics) == len(result.metrics) > 0 and np.isfinite(metrics).all()


def test_responses_are_reproducible_from_task_name_and_seed(tmp_path: Path) -> None:
    def weights(given: NetWorker, folder: str, name: str = "it") -> np.ndarray:
        train(given, tmp_path / folder, name=name)
        return read_arrays(tmp_path / folder / "policy.safetensors")["body.layers.0.weight"]

    first = weights(worker(), "a")
    train(worker(), tmp_path / "between", name="other")
    assert (weights(worker(), "b") == first).all()
    assert (weights(NetWorker(oracle(), SIDES, seed=1), "c") == first).all()
    assert (weights(NetWorker(oracle(), SIDES, seed=2), "d") != first).any()
    assert (weights(worker(), "e", "other") != first).any()


@pytest.mark.parametrize("algorithm", [FAST, DQN(rollout_length=16, gradient_steps=8, learning_starts=0)])
def test_response_starts_from_another_member(algorithm: Any, tmp_path: Path) -> None:
    given = NetWorker(oracle(algorithm=algorithm), SIDES, seed=1)
    train(given, tmp_path / "first")
    still = {"lr": 1e-12}
    train(given, tmp_path / "next", {"first": tmp_path / "first"}, "next", start="first", settings=still)
    train(given, tmp_path / "fresh", name="fresh", settings=still)
    old, new, fresh = (read_arrays(tmp_path / name / "policy.safetensors") for name in ("first", "next", "fresh"))
    for name, weights in old.items():
        np.testing.assert_allclose(new[name], weights, atol=1e-5)
    assert any(not np.allclose(fresh[name], weights, atol=1e-3) for name, weights in old.items())
    steps = [read_arrays(tmp_path / name / TRAINING_FILE)["versions"][0] for name in ("first", "next")]
    assert steps[1] == 2 * steps[0]  # optimizer moments and counts are copied too


def test_opponents_are_sampled_by_the_mixture(tmp_path: Path) -> None:
    for number, name in enumerate(("pass", "bet")):
        write_table(tmp_path / name, np.tile(np.eye(2)[number], (12, 1)))
    members = {name: tmp_path / name for name in ("pass", "bet")}
    result = train(
        worker(), tmp_path / "it", members, opponents=Opponents({"player_1": {"pass": 0.25, "bet": 0.75, "uniform": 0}})
    )
    games = {name: met.games for name, met in result.opponents.items()}
    assert set(games) == {"pass", "bet"}
    assert games["bet"] / sum(games.values()) == pytest.approx(0.75, abs=0.2)


def test_shared_learner_trains_at_every_seat(tmp_path: Path, check_score: Any) -> None:
    given = NetWorker(oracle(env_steps=12_000), SIDES.with_owner("all"), seed=3)
    result = train(given, tmp_path, player="all", opponents=Opponents({"all": {"uniform": 1.0}}), self_play=0.25)
    games = {name: met.games for name, met in result.opponents.items()}
    assert games["self"] / sum(games.values()) == pytest.approx(0.25, abs=0.1)
    mine, theirs = play(given, "play/it", [("it", "uniform"), ("uniform", "it")], 2000, {"it": tmp_path})
    check_score(min(mine.mean[0], theirs.mean[1]))  # at most (1/2 + 5/12) / 2


def test_correlated_opponents_are_sampled_jointly(tmp_path: Path) -> None:
    three = NetWorker(
        oracle(env={"type": "kuhn_poker", "num_envs": 64, "players": 3}), Sides.of(("a", "b", "c")), seed=1
    )
    for number, name in enumerate(("pass", "bet")):
        write_table(tmp_path / name, np.tile(np.eye(2)[number], (48, 1)))
    members = {name: tmp_path / name for name in ("pass", "bet")}
    joint = (Lineup({"a": "pass", "c": "bet"}, 0.5), Lineup({"a": "bet", "c": "pass"}, 0.5))
    result = train(three, tmp_path / "it", members, player="b", opponents=Opponents(joint=joint))
    games = {name: met.games for name, met in result.opponents.items()}
    assert games["pass"] == games["bet"] > 0  # one of each in every game


TUG = {"type": "pettingzoo", "env": "helpers.toy_teams:Tug", "num_envs": 32}
TEAMS = Sides.of(("left", "right", "left", "right"))
PULL = A2C(rollout_length=1, gamma=1.0)


@pytest.mark.parametrize(
    "algorithm",
    [PULL, pytest.param(QMIX(learning_starts=64, rollout_length=1), marks=pytest.mark.slow)],
    ids=lambda it: it.type,
)
def test_member_plays_all_seats_of_its_side(tmp_path: Path, algorithm: Any) -> None:
    given = NetWorker(oracle(env=TUG, algorithm=algorithm, env_steps=4096), TEAMS, seed=1)
    result = train(given, tmp_path / "it", player="left", opponents=Opponents({"right": {"uniform": 1.0}}))
    assert set(result.opponents) == {"uniform"} and result.opponents["uniform"].games > 100
    pulled, equal = play(given, "play", [("it", "uniform"), ("uniform", "uniform")], 400, {"it": tmp_path / "it"})
    assert pulled.mean[0] == -pulled.mean[1] > 0.5  # 1 if both always pull; one of them alone would earn 0.5 at most
    assert equal.mean[0] == pytest.approx(0.0, abs=0.3)  # six standard errors


def test_both_sides_learn_and_play_their_members(tmp_path: Path) -> None:
    given = NetWorker(oracle(env=TUG, algorithm=PULL, env_steps=4096), TEAMS, seed=1)
    names = {"left": "one", "right": "two"}
    for player, other in (("left", "right"), ("right", "left")):
        opponents = Opponents({other: {"uniform": 1.0}})
        train(given, tmp_path / names[player], name=names[player], player=player, opponents=opponents)
    members = {name: tmp_path / name for name in names.values()}
    (even,) = play(given, "play", [("one", "two")], 200, members)
    assert even.mean[0] == pytest.approx(0.0, abs=0.5)
    with pytest.raises(ValueError, match="names 4 members, and the game has 2 seats"):
        play(given, "play", [("one", "two", "one", "two")], 2, members)


def test_one_population_learns_and_plays_both_sides(tmp_path: Path) -> None:
    """A member that pulls earns 1 a game at either side against uniform play; one that learned left alone would not
    know the observations of right."""
    given = NetWorker(
        oracle(env=TUG | {"options": {"is_shown": True}}, algorithm=PULL, env_steps=8192),
        TEAMS.with_owner("all"),
        seed=1,
    )
    opponents = Opponents({"all": {"uniform": 1.0}})
    result = train(given, tmp_path / "it", player="all", opponents=opponents, self_play=0.25)
    games = {name: met.games for name, met in result.opponents.items()}
    assert games["self"] / sum(games.values()) == pytest.approx(0.25, abs=0.1)
    left, right = play(given, "play", [("it", "uniform"), ("uniform", "it")], 400, {"it": tmp_path / "it"})
    assert left.games == right.games == 400
    assert min(left.mean[0], right.mean[1]) > 0.5


def test_sides_draw_one_member_for_all_their_seats() -> None:
    sampler = SideSampler(IndependentSampler([{0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}]), [0, 1, 0, 1, 1])
    _, drawn = sampler.sample_members(np.random.default_rng(0), 500)
    assert (drawn[:, 0] == drawn[:, 2]).all() and (drawn[:, 1] == drawn[:, 3]).all()
    assert (drawn[:, 1] == drawn[:, 4]).all() and len(np.unique(drawn[:, :2], axis=0)) == 4


def test_algorithm_whose_seats_act_together_is_refused_for_sides() -> None:
    given = NetWorker(oracle(env=TUG, algorithm=MAT(rollout_length=1)), TEAMS, seed=1)
    with pytest.raises(ValueError, match="mat plays its seats together, and members play one by one"):
        train(given, Path("unused"), player="left", opponents=Opponents({"right": {"uniform": 1.0}}))


@pytest.mark.parametrize("tabulate", [True, False])
def test_payoff_cells_are_unbiased_by_game_length(tabulate: bool, tmp_path: Path) -> None:
    """Against a player that always bets, games in which the other passes are shorter: all games must have equal
    weight."""
    given = NetWorker(oracle(tabulate=tabulate), SIDES, seed=1)
    train(given, tmp_path / "a")
    members = {"a": tmp_path / "a"}
    exact = assess(worker(), "a", "uniform", members).values
    played = play(given, "play/1", [("a", "uniform"), ("uniform", "uniform"), ("uniform", "a")], 3001, members)
    assert [cell.games for cell in played] == [3001] * 3
    for cell, value in zip(played[:2], (exact[0], 0.125), strict=True):
        error = np.sqrt(cell.m2[0] / 3001 / 3000)
        assert abs(cell.mean[0] - value) < 4 * error
        assert cell.mean[1] == pytest.approx(-cell.mean[0])
        assert sum(cell.wins) + cell.draws == 3001


def test_exact_payoffs_and_nash_conv(tmp_path: Path) -> None:
    given = worker(payoffs="exact")
    train(given, tmp_path)
    members = {"it": tmp_path}
    (cell,) = play(given, "play/2", [("it", "uniform")], 10, members)
    assessment = assess(given, "it", "uniform", members)
    assert cell.mean == pytest.approx(assessment.values)
    assert cell.m2 == (0.0, 0.0) and sum(cell.wins) + cell.draws == pytest.approx(10)
    assert given.exact is not None
    mixed = given.exact.mixture_policy({"player_0": {"it": 1.0}}, lambda name: given.loader.policy(name, members))
    assert assessment.nash_conv == pytest.approx(nash_conv(given.exact.tree, mixed))
    assert assessment.exploitability == assessment.nash_conv / 2


def test_settings_change_the_algorithm_or_its_network() -> None:
    changed = apply_settings(oracle(), {"lr": 0.5, "entropy_coef": 0.25, "clip": 0.125})
    assert (changed.policy.lr, getattr(changed.algorithm, "entropy_coef", 0)) == (0.5, 0.25)
    assert (getattr(changed.algorithm, "clip", 0), changed.policy.max_grad_norm) == (0.125, SMALL.max_grad_norm)
    with pytest.raises(
        ValueError,
        match='"speed" is not a setting of ppo or its network; there are: activation, attention_blocks',
    ):
        apply_settings(oracle(), {"speed": 1})
    with pytest.raises(ValueError, match=r"policy\.lr: should be greater than 0"):
        apply_settings(oracle(), {"lr": -1})


def test_divergence_is_reported_with_task_and_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task train/it, after [\d,]+ of 2,048 env steps: .* not a finite number"):
        train(worker(), tmp_path, settings={"lr": 1e6, "hidden": [8] * 8, "activation": "relu"})


def test_incompatible_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a population that plays every side can"):
        train(worker(), tmp_path, self_play=0.5)
    with pytest.raises(ValueError, match='does not bring the files of member "who"'):
        train(worker(), tmp_path, opponents=Opponents({"player_1": {"who": 1.0}}))
    matrix = NetWorker(oracle(env={"type": "matrix"}), SIDES)
    with pytest.raises(ValueError, match=r"task assess/it \(assess\) needs the rules of env"):
        assess(matrix, "uniform", "uniform", {})
    with pytest.raises(ValueError, match="3 populations cannot share 2 seats"):
        NetWorker(oracle(), Sides.of(("a", "b", "c")))
