"""Evaluation of what a run in a vectorised game trained: its policies in any seats, swapped, or against others."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from palestra.config import load, validate
from palestra.drill import play_exam
from palestra.envs import VectorEnv
from palestra.evaluate import find_checkpoint, swapped
from palestra.learners.nets import read_member
from palestra.policies.vector import Player, Uniform
from palestra.rollouts.play import derive
from palestra.runs import Checkpoint
from palestra.setup_games import GamesConfig, Script, fixed, make_games, member_folder, own_names
from palestra.types import Seat

MOST = 256  # games at once


def evaluate_games(
    path: Path,
    env: dict[str, Any],
    seats: dict[str, str],
    *,
    swap: bool,
    episodes: int,
    best: bool,
    step: int | None,
    seed: int,
) -> tuple[dict[Seat, str], dict[str, Any]]:
    """Who sat where, and the figures of `episodes` held-out games. `path` is a run, or RUN:NAME, which then plays every
    seat; `seats` maps seats (`*` stands for any letters) to policies of the run, RUN:NAME, `random`, or `script:NAME`.
    `best` plays likeliest actions, else policies draw theirs."""
    run, _, everywhere = str(path).rpartition(":")
    path = Path(run) if run else path
    config = validate(GamesConfig, load(path / "config.yaml" if path.is_dir() else path))
    made = make_games(config.env | env, min(episodes, MOST))
    checkpoint = find_checkpoint(path, step) if path.is_dir() else None
    names = own_names(config, made)
    if run:
        names = dict.fromkeys(names, everywhere)
    for pattern, name in seats.items():
        matched = [seat for seat in made.seats if fnmatchcase(seat, pattern)]
        if not matched:
            raise ValueError(f'no seat "{pattern}": env "{made.name}" plays {", ".join(made.seats)}')
        names |= dict.fromkeys(matched, str(name))
    if swap:
        names = swapped(names)
    players = [player_of(config, checkpoint, made, seat, name, best) for seat, name in names.items()]
    figures = play_exam(made, players, episodes, derive(seed, "eval"))
    return {seat: player.names[0] for seat, player in zip(made.seats, players, strict=True)}, figures


def player_of(
    config: GamesConfig, checkpoint: Checkpoint | None, env: VectorEnv, seat: Seat, name: str, best: bool
) -> Player:
    """The player called `name` at a seat."""
    number = env.seats.index(seat)
    if name == "random":
        return Uniform(env, [number], f"random/{seat}")
    if name.startswith("script:"):
        script = config.model_copy(update={"policies": {name: Script(name=name.removeprefix("script:"))}})
        return fixed(script, env, seat, name)
    if ":" in name:
        player = read_member(member_folder(name), env, [number], best=best)
    elif checkpoint and name in checkpoint.names:
        player = read_member(checkpoint.path / checkpoint.names[name], env, [number], best=best)
    elif name in config.policies and config.policies[name].type != "net":
        return fixed(config, env, seat, name)
    else:
        have = ", ".join(checkpoint.names if checkpoint else config.policies)
        raise ValueError(f'no policy "{name}"; the run has {have}, or say random, script:NAME or RUN:NAME')
    player.name = f"{name}/{seat}"
    return player
