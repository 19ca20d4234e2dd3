"""`palestra config`: the keys of configs, with values, defaults and descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from palestra.api.console import console, styled_text, user_errors

if TYPE_CHECKING:
    from palestra.api.config_reference import Section

INDENT = 4  # columns before a description


def describe_config(
    name: Annotated[
        str | None,
        typer.Argument(
            help="a kind of run (text, vector, population), a value of `type:` (grpo, lora, psro, sokoban), or a key "
            "with keys of its own (evals, sampling); without it, these names are listed"
        ),
    ] = None,
    key: Annotated[str | None, typer.Argument(help="show this key only")] = None,
) -> None:
    """Describe the keys of a config.

    Each has its values, its default and its meaning.

    Examples:

        palestra config                  # the names that can be looked up
        palestra config text             # a run of language agents
        palestra config grpo             # an algorithm; likewise a policy, a population, a sink or an env
        palestra config algorithm clip   # one key, of every algorithm that has it
    """
    with user_errors():
        from palestra.api.config_reference import find_sections

        if name is None:
            console.print(_names_table())
            return
        for section in find_sections(name, key):
            _print_section(section, with_text=key is None)


def _names_table() -> Table:
    from palestra.api.config_reference import config_names

    table = Table("run", "key", "types")
    for (run, key), types in config_names().items():
        table.add_row(run, key, ", ".join(types))
    return table


def _print_section(section: Section, with_text: bool) -> None:
    console.print(styled_text((section.title, "bold")))
    if with_text and section.text:
        console.print(_unwrap(section.text))
    console.print()
    for key in section.keys:
        console.print(styled_text((key.key, "cyan"), f": {key.values_and_default}"))
        if key.text:
            console.print(Padding.indent(key.text, INDENT))
    console.print()


def _unwrap(text: str) -> str:
    """Returns text with each paragraph on one line, for the console to wrap; lists and indented lines are kept."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(one if "\n " in one or "\n-" in one else " ".join(one.split()) for one in paragraphs)
