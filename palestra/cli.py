"""palestra on the command line. Heavy imports wait until a command needs them, so that --help is instant."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.cli_league import league
from palestra.terminal import friendly

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
console = Console()

Settings = Annotated[list[str] | None, typer.Option("--set", help="change a setting: `--set algorithm.k=4`")]
Root = Annotated[Path, typer.Option(help="the folder that holds runs")]


@app.callback()
def main() -> None:
    """Train many agents together."""
    sys.path.insert(0, os.getcwd())  # a user's env beside the config is found as module:Class


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
        str | None, typer.Option(help="where a population's tasks are done: local (processes), ray or inline")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="how many of a population's tasks are done at once")
    ] = None,
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; without it one is started here")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the config, print it resolved, and stop")] = False,
) -> None:
    """Train the agents of a config.

    Examples:

        palestra train configs/demo.yaml

        palestra train configs/demo.yaml --set steps=20 --set policies.planner.lr=3e-4

        palestra train configs/demo.yaml --engine http://127.0.0.1:8000

        palestra train configs/populations/kuhn_psro.yaml --workers 2

        palestra train --resume runs/demo

    Ctrl-C ends the run after the current step, with a checkpoint; a second Ctrl-C ends it at once.
    """
    places = [("type", backend), ("workers", workers), ("address", address)]
    changes = [*(settings or []), *([f"engine={engine}"] if engine else [])]
    with friendly():
        tree = _described(config, resume, changes, [f"backend.{key}={value}" for key, value in places if value])
        _train(tree, resume, name, root, dry_run)


def _described(path: Path | None, resume: Path | None, settings: list[str], places: list[str]) -> dict[str, Any]:
    """The config of a run that starts, or of one that goes on; where its tasks are done may change in between."""
    from palestra.config import load, override

    if (path is None) == (resume is None):
        raise ValueError("name a config to start a run, or --resume RUN to go on with one")
    if resume and settings:
        raise ValueError(
            "--set and --engine change a run that starts; a resumed run goes on as it began. Start a new one instead."
        )
    tree = load(resume / "config.yaml" if resume else path)  # type: ignore[arg-type]
    if places and "population" not in tree:
        raise ValueError("--backend, --workers and --address place the tasks of a population; this config has none")
    return override(tree, [*settings, *places])


def _train(tree: dict[str, Any], resume: Path | None, name: str | None, root: Path, dry_run: bool) -> None:
    from palestra.config import dump, validate
    from palestra.runs import Run

    kind = kind_of(tree)
    config = validate(kind.config, tree)
    if dry_run:
        kind.check(config)
        print(dump(config), end="")
        return
    setup = kind.build(config)
    with (
        Run.open(resume)
        if resume
        else Run.create(root, dump(config), name or config.name, {"seed": config.seed}) as run
    ):
        kind.follow(setup, run, config)


class Kind(NamedTuple):
    """What one kind of run is made by: language agents that talk, networks that play vectorised games, populations."""

    config: Any
    check: Callable[[Any], Any]
    build: Callable[[Any], Any]
    follow: Callable[..., None]


def kind_of(tree: dict[str, Any]) -> Kind:
    """The kind of run that a config describes, by its population or its env."""
    if "population" in tree:
        from palestra import setup_population as population

        return Kind(
            population.PopulationConfig, population.build_population, population.build_population, _follow_population
        )
    from palestra.envs import is_vectorised

    if is_vectorised((tree.get("env") or {}).get("type")):
        from palestra import drill
        from palestra import setup_games as games

        follow = partial(_follow, drill.restore, games.run_games)
        return Kind(games.GamesConfig, games.check_games, games.build_games, follow)
    from palestra import setup, train

    return Kind(setup.Config, setup.build, setup.build, partial(_follow, train.restore, train.run_training))


def _follow(restore: Callable[[Any, Any], int], train: Callable[..., bool], setup: Any, run: Any, config: Any) -> None:
    """Trains with a progress bar; draws and prints what was learned."""
    from palestra.progress import ProgressBar
    from palestra.reports import learned_table, plot_run

    start = restore(setup, run)
    what = f"{config.env['type']}, {', '.join(setup.names)} by {config.algorithm.type}"
    console.print(f"run [bold]{escape(str(run.path))}[/]: {escape(what)}", soft_wrap=True)
    if start:
        console.print(f"going on after step {start}")
    with ProgressBar(setup.steps, start, console) as bar, stop_on_interrupt() as stop:
        done = train(setup, run, bar, stop)
    if not done:
        return _say_stopped(run)
    console.print(learned_table(run.path))
    say(f"curves: {plot_run(run.path)}")


def _follow_population(setup: Any, run: Any, config: Any) -> None:
    """Does a plan's tasks with a line of progress."""
    from palestra.population_plots import plot_population
    from palestra.populations.scheduler import TASKS
    from palestra.progress import PopulationBar, standing
    from palestra.runs import read_lines
    from palestra.setup_population import run_population

    what = f"{config.env['type']}, {config.population.type} by {config.oracle.type}, {setup.workers} at once"
    console.print(f"run [bold]{escape(str(run.path))}[/]: {escape(what)}", soft_wrap=True)
    if start := len(read_lines(run.path / TASKS)):
        console.print(f"going on after {start} tasks")
    with PopulationBar(setup.plan.summary, console) as bar, stop_on_interrupt() as stop:
        done = run_population(setup, run, bar, stop)
    if not done:
        return _say_stopped(run)
    console.print(standing(setup.plan.summary()))
    say(f"pictures: {plot_population(run.path)}")
    if config.population.type != "xdo":  # whose members play no games
        say(f"who beats whom: palestra league standings {shlex.quote(str(run.path))}")


def _say_stopped(run: Any) -> None:
    say(f"stopped; go on with: palestra train --resume {shlex.quote(str(run.path))}")


def say(text: str) -> None:
    """Prints a line as it is: not wrapped, so that a path or command can be copied, and brackets are no markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


class stop_on_interrupt:
    """Within, the first Ctrl-C only makes the stop function true; the second is a Ctrl-C again."""

    def __enter__(self) -> Callable[[], bool]:
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self._note)
        return lambda: self.asked

    def _note(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print("stopping after this step (Ctrl-C again: at once)")

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)


@app.command(name="eval")
def evaluate(
    what: Annotated[Path, typer.Argument(help="a run, a member as RUN:NAME (it plays every seat), or a config")],
    env: Annotated[
        list[str] | None, typer.Option("--env", help="change the env: `--env split=test`, `--env size=5`")
    ] = None,
    seats: Annotated[
        list[str] | None,
        typer.Option(help="who plays a seat: `planner=executor`, `planner=runs/x:planner`, `planner=base`"),
    ] = None,
    swap: Annotated[bool, typer.Option("--swap", help="let two seats change policies")] = False,
    episodes: Annotated[int, typer.Option(min=1)] = 300,
    step: Annotated[int | None, typer.Option(help="a checkpoint of the run (default: the newest)")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="default: as in training; networks know only that and 0")
    ] = None,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Play held-out instances with the members of a run.

    Examples:

        palestra eval runs/demo --env split=test

        palestra eval runs/demo --swap

        palestra eval runs/demo:planner

        palestra eval runs/demo --seats planner=base --temperature 0
    """
    from palestra.reports import interval

    with friendly():
        options: dict[str, Any] = {"swap": swap, "episodes": episodes, "step": step, "seed": seed}
        if plays_games(what):
            from palestra.evaluate_games import evaluate_games

            who, figures = evaluate_games(what, pairs(env), seat_pairs(seats), best=temperature == 0, **options)
        else:
            from palestra.evaluate import evaluate_run

            sampling = {} if temperature is None else {"temperature": temperature}
            who, figures = asyncio.run(evaluate_run(what, pairs(env), pairs(seats), sampling=sampling, **options))
    if as_json:
        print(json.dumps({"seats": who, **figures}))
        return
    table = Table(title=f"{what}, {episodes} episodes", title_justify="left", show_header=False)
    for seat, policy in who.items():
        table.add_row(seat, policy)
    table.add_section()
    if "success" in figures:
        table.add_row("success", f"[bold]{interval(figures)}[/]")
    for key in ("return", "steps_per_episode", "team_return", "failed"):
        if key in figures:
            table.add_row(key.replace("_", " "), f"{figures[key]:.2f}")
    for seat, value in figures.get("returns", {}).items():
        table.add_row(f"return of {seat}", f"{value:.2f}")
    console.print(table)


@app.command()
def collect(
    what: Annotated[Path, typer.Argument(help="a run in a vectorised game, RUN:NAME, or a config")],
    out: Annotated[Path, typer.Option(help="the .npz file to write")],
    seats: Annotated[
        list[str] | None, typer.Option(help="who plays a seat: `agent_*=random`, `first_0=script:tracker`")
    ] = None,
    games: Annotated[int, typer.Option(min=1)] = 16,
    steps: Annotated[int, typer.Option(min=1, help="joint steps of every game")] = 500,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 plays the likeliest moves")] = None,
    step: Annotated[int | None, typer.Option(help="a checkpoint of the run (default: the newest)")] = None,
    seed: int = 0,
) -> None:
    """Record play as demonstrations, for the algorithms that imitate (bc, gail).

    Examples:

        palestra collect runs/spread_mappo --out expert.npz

        palestra collect configs/games/combat_vdn.yaml --seats 'unit_*=script:focus' --out focus.npz
    """
    with friendly():
        if not plays_games(what):
            raise ValueError(f"{what} is of language agents: their episodes are in the run's episodes/ already")
        from palestra.evaluate_games import collect as record_games

        options: dict[str, Any] = {"games": games, "steps": steps, "step": step, "seed": seed}
        who = record_games(what, out, seat_pairs(seats), best=temperature == 0, **options)
    say(f"{out}: {games * steps} joint steps of {', '.join(f'{seat}={name}' for seat, name in who.items())}")


def plays_games(what: Path) -> bool:
    """Whether a run, RUN:NAME or a config is of a vectorised game."""
    from palestra.config import load
    from palestra.envs import is_vectorised

    run, _, _ = str(what).rpartition(":")
    path = Path(run) if run else what
    tree = load(path / "config.yaml" if path.is_dir() else path)
    if "population" in tree:
        raise ValueError(
            f"{path} trains a population: `palestra league crossplay RUN` lets its members play each other"
        )
    return is_vectorised((tree.get("env") or {}).get("type"))


def seat_pairs(settings: list[str] | None) -> dict[str, str]:
    """`["adversary_*=random"]` -> {"adversary_*": "random"}."""
    found = [setting.partition("=") for setting in settings or []]
    if wrong := [seat for seat, equals, _ in found if not equals]:
        raise ValueError(f"cannot read --seats {wrong[0]}: write SEAT=POLICY, for example agent_0=random")
    return {seat: name for seat, _, name in found}


def pairs(settings: list[str] | None) -> dict[str, Any]:
    """`["size=5"]` -> {"size": 5}."""
    from palestra.config import override

    return override({}, settings or [])


@app.command()
def runs(root: Root = Path("runs")) -> None:
    """List the runs in a folder."""
    from palestra.runs import list_runs

    table = Table("run", "created", "steps", "checkpoint", "last exam")
    for run in list_runs(root):
        last = run.evals[-1] if run.evals else None
        exam = shown(last) if last else "-"
        kept = f"after {run.checkpoint.step + 1}" if run.checkpoint else "-"
        table.add_row(run.path.name, run.created[:19].replace("T", " "), str(run.steps), kept, exam)
    console.print(table if table.row_count else f"no runs in {root}/")


def shown(exam: dict[str, Any]) -> str:
    """An exam's name and its main figure."""
    return f"{exam['name']} {exam['success']:.1%}" if "success" in exam else f"{exam['name']} {exam['return']:.2f}"


@app.command()
def info() -> None:
    """Show versions, the device, and the envs, bases and algorithms there are."""
    import torch
    import transformers

    import palestra
    from palestra.engine.models import BASES
    from palestra.envs import BUILT_IN

    table = Table(show_header=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({torch.get_num_threads()} threads)"
    bases = sorted(p.parent.name for p in BASES.glob("*/config.json"))
    for row in (
        ("palestra", palestra.__version__),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("device", device),
        ("envs", ", ".join(sorted(BUILT_IN)) + ", or module:Class"),
        ("bases", ", ".join(bases) + ", a local folder, or a hub name"),
        ("algorithms", "grpo (at: root | turn), sft"),
        ("policies", "lora, full, frozen, random, scripted, human"),
    ):
        table.add_row(*row)
    console.print(table)


@app.command()
def serve(
    base: Annotated[
        list[str] | None,
        typer.Option("--base", help="a base to serve, NAME=PATH or a shipped one's name (default: tiny)"),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="a name that clients call a base by: `Qwen/Qwen3-0.6B=tiny`")
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    data: Annotated[Path, typer.Option(help="the folder for weights and the database")] = Path("palestra-data"),
    auth: Annotated[
        Path | None, typer.Option(help="a file of API keys, see `palestra keys`; without it any will do")
    ] = None,
    root_path: Annotated[str, typer.Option(help="a prefix of every address, such as /train")] = "",
    store: Annotated[
        str | None,
        typer.Option(help="another database than SQLite in --data: postgresql+psycopg://USER:PASSWORD@HOST/NAME"),
    ] = None,
    front_only: Annotated[
        bool,
        typer.Option(help="no engine: a further front end of the server that has one, on the same --data and --store"),
    ] = False,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="an origin whose web pages may use the server: https://chat.example.org")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="of torch, on a CPU")] = 1,
    max_rows: Annotated[int, typer.Option(min=1, help="sequences sampled at once")] = 512,
    poll: Annotated[float, typer.Option(min=0, max=40, help="seconds that a poll for an answer is held")] = 30.0,
    queue: Annotated[int, typer.Option(min=1, help="unanswered requests that one key may have")] = 20_000,
    queue_bytes: Annotated[int, typer.Option(min=1, help="bytes that one key's unanswered requests may have")] = 2**29,
    models: Annotated[int, typer.Option(min=1, help="models that one key may train at a time")] = 64,
) -> None:
    """Serve Tinker's and MinT's clients: training and sampling over HTTP.

    Examples:

        palestra serve

        palestra serve --base small=/models/small --alias Qwen/Qwen3-0.6B=small --port 9000

        palestra keys add ada --auth keys.txt && palestra serve --host 0.0.0.0 --auth keys.txt

    Ctrl-C, or SIGTERM, ends it after the requests under way, with every model saved.
    """
    with friendly():
        needs_service()
        from palestra.service.context import Limits
        from palestra.service.serve import Options
        from palestra.service.serve import serve as run_server

        options = Options(
            bases=named(base, "tiny"),
            aliases=named(alias),
            host=host,
            port=port,
            data=data,
            auth=auth,
            root_path=root_path,
            store=store,
            front_only=front_only,
            allow_origins=tuple(allow_origin or ()),
            device=device,
            dtype=dtype,
            threads=threads,
            max_rows=max_rows,
            limits=Limits(poll=poll, queue=queue, queue_bytes=queue_bytes, models=models),
        )
        run_server(options, say)


def named(settings: list[str] | None, *default: str) -> dict[str, str]:
    """`["small=/models/small", "tiny"]` -> {"small": "/models/small", "tiny": "tiny"}."""
    pairs = [text.partition("=") for text in settings or default]
    return {name: value or name for name, _, value in pairs}


def needs_service() -> None:
    """Raises ValueError where the optional packages of the service are not installed."""
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy", "jwt", "zstandard") if not find_spec(name)]
    if missing:
        raise ValueError(f"the service needs {', '.join(missing)}: pip install 'palestra[service]'")


keys = typer.Typer(no_args_is_help=True, help="Add, list and remove API keys of the service.")
app.add_typer(keys, name="keys")
app.add_typer(league, name="league")
Auth = Annotated[Path, typer.Option(help="the file of keys that `palestra serve --auth` reads")]


@keys.command("add")
def add_key(name: Annotated[str, typer.Argument(help="who the key is for")], auth: Auth) -> None:
    """Make a key and print it, this once: only its hash is kept.

    Example:

        palestra keys add ada --auth keys.txt
    """
    with friendly():
        needs_service()
        from palestra.service import keys as service_keys

        print(service_keys.add_key(auth, name))


@keys.command("list")
def list_keys(auth: Auth) -> None:
    """List who has keys, and how many."""
    with friendly():
        needs_service()
        from palestra.service import keys as service_keys

        owners = [name for name, _ in service_keys.read_keys(existing(auth))]
        for name in sorted(set(owners)):
            print(f"{name}  {owners.count(name)}")


@keys.command("remove")
def remove_keys(name: Annotated[str, typer.Argument(help="whose keys")], auth: Auth) -> None:
    """Remove the keys of an owner; a running server refuses them from then on."""
    with friendly():
        needs_service()
        from palestra.service import keys as service_keys

        if not service_keys.remove_keys(existing(auth), name):
            raise ValueError(f'"{name}" has no key in {auth}: `palestra keys list --auth {auth}` shows who has')


def existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"there is no file {path}: `palestra keys add NAME --auth {path}` makes one")
    return path
