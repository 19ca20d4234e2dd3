"""Policies of runs as tables: NashConv equal to OpenSpiel's, export to a file and to OpenSpiel, learned bounds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyspiel
import pytest
import torch
from helpers.command_line import invoke
from helpers.terminal_text import plain
from open_spiel.python.algorithms import exploitability

import palestra as pl
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.envs.adapters.openspiel import OpenSpielEnv
from palestra.evaluation.best_response import learn_best_responses
from palestra.evaluation.evaluate import evaluate
from palestra.evaluation.game_policy import (
    GamePolicy,
    as_game_policy,
    enumerate_game,
    export_game_policy,
    nash_conv_metrics,
)
from palestra.evaluation.report.population_data import nash_conv_lower_bound
from palestra.evaluation.target import find_target
from palestra.evaluation.text import table_of_seats
from palestra.populations.tabular.game_tree import GameTree, uniform_policy
from palestra.text.policies.lm import LanguagePolicy
from palestra.vector.learners.policy_stack import read_frozen_member

GOOFSPIEL = "turn_based_simultaneous_game(game=goofspiel(num_cards=4,imp_info=True,points_order=descending))"
OSHI_ZUMO = "turn_based_simultaneous_game(game=oshi_zumo(coins=4,size=1,horizon=3))"


def train(root: Path, game: str, env: dict[str, Any] | None = None, **options: Any) -> pl.TrainedRun:
    """A run of one rollout, in which two networks play an OpenSpiel game; `env` has further options of the env,
    `options` those of the networks."""
    policy = {"type": "net", "hidden": [8], "lr": 1e-2, **options}
    return pl.train(
        env={"type": "openspiel", "game": game, "num_envs": 64} | (env or {}),
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
def test_nash_conv_of_an_exported_policy_equals_openspiel(game: str, tmp_path: Path) -> None:
    run = train(tmp_path, game)
    policy = export_game_policy(run.path)
    policy.save(tmp_path / "policy.json")
    again = GamePolicy.load(tmp_path / "policy.json")
    assert again.players == policy.players and again.nash_conv == policy.nash_conv > 0
    assert spiel_nash_conv(again) == pytest.approx(policy.nash_conv, abs=1e-9)


def test_eval_prints_nash_conv_of_the_policies_at_the_seats(tmp_path: Path) -> None:
    run = train(tmp_path, "kuhn_poker")
    played = json.loads(invoke("eval", run.path, "--episodes", 8, "--json").stdout)
    assert played["nash_conv"] == pytest.approx(export_game_policy(run.path).nash_conv, abs=1e-12)
    uniform = evaluate(run.path, seats={"*": "random"}, episodes=8).metrics["nash_conv"]
    assert uniform == pytest.approx(11 / 12)  # of uniform play in Kuhn poker
    assert "NashConv" in plain(invoke("eval", run.path, "--episodes", 8).output)
    greedy = json.loads(invoke("eval", run.path, "--episodes", 8, "--temperature", 0, "--json").stdout)["nash_conv"]
    assert greedy == pytest.approx(export_game_policy(run.path, greedy=True).nash_conv, abs=1e-12)


def test_table_equals_the_networks_action_frequencies(tmp_path: Path) -> None:
    """Frequencies of a million first actions of player 0, compared with the table."""
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


@pytest.mark.parametrize("game", ["kuhn_poker", "liars_dice(dice_sides=3)"])
def test_table_of_a_network_that_sees_observations(game: str, tmp_path: Path) -> None:
    """For each information state the table has the network's output for OpenSpiel's observation tensor. In liar's dice
    both tensors have the same length."""
    run = train(tmp_path, game, {"view": "observation"})
    policy, env = export_game_policy(run.path), OpenSpielEnv(1, game=game, view="observation")
    folders = [find_target(run.path).weights(name) for name in ("player_0", "player_1")]
    nets = [read_frozen_member(folder, env, [seat])[0] for seat, folder in enumerate(folders) if folder]
    seen = 0
    for state in decisions(pyspiel.load_game(game).new_initial_state()):
        player, legal = state.current_player(), torch.tensor([state.legal_actions_mask()], dtype=torch.bool)
        out = nets[player].net(torch.tensor(state.observation_tensor(player))[None, None])[0].detach()
        row = policy.players[player][state.information_state_string(player)]
        expected = torch.softmax(out.masked_fill(~legal, -torch.inf), -1)[0, state.legal_actions()]
        assert list(row.values()) == pytest.approx(expected.tolist(), abs=1e-6)
        seen += 1
    assert seen > 20 and evaluate(run.path, episodes=8).metrics["nash_conv"] == policy.nash_conv
    assert spiel_nash_conv(policy) == pytest.approx(policy.nash_conv, abs=1e-9)


def decisions(state: Any) -> Iterator[Any]:
    """All states below `state` in which a player acts."""
    if not state.is_chance_node() and not state.is_terminal():
        yield state
    for action in [] if state.is_terminal() else state.legal_actions():
        yield from decisions(state.child(action))


def test_population_of_networks_that_see_observations(tmp_path: Path) -> None:
    """In Leduc poker states of one observation may differ in their legal actions, so a table by observation cannot
    represent a member."""
    for game in ("kuhn_poker", "leduc_poker"):
        run = pl.train(
            env={"type": "openspiel", "game": game, "view": "observation", "num_envs": 32},
            population={"type": "psro", "iterations": 1, "env_steps": 512, "games_per_cell": 32},
            oracle={"type": "net", "policy": {"hidden": [8]}, "algorithm": {"type": "ppo", "rollout_length": 16}},
            backend={"type": "inline"},
            root=tmp_path,
            name=game,
        )
        measured = run.metrics["nash_conv"].dropna()
        assert len(measured) == 2 and measured.between(0.1, 8).all()


def test_table_of_the_default_game_is_a_policy_of_openspiel() -> None:
    """OpenSpiel's `value` of uniform play in Leduc poker, which is the game of an env without the option `game`."""
    tree = enumerate_game({"type": "openspiel"})
    policy = as_game_policy({"type": "openspiel", "num_envs": 4}, tree, uniform_policy(tree))
    assert policy.env == {"type": "openspiel"} and policy.to_openspiel().game.get_type().short_name == "leduc_poker"
    assert policy.nash_conv == pytest.approx(4.747222222, abs=1e-6)


def random_by_tensor(tree: GameTree) -> np.ndarray:
    """A policy [I, A] that is equal in all information states with one tensor, as that of a network."""
    rows: dict[tuple[int, bytes], np.ndarray] = {}
    rng = np.random.default_rng(0)
    for player, tensor in zip(tree.state_player.tolist(), tree.info_state_tensors, strict=True):
        rows.setdefault((player, tensor.tobytes()), rng.random(tree.action_mask.shape[1]))
    found = [rows[n, x.tobytes()] for n, x in zip(tree.state_player.tolist(), tree.info_state_tensors, strict=True)]
    weights = np.array(found) * tree.action_mask
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("game", ["y(board_size=3)", "havannah(board_size=2)"])
def test_table_of_a_game_whose_texts_say_more_than_its_tensors(game: str) -> None:
    """The texts mark the last move. A policy looked up by a text that the table did not have raised a KeyError."""
    env = {"type": "openspiel", "game": game}
    tree = enumerate_game(env)
    policy = as_game_policy(env, tree, random_by_tensor(tree))
    assert spiel_nash_conv(policy) == pytest.approx(policy.nash_conv, abs=1e-9) and policy.nash_conv > 1


def test_table_of_a_game_whose_texts_say_less_than_its_tensors() -> None:
    """The text does not show whose lines they are."""
    env = {"type": "openspiel", "game": "dots_and_boxes(num_rows=1,num_cols=2)"}
    tree = enumerate_game(env)
    assert as_game_policy(env, tree, uniform_policy(tree)).nash_conv > 0
    with pytest.raises(ValueError, match="have one text, though their tensors and the policy's probabilities differ"):
        as_game_policy(env, tree, random_by_tensor(tree))


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


def test_policies_without_a_table_are_explained(tmp_path: Path) -> None:
    run = train(tmp_path, "kuhn_poker", gru_units=4)
    with pytest.raises(ValueError, match="is recurrent, so its play"):
        export_game_policy(run.path)
    assert "nash_conv" not in evaluate(run.path, episodes=8).metrics
    native = GamePolicy({"type": "kuhn_poker"}, ("pass", "bet"), ({}, {}), 0.0)
    with pytest.raises(ValueError, match="type: openspiel"):
        native.to_openspiel()
    done = invoke("publish", "simple_spread", "--out", tmp_path / "x.json")
    assert done.exit_code == 2 and "has no rules here" in plain(done.output)


@pytest.mark.parametrize(
    ("game", "options", "why"),
    [
        ("oshi_zumo(coins=4,size=1,horizon=3)", {}, "makes them take turns"),
        ("kuhn_poker", {"gru_units": 4}, "is recurrent, so its play is not a table"),
        ("goofspiel(num_cards=4,imp_info=True,points_order=descending)", {}, "its players move at once"),
    ],
)
def test_eval_explains_a_missing_nash_conv(game: str, options: Any, why: str, tmp_path: Path) -> None:
    run = train(tmp_path, game, **options)
    shown = " ".join(plain(invoke("eval", run.path, "--episodes", 8, "--record", "now").output).split())
    assert why in shown and "NashConv is not computed: " in shown and "--best-response 1000000 finds a lower" in shown
    assert why in json.loads(invoke("eval", run.path, "--episodes", 8, "--json").stdout)["no_nash_conv"]
    assert "no_nash_conv" not in run.evals.columns


def test_eval_reports_a_too_large_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("palestra.evaluation.game_policy.MAX_NODES_OF_EVAL", 50)
    run = train(tmp_path, "kuhn_poker")
    shown = " ".join(plain(invoke("eval", run.path, "--episodes", 8).output).split())
    assert "not computed: kuhn_poker has more than 50 nodes, too many for exact values. --best-response" in shown


def test_eval_of_a_task_without_rules_does_not_mention_nash_conv() -> None:
    done = invoke("eval", "simple_spread", "--seats", "*=random", "--episodes", 8)
    assert done.exit_code == 0 and "NashConv" not in plain(done.output)


def test_error_of_openspiel_keeps_the_other_metrics() -> None:
    def fails(tree: Any) -> Any:
        raise pyspiel.SpielError("not implemented")

    assert nash_conv_metrics({"type": "openspiel", "game": "kuhn_poker"}, fails) == {"no_nash_conv": "not implemented"}


@pytest.mark.parametrize(
    ("env", "options", "expected"),
    [
        ({"type": "text_kuhn"}, {"*": "random"}, "11/12"),  # the known value of uniform play
        ({"type": "text_tic_tac_toe"}, {"player_0": "random", "player_1": "expert"}, "expert is no language model"),
        ({"type": "text_kuhn", "rendering": "full"}, {"*": "tiny"}, "evaluate at temperature 0"),
        ({"type": "text_connect_four"}, {"*": "random"}, None),
    ],
)
def test_eval_of_a_text_game(env: dict[str, Any], options: dict[str, str], expected: str | None) -> None:
    """NashConv of the policies at the seats, the reason why there is none, or neither in a game without a tree."""
    found = evaluate(env.pop("type"), env, options, episodes=2).metrics
    if expected is None:
        assert not {"nash_conv", "no_nash_conv"} & found.keys()
    elif "/" in expected:
        assert found["nash_conv"] == pytest.approx(11 / 12)
    else:
        assert expected in found["no_nash_conv"] and "nash_conv" not in found


def test_policies_of_one_name_have_tables_of_their_own() -> None:
    """As the same member of two runs has: here one samples, and one does not."""
    env = {"type": "text_kuhn"}
    game = enumerate_game(env)
    engine = Engine.load("tiny")
    encoder = ChatEncoder(engine.tokenizer)
    greedy = SamplingConfig(max_tokens=4, temperature=0.0)
    sampled = SamplingConfig(max_tokens=4)
    alike = [LanguagePolicy("agent@1", Sampler(engine), encoder, sampling) for sampling in (greedy, sampled)]
    first, second = (table_of_seats(env, dict.fromkeys(("player_0", "player_1"), one), game) for one in alike)
    both = table_of_seats(env, dict(zip(("player_0", "player_1"), alike, strict=True)), game)
    own, other = game.player_rows(0), game.player_rows(1)
    assert not np.array_equal(first[other], second[other])
    assert np.array_equal(both[own], first[own]) and np.array_equal(both[other], second[other])


def test_greedy_language_agent_has_the_nash_conv_of_its_play() -> None:
    """The tiny base says no legal word in Kuhn poker, in either rendering: the env draws for it."""
    for rendering in ("compact", "full"):
        env = {"rendering": rendering}
        found = evaluate("text_kuhn", env, {"*": "tiny"}, episodes=2, sampling={"temperature": 0.0, "max_tokens": 4})
        assert found.metrics["nash_conv"] == pytest.approx(11 / 12)


@pytest.mark.slow
def test_learned_responses_bound_nash_conv_from_below(tmp_path: Path) -> None:
    """In Kuhn poker, against two networks that were hardly trained: the bound is most of NashConv, and not more."""
    run = train(tmp_path, "kuhn_poker")
    exact = export_game_policy(run.path).nash_conv
    found = learn_best_responses(find_target(run.path), steps=20_000, episodes=5_000)
    bound = nash_conv_lower_bound(found)
    error = 4 * np.hypot(*[one.stderr for one in found])
    assert bound is not None and 0.5 * exact - error < bound < exact
