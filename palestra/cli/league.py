"""`palestra league`: rankings, payoffs and plots of the members of a population."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palestra.api.console import console, print_line, styled_text, user_errors

league = typer.Typer(no_args_is_help=True, help="Rank a population's members, and let them play each other.")
RunArgument = Annotated[Path, typer.Argument(help="a run that trained a population")]
BackendOption = Annotated[str | None, typer.Option(help="backend: local, ray or inline (default: as in training)")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="also write the whole table to this file")]


@league.command()
def standings(run: RunArgument, output: CsvOption = None) -> None:
    """Rank the members by the games that they played against each other.

    Elo and OpenSkill rate a member by one number, which cannot express that it beats some members and loses to others.
    If there are cycles, a warning is printed; the column of the worst opponent then shows more.

    Examples:

        palestra league standings runs/rps_league
        palestra league crossplay runs/rps_league --games 500 && palestra league standings runs/rps_league
    """
    with user_errors(run):
        from palestra.evaluation.report.population_data import (
            cyclicity_warning,
            read_record,
            standings_csv,
            standings_table,
        )

        record = read_record(run)
        console.print(standings_table(record))
        if text := cyclicity_warning(record):
            console.print(styled_text((text, "yellow")))
        _write(output, standings_csv(record))


@league.command()
def crossplay(
    run: RunArgument,
    games: Annotated[
        int, typer.Option(min=0, help="games per pair: play until every pair has this many; 0: play none")
    ] = 0,
    output: CsvOption = None,
    backend: BackendOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="number of parallel tasks")] = None,
) -> None:
    """Show the payoffs between members, after playing the games that are missing.

    Results are stored in crossplay.jsonl in the run. Ctrl-C loses the games of tasks in progress; a second call
    continues from there.

    Examples:

        palestra league crossplay runs/rps_league --games 500
        palestra league crossplay runs/rps_league --csv payoffs.csv
    """
    if games:
        _play(run, games, [("type", backend), ("workers", workers)])
    with user_errors(run):
        from palestra.evaluation.report.population_data import crossplay_table, read_record

        record = read_record(run)
        if len(record.payoffs.seats) == 2 or output is None:  # else the table raises ValueError, which asks for --csv
            console.print(crossplay_table(record))
        _write(output, record.payoffs.to_csv())


def _check_readable(run: Path) -> None:
    """Reads the run that a command is about to play with: an error after that is no damage of the run."""
    with user_errors(run):
        from palestra.evaluation.report.population_data import read_record

        read_record(run)


def _play(run: Path, games: int, places: list[tuple[str, str | int | None]]) -> None:
    _check_readable(run)
    settings = [f"backend.{key}={value}" for key, value in places if value]
    with user_errors():
        from palestra.api.progress import CountingBar
        from palestra.evaluation.crossplay import play_missing_cells

        with CountingBar("playing the missing games") as bar:
            cells = play_missing_cells(run, games, settings, bar.count)
    console.print(f"{cells} pairs lacked games, and have {games} now" if cells else f"every pair has {games} games")


@league.command()
def exploit(
    run: RunArgument,
    steps: Annotated[int, typer.Option(min=1, help="env steps of a response (language agents: training steps)")],
    games: Annotated[int, typer.Option(min=2, help="evaluation games of each response")] = 2000,
    backend: BackendOption = None,
) -> None:
    """Train best responses to the final strategies of the run, to estimate how exploitable they are.

    The gains of all responses over the mixtures they replace give a lower bound on NashConv (at 95 % confidence), which
    is tighter the better they are trained. It works in games that are too large to compute NashConv. Responses are
    stored in exploits/ in the run, results in exploits.jsonl.

    Example:

        palestra league exploit runs/leduc_psro --steps 1000000
    """
    _check_readable(run)
    with user_errors():
        from palestra.api.progress import CountingBar
        from palestra.evaluation.exploit import measure_exploitability as learned
        from palestra.evaluation.final_strategies import describe_mixtures
        from palestra.evaluation.report.population_data import describe_lower_bound, exploits_table

        settings = [f"backend.type={backend}"] if backend else []
        with CountingBar("learning responses") as bar:
            exploits = learned(run, steps, games, settings, bar.say)
        console.print(exploits_table(run, exploits))
        print_line(f"final strategies: {describe_mixtures(exploits[0].mixtures)}")
        if text := describe_lower_bound(exploits):
            print_line(text)


@league.command()
def plot(
    run: RunArgument,
    target: Annotated[Path | None, typer.Option("--out", help="the PNG (default: population.png in the run)")] = None,
) -> None:
    """Plot the run of a population.

    The figures show the distance from equilibrium, payoffs, best responses and mixtures.

    Example:

        palestra league plot runs/kuhn_psro
    """
    with user_errors(run):
        from palestra.evaluation.report.population_plots import plot_population

        print_line(f"figures: {plot_population(run, target)}")


def _write(output: Path | None, text: str) -> None:
    if output:
        output.write_text(text, encoding="utf-8")
        print_line(f"written: {output}")
