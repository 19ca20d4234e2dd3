"""Lets the reference players of the arena play each other again: palestra/data/arena.jsonl, in some ten CPU minutes.

python scripts/arena_references.py                    100 games of each pair
python scripts/arena_references.py --quick            2, into /tmp: a smoke test
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from palestra.core.files import atomic_write
from palestra.core.seeding import derive_seed
from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.evaluation.arena.players import GAMES, REFERENCES, Player, reference_player, text_game
from palestra.evaluation.arena.scores import REFERENCE_FILE, ArenaResult, Score

COUNT = 100


def play_references(games: Sequence[str], count: int, seed: int = 0) -> list[ArenaResult]:
    """Lets the reference players play each other: `count` games of each pair, half at each seat; returns one result
    each."""
    scores: dict[str, dict[str, dict[str, Score]]] = {name: {} for name in REFERENCES}
    for game in games:
        for row in scores.values():
            row[game] = {}
        rules = text_game(game).rules
        players = {name: reference_player(name, game) for name in REFERENCES}
        for one, two in combinations(REFERENCES, 2):
            returns: list[tuple[float, float]] = []
            for number in range(count):
                rng = Random(derive_seed(seed, "arena", game, one, two, number))
                if number % 2:
                    second, first = play_game(rules, [players[two], players[one]], rng)
                else:
                    first, second = play_game(rules, [players[one], players[two]], rng)
                returns.append((first, second))
            scores[one][game][two] = Score.of(returns)
            scores[two][game][one] = Score.of([(second, first) for first, second in returns])
    return [ArenaResult(name, rows) for name, rows in scores.items()]


def play_game(rules: Rules[Any], players: Sequence[Player], rng: Random) -> tuple[float, ...]:
    """Plays a game and returns the return of each player."""
    state = rules.initial_state()
    while (turn := rules.current_player(state)) != TERMINAL:
        if turn == CHANCE:
            actions, weights = zip(*rules.chance_outcomes(state), strict=True)
            action = rng.choices(actions, weights)[0]
        else:
            action = players[turn](rules, state, rng)
        state = rules.next_state(state, action)
    return rules.returns(state)


def save_references(results: Sequence[ArenaResult], path: Path) -> None:
    """Writes the results of the reference players, one on each line."""
    atomic_write(path, "".join(f"{json.dumps(asdict(result))}\n" for result in results).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two games of each pair, into /tmp")
    quick = parser.parse_args().quick
    path = Path("/tmp/arena.jsonl") if quick else REFERENCE_FILE
    save_references(play_references(list(GAMES), 2 if quick else COUNT), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
