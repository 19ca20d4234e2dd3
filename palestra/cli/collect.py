"""`palestra collect`: episodes of any policies, as data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palestra.api.console import print_line, user_errors
from palestra.cli.seat_options import (
    CheckpointOption,
    EnvOption,
    InProcessOption,
    SeatsOption,
    TargetArgument,
    TemperatureOption,
    parse_seats,
    parse_settings,
    sampling_options,
)

if TYPE_CHECKING:
    from palestra.evaluation.collect import EpisodeFilter
    from palestra.evaluation.text import TextEvalSetup


def collect(  # noqa: PLR0913 - a parameter for each option
    what: TargetArgument,
    out: Annotated[Path, typer.Option(help="the Parquet file to write")],
    seats: SeatsOption = None,
    env: EnvOption = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="episodes to play, 300 by default; for vector envs see --num-envs")
    ] = None,
    min_return: Annotated[
        float | None, typer.Option(help="keep episodes of at least this return: the team's plus the seats' mean")
    ] = None,
    successes: Annotated[bool, typer.Option("--successes", help="keep only episodes that were a success")] = False,
    num_envs: Annotated[int | None, typer.Option(min=1, help="parallel copies of a vector env, 16 by default")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="joint steps per copy of a vector env, 500 by default")
    ] = None,
    temperature: TemperatureOption = None,
    checkpoint: CheckpointOption = None,
    seed: int = 0,
    in_process: InProcessOption = False,
) -> None:
    """Record episodes as Parquet.

    They have tokens, log-probabilities and rewards by seat, or, of a vector env, observations, actions and rewards by
    seat, for bc, gail, iql, cql and cql_sac.

    Examples:

        palestra collect runs/demo --out demo.parquet --successes
        palestra collect math --seats reasoner=expert --seats tool=expert --out math.parquet --episodes 1000
        palestra collect configs/demo.yaml --seats planner=https://api.example.org/v1#big --out big.parquet
        palestra collect runs/spread_mappo --out expert.parquet
        palestra collect configs/games/combat_vdn.yaml --seats 'unit_*=script:focus' --out focus.parquet
    """
    with user_errors():
        from palestra.evaluation.target import find_target

        if out.suffix not in (".parquet", ""):
            raise ValueError(f"--out {out}: episodes are written as Parquet: name it {out.with_suffix('.parquet')}")
        changes = parse_settings(env)
        target = find_target(what, changes, checkpoint)
        if target.is_vector:
            from palestra.evaluation.vector import collect_vector_episodes

            only_text = {"--episodes": episodes, "--min-return": min_return, "--successes": successes}
            _refuse_given(only_text | {"--in-process": in_process}, "the episodes of text envs", "--num-envs, --steps")
            if temperature not in (None, 0):
                raise ValueError("networks play as trained, or with --temperature 0 their most probable action")
            size = {"num_envs": num_envs or 16, "steps": steps or 500}
            greedy = temperature == 0
            policy_names = collect_vector_episodes(
                target, out, changes, parse_seats(seats), greedy=greedy, seed=seed, **size
            )
            amount = f"{size['num_envs'] * size['steps']} joint steps"
        else:
            from palestra.evaluation.collect import EpisodeFilter
            from palestra.evaluation.text import open_text_eval

            _refuse_given({"--num-envs": num_envs, "--steps": steps}, "vector envs", "--episodes")
            episodes = episodes or 300
            setup = open_text_eval(
                target,
                changes,
                parse_seats(seats),
                split="train",
                sampling=sampling_options(temperature),
                in_process=in_process,
            )
            keep = EpisodeFilter(min_return, successes)
            policy_names, metrics = _collect_with_progress(setup, out, episodes, seed, keep)
            amount = f"{metrics['kept']} of {episodes} episodes"
    print_line(f"{out}: {amount} of {', '.join(f'{seat}={name}' for seat, name in policy_names.items())}")


def _refuse_given(options: Mapping[str, object], what: str, instead: str) -> None:
    """Raises ValueError for an option that was given, and is only for what `what` names."""
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise ValueError(f"{given[0]} is for {what}: leave it out; there are {instead}")


def _collect_with_progress(
    setup: TextEvalSetup, out: Path, episodes: int, seed: int, keep: EpisodeFilter
) -> tuple[dict[str, str], dict[str, Any]]:
    from palestra.api.progress import CountingBar
    from palestra.evaluation.collect import collect_episodes

    with CountingBar("playing") as bar:

        def report_progress(played: int, num_kept: int) -> None:
            bar.count(played, episodes)
            bar.say(f"playing, kept {num_kept}")

        playing = collect_episodes(setup, out, episodes=episodes, seed=seed, keep=keep, on_progress=report_progress)
        return asyncio.run(playing)
