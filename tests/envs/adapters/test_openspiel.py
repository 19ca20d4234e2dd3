"""OpenSpiel's games through the adapter equal OpenSpiel's own."""

from pathlib import Path

import numpy as np
import pyspiel
import pytest

import palestra as pl
from palestra.envs.adapters.openspiel import OpenSpielEnv, OpenSpielGame
from palestra.envs.batch.sync_vector import SyncVectorEnv
from palestra.envs.vector_check import check_vector_env, random_actions


@pytest.mark.parametrize(
    "game",
    [
        "kuhn_poker(players=3)",
        "leduc_poker",
        "tic_tac_toe",
        "liars_dice",
        "matrix_pd",
        "goofspiel(num_cards=4,points_order=random,returns_type=total_points)",
        "markov_soccer(horizon=30)",
        "hanabi",
    ],
)
@pytest.mark.few(4)
def test_games_pass_the_vector_env_check(game: str) -> None:
    check_vector_env(lambda games: OpenSpielEnv(games, game=game), num_envs=4, steps=80)


def rebuilt(name: str, state: pyspiel.State) -> pyspiel.State:
    """A new state with the same history."""
    is_first, joint = pyspiel.load_game(name).new_initial_state(), []
    for move in state.full_history():
        if not is_first.is_simultaneous_node():
            is_first.apply_action(move.action)
        elif len(joint) < is_first.num_players() - 1:
            joint.append(move.action)
        else:
            is_first.apply_actions([*joint, move.action])
            joint = []
    return is_first


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("leduc_poker", "information_state"),
        ("leduc_poker", "observation"),
        ("oshi_zumo(coins=6)", "observation"),
        ("hanabi", "observation"),
    ],
)
def test_observations_equal_openspiel_at_the_same_history(name: str, view: str) -> None:
    """States are rebuilt by OpenSpiel from each game's history; returns are sums of the rewards."""
    env = OpenSpielEnv(3, game=name, view=view)  # type: ignore[arg-type]
    assert isinstance(env.inner, SyncVectorEnv)
    rng, frame, ended = np.random.default_rng(0), env.reset(np.arange(3)), 0
    paid = np.zeros((3, 2))
    for _ in range(60):
        for b, game in enumerate(env.inner.single_envs):
            assert isinstance(game, OpenSpielGame) and frame.action_mask is not None
            state = rebuilt(name, game.state)
            for seat in np.flatnonzero(frame.agent_mask[b]):
                tensor = getattr(state, f"{view}_tensor")(int(seat))
                assert np.array_equal(frame.obs[b, seat], np.array(tensor, np.float32))
                assert np.flatnonzero(frame.action_mask[b, seat]).tolist() == state.legal_actions(int(seat))
            together = state.is_simultaneous_node()
            assert frame.agent_mask[b].tolist() == [together or seat == state.current_player() for seat in range(2)]
        last = [game.state for game in env.inner.single_envs if isinstance(game, OpenSpielGame)]
        frame = env.step(random_actions(env, frame, rng))
        paid += frame.rewards
        for b in np.flatnonzero(frame.done):
            assert np.allclose(paid[b], last[b].returns())
            paid[b], ended = 0, ended + 1
    assert ended > 3


def test_uniform_kuhn_poker_has_value_one_eighth() -> None:
    """Showdowns cancel over the deals. With probability 1/4 the first seat bets and the other folds (+1); with 1/8 it
    passes, the other bets, and it folds (-1)."""
    policy = pyspiel.UniformRandomPolicy(pyspiel.load_game("kuhn_poker"))
    exact = pyspiel.expected_returns(pyspiel.load_game("kuhn_poker").new_initial_state(), policy, -1, True)
    assert np.allclose(exact, [0.125, -0.125])
    env = OpenSpielEnv(100, game="kuhn_poker")
    rng, frame = np.random.default_rng(0), env.reset(np.arange(100))
    paid, games = np.zeros(2), 0
    for _ in range(300):
        frame = env.step(random_actions(env, frame, rng))
        paid, games = paid + frame.rewards.sum(0), games + int(frame.done.sum())
    assert games > 10_000 and np.allclose(paid / games, exact, atol=4 * 1.3 / np.sqrt(games))


def test_deals_are_uniform_and_differ_between_games() -> None:
    """Kuhn: the first seat's card is in the three numbers after the two of the observing seat."""
    env = OpenSpielEnv(600, game="kuhn_poker")
    cards = env.reset(np.arange(600)).obs[:, 0, 2:5]
    assert (cards.sum(1) == 1).all() and np.allclose(cards.mean(0), 1 / 3, atol=0.06)


def test_simultaneous_prisoners_dilemma() -> None:
    """OpenSpiel's prisoner's dilemma pays 5 and 5 for mutual cooperation, 1 and 1 for mutual defection, 10 and 0 if one
    defects."""
    env = OpenSpielEnv(3, game="matrix_pd")
    assert env.reset(np.arange(3)).agent_mask.all()
    frame = env.step(np.array([[0, 0], [1, 1], [1, 0]], np.int32))
    assert frame.rewards.tolist() == [[5, 5], [1, 1], [10, 0]] and frame.terminated.all() and frame.agent_mask.all()


def test_tic_tac_toe_win_by_hand() -> None:
    env = OpenSpielEnv(1, game="tic_tac_toe")
    frame = env.reset(np.array([0]))
    for move in (0, 3, 1, 4):
        frame = env.step(np.full((1, 2), move, np.int32))
        assert not frame.done[0] and not frame.rewards.any()
    assert (
        frame.action_mask is not None
        and frame.action_mask[0, 0].tolist() == [False, False, True, False, False] + [True] * 4
    )
    frame = env.step(np.array([[0, 0]], np.int32))  # occupied: the first legal cell, 2, is used instead, which wins
    assert frame.rewards.tolist() == [[1, -1]] and frame.terminated[0] and frame.agent_mask[0].tolist() == [True, False]


def test_hanabi_rewards_are_shared_and_lost_with_the_last_life() -> None:
    """One colour of cards 1, 1, 1, 2, 2, 3, 3, 4, 4, 5; hands of two, one life. Actions 2 and 3 play a card. Each
    fitting card pays 1 to all; a card that does not fit ends the game with a return of 0."""
    env = OpenSpielEnv(400, game="hanabi(players=2,colors=1,hand_size=2,max_life_tokens=1)")
    frame, paid, returns = env.reset(np.arange(400)), np.zeros(400), []
    for _ in range(3):
        before = frame.agent_mask.copy()
        frame = env.step(np.full((400, 2), 2, np.int32))
        assert (frame.rewards[:, 0] == frame.rewards[:, 1]).all()
        assert (before.sum(1) == 1).all() and (frame.agent_mask != before)[~frame.done].all()
        assert (frame.rewards[~frame.done] == 1).all() and (frame.rewards[frame.done, 0] == -paid[frame.done]).all()
        paid += frame.rewards[:, 0]
        returns += paid[frame.done].tolist()
        paid[frame.done] = 0
    assert len(returns) > 200 and not any(returns) and paid.max() >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute on an idle machine
def test_hanabi_of_two_colours_is_learned(tmp_path: Path) -> None:
    """By PPO, one network for both players: random play scores 0.8 of 6 points, learned play about 3.2."""
    run = pl.train(
        env={
            "type": "openspiel",
            "game": "hanabi(players=2,colors=2,ranks=3,hand_size=2,max_information_tokens=3,max_life_tokens=2)",
            "num_envs": 32,
        },
        policies={"player": {"type": "net", "lr": 1e-3, "lr_schedule": "linear"}},
        algorithm={"type": "ppo", "rollout_length": 64, "epochs": 4, "minibatches": 4, "entropy_coef": 0.02},
        evals={"held_out": {"episodes": 256}},
        env_steps=300_000,
        root=tmp_path,
        name="hanabi",
    )
    first, *_, last = run.evals["return"].tolist()
    assert first < 1.2 and last > 2.5


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 20 s each on an idle machine
@pytest.mark.parametrize("name", ["hanabi_tiny_mappo", "hanabi_tiny_vdn"])
def test_shipped_hanabi_is_learned(name: str, tmp_path: Path) -> None:
    """Uniform play scores 0.39 of 6 points (2,607 games, standard error 0.02)."""
    run = pl.train(f"configs/games/{name}.yaml", env_steps=100_000, seed=3, root=tmp_path)
    first, *_, last = run.evals["return"].tolist()
    assert first < 1.2 and last > 1.5


def test_intermediate_rewards_are_paid_when_earned() -> None:
    env = OpenSpielEnv(1, game="repeated_game(stage_game=matrix_pd(),num_repetitions=3)")
    env.reset(np.array([0]))
    assert env.step(np.array([[1, 0]], np.int32)).rewards.tolist() == [[10, 0]]
    assert env.step(np.array([[0, 0]], np.int32)).rewards.tolist() == [[5, 5]]
    frame = env.step(np.array([[1, 1]], np.int32))
    assert frame.rewards.tolist() == [[1, 1]] and frame.terminated[0]


def test_unsupported_games_are_refused() -> None:
    with pytest.raises(ValueError, match=r'cannot load the game "leduc_pocker" \(.*\): did you mean leduc_poker'):
        OpenSpielEnv(1, game="leduc_pocker")
    with pytest.raises(ValueError, match="mean-field"):
        OpenSpielEnv(1, game="mfg_crowd_modelling")
    with pytest.raises(ValueError, match="no information_state tensor"):
        OpenSpielEnv(1, game="backgammon", view="information_state")
    pytest.importorskip("open_spiel.python.games.chat_game")
    with pytest.raises(ValueError, match=r'"chat_game" allows action \d+ of 2 distinct actions'):
        OpenSpielEnv(1, game="chat_game").reset(np.array([0]))
