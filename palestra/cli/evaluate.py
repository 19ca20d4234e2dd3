"""`palestra eval`: evaluation with any policies at any seats."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from palestra.api.console import console, print_line, styled_text, user_errors
from palestra.cli.seat_options import (
    POLICY_HELP,
    CheckpointOption,
    EnvOption,
    InProcessOption,
    SeatsOption,
    TargetArgument,
    TemperatureOption,
    parse_seats,
    parse_settings,
    require_text_env,
    sampling_options,
)
from palestra.text.rollouts.transcript import transcript

if TYPE_CHECKING:
    from palestra.evaluation.judged import Judge
    from palestra.evaluation.target import EvalResult


def evaluate(  # noqa: PLR0913 - a parameter for each option
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
    checkpoint: CheckpointOption = None,
    temperature: TemperatureOption = None,
    seed: int = 0,
    in_process: InProcessOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    best_response: Annotated[
        int,
        typer.Option(
            min=0, help="vector envs: train a best response to the others at each seat for this many env steps"
        ),
    ] = 0,
    judge: Annotated[
        str,
        typer.Option(help=f"compare with --against by the verdicts of a language model, in both orders: {POLICY_HELP}"),
    ] = "",
    judge_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="maximum number of tokens of a judge's reply (default: 256, or the endpoint's own)"),
    ] = None,
    against: Annotated[
        str, typer.Option(help="with --judge, the policy that plays all seats on the other side (default: base)")
    ] = "",
    record: Annotated[
        str,
        typer.Option(
            help="store the result under this name in the run, beside its evaluations; the dashboard shows it"
        ),
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
        palestra eval runs/demo --episodes 100 --judge http://127.0.0.1:8000/oai/api/v1#judge --against base
        palestra eval runs/goofspiel --episodes 2000 --best-response 1000000
        palestra eval math --env difficulty=2 --seats reasoner=http://127.0.0.1:8000/oai/api/v1#tiny

    The result of a game that can be enumerated includes NashConv of the policies. In a larger one, --best-response
    gives a lower bound on it (at 95 % confidence), from what trained responses gain. A game of OpenSpiel whose players
    move at once is enumerated as turn_based_simultaneous_game(game=...).
    """
    with user_errors():
        _refuse_combinations(
            {
                "--best-response goes with --env, --seats, --episodes, --checkpoint, --temperature, --seed and "
                "--json": best_response and (cross or swap or record or show or judge or samples > 1),
                "--against names the other side of a comparison: name the judge with --judge": against and not judge,
                "--judge-tokens limits the replies of a judge: name the judge with --judge": judge_tokens and not judge,
                "--judge goes with --judge-tokens, --against, --env, --seats, --episodes, --checkpoint, --temperature, "
                "--seed and --json": judge and (cross or swap or record or show or samples > 1),
                "--samples compares answers that differ, and --temperature 0 gives the same each time: leave one out": (
                    samples > 1 and temperature == 0
                ),
                "--cross plays members in all assignments: name them with --member, not --seats or --swap": (
                    cross and (swap or seats)
                ),
                "--member is only used with --cross; to assign a policy to a seat, use --seats SEAT=POLICY": (
                    members and not cross
                ),
            }
        )
        settings = parse_settings(env)
        policies = parse_seats(seats)
        options: dict[str, Any] = {"episodes": episodes, "seed": seed, "greedy": temperature == 0}
        if best_response:
            options["steps"] = best_response
            _best_responses(what, checkpoint, settings, policies, as_json, options)
            return
        options |= {"checkpoint": checkpoint, "in_process": in_process, "samples": samples}
        options["sampling"] = sampling_options(temperature)
        if show:
            require_text_env(what, "--show")
        if record:
            _check_name(what, record)
        if judge:
            from palestra.evaluation.judged import Judge

            sides = (policies, against or "base")
            _print_judged(what, settings, *sides, Judge(judge, judge_tokens), as_json, options)
            return
        from palestra.api.progress import CountingBar
        from palestra.evaluation import evaluate as evaluation

        is_asked = "human" in policies.values()  # a person answers in the terminal, where a bar would be in the way
        with nullcontext() if is_asked else CountingBar(f"evaluating {what}") as bar:
            if bar:
                options["on_progress"] = bar.count
            if cross:
                results = evaluation.cross_play(what, settings, members or [], **options)
            else:
                results = [evaluation.evaluate(what, settings, policies, swap=swap, **options)]
        if record:
            _record(what, record, checkpoint, results)
    for episode in chain.from_iterable(scored.episodes[:show] for scored in results):
        print_line(f"{transcript(episode)}\n")
    if as_json:
        lines: Any = [{"seats": scored.policy_names, **scored.metrics} for scored in results]
        print(json.dumps(lines if cross else lines[0]))
    else:
        _print_results(f"{what}, {episodes} episodes", results, cross)
    with user_errors():
        from palestra.core.failures import check_not_all_failed

        check_not_all_failed(list(chain.from_iterable(scored.episodes for scored in results)), "eval")


def _refuse_combinations(reasons: dict[str, object]) -> None:
    """Raises ValueError with the first reason that holds: options that do not go together."""
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def _print_results(title: str, results: list[EvalResult], cross: bool) -> None:
    metrics = results[0].metrics
    if cross:
        console.print(_cross_table(f"{title} each", results))
    else:
        console.print(_eval_table(title, results[0].policy_names, metrics))
        if why := metrics.get("no_nash_conv"):
            is_vector = not results[0].episodes
            bound = " --best-response 1000000 finds a lower bound on it." if is_vector else ""
            print_line(f"NashConv is not computed: {why}.{bound}")
    if note := metrics.get("not_repeatable"):
        print_line(note)


def _best_responses(
    what: Path,
    checkpoint: int | None,
    env: dict[str, Any],
    seats: dict[str, str],
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from palestra.api.progress import CountingBar
    from palestra.evaluation.best_response import learn_best_responses
    from palestra.evaluation.report.population_data import describe_lower_bound, exploits_table, nash_conv_lower_bound
    from palestra.evaluation.target import find_target

    target = find_target(what, env, checkpoint)
    with CountingBar("learning a response at each seat") as bar:
        learned = learn_best_responses(target, env, seats, on_progress=bar.say, **options)
    if as_json:
        print(
            json.dumps(
                {"nash_conv_at_least": nash_conv_lower_bound(learned), "responses": [one._asdict() for one in learned]}
            )
        )
        return
    console.print(exploits_table(what, learned))
    print_line(describe_lower_bound(learned))


def _print_judged(
    what: Path,
    env: dict[str, Any],
    seats: dict[str, str],
    against: str,
    judge: Judge,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from palestra.api.progress import CountingBar
    from palestra.evaluation.judged import compare_judged

    with CountingBar(f"evaluating {what}") as bar:
        judged = compare_judged(str(what), env, seats, against, judge, on_progress=bar.count, **options)
    if as_json:
        names = [result.policy_names for result in judged.results]
        error = {"error": judged.error} if judged.error else {}
        print(json.dumps({"seats": names[0], "against": names[1], "judge": judge.policy, **judged.metrics(), **error}))
        return
    table = Table(title=f"{what} against {against}, judged by {judge.policy}", title_justify="left", show_header=False)
    for seat, policy in judged.results[0].policy_names.items():
        table.add_row(seat, policy)
    table.add_section()
    table.add_row("win rate", styled_text((f"{judged.win_rate:.1%}", "bold")))
    for name, count in judged.metrics().items():
        if name != "win_rate":
            table.add_row(name, str(count))
    console.print(table)
    if judged.error:
        console.print(styled_text("the judge failed, the first time with ", (judged.error, "bold")))


def _check_name(run: Path, name: str) -> None:
    """Raises ValueError if `name` is that of an evaluation of the run's config, whose curve it would continue."""
    from palestra.core.config import load
    from palestra.runs import find_run

    own = load(find_run(run) / "config.yaml").get("evals") or {}
    if name in own:
        raise ValueError(f"--record {name}: {run} evaluates itself under this name: record under another one")


def _record(run: Path, name: str, checkpoint: int | None, results: list[EvalResult]) -> None:
    """Appends results to the run, with their first episodes; several are named by their seats."""
    from palestra.evaluation.target import find_checkpoint
    from palestra.runs import Run
    from palestra.runs.eval_files import MAX_EVAL_EPISODES
    from palestra.text.rollouts.metrics import first_of_each_instance

    after = find_checkpoint(run, checkpoint).step
    with Run.open(run) as opened:
        for scored in results:
            policy_names = ", ".join(f"{seat}={member}" for seat, member in scored.policy_names.items())
            title = name if len(results) == 1 else f"{name}: {policy_names}"
            notes = ("no_nash_conv", "not_repeatable")
            metrics = {name: value for name, value in scored.metrics.items() if name not in notes}
            opened.log_eval(after, title, {**metrics, "seats": scored.policy_names})
            if first := first_of_each_instance(scored.episodes)[:MAX_EVAL_EPISODES]:
                opened.write_eval_episodes(after, title, first)


def _eval_table(title: str, policy_names: dict[str, str], metrics: dict[str, Any]) -> Table:
    from palestra.runs.headline import format_return, format_seat_return, paid_seats, return_keys, success_keys
    from palestra.runs.series import success_interval
    from palestra.text.rollouts.sample_metrics import sample_rows

    table = Table(title=title, title_justify="left", show_header=False)
    for seat, policy in policy_names.items():
        table.add_row(seat, policy)
    table.add_section()
    for key, what in success_keys(metrics).items():
        table.add_row(what, styled_text((success_interval(metrics, key), "bold")))
    for name, text in sample_rows(metrics):
        table.add_row(name, text)
    if "return" in return_keys(metrics):
        table.add_row("return", format_return(metrics))
    for key, digits in (("steps_per_episode", 2), ("team_return", 2), ("failed", 0), ("instances", 0)):
        if key in metrics:
            table.add_row(key.replace("_", " "), f"{metrics[key]:.{digits}f}")
    for seat in paid_seats(metrics):
        table.add_row(f"return of {seat}", format_seat_return(metrics, seat))
    if "nash_conv" in metrics:
        table.add_row("NashConv", f"{metrics['nash_conv']:.4f}")
    return table


def _cross_table(title: str, results: list[EvalResult]) -> Table:
    from palestra.runs.headline import format_seat_return, format_success, return_keys, success_by_name
    from palestra.runs.series import success_interval
    from palestra.text.rollouts.sample_metrics import sample_rows

    seats = list(results[0].policy_names)
    sampled = [name for name, _ in sample_rows(results[0].metrics)]
    columns = ["success", *sampled, "return", *(f"return of {seat}" for seat in seats)]
    table = Table(*seats, *columns, title=title, title_justify="left")
    for policy_names, metrics, _ in results:
        returns = [format_seat_return(metrics, seat) for seat in seats]
        has_one = "success" in metrics
        success = success_interval(metrics) if has_one else format_success(success_by_name(metrics)) or "-"
        passed = dict(sample_rows(metrics))
        more = [passed.get(name, "-") for name in sampled]
        mean = f"{metrics['return']:.2f}" if "return" in return_keys(metrics) else "-"
        table.add_row(*policy_names.values(), success, *more, mean, *returns)
    return table
