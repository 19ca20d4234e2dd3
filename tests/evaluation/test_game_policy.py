"""Policies of runs as tables: NashConv equal to OpenSpiel's, in a file, as OpenSpiel's policy; learned bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyspiel
import pytest
from command_line import invoke
from open_spiel.python.algorithms import exploitability
from terminal_text import plain

import palestra as pl
from palestra.evaluation.best_response import learn_best_responses
from palestra.evaluation.evaluate import evaluate
from palestra.evaluation.game_policy import GamePolicy, export_game_policy

GOOFSPIEL = "turn_based_simultaneous_game(game=goofspiel(num_cards=4,imp_info=True,points_order=descending))"
OSHI_ZUMO = "turn_based_simultaneous_game(game=oshi_zumo(coins=4,size=1,horizon=3))"


def train(root: Path, game: str, **options: Any) -> pl.TrainedRun:
    """A run of one rollout, in which two networks play an OpenSpiel game; `options` are those of the networks."""
    policy = {"type": "net", "hidden": [8], "lr": 1e-2, **options}
    return pl.train(
        env={"type": "openspiel", "game": game, "num_envs": 64},
        policies={"player_0": policy, "player_1": policy},
        algorithm={"type": "ppo", "rollout_length": 16, "epochs": 1, "minibatches": 1, "gamma": 1.0},
        env_steps=1024,
        root=root,
        name="spiel",
    )


def spiel_nash_conv(policy: GamePolicy) -> float:
    game = pyspiel.load_game(policy.env["game"])
    return float(exploitability.nash_conv(game, policy.to_openspiel(), use_cpp_br=False))


@pytest.mark.parametrize(
    "game",
    [
        "kuhn_poker",
        "tiny_hanabi",
        "dark_hex(board_size=2)",
        GOOFSPIEL,
        OSHI_ZUMO,
        pytest.param("leduc_poker", marks=pytest.mark.slow),
        pytest.param("liars_dice", marks=pytest.mark.slow),
        pytest.param("tic_tac_toe", marks=pytest.mark.slow),
        pytest.param("dark_hex(num_rows=2,num_cols=3)", marks=pytest.mark.slow),
    ],
)
def test_nash_conv_of_an_exported_policy_is_that_of_openspiel(game: str, tmp_path: Path) -> None:
    run = train(tmp_path, game)
    policy = export_game_policy(run.path)
    policy.save(tmp_path / "policy.json")
    again = GamePolicy.load(tmp_path / "policy.json")
    assert again.players == policy.players and again.nash_conv == policy.nash_conv > 0
    assert spiel_nash_conv(again) == pytest.approx(policy.nash_conv, abs=1e-9)


def test_eval_prints_nash_conv_of_the_policies_at_the_seats(tmp_path: Path) -> None:
    run = train(tmp_path, "kuhn_poker")
    played = json.loads(invoke("eval", run.path, "--episodes", 8, "--json").output)
    assert played["nash_conv"] == pytest.approx(export_game_policy(run.path).nash_conv, abs=1e-12)
    uniform = evaluate(run.path, seats={"*": "random"}, episodes=8).metrics["nash_conv"]
    assert uniform == pytest.approx(11 / 12)  # of uniform play in Kuhn poker
    assert "NashConv" in plain(invoke("eval", run.path, "--episodes", 8).output)
    greedy = json.loads(invoke("eval", run.path, "--episodes", 8, "--temperature", 0, "--json").output)["nash_conv"]
    assert greedy == pytest.approx(export_game_policy(run.path, greedy=True).nash_conv, abs=1e-12)


def test_table_holds_the_probabilities_by_which_the_network_plays(tmp_path: Path) -> None:
    """Frequencies of a million first actions of player 0, against the table."""
    run = train(tmp_path, "kuhn_poker")
    policy = export_game_policy(run.path)
    rows = [row for state, row in policy.players[0].items() if len(state) == 1]
    assert len(rows) == 3 and all(sum(row.values()) == pytest.approx(1) for row in policy.players[1].values())
    metrics = evaluate(run.path, episodes=5_000).metrics
    expected = pyspiel_value(policy)
    assert metrics["returns"]["player_0"] == pytest.approx(expected, abs=5 * 1.5 / np.sqrt(5_000))


def pyspiel_value(policy: GamePolicy) -> float:
    from open_spiel.python.algorithms import expected_game_score

    state = pyspiel.load_game(policy.env["game"]).new_initial_state()
    return float(expected_game_score.policy_value(state, [policy.to_openspiel()] * 2)[0])


def test_population_is_exported_as_its_last_mixtures(tmp_path: Path) -> None:
    run = pl.train(
        env={"type": "openspiel", "game": "leduc_poker"},
        population={"type": "psro", "iterations": 3},
        oracle={"type": "exact"},
        backend={"type": "inline"},
        root=tmp_path,
        name="psro",
    )
    done = invoke("publish", run.path, "--out", tmp_path / "leduc.json")
    assert done.exit_code == 0 and "936 information states, NashConv" in plain(done.output), done.output
    policy = pl.GamePolicy.load(tmp_path / "leduc.json")
    last = [line["nash_conv"] for line in run.metrics.to_dict("records") if line.get("nash_conv") is not None][-1]
    assert policy.nash_conv == pytest.approx(last, abs=1e-9)
    uniform = export_game_policy(run.path, member="uniform")
    assert uniform.nash_conv == pytest.approx(4.747222222, abs=1e-6)  # of uniform play in Leduc poker
    refused = invoke("publish", run.path, "--out", tmp_path / "leduc.json")
    assert refused.exit_code == 2 and "exists" in plain(refused.output)


def test_policies_without_a_table_say_why(tmp_path: Path) -> None:
    run = train(tmp_path, "kuhn_poker", gru_units=4)
    with pytest.raises(ValueError, match="remembers more"):
        export_game_policy(run.path)
    assert "nash_conv" not in evaluate(run.path, episodes=8).metrics
    native = GamePolicy({"type": "kuhn_poker"}, ("pass", "bet"), ({}, {}), 0.0)
    with pytest.raises(ValueError, match="type: openspiel"):
        native.to_openspiel()
    done = invoke("publish", "simple_spread", "--out", tmp_path / "x.json")
    assert done.exit_code == 2 and "has no rules here" in plain(done.output)


@pytest.mark.slow
def test_learned_responses_bound_nash_conv_from_below(tmp_path: Path) -> None:
    """In Kuhn poker, against two networks that hardly learned: most of NashConv, and no more than it."""
    run = train(tmp_path, "kuhn_poker")
    exact = export_game_policy(run.path).nash_conv
    found = learn_best_responses(run.path, steps=20_000, episodes=5_000)
    bound = sum(max(0.0, one.gain or 0.0) for one in found)
    error = 4 * np.hypot(*[one.stderr for one in found])
    assert 0.5 * exact - error < bound < exact + error
