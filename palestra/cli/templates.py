"""`palestra init` and `demo`: a config or a package to start from, and a run that shows what palestra does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from palestra.api.console import console, print_line, styled_text, user_errors
from palestra.core.config.key_hints import nearest

if TYPE_CHECKING:
    from palestra.core.config.shipped import Template

GROUPS = {  # titles of the folders that shipped configs are in
    "configs": "start here",
    "text": "language agents, by task",
    "games": "vector envs (small networks)",
    "populations": "populations",
    "grids": "grids of algorithms, tasks and seeds, for palestra grid",
}


def init(
    name: Annotated[
        str | None, typer.Argument(help="the config to copy, or `env` for a package; without it, configs are listed")
    ] = None,
    package: Annotated[str | None, typer.Argument(help="with `env`: the name of the package and of its env")] = None,
    out: Annotated[
        Path | None, typer.Option(help="the file or folder to write (default: NAME.yaml, or PACKAGE)")
    ] = None,
    vector: Annotated[
        bool, typer.Option("--vector", help="with `env`: a vector env, for small networks, instead of one in text")
    ] = False,
) -> None:
    """Write a config to start from, or list the available ones; with `env`, a package with an env of your own.

    Examples:

        palestra init
        palestra init demo
        palestra init spread_mappo --out mine.yaml
        palestra init env relay
        palestra init env relay_race --vector

    `palestra train NAME.yaml` trains a config, and `palestra config` describes its keys. A package has an env that
    works, its entry point, a config that trains it, and a test that checks the env contract.
    """
    with user_errors():
        if name == "env":
            _write_package(package, out, vector)
            return
        if package is not None or vector:
            raise ValueError("a second name and --vector go with env: palestra init env NAME --vector")
        from palestra.core.config.shipped import templates

        known = templates()
        if name is None:
            _print_templates(known)
            return
        path = out or Path(f"{name}.yaml")
        text = _find_template(known, name).text
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ValueError(f"{path} exists already: remove it, or name another file with --out") from None
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error
    print_line(f"{path}: edit it, then: palestra train {path}")


def _write_package(name: str | None, out: Path | None, is_vector: bool) -> None:
    from palestra.api.env_package import write_env_package

    if name is None:
        raise ValueError("the env has no name: palestra init env NAME writes the package NAME")
    folder = out or Path(name)
    write_env_package(name, folder, is_vector=is_vector)
    print_line(f"{folder}: edit {folder / name / 'env.py'}, then:")
    print_line(f"  pip install -e {folder}")
    print_line(f"  pytest {folder}")
    print_line(f"  palestra train {folder / name}.yaml")


def _find_template(known: list[Template], name: str) -> Template:
    """Raises ValueError, with the nearest name, if there is no template `name`."""
    named = {template.name: template for template in known}
    if name not in named:
        raise ValueError(f"there is no config {name}{nearest(name, list(named))}; `palestra init` lists them")
    return named[name]


def _print_templates(known: list[Template]) -> None:
    for group in dict.fromkeys([*GROUPS, *(template.group for template in known)]):
        of_group = [template for template in known if template.group == group]
        if not of_group:
            continue
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        for template in of_group:
            table.add_row(styled_text(template.name), styled_text(template.description))
        console.print(styled_text((GROUPS.get(group, group), "bold")))
        console.print(table)
        console.print()
    print_line("palestra init NAME writes one of them here; palestra init env NAME a package with an env of your own")


def demo(
    name: Annotated[str, typer.Option(help="name of the run; if it exists, -2, -3, ... is appended")] = "demo",
    root: Annotated[Path, typer.Option(help="the folder that holds runs")] = Path("runs"),
    steps: Annotated[int | None, typer.Option(min=1, help="training steps (default: 80)")] = None,
) -> None:
    """Train the demo: two agents learn to work as a team, in a few minutes on two CPU cores, without a download.

    The same as `palestra train configs/demo.yaml`, the first config in `palestra init`.
    """
    with user_errors():
        from palestra.cli.train import train_tree
        from palestra.core.config import load, override

        tree = override(load("configs/demo.yaml"), [f"steps={steps}"] if steps else [])
        train_tree(tree, name=name, root=root)
