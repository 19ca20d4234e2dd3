"""Evaluation of policies trained in vectorised games: in any seats, swapped, or against others."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from palestra.algorithms.vector.imitation import record
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

MOST = 256  # parallel games


def collect(
    path: Path, out: Path, seats: dict[str, str], *, games: int, steps: int, best: bool, step: int | None, seed: int
) -> dict[Seat, str]:
    """Records `steps` joint steps of `games` parallel games as demonstrations for `bc` and `gail`; returns the policy
    at each seat. Seeds differ from those of evaluations. See `evaluate_games` for `seats`, `best` and the errors."""
    env, players = seated(path, {}, seats, games=games, swap=False, best=best, step=step)
    record(env, players, steps, out, seed=derive(seed, "collect") >> 1 | 1 << 33)
    return named(env, players)


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
    """Plays `episodes` held-out games; returns the policy at each seat and the metrics. `path` is a run, or RUN:NAME,
    which then plays every seat; `seats` maps seats (`*` matches any characters) to policies of the run, RUN:NAME,
    `random`, or `script:NAME`. With `best`, policies take their most probable action instead of sampling. Raises
    ValueError for an unknown seat, policy or checkpoint."""
    made, players = seated(path, env, seats, games=min(episodes, MOST), swap=swap, best=best, step=step)
    return named(made, players), play_exam(made, players, episodes, derive(seed, "eval"))


def seated(
    path: Path, env: dict[str, Any], seats: dict[str, str], *, games: int, swap: bool, best: bool, step: int | None
) -> tuple[VectorEnv, list[Player]]:
    """Returns the env and the player of each seat, in seat order; see `evaluate_games`."""
    run, _, everywhere = str(path).rpartition(":")
    path = Path(run) if run else path
    config = validate(GamesConfig, load(path / "config.yaml" if path.is_dir() else path))
    made = make_games(config.env | env, games)
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
    return made, [player_of(config, checkpoint, made, seat, names[seat], best) for seat in made.seats]


def named(env: VectorEnv, players: list[Player]) -> dict[Seat, str]:
    """Returns the versioned policy name at each seat."""
    return {seat: player.names[0] for seat, player in zip(env.seats, players, strict=True)}


def player_of(
    config: GamesConfig, checkpoint: Checkpoint | None, env: VectorEnv, seat: Seat, name: str, best: bool
) -> Player:
    """Returns the player called `name` for a seat. Raises ValueError for an unknown name."""
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
