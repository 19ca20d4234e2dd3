"""`palestra tune`: chooses settings by training runs with them, on development instances and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palestra.api.console import interruptible, print_line, user_errors
from palestra.cli.runs import Root

if TYPE_CHECKING:
    from palestra.api.experiments.schedule import CellResult
    from palestra.api.experiments.study import Search, Trial


def tune(
    file: Annotated[Path, typer.Argument(help="a YAML file of a config and the settings to choose")],
    workers: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    trials: Annotated[int | None, typer.Option(min=1, help="number of trials, in place of the file's")] = None,
    root: Root = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the file and every range, and stop")] = False,
    results: Annotated[bool, typer.Option("--results", help="write the results of what is finished, and stop")] = False,
) -> None:
    """Search for settings, such as learning rates, that score best in a development evaluation.

    Optuna chooses; each trial is one run per seed, in ROOT/NAME. The same command continues after Ctrl-C, SIGTERM or a
    crash. results.md lists the best trials, best.yaml is the config with their settings: train it with other seeds.

    Examples:

        palestra tune configs/tuning/spread_tuning.yaml --workers 4
        palestra tune configs/tuning/spread_tuning.yaml --trials 60
        palestra train runs/spread_tuning/best.yaml --set seed=0
    """
    with user_errors(), interruptible("; the same command continues"):
        from palestra.api.experiments.study import Search, check_space
        from palestra.api.experiments.tune import base_tree, load_tuning, scored_eval
        from palestra.core.config.shipped import find_config

        path = find_config(file)
        config = load_tuning(path)
        if trials is not None:
            config = config.model_copy(update={"trials": trials})
        folder = root / config.name
        if results and not folder.is_dir():
            raise ValueError(f"{folder} does not exist: run the search first, with `palestra tune` without --results")
        base = base_tree(config, path.parent)
        evaluation = scored_eval(config, base)
        if dry_run:
            start = check_space(config, base, folder)
            score = evaluation or "nash_conv"
            print_line(f"search {config.name}: {config.trials} trials, scored by {score}; every range is valid")
            print_line(f"it starts {'from the config' if start else 'at random, since the config has values outside'}")
            return
        search = Search(config, base, evaluation, folder)
        print_line(f"search {config.name}: {config.trials} trials, {len(search.trials)} finished, in {folder}")
        if results:
            _print_results(search)
        else:
            _run(search, workers)


def _run(search: Search, workers: int) -> None:
    """Runs the search and writes its results. Raises RunFailed if no trial has a score."""
    from palestra.api.experiments.schedule import LOGS
    from palestra.api.interrupt import StopOnInterrupt
    from palestra.core.failures import RunFailed

    def on_end(result: CellResult) -> None:
        if result.status == "failed":
            print_line(f"{result.cell.name} failed after {result.seconds:.0f} s {result.reason}")

    def on_trial(trial: Trial) -> None:
        print_line(f"[{len(search.trials)}/{search.config.trials}] {_describe(trial)}")

    with StopOnInterrupt() as interrupted:
        search.run(workers, on_end, on_trial, interrupted)
    _print_results(search)
    if len(search.trials) < search.config.trials:
        print_line("stopped; the same command continues")
    elif search.best is None:
        raise RunFailed(f"every trial failed; what the runs printed is in {search.root / LOGS}")


def _describe(trial: Trial) -> str:
    from palestra.api.experiments.results import format_values
    from palestra.api.experiments.study import format_value

    reason = f" ({trial.reason})" if trial.reason else ""
    score = f"failed{reason}" if trial.score is None else format_values(trial.values)
    settings = " ".join(f"{key}={format_value(value)}" for key, value in trial.params.items())
    return f"trial {trial.number}: {score}  {settings}"


def _print_results(search: Search) -> None:
    files = search.write_results()
    if (best := search.best) is not None:
        print_line(f"best: {_describe(best)}")
    print_line(f"results of {len(search.trials)} trials: {files[-1]}")
