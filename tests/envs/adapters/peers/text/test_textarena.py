"""TextArena's games through palestra's adapter: as TextArena plays them, each determined by its seed."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import textarena

from palestra.envs import check_env
from palestra.envs.adapters.textarena import EliminatedPlayers, TextArena

pytestmark = pytest.mark.peers


def some_move(seat: str, seen: str, rng: random.Random) -> str:
    """Often a move that the game has named in brackets."""
    named = re.findall(r"\[[^\[\]\n]{1,12}\]", seen)
    return rng.choice(named) if named and rng.random() < 0.8 else rng.choice(["[0]", "[2 3]", "[up]", "hello"])


@pytest.mark.parametrize(
    ("game", "players"),
    [
        ("TicTacToe-v0", 2),
        ("TicTacToe-v0-train", 2),
        ("TicTacToe-v0-raw", 2),
        ("FrozenLake-v0-random", 1),
        ("Blackjack-v0", 1),
        ("KuhnPoker-v0", 2),
        ("LiarsDice-v0-small", 3),
        ("PublicGoodsGame-v0", 3),
        ("SimpleNegotiation-v0-short", 2),
        ("Countdown-v0", 1),  # this game gives the reason of an invalid move as its reward
    ],
)
def test_games_pass_the_env_check(game: str, players: int) -> None:
    check_env(lambda: TextArena(game=game, players=players, max_steps=80), seeds=range(2), act=some_move)


def test_games_equal_textarena() -> None:
    """Two hands of poker beside the game itself, which draws from the global generator."""
    moves = random.Random(3)
    env = TextArena(game="KuhnPoker-v0", reward="outcome")
    step = env.reset(5)
    random.seed(5)
    theirs = textarena.make("KuhnPoker-v0")
    theirs.reset(num_players=2, seed=5)
    while not step.done:
        mover, seen = theirs.get_observation()
        assert step.observations == {f"player_{mover}": seen.strip()}
        move = moves.choice(["[check]", "[bet]", "[call]", "[fold]"])
        state = random.getstate()
        step = env.step({f"player_{mover}": move})
        assert random.getstate() == state  # the adapter's game has its own generator
        done, _ = theirs.step(action=move)
        assert done == step.done
    rewards, _ = theirs.close()
    assert {f"player_{number}": float(won) for number, won in rewards.items()} == step.rewards


def test_games_are_independent_of_global_random_state() -> None:
    def played(seeds: list[int]) -> list[list[str]]:
        envs = [TextArena(game="Blackjack-v0", players=1) for _ in seeds]
        steps = [env.reset(seed) for env, seed in zip(envs, seeds, strict=True)]
        seen = [[step.observations["player_0"]] for step in steps]
        for _ in range(6):
            for number, env in enumerate(envs):
                if not steps[number].done:
                    random.random(), np.random.random()
                    steps[number] = env.step({"player_0": "[Hit]"})
                    seen[number] += steps[number].observations.values()
        return seen

    random.seed(1)
    np.random.seed(1)
    alone = [played([seed])[0] for seed in (1, 2, 3)]
    assert played([1, 2, 3]) == alone and len({line[-1] for line in alone}) == 3
    random.seed(7)
    expected = random.random(), np.random.RandomState(7).random()
    random.seed(7)
    np.random.seed(7)
    TextArena(game="Blackjack-v0", players=1).reset(4)
    assert (random.random(), np.random.random()) == expected


def test_invalid_moves_are_flagged_and_the_second_loses() -> None:
    env = TextArena()
    env.reset(0)
    assert env.step({"player_0": "I think of [9]\n#### [4]"}).info["invalid"] == {"player_0": False}
    step = env.step({"player_1": "[4]"})
    assert step.rewards == {"player_1": -0.1} and step.info["invalid"] == {"player_1": True}
    assert "already occupied" in step.observations["player_1"]
    step = env.step({"player_1": "hm"})
    assert step.done and step.rewards == {"player_0": 1.0, "player_1": pytest.approx(-1.1)}
    assert step.info["reward_terms"] == {"player_1": {"form": -0.1, "outcome": -1.0}, "player_0": {"outcome": 1.0}}
    assert step.info["invalid"] == {"player_1": True} and "format" in step.info["reason"]


def test_one_players_success_and_the_limit() -> None:
    env = TextArena(game="GuessTheNumber-v0", players=1)
    number = 0
    for guess in range(1, 21):
        env.reset(3)
        step = env.step({"player_0": f"[{guess}]"})
        if step.done:
            number = guess
            assert step.info["success"] and step.rewards == {"player_0": 1.0}
    assert number
    short = TextArena(game="GuessTheNumber-v0", players=1, max_steps=1)
    short.reset(3)
    step = short.step({"player_0": f"[{number % 20 + 1}]"})
    assert step.done and step.truncated and step.info["success"] is False


def test_game_lost_by_all_players_ends() -> None:
    """TextArena itself searches for the next player forever."""
    env, reasons = TextArena(game="PublicGoodsGame-v0", max_steps=150), []
    for seed in range(3):
        rng, step = random.Random(seed), env.reset(seed)
        while not step.done:
            ((seat, seen),) = step.observations.items()
            step = env.step({seat: some_move(seat, seen, rng)})
        reasons.append(step.info["reason"])
        if "every player" in reasons[-1]:
            assert sorted(step.rewards.values()) == [pytest.approx(-1.1), -1.0] and not step.truncated
    assert "every player is out by invalid moves" in reasons
    out = EliminatedPlayers(2, [0])
    assert 0 in out and 1 not in out and not out.all_eliminated
    out.append(1)
    assert 0 not in out and 1 not in out and out.all_eliminated


def test_uncopyable_game_is_forked_by_replay() -> None:
    env = TextArena(game="Blackjack-v0", players=1)
    env.reset(3)
    env.step({"player_0": "[Hit]"})
    env._arena.env.state.held = (number for number in range(3))  # generators cannot be copied
    twin = env.fork()
    assert twin._arena is not env._arena and twin._shown == env._shown
    assert twin.step({"player_0": "[Stand]"}) == env.step({"player_0": "[Stand]"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"game": "TicTacTo-v0"}, 'no game "TicTacTo-v0": did you mean TicTacToe-v0'),
        ({"game": "TicTacToe-v0", "players": 1}, "does not begin with players=1.*set players"),
        ({"game": "TicTacToe-v0", "options": {"size": 5}}, "does not take the options"),
        ({"game": "GuessWho-v0"}, "needs more than TextArena provides"),
        ({"players": 0}, "players=0 is out of range"),
    ],
)
def test_unsupported_games_are_refused(options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=why):
        TextArena(**options)
