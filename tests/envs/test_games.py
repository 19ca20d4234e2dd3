"""Text games: they pass the env check, pay by their rules, and their observations are the information states."""

import pytest

from palestra.envs import TEXT_ENVS, check_env, make_env
from palestra.envs.text.board_games import TextGame
from palestra.populations.tabular.game_tree import build_game_tree

GAMES = [name for name in TEXT_ENVS if name.startswith("text_")]


@pytest.mark.parametrize("name", GAMES)
def test_envs_pass_the_env_check(name: str) -> None:
    check_env(lambda: make_env(name), seeds=range(8))


def play(env: TextGame, seed: int, words: list[str]) -> tuple[dict[str, float], list[dict]]:
    """Returns and infos of a game in which these words are the answers."""
    step, returns, infos = env.reset(seed), dict.fromkeys(env.seats, 0.0), []
    for word in words:
        assert not step.done
        step = env.step(dict.fromkeys(step.observations, word))
        infos.append(step.info)
        for seat, reward in step.rewards.items():
            returns[seat] += reward
    assert step.done
    return returns, infos


def test_kuhn_rewards_follow_the_rules() -> None:
    env = make_env("text_kuhn")
    for seed in range(20):
        step = env.reset(seed)
        assert list(step.observations) == ["player_0"] and step.legal_actions == {"player_0": ["pass", "bet"]}
        first, second = env.state.cards
        winner = 1.0 if first > second else -1.0
        for words, won in (
            (["pass", "pass"], winner),
            (["bet", "pass"], 1.0),
            (["bet", "bet"], 2 * winner),
            (["pass", "bet", "pass"], -1.0),
            (["pass", "bet", "bet"], 2 * winner),
        ):
            assert play(env, seed, words)[0] == {"player_0": won, "player_1": -won}


def test_invalid_answer_draws_a_random_action_and_costs() -> None:
    env, drawn = make_env("text_kuhn", illegal_penalty=0.25), []
    for seed in range(200):
        env.reset(seed)
        step = env.step({"player_0": " bet"})
        assert step.info["invalid"] == {"player_0": True} and step.rewards["player_0"] == -0.25
        drawn.append(step.info["action"])
    assert 70 < drawn.count("bet") < 130
    _, infos = play(env, 3, ["bet", "pass"])
    assert [info["invalid"] for info in infos] == [{"player_0": False}, {"player_1": False}]


@pytest.mark.parametrize("name", ["text_kuhn", "text_leduc", "text_bargaining"])
def test_observations_are_the_information_states(name: str) -> None:
    env = make_env(name)
    tree = build_game_tree(env.rules)
    known = {
        env.format_observation(state_text, legal.nonzero()[0].tolist())
        for state_text, legal in zip(tree.info_state_texts, tree.action_mask, strict=True)
    }
    assert len(known) == len(tree.info_state_texts)
    for seed in range(50):
        step = env.reset(seed)
        while not step.done:
            ((seat, observation),) = step.observations.items()
            assert observation in known
            step = env.step({seat: env.rng.choice(step.legal_actions[seat])})


def test_vocabulary_option_renames_actions() -> None:
    env = make_env("text_kuhn", vocabulary={"J": "1", "Q": "2", "K": "3", "pass": "no", "bet": "yes"})
    step = env.reset(0)
    card = "123"[env.state.cards[0]]
    assert step.observations["player_0"] == f"You are player 0. You hold {card}. Moves: none. Say no or yes."
    step = env.step({"player_0": "no"})
    assert step.info == {"invalid": {"player_0": False}, "action": "no"}
    assert "Moves: no. Say no or yes." in step.observations["player_1"]
    assert env.step({"player_1": "bet"}).info["invalid"] == {"player_1": True}
    with pytest.raises(ValueError, match="one word for two things"):
        make_env("text_kuhn", vocabulary={"pass": "bet"})
