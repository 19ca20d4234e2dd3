"""The env copies of a run in a vectorised env, and whether they fit into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.core.accel.malloc import check_fits_memory
from palestra.envs import VectorEnv, load_env_class, new_env, validate_env_options
from palestra.envs.step_layout import StepLayout, check_spec
from palestra.envs.vector_base import find_difference
from palestra.vector.config import VectorConfig
from palestra.vector.learners.policy_stack import NetPolicyConfig

MEASURE_ABOVE = 50_000_000  # transitions; above this the real size of one is measured


def make_vector_env(env: dict[str, Any], num_envs: int | None = None) -> VectorEnv:
    """Builds the env that a config describes. `num_envs`, if given, replaces the number of env copies. Raises
    ValueError if its seats, observations or actions are not as `VectorEnv` describes."""
    cls = load_env_class(env["type"])
    options = validate_env_options(
        cls, {k: v for k, v in env.items() if k != "type"} | ({"num_envs": num_envs} if num_envs else {})
    )
    built = new_env(cls, options)
    assert isinstance(built, VectorEnv)
    try:
        check_spec(built)
    except ValueError as error:
        raise ValueError(f"env {built.label}: {error}") from None
    return built


def make_own_envs(config: VectorConfig, num_processes: int) -> tuple[VectorEnv, int]:
    """Returns the env copies of one process or actor, and the number of copies that one training step covers in all.

    Raises ValueError if the copies cannot be divided equally.
    """
    env = make_vector_env(config.env)
    shares = config.num_actors or config.num_processes
    if env.num_envs % shares:
        raise ValueError(
            f"{env.num_envs} games cannot be shared by {shares} processes: set env.num_envs to a multiple of {shares}"
        )
    share_size = env.num_envs // (config.num_actors or num_processes)
    covered = env.num_envs // (config.num_actors or 1)
    if share_size == env.num_envs:
        return env, covered
    env.close()
    return make_vector_env(config.env, share_size), covered


def seed_notes(env: VectorEnv) -> list[str]:
    """Returns a note for the user if two resets to the same seeds begin different games, else no note. Raises
    ValueError for a reset that returns something else than the env's spec says."""
    seeds = np.arange(env.num_envs)
    first = env.reset(seeds)
    try:
        StepLayout(env).check(first)
    except ValueError as error:
        raise ValueError(f'env "{env.label}" {error}') from None
    first = first.copy()
    if field := find_difference(env.reset(seeds), first):
        return [
            f'env "{env.label}" begins other games when it is reset to the same seeds ({field} differ): results cannot '
            "be repeated, and a resume begins its games anew. Draw all randomness from the seed of reset to avoid that"
        ]
    return []


def check_memory(env: Mapping[str, Any], nets: Sequence[NetPolicyConfig], algorithm: Any) -> None:
    """Checks that the run fits into this machine's memory.

    Raises ValueError if the networks, the env copies, one rollout or the replay buffer would not fit. The sizes are
    lower bounds; the size of a transition is measured only if there are many of them.
    """
    games = _number(env.get("num_envs"))
    horizon = algorithm.rollout_length + 1
    if games < 1:
        raise ValueError(f"env.num_envs is {games}: set it to 1 or more")
    capacity = max(getattr(algorithm, name, 0) for name in ("buffer_size", "reservoir_size"))
    wide = [max(one.hidden) ** 2 if len(one.hidden) > 1 else one.hidden[0] for one in nets]
    check_fits_memory(
        16 * sum(wide), "networks, with gradients and Adam's moments,", "make policies' hidden layers smaller"
    )
    check_fits_memory(8 * games, f"env.num_envs: {games:,}", "play fewer games at once")
    moment = _moment(env) if games * horizon + capacity > MEASURE_ABOVE else 8
    check_fits_memory(
        moment * games * horizon,
        f"a rollout of {games:,} games and {horizon - 1:,} steps",
        "lower algorithm.rollout_length or env.num_envs",
    )
    check_fits_memory(
        moment * capacity, f"a buffer of {capacity:,} transitions", "lower algorithm.buffer_size (nfsp: reservoir_size)"
    )


def _moment(env: Mapping[str, Any]) -> int:
    """Returns the size in bytes of one transition of one env copy, all seats together."""
    probe = make_vector_env(dict(env), 1)
    frame = probe.reset(np.zeros(1, np.int64))
    size = sum(array.nbytes for array in vars(frame).values() if isinstance(array, np.ndarray))
    probe.close()
    return size


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1
