"""`palestra play` and `render`: a person plays one seat or looks on; a game as a film."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from palestra.api.console import console, print_line, require_packages, styled_text, user_errors
from palestra.cli.seat_options import (
    CheckpointOption,
    EnvOption,
    SeatsOption,
    TargetArgument,
    TemperatureOption,
    parse_seats,
    parse_settings,
    require_text_env,
    sampling_options,
)

if TYPE_CHECKING:
    from palestra.evaluation.text import TextEvalSetup


def play(  # noqa: PLR0913 - a parameter for each option
    what: TargetArgument,
    seat: Annotated[str | None, typer.Option(help="your seat (default: the first that --seats leaves)")] = None,
    seats: SeatsOption = None,
    env: EnvOption = None,
    temperature: TemperatureOption = None,
    checkpoint: CheckpointOption = None,
    seed: Annotated[int, typer.Option(help="seed of the instance")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser", help="play in the browser, on a page served until Ctrl-C")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="look on in the browser while policies play every seat, with a pause button")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the page; 0 takes a free one")] = 6071,
    host: Annotated[
        str, typer.Option(help="the address that the page is served at; any other than localhost requires a token")
    ] = "127.0.0.1",
) -> None:
    """Play one seat yourself.

    The other seats are played as in `palestra eval`. Ctrl-D gives up.

    Examples:

        palestra play runs/demo --seat executor
        palestra play sudoku --env size=4
        palestra play text_tic_tac_toe --seats player_1=expert
        palestra play text_connect_four --seats player_1=expert --browser
        palestra play text_tic_tac_toe --seats player_0=smollm2 --seats player_1=./model.gguf --watch
    """
    with user_errors():
        require_text_env(what, "palestra play")
        from palestra.core.failures import RunFailed
        from palestra.evaluation.target import find_target
        from palestra.evaluation.text import human_eval_setup, open_text_eval, play_episode

        changes, names, sampling = parse_settings(env), parse_seats(seats), sampling_options(temperature)
        if watch:
            if seat:
                raise ValueError("--watch leaves no seat for you: leave out --seat, or play with --browser")
            target = find_target(what, changes, checkpoint)
            watched = open_text_eval(target, changes, names, sampling=sampling, in_process=True)
            return _in_browser(watched, "", seed, host, port)
        setup, own_seat = human_eval_setup(what, changes, names, seat, sampling=sampling, checkpoint=checkpoint)
        if browser:
            return _in_browser(setup, own_seat, seed, host, port)
        _print_rules(setup, own_seat)
        episode = asyncio.run(play_episode(setup, own_seat, seed))
        if episode.error:
            why = f"the episode ended early: {episode.error}"
            gave_up = episode.error.startswith("EOFError")
            raise ValueError(why) if gave_up else RunFailed.from_traceback(why, episode.traceback)
    console.print(_outcome(own_seat, episode))


def render(
    what: TargetArgument,
    out: Annotated[Path, typer.Option(help="the film to write: a .gif or .mp4")] = Path("game.gif"),
    seats: SeatsOption = None,
    env: EnvOption = None,
    temperature: TemperatureOption = None,
    checkpoint: CheckpointOption = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the game")] = 0,
    per_second: Annotated[
        float | None,
        typer.Option(min=0.05, max=60, help="joint steps in a second (default: 10; of language agents 0.5)"),
    ] = None,
) -> None:
    """Play one game as in `palestra eval`, and write it as a film.

    The film shows what each seat does and what it is paid.

    Examples:

        palestra render runs/spread_mappo --out spread.gif
        palestra render runs/demo --out demo.gif --env rendering=ascii
        palestra render runs/tag --seats "adversary_*=random" --seed 3 --out tag.mp4
    """
    with user_errors():
        from palestra.evaluation.film import write_film

        options: dict[str, Any] = {"checkpoint": checkpoint, "greedy": temperature == 0}
        options["sampling"] = sampling_options(temperature)
        count = write_film(
            what, out, parse_settings(env), parse_seats(seats), seed=seed, per_second=per_second, **options
        )
    print_line(f"film: {out}, {count} pictures")


def _print_rules(setup: TextEvalSetup, seat: str) -> None:
    """Prints rules and form of an answer, unless they are in the role, which is shown anyway."""
    env = setup.runner.make_env()
    if env.rules_for(seat) not in env.roles.get(seat, ""):
        console.print(f"{env.rules_for(seat)}\n")


def _in_browser(setup: TextEvalSetup, own_seat: str, seed: int, host: str, port: int) -> None:
    require_packages("playing in the browser", "dashboard", "starlette", "uvicorn", "httptools")
    from palestra.dashboard.play_server import serve
    from palestra.dashboard.play_session import GameSetup, PlaySessions
    from palestra.evaluation.text import check_humans, play_episode, watch_episode

    env = setup.runner.make_env()
    name = env.name or type(env).__name__
    rules = env.rules_for(own_seat or env.seats[0])
    run_game: Any = partial(watch_episode, setup)
    if own_seat:
        run_game = partial(play_episode, setup, own_seat)
    seats = check_humans(setup, own_seat)
    sessions = PlaySessions(
        run_game, GameSetup(name, seats, own_seat, rules, env.picture), first_instance=seed, print_line=print_line
    )
    serve(sessions, host, port, print_line)


def _outcome(own_seat: str, episode: Any) -> Table:
    """Result table of an episode that a person played."""
    from palestra.text.rollouts.metrics import episode_metrics, seat_returns

    table = Table(title="the end", title_justify="left", show_header=False)
    if episode.success is not None:
        table.add_row("success", styled_text(("yes" if episode.success else "no", "bold")))
    for seat, success in episode.seat_success.items():
        table.add_row(f"success of {seat}", "yes" if success else "no")
    if (team := episode_metrics([episode]).get("team_return")) is not None:
        table.add_row("return of the team", f"{team:.2f}")
    for seat, value in seat_returns([episode])["returns"].items():
        table.add_row(f"return of {seat}{' (you)' if seat == own_seat else ''}", f"{value:.2f}")
    return table
