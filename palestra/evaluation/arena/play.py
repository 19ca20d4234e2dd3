"""Plays the games of the arena: one player against every reference player."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

from palestra.core.config.user_modules import load_object
from palestra.core.types import Episode, Seat
from palestra.evaluation.arena.players import GAMES, REFERENCES, text_game, tree_of
from palestra.evaluation.arena.scores import RATED_GAMES, ArenaResult, Score
from palestra.evaluation.target import Target, find_target
from palestra.evaluation.text import load_policy, table_of_seats
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.workers.lm_oracle import branch_returns
from palestra.text.build.build import make_episode_runner
from palestra.text.build.engines import Engines
from palestra.text.policies.base import Policy
from palestra.text.policies.scripted import ExpertPolicy, ScriptedPolicy
from palestra.text.rollouts.metrics import CONTEXT_FULL_KEY
from palestra.text.training.trainer import play_instances

MAX_NUM_SEQS = 512  # sequences that are sampled at once
MAX_TOKENS = 64  # of an answer of a base
MAX_TABLE_STATES = 1_100  # information states of a game for which exploitability is computed
OnProgress = Callable[[str, int, int], None]  # called with the game, and the numbers of games played and in all


@dataclass(frozen=True)
class ArenaOptions:
    """The games to play: `games`, `count` games against each reference player (half at each seat), with `seed`, and
    the texts' `rendering` ("": as the player was trained, else full)."""

    games: Sequence[str]
    count: int = 20
    seed: int = 0
    rendering: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


def enter_arena(player: str, options: ArenaOptions, on_progress: OnProgress = lambda game, n, of: None) -> ArenaResult:
    """Lets `player` play every reference player; see `load_player` for its name.

    A game in which it gives an answer that is no legal word, or none, is forfeited: no points, and the game's lowest
    return. If it fails in all games of one kind, all later ones are forfeited. Raises ValueError for an unknown name.
    """
    for game in options.games:
        text_game(game, rendering=options.rendering or "full")  # raises ValueError before a model is loaded
    if not set(options.games) & set(RATED_GAMES):
        raise ValueError(f"none of these games counts for ratings: add one of {', '.join(RATED_GAMES)}")
    policy = load_player(player, options.sampling)
    return asyncio.run(_play_all(player, policy, options, on_progress))


async def _play_all(player: str, policy: Policy, options: ArenaOptions, on_progress: OnProgress) -> ArenaResult:
    scores: dict[str, dict[str, Score]] = {}
    exploitability: dict[str, float] = {}
    notes: list[str] = []
    has_failed = False
    for game in options.games:
        if has_failed:
            lost = [(GAMES[game].lowest, float("inf"))] * options.count
            scores[game] = dict.fromkeys(REFERENCES, Score.of(lost, options.count))
            continue
        texts = texts_of(player, game, options.rendering)
        played = await _play_game(game, policy, texts, options, on_progress)
        scores[game] = {name: score_episodes(game, episodes) for name, episodes in played.items()}
        episodes = [episode for episode, _ in chain(*played.values())]
        has_failed = all(episode.error for episode in episodes)
        notes += forfeit_notes(game, scores[game], episodes)
        if has_failed:
            notes.append("it failed in all games of one kind, so all later ones are forfeited")
        elif (gap := read_exploitability(game, policy, texts)) is not None:
            exploitability[game] = gap
    return ArenaResult(player, scores, exploitability, notes)


def forfeit_notes(game: str, scores: Mapping[str, Score], episodes: Sequence[Episode]) -> list[str]:
    """Returns lines that say how many games were forfeited, and why."""
    notes = []
    failed = [episode for episode in episodes if episode.error]
    overfull = sum(map(has_full_context, episodes))
    if failed:
        notes.append(f"{game}: {len(failed)} games forfeited, since it failed: {(failed[0].error or '').strip()}")
    if overfull:
        notes.append(f"{game}: {overfull} games forfeited by a prompt that is too long for it")
    if invalid := sum(score.forfeits for score in scores.values()) - len(failed) - overfull:
        notes.append(f"{game}: {invalid} games forfeited by an answer that is no legal word")
    return notes


def has_full_context(episode: Episode) -> bool:
    """True if a game ended because the next prompt did not fit the player's model."""
    return any(node.info.get(CONTEXT_FULL_KEY) for node in episode.nodes)


async def _play_game(
    game: str, policy: Policy, texts: Mapping[str, Any], options: ArenaOptions, on_progress: OnProgress
) -> dict[str, list[tuple[Episode, Seat]]]:
    """Plays a game against all reference players at once; returns the episodes of each, with the player's seat."""
    names = text_game(game).seats
    done = 0
    total = options.count * len(REFERENCES)

    def count(_: Episode) -> None:
        nonlocal done
        done += 1
        on_progress(game, done, total)

    async def play(opponent: str, place: int) -> list[tuple[Episode, Seat]]:
        env = {"type": "arena", "game": game, "opponent": opponent, **texts}
        runner = make_episode_runner(env, f"{game}/{opponent}")
        seats: dict[Seat, Policy] = {names[place]: policy, names[1 - place]: ExpertPolicy(opponent)}
        numbers = range(place, options.count, 2)
        episodes = await play_instances(runner, seats, numbers, options.seed, count)
        return [(episode, names[place]) for episode in episodes]

    halves = await asyncio.gather(*[play(*one) for one in product(REFERENCES, (0, 1))])
    return {name: halves[2 * n] + halves[2 * n + 1] for n, name in enumerate(REFERENCES)}


def score_episodes(game: str, episodes: Sequence[tuple[Episode, Seat]]) -> Score:
    """Returns the score of games that a player played at these seats."""
    lost = (GAMES[game].lowest, float("inf"))
    returns: list[tuple[float, float]] = []
    forfeits = 0
    for episode, seat in episodes:
        if episode.error or has_full_context(episode) or any(node.is_invalid(seat) for node in episode.nodes):
            returns.append(lost)
            forfeits += 1
            continue
        ((first, second),) = branch_returns(episode)
        returns.append((first, second) if seat == next(iter(episode.seats)) else (second, first))
    return Score.of(returns, forfeits)


def read_exploitability(game: str, policy: Policy, texts: Mapping[str, Any]) -> float | None:
    """Returns the exploitability of a player in a small zero-sum game, from the probabilities of its words: half of
    what best responses to it gain at both seats. None for larger games, and for players without such
    probabilities."""
    if GAMES[game].search_depths or not GAMES[game].is_zero_sum:
        return None
    tree = tree_of(game)
    if len(tree.state_player) > MAX_TABLE_STATES:
        return None
    try:
        policy_IA = table_of_seats({**GAMES[game].env, **texts}, dict.fromkeys(text_game(game).seats, policy), tree)
    except ValueError:
        return None
    return nash_conv(tree, policy_IA) / tree.num_players


# ---- players by name


def load_player(name: str, sampling: Mapping[str, Any]) -> Policy:
    """Returns a player: a policy by a name as `palestra eval --seats` takes it, or "module:function" of a function of
    the query and a random generator. Raises ValueError for an unknown name, and for those that cannot play alone."""
    if name in ("expert", "human", "base"):
        raise ValueError(f"{name} is no player of its own: name a base, RUN:NAME, URL#MODEL or module:function")
    home, _, attribute = name.rpartition(":")
    if home and attribute.isidentifier() and "/" not in home and not Path(home).exists():
        return ScriptedPolicy(load_object(name, "the player"), name)
    target = Target({"env": {"type": "arena"}, "policies": {"default": {"type": "frozen"}}})
    if not home:  # a base; a run's policy has its own limit
        sampling = {"max_tokens": MAX_TOKENS, **sampling}
    return load_policy(name, target=target, engines=Engines("auto", MAX_NUM_SEQS), sampling=sampling)


def texts_of(player: str, game: str, rendering: str) -> dict[str, Any]:
    """Returns the options of a game's texts: `rendering`, else those that the player's run was trained with if it is
    of this game, else the full rendering, which explains the rules."""
    if rendering:
        return {"rendering": rendering}
    run = player.rpartition(":")[0]
    if run and Path(run).is_dir():
        env = find_target(run).tree.get("env") or {}
        if env.get("type") == GAMES[game].env["type"]:
            return {"rendering": "compact"} | {key: env[key] for key in ("rendering", "vocabulary") if key in env}
    return {"rendering": "full"}
