"""Evaluation of policies trained in vectorised games: in any seats, swapped, or against others."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from palestra.algorithms.vector.imitation import record_demonstrations
from palestra.builders.vector import make_fixed_player, member_folder, policy_by_seat
from palestra.builders.vector_config import ScriptConfig, VectorConfig
from palestra.builders.vector_envs import make_vector_env
from palestra.config import load, validate
from palestra.envs import VectorEnv
from palestra.evaluation.evaluate import find_checkpoint, swap_seats
from palestra.learners.nets import read_policy
from palestra.policies.vector import UniformVectorPolicy, VectorPolicy
from palestra.runs import Checkpoint
from palestra.seeding import derive_seed
from palestra.training.vector_loop import play_eval
from palestra.types import Seat

MAX_NUM_ENVS = 256  # parallel games


def collect_demonstrations(
    path: Path,
    out: Path,
    seats: dict[str, str],
    *,
    num_envs: int,
    steps: int,
    greedy: bool,
    step: int | None,
    seed: int,
) -> dict[Seat, str]:
    """Records `steps` joint steps of `num_envs` parallel games as demonstrations for `bc` and `gail`; returns the
    policy at each seat. Seeds differ from those of evaluations. See `evaluate_vector` for `seats`, `greedy` and the
    errors."""
    env, players = seat_players(path, {}, seats, num_envs=num_envs, swap=False, greedy=greedy, step=step)
    record_demonstrations(env, players, steps, out, seed=derive_seed(seed, "collect") >> 1 | 1 << 33)
    return player_names(env, players)


def evaluate_vector(
    path: Path,
    env: dict[str, Any],
    seats: dict[str, str],
    *,
    swap: bool,
    episodes: int,
    greedy: bool,
    step: int | None,
    seed: int,
) -> tuple[dict[Seat, str], dict[str, Any]]:
    """Plays `episodes` held-out games; returns the policy at each seat and the metrics. `path` is a run, or RUN:NAME,
    which then plays every seat; `seats` maps seats (`*` matches any characters) to policies of the run, RUN:NAME,
    `random`, or `script:NAME`. With `greedy`, policies take their most probable action instead of sampling. Raises
    ValueError for an unknown seat, policy or checkpoint."""
    made, players = seat_players(
        path, env, seats, num_envs=min(episodes, MAX_NUM_ENVS), swap=swap, greedy=greedy, step=step
    )
    return player_names(made, players), play_eval(made, players, episodes, derive_seed(seed, "eval"))


def seat_players(
    path: Path, env: dict[str, Any], seats: dict[str, str], *, num_envs: int, swap: bool, greedy: bool, step: int | None
) -> tuple[VectorEnv, list[VectorPolicy]]:
    """Returns the env and the player of each seat, in seat order; see `evaluate_vector`."""
    run, _, everywhere = str(path).rpartition(":")
    path = Path(run) if run else path
    config = validate(VectorConfig, load(path / "config.yaml" if path.is_dir() else path))
    made = make_vector_env(config.env | env, num_envs)
    checkpoint = find_checkpoint(path, step) if path.is_dir() else None
    names = policy_by_seat(config, made)
    if run:
        names = dict.fromkeys(names, everywhere)
    for pattern, name in seats.items():
        matched = [seat for seat in made.seats if fnmatchcase(seat, pattern)]
        if not matched:
            raise ValueError(f'no seat "{pattern}": env "{made.name}" plays {", ".join(made.seats)}')
        names |= dict.fromkeys(matched, str(name))
    if swap:
        names = swap_seats(names)
    return made, [make_player(config, checkpoint, made, seat, names[seat], greedy) for seat in made.seats]


def player_names(env: VectorEnv, players: list[VectorPolicy]) -> dict[Seat, str]:
    """Returns the versioned policy name at each seat."""
    return {seat: player.names[0] for seat, player in zip(env.seats, players, strict=True)}


def make_player(
    config: VectorConfig, checkpoint: Checkpoint | None, env: VectorEnv, seat: Seat, name: str, greedy: bool
) -> VectorPolicy:
    """Returns the player called `name` for a seat. Raises ValueError for an unknown name."""
    number = env.seats.index(seat)
    if name == "random":
        return UniformVectorPolicy(env, [number], f"random/{seat}")
    if name.startswith("script:"):
        script = config.model_copy(update={"policies": {name: ScriptConfig(script=name.removeprefix("script:"))}})
        return make_fixed_player(script, env, seat, name)
    if ":" in name:
        player = read_policy(member_folder(name), env, [number], best=greedy)
    elif checkpoint and name in checkpoint.names:
        player = read_policy(checkpoint.path / checkpoint.names[name], env, [number], best=greedy)
    elif name in config.policies and config.policies[name].type != "net":
        return make_fixed_player(config, env, seat, name)
    else:
        have = ", ".join(checkpoint.names if checkpoint else config.policies)
        raise ValueError(f'no policy "{name}"; the run has {have}, or say random, script:NAME or RUN:NAME')
    player.name = f"{name}/{seat}"
    return player
