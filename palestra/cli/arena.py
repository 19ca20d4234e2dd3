"""`palestra arena`: ratings of any player by games against reference players."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from palestra.api.console import console, print_line, user_errors
from palestra.cli.seat_options import TemperatureOption, sampling_options

if TYPE_CHECKING:
    from palestra.evaluation.arena.scores import Standing


def arena(
    player: Annotated[
        str, typer.Argument(help="a base (smollm2, ./model.gguf), RUN:NAME, URL#MODEL, random or module:function")
    ] = "",
    games: Annotated[int, typer.Option(min=2, help="games against each reference player, half at each seat")] = 20,
    only: Annotated[list[str] | None, typer.Option("--only", help="play this game only")] = None,
    rendering: Annotated[
        str, typer.Option(help="compact or full texts (default: as the player's run was trained, else full)")
    ] = "",
    temperature: TemperatureOption = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder for the results of players and the leaderboard")] = Path("arena"),
) -> None:
    """Rate a player by two-player text games against twelve reference players, which need no files.

    Without a player the standings of the reference players, and of those whose results are in the folder. Reference
    players follow simple rules, search or play equilibria; each can be played: `palestra play arena --env
    game=connect_four --env opponent=hunter --seats player_1=expert --browser`. Elo, the share of points against the
    reference players' equilibrium, the worst opponent, and where it can be computed the exploitability. A game with an
    answer that is no legal word is lost.

    Examples:

        palestra arena
        palestra arena smollm2
        palestra arena runs/mine:player_0 --only kuhn --only leduc
        palestra arena http://127.0.0.1:8000/oai/api/v1#tiny --games 10
        palestra arena mine:answer
    """
    with user_errors():
        from palestra.evaluation.arena.scores import load_references, read_results, standings_of, write_leaderboard

        references = load_references()
        if player:
            _play(player, games, only or [], rendering, temperature, seed, out)
        results = read_results(out)
        standings = standings_of(references, results)
        console.print(standings_table(standings, {result.player for result in results}))
        if results:
            print_line(f"leaderboard: {write_leaderboard(out, standings, results)}")


def _play(
    player: str, games: int, only: list[str], rendering: str, temperature: float | None, seed: int, out: Path
) -> None:
    """Plays, prints what was forfeited and what the player can be exploited for, and writes the result."""
    from palestra.api.progress import CountingBar
    from palestra.evaluation.arena.play import ArenaOptions, enter_arena
    from palestra.evaluation.arena.players import GAMES
    from palestra.evaluation.arena.scores import result_path

    options = ArenaOptions(only or list(GAMES), games, seed, rendering, sampling_options(temperature))
    with CountingBar("games") as bar:

        def show(game: str, played: int, of: int) -> None:
            bar.say(game)
            bar.count(played, of)

        result = enter_arena(player, options, show)
    for note in result.notes:
        print_line(note)
    for game, gap in result.exploitability.items():
        print_line(f"{game}: exploitability {gap:.3f}")
    result.save(result_path(out, player))


def standings_table(standings: Sequence[Standing], players: Set[str]) -> Table:
    """Returns the standings as a table for the screen, with `players` in bold."""
    table = Table(title="Arena", title_justify="left")
    for heading in ("", "player", "Elo", "equilibrium", "worst", "against", "forfeited"):
        is_name = heading in ("player", "against")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name, overflow="fold")
    for place, one in enumerate(standings, 1):
        table.add_row(
            str(place),
            one.label,
            f"{one.elo:.0f} ± {one.stderr:.0f}",
            f"{one.nash_average:.0%}",
            f"{one.worst:.0%}",
            one.nemesis,
            f"{one.forfeits} of {one.games}" if one.forfeits else "",
            style="bold" if one.player in players else "",
        )
    return table
