"""The arena: reference players, games against them, and the ratings that follow."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import palestra as pl
from palestra.cli.main import app
from palestra.envs import check_env, make_env
from palestra.evaluation.arena.play import ArenaOptions, enter_arena
from palestra.evaluation.arena.players import (
    GAMES,
    REFERENCES,
    reference_player,
    solution_table,
    text_game,
    tree_of,
)
from palestra.evaluation.arena.scores import (
    RATED_GAMES,
    ArenaResult,
    ReferenceRatings,
    load_references,
    read_results,
    standings_of,
)
from palestra.populations.tabular.best_response import nash_conv
from scripts.arena_references import play_game, play_references, save_references

QUICK = ["kuhn", "leduc", "liars_dice_4", "ultimatum", "bargaining"]
FIRST = "helpers.arena_players:say_first"


@pytest.fixture(scope="module")
def shipped() -> dict[str, ArenaResult]:
    return {result.player: result for result in load_references()}


@pytest.fixture(scope="module")
def ratings(shipped: dict[str, ArenaResult]) -> ReferenceRatings:
    return ReferenceRatings(list(shipped.values()))


# ---- reference players


def test_shipped_results_are_those_that_the_players_get(shipped: dict[str, ArenaResult]) -> None:
    """To the last digit, in the games that are quick to play."""
    count = shipped["random"].scores["kuhn"]["first"].games
    for result in play_references(QUICK, count):
        assert list(shipped[result.player].scores) == list(GAMES)
        for game in QUICK:
            assert result.scores[game] == shipped[result.player].scores[game]


@pytest.mark.slow
def test_shipped_results_of_the_other_games_too(shipped: dict[str, ArenaResult]) -> None:
    games = [game for game in GAMES if game not in QUICK]
    count = shipped["random"].scores["kuhn"]["first"].games
    assert all(
        result.scores[game] == shipped[result.player].scores[game]
        for result in play_references(games, count)
        for game in games
    )


@pytest.mark.parametrize("game", ["kuhn", "leduc", "liars_dice_4"])
def test_solver_plays_an_equilibrium_of_card_games(game: str) -> None:
    assert nash_conv(tree_of(game), solution_table(game)) < 0.02


def test_solver_never_loses_tic_tac_toe(shipped: dict[str, ArenaResult]) -> None:
    for score in shipped["solver"].scores["tic_tac_toe"].values():
        assert score.points >= score.games / 2
    rules = text_game("tic_tac_toe").rules
    players = [reference_player(name, "tic_tac_toe") for name in ("solver", "random")]
    for seed in range(40):
        assert play_game(rules, players, random.Random(seed))[0] >= 0
        assert play_game(rules, players[::-1], random.Random(seed))[1] >= 0


def test_hunter_is_a_best_response_to_random_play() -> None:
    """It earns 1/2 of a game as the first player of Kuhn poker, and 5/12 as the second."""
    rules = text_game("kuhn").rules
    hunter, other = (reference_player(name, "kuhn") for name in ("hunter", "random"))
    first = np.mean([play_game(rules, [hunter, other], random.Random(seed))[0] for seed in range(4000)])
    second = np.mean([play_game(rules, [other, hunter], random.Random(seed))[1] for seed in range(4000)])
    assert first == pytest.approx(1 / 2, abs=0.08) and second == pytest.approx(5 / 12, abs=0.08)  # four errors


def test_skill_is_in_order(ratings: ReferenceRatings) -> None:
    elo = dict(zip(ratings.names, ratings.ratings.elo_M, strict=True))
    assert elo["solver"] > elo["slips-10"] > elo["slips-30"] > elo["slips-60"] > elo["random"]
    assert np.mean(ratings.ratings.elo_M) == pytest.approx(1200)


# ---- ratings


def test_a_reference_player_is_rated_as_among_its_own(
    shipped: dict[str, ArenaResult], ratings: ReferenceRatings
) -> None:
    for name, elo in zip(ratings.names, ratings.ratings.elo_M, strict=True):
        standing = ratings.stand(shipped[name])
        assert standing.elo == pytest.approx(elo, abs=5)
        assert standing.worst == min(score.share for score in shipped[name].by_opponent().values())


def test_a_player_of_one_game_is_compared_with_what_the_reference_players_reach_in_it(
    shipped: dict[str, ArenaResult],
) -> None:
    references = list(shipped.values())
    in_kuhn = dict(zip(shipped, ReferenceRatings(references, ["kuhn"]).ratings.elo_M, strict=True))
    for name, result in shipped.items():
        alone = replace(result, player="x", scores={game: result.scores[game] for game in ("kuhn", "ultimatum")})
        standings = {one.label: one for one in standings_of(references, [alone])}
        assert standings["x (kuhn)"].elo == pytest.approx(in_kuhn[name], abs=15)
        assert standings[name].rated_by == tuple(RATED_GAMES)
    assert in_kuhn["random"] > standings["random"].elo + 50  # it loses less in Kuhn poker than elsewhere
    unrated = replace(shipped["random"], player="x", scores={"ultimatum": shipped["random"].scores["ultimatum"]})
    with pytest.raises(ValueError, match="x has played no game that counts for ratings: kuhn"):
        standings_of(references, [unrated])


def test_a_result_against_players_of_another_version_is_refused(
    shipped: dict[str, ArenaResult], ratings: ReferenceRatings
) -> None:
    (game, scores), *_ = shipped["random"].scores.items()
    other = replace(shipped["random"], player="x", scores={game: {"oracle": next(iter(scores.values()))}})
    with pytest.raises(ValueError, match="x met oracle, no reference player of this version: let it play again"):
        ratings.stand(other)


def test_results_are_read_as_written(tmp_path: Path, shipped: dict[str, ArenaResult]) -> None:
    save_references(list(shipped.values()), tmp_path / "all")
    assert load_references(tmp_path / "all") == list(shipped.values())
    result = replace(shipped["random"], player="x", notes=["why"])
    result.save(tmp_path / "x.json")
    assert read_results(tmp_path) == [result]
    (tmp_path / "x.json").write_text('{"player": 3}')
    with pytest.raises(ValueError, match=r"x\.json: this is no result of the arena .*: move it elsewhere"):
        read_results(tmp_path)


# ---- players


def test_the_match_is_an_env() -> None:
    for game in GAMES:
        check_env(lambda game=game: make_env("arena", game=game, opponent="hunter"), seeds=range(1))
    with pytest.raises(ValueError, match='no game "go" in the arena: it has kuhn'):
        make_env("arena", game="go")
    with pytest.raises(ValueError, match='no reference player "me": the arena has random'):
        make_env("arena", opponent="me")


def test_a_player_that_plays_like_a_reference_has_its_results(shipped: dict[str, ArenaResult]) -> None:
    games = ["kuhn", "bargaining"]
    result = enter_arena(FIRST, ArenaOptions(games, count=40))
    assert not result.notes and not result.exploitability
    for game in games:
        assert set(result.scores[game]) == set(REFERENCES)
        for name, score in shipped["first"].scores[game].items():
            ours = result.scores[game][name]
            spread = np.sqrt(max(score.squares / score.games - score.mean**2, 0.05) * (1 / 40 + 1 / score.games))
            assert ours.games == 40 and ours.mean == pytest.approx(score.mean, abs=4 * spread)


def test_rubbish_and_failures_lose_by_rule() -> None:
    options = ArenaOptions(["kuhn", "leduc"], count=4)
    babbling = enter_arena("helpers.arena_players:babble", options)
    for row in babbling.scores.values():
        assert all(score.points == 0 and score.forfeits == 4 for score in row.values())
    assert babbling.scores["leduc"]["random"].mean == -13
    assert babbling.notes[0] == "kuhn: 48 games forfeited by an answer that is no legal word"
    falling = enter_arena("helpers.arena_players:fall", options)
    assert falling.scores == babbling.scores
    assert "kuhn: 48 games forfeited, since it failed: RuntimeError: no power" in falling.notes[0]
    assert "so all later ones are forfeited" in falling.notes[1]
    stumbling = enter_arena("helpers.arena_players:stumble", options)
    assert 0 < sum(score.forfeits for score in stumbling.scores["kuhn"].values()) < 48


def test_a_prompt_that_is_too_long_for_the_player_is_a_forfeit() -> None:
    result = enter_arena("helpers.arena_players:overflow", ArenaOptions(["kuhn"], count=4))
    scores = result.scores["kuhn"].values()
    forfeits = sum(score.forfeits for score in scores)
    assert 24 <= forfeits < 48  # as the second player it is told of a move at once
    assert result.notes == [f"kuhn: {forfeits} games forfeited by a prompt that is too long for it"]
    assert all(score.points <= score.games - score.forfeits for score in scores)


def test_one_kind_of_game_twice_gives_the_same_digits() -> None:
    options = ArenaOptions(["kuhn", "tic_tac_toe"], count=4, seed=3)
    assert enter_arena(FIRST, options) == enter_arena(FIRST, options)


def test_a_run_plays_its_own_game_in_its_own_words(tmp_path: Path) -> None:
    words = {"J": "1", "Q": "2", "K": "3", "pass": "up", "bet": "down"}
    run = pl.train(
        {
            "env": {"type": "text_kuhn", "vocabulary": words},
            "policies": {"default": {"type": "lora", "rank": 2, "sampling": {"max_tokens": 2}}},
            "algorithm": {"type": "sft", "imitate": "all"},
            "steps": 1,
            "episodes": 4,
            "name": "words",
        },
        root=tmp_path,
    )
    result = enter_arena(f"{run.path}:default", ArenaOptions(["kuhn"], count=4))
    assert 0 < result.exploitability["kuhn"] <= 2
    assert sum(score.games for score in result.scores["kuhn"].values()) == 48


def test_command_writes_a_leaderboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(app, ["arena", FIRST, "--only", "kuhn", "--games", "5"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "arena" / "leaderboard.md").read_text()
    assert f"| **{FIRST} (kuhn)** |" in page and "| solver |" in page
    again = runner.invoke(app, ["arena"])
    assert again.exit_code == 0 and "say_first" in again.output
    for wrong, message in {
        "expert": "expert is no player of its own",
        "helpers.arena_players:nobody": "cannot be loaded",
        "nobody": 'no policy "nobody"',
    }.items():
        refused = runner.invoke(app, ["arena", wrong, "--only", "kuhn"])
        assert refused.exit_code == 2 and message in " ".join(refused.output.split())
    refused = runner.invoke(app, ["arena", "random", "--only", "bargaining"])
    assert refused.exit_code == 2 and "none of these games counts for ratings" in refused.output
    refused = runner.invoke(app, ["arena", "random", "--only", "go"])
    assert refused.exit_code == 2 and 'no game "go"' in refused.output
