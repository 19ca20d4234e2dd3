"""`palestra collect`: episodes of any policies, as data."""

from __future__ import annotations

import asyncio
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
        int, typer.Option(min=1, help="episodes to play; for vector envs see --num-envs and --steps")
    ] = 300,
    min_return: Annotated[
        float | None, typer.Option(help="keep episodes of at least this return: the team's plus the seats' mean")
    ] = None,
    successes: Annotated[bool, typer.Option("--successes", help="keep only episodes that were a success")] = False,
    num_envs: Annotated[int, typer.Option(min=1, help="parallel copies of a vector env")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="joint steps per env copy")] = 500,
    temperature: TemperatureOption = None,
    checkpoint: CheckpointOption = None,
    seed: int = 0,
    in_process: InProcessOption = False,
) -> None:
    """Record episodes as Parquet: with tokens, log-probabilities and rewards by seat, or of a vector env with
    observations, actions and rewards by seat, for bc, gail, iql, cql and cql_sac.

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
        if find_target(what, step=checkpoint).is_vector:
            from palestra.evaluation.vector import collect_vector_episodes as record_games

            options: dict[str, Any] = {"num_envs": num_envs, "steps": steps, "checkpoint": checkpoint, "seed": seed}
            policy_names = record_games(what, out, parse_seats(seats), greedy=temperature == 0, **options)
            amount = f"{num_envs * steps} joint steps"
        else:
            from palestra.evaluation.collect import EpisodeFilter
            from palestra.evaluation.text import open_text_eval

            changes = parse_settings(env)
            setup = open_text_eval(
                find_target(what, changes, checkpoint),
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
