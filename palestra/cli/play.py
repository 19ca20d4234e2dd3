"""`palestra eval`, `collect` and `play`: evaluation, recording and human play, with any policies at any
seats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from palestra.launch.console import PlainConsole, console, print_line, require_packages, styled_text, user_errors
from palestra.rollouts.transcript import transcript

if TYPE_CHECKING:
    from palestra.evaluation.target import EvalResult, OnProgress
    from palestra.evaluation.text import TextEvalSetup

POLICY_HELP = (
    "a policy of the run, RUN:NAME of another, base, expert, random, human, or an endpoint as URL#MODEL; in vectorised "
    "games script:NAME plays too"
)
TargetArgument = Annotated[
    Path, typer.Argument(help="a run, a member as RUN:NAME (it plays every seat), a config, or an env")
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", help="change the env: `--env split=test`, `--env size=5`")
]
SeatsOption = Annotated[
    list[str] | None,
    typer.Option(help=f"policy of a seat, as SEAT=POLICY; `*` in SEAT matches any letters: {POLICY_HELP}"),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0, help="sampling temperature (default: as in training; networks accept only that and 0)"),
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="sample in this process, even if the config names a sampler")
]
StepOption = Annotated[int | None, typer.Option(help="a checkpoint of the run (default: the newest)")]


def evaluate(
    what: TargetArgument,
    env: EnvOption = None,
    seats: SeatsOption = None,
    swap: Annotated[bool, typer.Option("--swap", help="swap the policies of two seats")] = False,
    cross: Annotated[
        bool, typer.Option("--cross", help="play every assignment of members to seats, on the same instances")
    ] = False,
    members: Annotated[list[str] | None, typer.Option("--member", help=f"a policy for --cross: {POLICY_HELP}")] = None,
    episodes: Annotated[int, typer.Option(min=1)] = 300,
    samples: Annotated[
        int, typer.Option(min=1, help="play each instance this many times, for pass@k and majority vote")
    ] = 1,
    show: Annotated[int, typer.Option(min=0, help="number of episodes to print in full")] = 0,
    step: StepOption = None,
    temperature: TemperatureOption = None,
    seed: int = 0,
    in_process: InProcessOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    best_response: Annotated[
        int,
        typer.Option(
            min=0, help="vectorised games: train a best response to the others at each seat for this many env steps"
        ),
    ] = 0,
    record: Annotated[
        str,
        typer.Option(help="keep the result in the run under this name, beside its evaluations; the dashboard shows it"),
    ] = "",
) -> None:
    """Play held-out instances with the members of a run, or with any other policies.

    Examples:

        palestra eval runs/demo --env split=test

        palestra eval runs/demo --swap

        palestra eval runs/demo:planner

        palestra eval runs/demo --swap --record swapped

        palestra eval runs/demo --seats planner=base --temperature 0

        palestra eval runs/demo --cross --member planner --member executor --member base

        palestra eval runs/spread_mappo --cross --member agent --member random

        palestra eval runs/demo --episodes 3 --show 3

        palestra eval runs/demo --episodes 100 --samples 8

        palestra eval runs/goofspiel --episodes 2000 --best-response 1000000

        palestra eval math --env difficulty=2 --seats reasoner=http://127.0.0.1:8000/v1#tiny

    The result of a game that can be enumerated includes NashConv of the policies. In a larger one, --best-response
    gives a lower bound on it: the sum of what trained responses gain.
    """
    with user_errors():
        if best_response and (cross or swap or record or show):
            raise ValueError("--best-response goes with --env, --seats, --step, --temperature, --seed and --json")
        if best_response:
            choice = {"episodes": episodes, "step": step, "seed": seed, "greedy": temperature == 0}
            _best_responses(what, parse_settings(env), parse_seats(seats), best_response, as_json, choice)
            return
        if cross and (swap or seats):
            raise ValueError("--cross seats its members in every way: name them with --member, not --seats or --swap")
        if members and not cross:
            raise ValueError(
                "--member is only used with --cross; to assign a policy to a seat, use --seats SEAT=POLICY"
            )
        options: dict[str, Any] = {"episodes": episodes, "step": step, "seed": seed, "in_process": in_process}
        options |= {"sampling": _sampling(temperature), "greedy": temperature == 0, "samples": samples}
        if show:
            _needs_text(what, "--show")
        from palestra.evaluation import evaluate as evaluation

        with _progress_bar(is_shown="human" not in parse_seats(seats).values()) as on_progress:
            if cross:
                found = evaluation.cross_play(
                    what, parse_settings(env), members or [], on_progress=on_progress, **options
                )
            else:
                found = [
                    evaluation.evaluate(
                        what, parse_settings(env), parse_seats(seats), swap=swap, on_progress=on_progress, **options
                    )
                ]
        if record:
            _record(what, record, step, found)
    for episode in [episode for scored in found for episode in scored.episodes[:show]]:
        print_line(f"{transcript(episode)}\n")
    if as_json:
        lines: Any = [{"seats": scored.policy_names, **scored.metrics} for scored in found]
        print(json.dumps(lines if cross else lines[0]))
    elif cross:
        console.print(_cross_table(f"{what}, {episodes} episodes each", found))
    else:
        console.print(_eval_table(f"{what}, {episodes} episodes", found[0].policy_names, found[0].metrics))
    with user_errors():
        from palestra.rollouts.failures import check_not_all_failed

        check_not_all_failed([episode for scored in found for episode in scored.episodes], "eval")


def _best_responses(
    what: Path, env: dict[str, Any], seats: dict[str, str], steps: int, as_json: bool, choice: dict[str, Any]
) -> None:
    from palestra.evaluation.best_response import learn_best_responses
    from palestra.report.population_data import exploits_table, nash_conv_lower_bound

    with PlainConsole(stderr=True).status("learning a response at each seat") as status:
        report = lambda text: status.update(styled_text(text))  # noqa: E731
        found = learn_best_responses(what, env, seats, steps=steps, on_progress=report, **choice)
    bound = nash_conv_lower_bound(found)
    if as_json:
        print(json.dumps({"nash_conv_at_least": bound, "responses": [one._asdict() for one in found]}))
        return
    console.print(exploits_table(what, found))
    console.print(styled_text("NashConv is at least ", (f"{bound:.3f}", "bold"), ", up to the error of the gains"))


@contextmanager
def _progress_bar(is_shown: bool) -> Iterator[OnProgress]:
    """Context with a progress bar, on stderr and only in a terminal, which vanishes at its end. Yields the function
    that moves it."""
    loud = PlainConsole(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=loud, transient=True, disable=not (is_shown and loud.is_terminal)) as bar:
        task = bar.add_task("playing", total=None)
        yield lambda played, of: bar.update(task, completed=played, total=of)


def _record(run: Path, name: str, step: int | None, found: list[EvalResult]) -> None:
    """Appends results to the run's evals.jsonl. If there are several, the seats become part of the name."""
    from palestra.evaluation.target import find_checkpoint
    from palestra.runs import Run

    after = find_checkpoint(run, step).step
    with Run.open(run) as opened:
        for scored in found:
            who = ", ".join(f"{seat}={member}" for seat, member in scored.policy_names.items())
            title = name if len(found) == 1 else f"{name}: {who}"
            opened.log_eval(after, title, {**scored.metrics, "seats": scored.policy_names})


def collect(
    what: TargetArgument,
    out: Annotated[Path, typer.Option(help="the file to write: .parquet, or .npz of a vectorised game")],
    seats: SeatsOption = None,
    env: EnvOption = None,
    episodes: Annotated[
        int, typer.Option(min=1, help="episodes to play; for vectorised games see --num-envs and --steps")
    ] = 300,
    min_return: Annotated[
        float | None, typer.Option(help="keep episodes of at least this return: the team's plus the seats' mean")
    ] = None,
    successes: Annotated[bool, typer.Option("--successes", help="keep only episodes that were a success")] = False,
    num_envs: Annotated[int, typer.Option(min=1, help="parallel copies of a vectorised env")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="joint steps of every vectorised game")] = 500,
    temperature: TemperatureOption = None,
    step: StepOption = None,
    seed: int = 0,
    in_process: InProcessOption = False,
) -> None:
    """Record episodes: as Parquet with tokens, log-probabilities and rewards by seat, or as demonstrations for bc and
    gail.

    Examples:

        palestra collect runs/demo --out demo.parquet --successes

        palestra collect math --seats reasoner=expert --seats tool=expert --out math.parquet --episodes 1000

        palestra collect configs/demo.yaml --seats planner=https://api.example.org/v1#big --out big.parquet

        palestra collect runs/spread_mappo --out expert.npz

        palestra collect configs/games/combat_vdn.yaml --seats 'unit_*=script:focus' --out focus.npz
    """
    with user_errors():
        from palestra.evaluation.target import find_target

        if find_target(what, step=step).is_vector:
            from palestra.evaluation.vector import collect_demonstrations as record_games

            options: dict[str, Any] = {"num_envs": num_envs, "steps": steps, "step": step, "seed": seed}
            who = record_games(what, out, parse_seats(seats), greedy=temperature == 0, **options)
            kept = f"{num_envs * steps} joint steps"
        else:
            options = {
                "episodes": episodes,
                "min_return": min_return,
                "successes": successes,
                "step": step,
                "seed": seed,
            }
            options["in_process"] = in_process
            who, metrics = _collected(what, out, env, seats, temperature, options)
            kept = f"{metrics['kept']} of {episodes} episodes"
    print_line(f"{out}: {kept} of {', '.join(f'{seat}={name}' for seat, name in who.items())}")


def play(
    what: TargetArgument,
    seat: Annotated[str | None, typer.Option(help="your seat (default: the first)")] = None,
    seats: SeatsOption = None,
    env: EnvOption = None,
    temperature: TemperatureOption = None,
    step: StepOption = None,
    seed: Annotated[int, typer.Option(help="seed of the instance")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser", help="play in the browser, on a page served until Ctrl-C")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the page; 0 takes a free one")] = 6071,
    host: Annotated[
        str, typer.Option(help="the address that the page is served at; others than this machine's ask for a token")
    ] = "127.0.0.1",
) -> None:
    """Play one seat yourself; the other seats are played as in `palestra eval`. Ctrl-D gives up.

    Examples:

        palestra play runs/demo --seat executor

        palestra play sudoku --env size=4

        palestra play text_tic_tac_toe --seats player_1=expert

        palestra play text_connect_four --seats player_1=expert --browser
    """
    with user_errors():
        _needs_text(what, "palestra play")
        from palestra.evaluation.text import human_eval_setup, play_episode
        from palestra.rollouts.failures import RunFailed

        asked = {name: who for name, who in parse_seats(seats).items() if name != seat}
        table, mine = human_eval_setup(
            what, parse_settings(env), asked, seat, sampling=_sampling(temperature), step=step
        )
        if browser:
            return _in_browser(table, mine, seed, host, port)
        _print_rules(table, mine)
        episode = asyncio.run(play_episode(table, mine, seed))
        if episode.error:
            why, gave_up = f"the episode ended early: {episode.error}", episode.error.startswith("EOFError")
            raise ValueError(why) if gave_up else RunFailed.from_traceback(why, episode.traceback)
    console.print(_outcome(mine, episode))


def _print_rules(table: TextEvalSetup, seat: str) -> None:
    """Prints the rules and the form of an answer, unless the seat's role, which is shown with its first observation,
    has them."""
    env = table.runner.make_env()
    if env.rules_for(seat) not in env.roles.get(seat, ""):
        console.print(f"{env.rules_for(seat)}\n")


def _in_browser(table: TextEvalSetup, mine: str, seed: int, host: str, port: int) -> None:
    require_packages("playing in the browser", "dashboard", "starlette", "uvicorn", "httptools")
    from palestra.dashboard.play_server import serve
    from palestra.dashboard.play_session import GameSetup, PlaySessions
    from palestra.evaluation.text import check_single_human, play_episode

    env = table.runner.make_env()
    name, seats = env.name or type(env).__name__, check_single_human(table, mine)
    setting = GameSetup(name, seats, mine, env.rules_for(mine), env.picture)
    serve(
        PlaySessions(partial(play_episode, table, mine), setting, first_instance=seed, print_line=print_line),
        host,
        port,
        print_line,
    )


def _collected(
    what: Path,
    out: Path,
    env: list[str] | None,
    seats: list[str] | None,
    temperature: float | None,
    options: dict[str, Any],
) -> tuple[dict[str, str], dict[str, Any]]:
    from palestra.evaluation.collect import collect_episodes

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("playing", total=options["episodes"])

        def report_progress(played: int, kept: int) -> None:
            bar.update(task, completed=played, description=f"kept {kept}")

        playing = collect_episodes(
            what,
            out,
            parse_settings(env),
            parse_seats(seats),
            sampling=_sampling(temperature),
            on_progress=report_progress,
            **options,
        )
        return asyncio.run(playing)


def _eval_table(title: str, who: dict[str, str], figures: dict[str, Any]) -> Table:
    from palestra.rollouts.sample_metrics import sample_rows
    from palestra.runs.series import success_interval

    table = Table(title=title, title_justify="left", show_header=False)
    for seat, policy in who.items():
        table.add_row(seat, policy)
    table.add_section()
    if "success" in figures:
        table.add_row("success", styled_text((success_interval(figures), "bold")))
    for name, text in sample_rows(figures):
        table.add_row(name, text)
    for key in ("return", "steps_per_episode", "team_return", "failed"):
        if key in figures:
            table.add_row(key.replace("_", " "), f"{figures[key]:.2f}")
    for seat in figures.get("returns", {}):
        table.add_row(f"return of {seat}", _return(figures, seat))
    if "nash_conv" in figures:
        table.add_row("NashConv", f"{figures['nash_conv']:.4f}")
    return table


def _cross_table(title: str, found: list[EvalResult]) -> Table:
    from palestra.rollouts.sample_metrics import sample_rows
    from palestra.runs.series import success_interval

    seats = list(found[0].policy_names)
    mean = "team_return" if "team_return" in found[0].metrics else "return"  # networks have the mean over seats
    sampled = [name for name, _ in sample_rows(found[0].metrics)]
    columns = ["success", *sampled, mean.replace("_", " "), *(f"return of {seat}" for seat in seats)]
    table = Table(*seats, *columns, title=title, title_justify="left")
    for who, metrics, _ in found:
        returns = [_return(metrics, seat) for seat in seats]
        success = success_interval(metrics) if "success" in metrics else "-"
        passed = dict(sample_rows(metrics))
        more = [passed.get(name, "-") for name in sampled]
        table.add_row(*who.values(), success, *more, f"{metrics[mean]:.2f}", *returns)
    return table


def _return(figures: dict[str, Any], seat: str) -> str:
    half = figures.get("returns_ci95", {}).get(seat)
    return f"{figures['returns'][seat]:.2f}" + (f" ± {half:.2f}" if half is not None else "")


def _outcome(mine: str, episode: Any) -> Table:
    """Result table of an episode that a person played."""
    from palestra.rollouts.metrics import episode_metrics, seat_returns

    (leaf,) = episode.leaves()
    table = Table(title="the end", title_justify="left", show_header=False)
    if "success" in leaf.info:
        table.add_row("success", styled_text(("yes" if episode.success else "no", "bold")))
    table.add_row("return of the team", f"{episode_metrics([episode])['team_return']:.2f}")
    for seat, value in seat_returns([episode])["returns"].items():
        table.add_row(f"return of {seat}{' (you)' if seat == mine else ''}", f"{value:.2f}")
    return table


def _sampling(temperature: float | None) -> dict[str, Any]:
    return {} if temperature is None else {"temperature": temperature}


def _needs_text(what: Path, name: str) -> None:
    from palestra.evaluation.target import find_target

    if find_target(what).is_vector:
        raise ValueError(f"{name} is for envs in words; {what} is a vectorised game, whose seats take arrays")


def parse_seats(settings: list[str] | None) -> dict[str, str]:
    """Parses `["adversary_*=random"]` to {"adversary_*": "random"}. Raises ValueError for an entry without "="."""
    found = [setting.partition("=") for setting in settings or []]
    if wrong := [seat for seat, equals, _ in found if not equals]:
        raise ValueError(f"cannot read --seats {wrong[0]}: write SEAT=POLICY, for example agent_0=random")
    return {seat: name for seat, _, name in found}


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parses `["size=5"]` to {"size": 5}. Raises ValueError for an entry that is not a setting."""
    from palestra.config import override

    return override({}, settings or [])
