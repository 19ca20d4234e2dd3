"""Success by team: where opponents play, no number is that of all of them. All results are known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import palestra

import palestra as pl
from palestra.core.files import read_lines
from palestra.envs.adapters.pettingzoo.export import to_parallel
from palestra.envs.batch.seat_shuffle import SeatShuffledEnv
from palestra.envs.vector_check import check_vector_env
from palestra.vector.build.envs import make_vector_env
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.replay_recorder import ReplayRecorder
from palestra.vector.trainer import play_eval

NET = {"type": "net", "hidden": [4]}
PPO = {"type": "ppo", "rollout_length": 8, "epochs": 1, "minibatches": 1}
HUNT = {"type": "pettingzoo", "env": "helpers.toy_teams:Hunt", "num_envs": 4}
DUEL = {"type": "pettingzoo", "env": "helpers.toy_teams:Duel", "num_envs": 3}
SIDES = ["hunters", "hunters", "prey"]


def evaluate(env_config: dict[str, Any], teams: list[str], episodes: int) -> dict[str, Any]:
    """Returns the metrics of an evaluation by random players: the games have the seeds 0, 1, ..."""
    env = make_vector_env(env_config)
    try:
        players = [UniformVectorPolicy(env, range(len(env.seats)))]
        return play_eval(ReplayRecorder(env, 4), players, episodes, 0, teams=teams)
    finally:
        env.close()


def rates(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("success")}


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_agents_of_a_parallel_env_report_their_own_success(processes: int) -> None:
    """Prey is caught in 3 of 4 games; the second hunter succeeds in 1 of 4."""
    env = HUNT | {"num_processes": processes}
    assert rates(evaluate(env, SIDES, 4)) == {"success.hunters": (0.75 + 0.25) / 2, "success.prey": 0.25}
    assert rates(evaluate(env, ["all"] * 3, 4)) == {"success": pytest.approx((0.75 + 0.25 + 0.25) / 3)}


def test_agents_of_a_turn_based_env_report_their_own_success() -> None:
    found = rates(evaluate(DUEL, ["one", "other"], 3))
    assert found == {"success.one": pytest.approx(2 / 3), "success.other": 0.0}


def test_success_that_nobody_reports_is_absent() -> None:
    assert rates(evaluate(HUNT | {"options": {"odd": "hunters only"}}, SIDES, 4)) == {"success.hunters": 0.5}
    assert rates(evaluate(HUNT | {"options": {"odd": "none"}}, SIDES, 4)) == {}


def test_success_that_is_only_given_if_true_is_false_elsewhere() -> None:
    env = HUNT | {"options": {"odd": "only true"}}
    assert rates(evaluate(env, SIDES, 4)) == {"success.hunters": 0.5, "success.prey": 0.25}


def test_success_that_is_no_flag_is_refused() -> None:
    with pytest.raises(Exception, match="is_success of agent prey is 'yes': give True or False"):
        evaluate(HUNT | {"options": {"odd": "text"}}, SIDES, 4)


def test_seats_of_a_gymnasium_env_report_their_own_success_or_one() -> None:
    for is_one in (False, True):
        config = {"type": "gymnasium", "id": "helpers.toy_teams:shared-v0", "num_envs": 2}
        env = make_vector_env(config | {"options": {"is_one": is_one}})
        env.reset(np.array([0, 1]))
        step = env.step(np.array([[1, 0], [0, 1]]))
        assert step.success is not None
        assert step.success.tolist() == ([True, False] if is_one else [[1, 0], [0, 1]])
        env.close()


@pytest.mark.parametrize("config", [HUNT, DUEL, {"type": "pong", "max_steps": 20}], ids=lambda config: config["type"])
def test_envs_with_success_by_seat_pass_the_env_check(config: dict[str, Any]) -> None:
    check_vector_env(lambda games: make_vector_env(config | {"num_envs": games}), steps=30)


def test_success_moves_with_shuffled_seats_and_is_exported() -> None:
    config = {"type": "pong", "points": 1, "max_steps": 300}
    env = SeatShuffledEnv(make_vector_env(config | {"num_envs": 16}))
    env.reset(np.arange(16))
    ended = 0
    for _ in range(300):
        step = env.step(np.zeros((16, 2), np.int32))
        assert step.success is not None
        ended += int(step.terminated.sum())
        assert (step.success[step.terminated] == (step.rewards[step.terminated] == 1)).all()
    assert ended > 16
    single = to_parallel(lambda games: make_vector_env(config | {"num_envs": games}))
    single.reset(seed=0)
    while single.agents:
        _, rewards, _, _, infos = single.step(dict.fromkeys(single.agents, 0))
    assert {agent: info["is_success"] for agent, info in infos.items()} == {
        agent: reward == 1 for agent, reward in rewards.items()
    }


def test_replays_say_success_where_it_is_that_of_all() -> None:
    for max_steps, success in ((300, None), (5, False)):
        env = make_vector_env({"type": "pong", "points": 1, "max_steps": max_steps, "num_envs": 1})
        recorder = ReplayRecorder(env, 1)
        recorder.reset(np.zeros(1, np.int64))
        while not recorder.step(np.zeros((1, 2), np.int32)).done[0]:
            pass
        assert recorder.games[0].end == ("truncated" if max_steps == 5 else "terminated")
        assert recorder.games[0].success is success


def test_seats_that_different_policies_play_in_an_evaluation_are_opponents() -> None:
    """Won less lost games are the return of games of one point."""
    played = palestra(
        *("eval", "pong", "--env", "points=1", "--seats", "first_0=script:tracker", "--seats", "second_0=random"),
        *("--episodes", "20", "--json"),
    )
    found = json.loads(played.splitlines()[-1])
    won, lost = found["success.script:tracker"], found["success.random"]
    assert won - lost == pytest.approx(found["returns"]["first_0"]) and won > 0.6 and "success" not in found


def test_a_run_and_its_files_show_success_by_team(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pl.train(
        env=HUNT,
        policies={"lead": NET, "pack": NET, "prey": NET},
        seats={"hunter_0": "lead", "hunter_1": "pack", "prey": "prey"},
        teams={"hunter_*": "hunters", "prey": "hunted"},
        algorithm=PPO,
        steps=160,
        evals={"test": {"episodes": 4, "replays": 0}},
        root=tmp_path,
        name="hunt",
    )
    expected = {"success.hunters": 0.5, "success.hunted": 0.25}
    for line in read_lines(run.path / "evals.jsonl"):
        assert rates(line) == expected
        assert line["return.hunters"] == 0.75 and line["return.hunted"] == -1.5
    assert "success (hunters) 50.0%, success (hunted) 25.0%" in capsys.readouterr().out
    lines = read_lines(run.path / "metrics.jsonl")
    last = {line["policy"]: line for line in lines[-4:]}
    assert rates(last["team"]).keys() == expected.keys()
    assert last["team"]["success.hunters"] == (last["lead"]["success"] + last["pack"]["success"]) / 2
    assert last["team"]["success.hunted"] == last["prey"]["success"] == 1 - last["lead"]["success"]
    for policy, seat in (("lead", 1.0), ("prey", -2.0)):
        assert last[policy]["return"] == seat * last["lead"]["success"]
    printed = palestra("eval", run.path, "--episodes", "4", "--record", "again")
    assert "success (hunters)" in printed and "50.0% [" in printed and "success (hunted)" in printed
    assert rates(read_lines(run.path / "evals.jsonl")[-1]) == expected
    palestra("report", run.path, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "success of 4 (hunters)" in page and "success (hunted) [95 % interval]" in page
