"""Evaluation of what a run trained: its members in any seats, swapped, or beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palestra.config import load, override, validate
from palestra.engine.sampler import Sampling
from palestra.policies.base import Policy
from palestra.rollouts.figures import summary
from palestra.runs import Checkpoint, checkpoints
from palestra.setup import Config, Engines, FrozenConfig, exam_env, make_arena, make_policy, seat_map
from palestra.train import evaluate
from palestra.types import Metrics, Seat


async def evaluate_run(
    path: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    *,
    swap: bool,
    episodes: int,
    sampling: dict[str, Any],
    step: int | None,
    seed: int,
) -> tuple[dict[Seat, str], Metrics]:
    """Who sat where, and the figures of `episodes` held-out episodes (split "test" unless `env` says otherwise).

    `path` is a run, a config, or a member as RUN:NAME, which then plays every seat not named in `seats`.
    """
    run, _, everywhere = str(path).rpartition(":")
    path = Path(run) if run else path
    source = path / "config.yaml" if path.is_dir() else path
    config = validate(Config, override(load(source), []))
    checkpoint = find_checkpoint(path, step) if path.is_dir() else None
    names = seat_map(config)
    if unknown := sorted(set(seats) - set(names)):
        raise ValueError(f'no seat "{unknown[0]}": env "{config.env["type"]}" plays {", ".join(names)}')
    names = (dict.fromkeys(names, everywhere) if run else names) | seats
    if swap:
        names = swapped(names)
    engines = Engines(config.device, config.max_rows)
    team = {seat: member(name, config, checkpoint, engines, sampling) for seat, name in names.items()}
    arena = make_arena(exam_env(config.env, None, "test") | env, "test")
    played = await evaluate(arena, team, episodes, seed)
    return {seat: policy.name for seat, policy in team.items()}, summary(played)


def swapped(names: dict[Seat, str]) -> dict[Seat, str]:
    """Two seats with each other's policies."""
    if len(names) != 2:
        raise ValueError(f"--swap is for two seats; this env has {len(names)}: name them with --seats")
    (a, first), (b, second) = names.items()
    return {a: second, b: first}


def find_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """The newest checkpoint of a run, or the one after `step` steps."""
    found = checkpoints(path)
    if step is not None:
        found = [c for c in found if c.step + 1 == step]
    if not found:
        have = ", ".join(str(c.step + 1) for c in checkpoints(path)) or "none"
        raise ValueError(f"{path} has no checkpoint{f' after step {step}' if step else ''}; it has: {have}")
    return found[-1]


def member(
    name: str, config: Config, checkpoint: Checkpoint | None, engines: Engines, sampling: dict[str, Any]
) -> Policy:
    """A policy by name: one of the run's, "base" (the bare base of the first policy), or "RUN:NAME" of another run."""
    run, _, other = name.rpartition(":")
    if run:
        return member(
            other,
            validate(Config, load(Path(run) / "config.yaml")),
            find_checkpoint(Path(run), None),
            engines,
            sampling,
        )
    speakers = [p for p in config.policies.values() if hasattr(p, "base")]
    if name == "base" and speakers:
        return engines.frozen("base", _frozen(speakers[0], None, sampling))
    if name not in config.policies:
        raise ValueError(f'no policy "{name}"; the run has {", ".join(config.policies)}, or say base, or RUN:NAME')
    chosen = config.policies[name]
    if checkpoint and name in checkpoint.names:
        folder = checkpoint.path / checkpoint.names[name]
        version = json.loads((folder / "member.json").read_text())["version"]
        return engines.frozen(f"{name}@{version}", _frozen(chosen, str(folder), sampling))
    if isinstance(chosen, FrozenConfig):
        return engines.frozen(name, _frozen(chosen, chosen.path, sampling))
    if hasattr(chosen, "base"):
        return engines.frozen(name, _frozen(chosen, None, sampling))
    return make_policy(name, chosen, engines)


def _frozen(config: Any, path: str | None, sampling: dict[str, Any]) -> FrozenConfig:
    """The speech settings of `config` for a policy that does not learn."""
    shared = {key: getattr(config, key) for key in FrozenConfig.model_fields if key not in ("type", "path")}
    changed = validate(Sampling, config.sampling.model_dump() | sampling)
    return FrozenConfig(**(shared | {"sampling": changed, "path": path}))
