"""`palestra report`, `plot` and `sync`: a run as an HTML page, as a figure, or sent to trackers and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palestra.api.console import console, print_line, styled_text, user_errors
from palestra.cli.mirror import send_to_store
from palestra.runs.mirror import is_store_url

RunPath = Annotated[Path, typer.Argument(help="a run")]


def report(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="the page to write (default: report.html in the run)")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="sample episodes to show")] = 6,
    step: Annotated[
        int | None,
        typer.Option(
            help="training step of the sample episodes: 1 is the first of the run (default: the newest recorded)"
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: curves, tables, sample episodes, config, versions.

    The page loads nothing from the network; print it in the browser to get a PDF.

    Example:

        palestra report runs/demo --out demo.html
    """
    with user_errors(run):
        from palestra.evaluation.report.page import write_report

        print_line(f"report: {write_report(run, out, episodes=episodes, step=step)}")


def plot(  # noqa: PLR0913 - a parameter for each option
    runs: Annotated[list[Path], typer.Argument(help="runs; those that differ only in the seed make one curve")],
    metric: Annotated[
        str | None,
        typer.Option(
            help="a metric of training, or with --eval of an evaluation: success, return, entropy (default: the "
            "success or return of the held-out evaluation)"
        ),
    ] = None,
    eval_name: Annotated[
        str | None, typer.Option("--eval", help="draw the metric of this evaluation (default: test, else the first)")
    ] = None,
    policy: Annotated[str, typer.Option(help="policy of a training metric")] = "team",
    smooth: Annotated[int, typer.Option(min=1, help="window of the moving mean, in steps")] = 1,
    out: Annotated[Path, typer.Option(help="a .svg, .pdf or .png")] = Path("figure.svg"),
    width: Annotated[float, typer.Option(min=1, help="inches: a column of a paper is about 3.3, a page 6.8")] = 3.3,
    height: Annotated[float | None, typer.Option(min=0.5, help="inches (default: two thirds of the width)")] = None,
    band: Annotated[str, typer.Option(help="shaded band around the mean over seeds: sd, ci or range")] = "ci",
) -> None:
    """Plot one metric of several runs for a paper.

    The figure is in vector graphics, with the mean and a band over seeds.

    Examples:

        palestra plot runs/demo --eval test --out demo.svg
        palestra plot runs/a-* runs/b-* --metric entropy --policy planner --smooth 9 --out entropy.pdf
    """
    with user_errors(", ".join(map(str, runs))):
        from palestra.evaluation.report.plot import FigureSpec, draw_figure

        figure = FigureSpec(metric, eval_name, policy, smooth, width, height, band)
        for line in draw_figure(runs, figure, out):
            print_line(line)


def sync(
    run: RunPath,
    to: Annotated[str, typer.Option(help="tensorboard, wandb, mlflow, trackio, or a store: s3://bucket/runs")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="setting of the sink: `--set project=games`")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="follow the run until Ctrl-C")] = False,
) -> None:
    """Send a run's metrics to a tracker, or all of it to an object store.

    What was sent before is not sent again.

    Examples:

        palestra sync runs/demo --to tensorboard
        palestra sync runs/demo --to wandb --set project=games --set mode=offline --follow
        palestra sync runs/demo --to s3://bucket/runs
    """
    if is_store_url(to):
        return send_to_store(run, to, settings or [], follow)
    with user_errors(run):
        from palestra.core.config import override, validate
        from palestra.runs.sinks import log_tailer as sinks
        from palestra.runs.sinks.base import SinksConfig
        from palestra.runs.sinks.factory import check_sinks

        (sink,) = validate(SinksConfig, {"sinks": [override({"type": to}, settings or [])]}).sinks
        check_sinks([sink])
        count = sinks.send_logs(run, sink, follow=follow)
    print_line(f"{count} lines sent to {to}")


def print_cycles(run: Path) -> None:
    """Prints a warning if the members of a two-player population beat each other in a cycle."""
    from palestra.evaluation.report.population_data import read_record
    from palestra.populations.ratings import cyclicity

    payoffs = read_record(run).payoffs
    if len(payoffs.seats) == 2 and (warning := cyclicity(*payoffs.pairwise_scores()).warning):
        console.print(styled_text(("alarm: cyclic population:", "yellow"), f" {warning}"), soft_wrap=True)
