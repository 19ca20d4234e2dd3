"""The `palestra` command line. Heavy imports are deferred until a command needs them, so that --help is fast."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from palestra.cli.agents import publish, serve_agent
from palestra.cli.dashboard import dashboard
from palestra.cli.envs import serve_envs
from palestra.cli.league import league
from palestra.cli.play import collect, evaluate, play
from palestra.cli.report import plot, print_alarms, print_cycles, report, sync
from palestra.cli.serve import keys, serve, serve_sampler
from palestra.launch.console import RANK, console, print_line, styled_text, user_errors

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)

Settings = Annotated[list[str] | None, typer.Option("--set", help="change a setting: `--set algorithm.group_size=4`")]
Root = Annotated[Path, typer.Option(help="the folder that holds runs")]


@app.callback()
def main() -> None:
    """Train multiple agents together."""
    sys.path.insert(0, os.getcwd())  # so that module:Class finds a user's env in the working directory


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="a YAML config; not needed with --resume")] = None,
    settings: Settings = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on with this run, exactly where its last checkpoint is")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run (default: the config's)")] = None,
    root: Root = Path("runs"),
    engine: Annotated[
        str | None, typer.Option(help="train on the server at this URL (`palestra serve`, Tinker, MinT), not in here")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="where episodes are played, or a population's tasks done: inline, local or ray")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="how many play, or do a population's tasks, at once")
    ] = None,
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; without it one is started here")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the config, print it resolved, and stop")] = False,
) -> None:
    """Train the agents of a config.

    Examples:

        palestra train configs/demo.yaml

        palestra train configs/demo.yaml --set steps=20 --set policies.planner.lr=3e-4

        palestra train configs/demo.yaml --engine http://127.0.0.1:8000

        palestra train configs/demo.yaml --backend ray --workers 4 --address auto

        palestra train configs/populations/kuhn_psro.yaml --workers 2

        palestra train --resume runs/demo

        palestra train --resume runs/demo --set steps=200    # with more steps than it had

        torchrun --nproc-per-node 4 -m palestra train configs/demo.yaml

    Ctrl-C ends the run after the current step, with a checkpoint; a second Ctrl-C ends it at once.
    """
    places = [("type", backend), ("workers", workers), ("address", address)]
    changes = [*(settings or []), *([f"engine={engine}"] if engine else [])]
    with user_errors(), _interruptible(resume):
        tree = _described(config, resume, changes)
        placed = _placed(tree, [f"backend.{key}={value}" for key, value in places if value])
        _train(placed, resume, name, root, dry_run, tree if changes else None)


def _described(path: Path | None, resume: Path | None, settings: list[str]) -> dict[str, Any]:
    """Config tree of a new run, or of a resumed one, which `settings` may extend. Raises ValueError if both or neither
    is named."""
    from palestra.config import load, override, parse
    from palestra.launch.extend import extend_config
    from palestra.runs import check_config

    if (path is None) == (resume is None):
        raise ValueError("name a config to start a run, or --resume RUN to go on with one")
    if resume is None:
        return override(load(path), settings)  # type: ignore[arg-type]
    tree = parse(check_config(resume), str(resume / "config.yaml"))
    return extend_config(tree, settings, _vectorised(tree)) if settings else tree


def _placed(tree: dict[str, Any], places: list[str]) -> dict[str, Any]:
    """Adds the settings of `backend`, which may change at every resume, to the tree."""
    from palestra.config import override

    if places and "population" not in tree and _vectorised(tree):
        raise ValueError(
            "--backend, --workers and --address place the tasks of a population or the episodes of language agents; "
            "this config has neither"
        )
    return override(tree, places)


def _train(
    tree: dict[str, Any],
    resume: Path | None,
    name: str | None,
    root: Path,
    dry_run: bool,
    changed: dict[str, Any] | None,
) -> None:
    """Starts or resumes a run. `changed`, if given, becomes its stored config."""
    from palestra.config import check_folder_name, dump, validate
    from palestra.remote.envs.address import with_short_waits
    from palestra.rollouts.failures import write_error_file
    from palestra.runs import Run, explain_disk_errors
    from palestra.sinks.factory import check_sinks
    from palestra.sinks.log_tailer import follow_run

    kind = run_kind(tree)
    config = _valid(kind, tree)
    check_sinks(config.sinks)
    if dry_run:
        kind.check(_valid(kind, with_short_waits(tree)))
        if RANK == 0:
            print(dump(config), end="")
        return
    text = kind.build(config)

    def open_run() -> Run:
        if not resume:
            return Run.create(root, dump(config), check_folder_name(name or config.name), {"seed": config.seed})
        run = Run.open(resume)
        if changed:
            run.replace_config(dump(validate(kind.config, changed)))
        return run

    with (
        explain_disk_errors(),
        kind.open_context(open_run) as run,
        explain_disk_errors(run.path),
        nullcontext() if RANK else write_error_file(run.path),
        _interruptible(run.path),
        follow_run(run.path, [] if RANK else config.sinks, print_line),
    ):
        kind.execute(text, run, config)


def _valid(kind: RunKind, tree: dict[str, Any]) -> Any:
    """Returns the checked config. A config written for the other kind of env raises a ValueError of one line."""
    from palestra.config import validate

    try:
        return validate(kind.config, tree)
    except ValueError:
        if mixed := _mixed_up(tree):
            raise ValueError(mixed) from None
        raise


def _mixed_up(tree: dict[str, Any]) -> str:
    """Returns the message for a config whose policy types do not fit the kind of its env; "" if they do."""
    from palestra.builders.text_config import TextConfig
    from palestra.builders.vector import VectorConfig
    from palestra.config import type_choices

    policies, env = tree.get("policies"), tree.get("env")
    if "population" in tree or not isinstance(policies, dict) or not isinstance(env, dict):
        return ""
    types = {str(policy.get("type")) for policy in policies.values() if isinstance(policy, dict)}
    talking, nets = set(type_choices(TextConfig, "policies")), set(type_choices(VectorConfig, "policies"))
    if _vectorised(tree) and types & (talking - nets):
        return (
            f'env "{env["type"]}" is a vectorised game, which small networks play, and this config is of language '
            "agents: start from one of configs/games, or name an env in words (`palestra info` lists them)"
        )
    if not _vectorised(tree) and types & (nets - talking):
        return (
            f'env "{env.get("type")}" is an env in words, which language agents play, and this config is of small '
            "networks: start from configs/demo.yaml, or name a vectorised game (`palestra info` lists them)"
        )
    return ""


@contextmanager
def _interruptible(run: Path | None) -> Iterator[None]:
    """Context in which a Ctrl-C that ends the run at once prints one line and exits with code 130. `run` is None before
    there is a run."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"go on from the last checkpoint with: palestra train --resume {shlex.quote(str(run))}"
        print_line(f"interrupted; {again}" if run else "interrupted before the run began")
        raise typer.Exit(130) from None


class RunKind(NamedTuple):
    """The functions that make and execute one kind of run: language agents, neural networks in vectorised envs, or
    populations.

    `config` is the config model; `check` and `build` make a setup from it, `check` without starting processes;
    `execute` executes it; `opened` opens the run directory.
    """

    config: Any
    check: Callable[[Any], Any]
    build: Callable[[Any], Any]
    execute: Callable[..., None]
    open_context: Callable[[Callable[[], Any]], Any] = lambda open_run: open_run()


def run_kind(tree: dict[str, Any]) -> RunKind:
    """Returns the kind of run that a config describes, from its population or env.

    Raises ValueError under torchrun for kinds that start processes themselves.
    """
    if "population" in tree:
        _alone("a population's tasks are done at once by workers: palestra train ... --workers N")
        from palestra.launch import population as population

        return RunKind(
            population.PopulationConfig, population.build_population, population.build_population, _follow_population
        )
    if _vectorised(tree):
        _alone("networks train on several processes with num_processes: N in the config")
        from palestra.builders import vector as games
        from palestra.training import vector_loop

        follow = partial(_follow, vector_loop.restore_checkpoint, games.run_vector_training)
        return RunKind(games.VectorConfig, games.check_vector_run, games.build_vector_run, follow)
    from palestra.builders import text, text_config
    from palestra.launch.distributed import build
    from palestra.training.distributed import distributed_run, restore_checkpoint, run_training

    follow = partial(_follow, restore_checkpoint, run_training)
    return RunKind(text_config.TextConfig, text.build, build, follow, distributed_run)


def _vectorised(tree: dict[str, Any]) -> bool:
    from palestra.envs import is_vectorised

    env = tree.get("env")
    return isinstance(env, dict) and not env.get("at") and is_vectorised(env.get("type"))


def _alone(instead: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"torchrun is for language agents; {instead}")


def _follow(restore: Callable[[Any, Any], int], train: Callable[..., bool], setup: Any, run: Any, config: Any) -> None:
    """Trains with a progress bar, then prints results and alarms and draws curves. Raises RunFailed if nothing was
    learned."""
    from palestra.launch.extend import complete_message
    from palestra.launch.progress import ProgressBar
    from palestra.report.run_report import explain_no_update, plot_run, summary_table
    from palestra.rollouts.failures import RunFailed

    start = restore(setup, run)
    what = f"{config.env_label}, {', '.join(setup.policy_names)} by {config.algorithm_label}"
    console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
    for line in run.skipped_checkpoints:
        print_line(line)
    if start >= setup.steps:
        tree = config.model_dump(mode="json")
        print_line(complete_message(tree, _vectorised(tree)))
    elif start:
        console.print(f"going on after step {start}")
    with ProgressBar(setup.steps, start, console) as bar, StopOnInterrupt() as stop:
        done = train(setup, run, bar, stop)
    if RANK:
        return
    if not done:
        return _say_stopped(run)
    console.print(summary_table(run.path))
    print_line(f"curves: {plot_run(run.path)}")
    print_alarms(run.path)
    if why := explain_no_update(run.path):
        raise RunFailed(why)


def _follow_population(setup: Any, run: Any, config: Any) -> None:
    """Runs the tasks of a population plan with a progress bar, then prints and draws results."""
    from palestra.launch.extend import complete_message
    from palestra.launch.population import run_population
    from palestra.launch.progress import PopulationBar, format_summary
    from palestra.populations.scheduler import TASKS_FILE
    from palestra.report.population_plots import plot_population
    from palestra.runs import read_lines

    what = f"{config.env['type']}, {config.population.type} by {config.oracle.type}, {setup.workers} at once"
    console.print(styled_text("run ", (str(run.path), "bold"), f": {what}"), soft_wrap=True)
    if start := len(read_lines(run.path / TASKS_FILE)):
        console.print(f"going on after {start} tasks")
    with PopulationBar(setup.plan.summary, console) as bar, StopOnInterrupt() as stop:
        done = run_population(setup, run, bar, stop)
    if not done:
        return _say_stopped(run)
    if start and len(read_lines(run.path / TASKS_FILE)) == start:
        print_line(complete_message(config.model_dump(mode="json")))
    console.print(format_summary(setup.plan.summary()))
    print_line(f"pictures: {plot_population(run.path)}")
    if config.population.type != "xdo":  # whose members play no games
        print_cycles(run.path)
        print_line(f"who beats whom: palestra league standings {shlex.quote(str(run.path))}")


def _say_stopped(run: Any) -> None:
    print_line(f"stopped; go on with: palestra train --resume {shlex.quote(str(run.path))}")


class StopOnInterrupt:
    """Context that yields a function that returns True after the first Ctrl-C; a second Ctrl-C interrupts as usual.

    Under torchrun SIGTERM has the same effect, and repeated signals count once: torchrun forwards its signals, and
    kills processes that take more than half a minute.
    """

    def __enter__(self) -> Callable[[], bool]:
        self.stop_requested, self.under_torchrun = False, "RANK" in os.environ
        signals = (signal.SIGINT, signal.SIGTERM) if self.under_torchrun else (signal.SIGINT,)
        self.before = {each: signal.signal(each, self._note) for each in signals}
        return lambda: self.stop_requested

    def _note(self, *_: object) -> None:
        again = "" if self.under_torchrun else " (Ctrl-C again: at once)"
        if not self.stop_requested:
            console.print(f"stopping after this step{again}")
        self.stop_requested = True
        if not self.under_torchrun:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)


@app.command()
def runs(root: Root = Path("runs")) -> None:
    """List the runs in a folder."""
    from palestra.runs import list_runs

    table = Table("run", "created", "steps", "checkpoint", "last exam")
    for run in list_runs(root):
        if run.damage:
            print_line(f"{run.path.name} is damaged: {run.damage}")
            continue
        last = run.evals[-1] if run.evals else None
        exam = eval_label(last) if last else "-"
        kept = f"after {run.checkpoint.step + 1}" if run.checkpoint else "-"
        table.add_row(run.path.name, run.created[:19].replace("T", " "), str(run.steps), kept, exam)
    console.print(table if table.row_count else f"no runs in {root}/")


def eval_label(exam: dict[str, Any]) -> str:
    """Formats an evaluation's name and main metric."""
    if "success" in exam:
        return f"{exam['name']} {exam['success']:.1%}"
    seats = {"": exam["return"]} if "return" in exam else exam["returns"]
    return " ".join([exam["name"], *(f"{seat} {own:.2f}".strip() for seat, own in seats.items())])


@app.command()
def info() -> None:
    """Show versions, the device, and the available envs, bases, algorithms and sandbox."""
    import torch
    import transformers

    import palestra
    from palestra.builders.text_config import TextConfig
    from palestra.builders.vector import VectorConfig
    from palestra.config import type_choices
    from palestra.engine.models import SHIPPED_BASES_DIR
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS
    from palestra.launch.population import PopulationConfig

    table = Table(show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({torch.get_num_threads()} threads)"
    bases = sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json"))
    for row in (
        ("palestra", palestra.__version__),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("device", device),
        ("envs in words", ", ".join(sorted(TEXT_ENVS)) + ", or module:Class"),
        ("vectorised games", ", ".join(sorted(VECTOR_ENVS)) + ", or module:Class"),
        ("bases", ", ".join(bases) + ", a local folder, or a hub name"),
        (
            "algorithms",
            f"{', '.join(type_choices(TextConfig, 'algorithm'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'algorithm'))}",
        ),
        (
            "policies",
            f"{', '.join(type_choices(TextConfig, 'policies'))}; for networks "
            f"{', '.join(type_choices(VectorConfig, 'policies'))}",
        ),
        ("populations", ", ".join(type_choices(PopulationConfig, "population"))),
        ("sandbox", _sandbox()),
    ):
        table.add_row(*row)
    console.print(table)


def _sandbox() -> str:
    """Name of the sandbox that is available here, or why there is none."""
    from palestra.sandbox import open_sandbox

    try:
        return open_sandbox().name
    except ValueError as error:
        return f"none: {error}"


app.command(name="eval")(evaluate)
for command in (collect, dashboard, play, plot, publish, report, serve, serve_agent, serve_envs, serve_sampler, sync):
    app.command()(command)
app.add_typer(keys, name="keys")
app.add_typer(league, name="league")
