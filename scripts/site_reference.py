"""What the code says of itself, as Markdown: the command line, what a config may say, the envs and their options.

Commands and configs are read from the very objects that run; envs from their source, since some need packages that are
not here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import griffe
import typer
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the reference is of this tree, whatever is installed

from palestra.config import StrictModel  # noqa: E402

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything", NoneType: "null"}
WRITTEN = {kind.__name__: words for kind, words in NAMES.items()} | {"Any": "anything", "None": "null", "Path": "path"}
WORD = re.compile(rf"(?<![\w'`])({'|'.join(WRITTEN)})(?![\w'`])")
YAML = {"None": "null", "True": "true", "False": "false"}
QUOTES = "'\""
ENDED = "...\n"  # how YAML ends a document that is one word
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
LITERAL = re.compile(r"Literal\[([^\]]*)\]")
EXAMPLE = re.compile(r"(?:^    .*\n+)+", re.MULTILINE)


# ---- the command line


def commands() -> str:
    """Every command: what it does, its examples, its arguments and options."""
    from palestra.cli.main import app

    root = typer.main.get_command(app)
    return "\n\n".join(_command(command, context) for command, context in _walk(root, _context(root, "palestra", None)))


def _context(command: Any, name: str, parent: Any) -> Any:
    return typer.Context(command, info_name=name, parent=parent)


def _walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        inner = _context(below, name, context)
        yield below, inner
        yield from _walk(below, inner)


def _command(command: Any, context: Any) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    head = "##" if context.parent.parent is None else "###"
    told = f"{head} {context.command_path}\n\n```text\n{usage}\n```\n\n{_examples(command.help or '')}\n"
    records = [(record, p.param_type_name) for p in command.params if (record := p.get_help_record(context))]
    rows = [f"| `{what.replace('|', chr(92) + '|')}` | {_cell(about)} |" for (what, about), _ in records]
    return told + ("\n".join(["\n| | |", "|---|---|", *rows]) if rows else "")


def _examples(text: str) -> str:
    """Help with its indented lines as one block of commands."""

    def block(match: re.Match[str]) -> str:
        return "```bash\n" + "\n".join(line.strip() for line in match[0].splitlines() if line.strip()) + "\n```\n\n"

    return EXAMPLE.sub(block, f"{text.rstrip()}\n\n").replace("Examples:\n", "").strip()


def _cell(text: str) -> str:
    """Text as a cell of a table has it: on one line, with nothing that could be read as markup."""
    plain = re.sub(r"  \[([^\]]*)\]$", r" (\1)", text)
    return " ".join(plain.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[")


# ---- configs


def configs() -> str:
    """The config of each kind of run, and of all that it holds."""
    from palestra.builders.text_config import TextConfig
    from palestra.builders.vector import VectorConfig
    from palestra.launch.population import PopulationConfig

    titles = {
        TextConfig: "Runs of language agents",
        VectorConfig: "Runs in vectorised games",
        PopulationConfig: "Runs of populations",
    }
    return "\n\n".join(_tree(model, title) for model, title in titles.items())


def _tree(root: type[BaseModel], title: str) -> str:
    """The tables of `root` and of the models below it, each once, in the order in which they are first named."""
    titles: dict[type[BaseModel], str] = {root: title}
    waiting = [root]
    for model in waiting:
        for key, field in model.model_fields.items():
            new = [below for below in _models(field.annotation) if below not in titles]
            titles |= {below: _title(key, below) for below in new}
            waiting += dict.fromkeys(new)
    return "\n\n".join(f"{'##' if model is root else '###'} {titles[model]}\n\n{_table(model)}" for model in waiting)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _title(key: str, model: type[BaseModel]) -> str:
    return f"{key}, type: {kind}" if (kind := _kind(model)) else key


def _kind(model: Any) -> str | None:
    """What `type:` says where this model is meant; None where there is no choice."""
    field = getattr(model, "model_fields", {}).get("type")
    return field.default if field and isinstance(field.default, str) else None


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | values | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name != "type" or not _kind(model):
            bounds = [f"{BOUNDS[key]} {value:g}" for found in field.metadata for key, value in _bound(found)]
            values = ", ".join([_shown(field.annotation), *bounds])
            rows.append(f"| `{name}` | {values} | {_default(field)} | {_cell(field.description or '')} |")
    return f"{_prose(model)}\n\n" + "\n".join(rows)


def _bound(metadata: Any) -> Iterator[tuple[str, float]]:
    for key in BOUNDS:
        if isinstance(value := getattr(metadata, key, None), int | float):
            yield key, value


def _prose(model: type[BaseModel]) -> str:
    """A class's docstring, and those of the configs that it builds on."""
    told = [inspect.getdoc(cls) for cls in model.__mro__ if issubclass(cls, StrictModel) and cls is not StrictModel]
    return "\n\n".join(dict.fromkeys(filter(None, told))).replace("<", "&lt;")


def _shown(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shown(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (list, tuple):
        return f"list of {_shown(parts[0])}"
    if origin is dict:
        return f"mapping of {_shown(parts[0])} to {_shown(parts[1])}"
    if kind := _kind(annotation):
        return f"`type: {kind}`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "settings, below"
    if parts:
        return " or ".join(dict.fromkeys(_shown(part) for part in parts if part is not Ellipsis))
    return NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        kind = getattr(value, "type", None)
        return f"`{{type: {kind}}}`" if kind else "its own"
    plain = TypeAdapter(Any).dump_python(value, mode="json", warnings=False)
    return f"`{yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix(ENDED).strip()}`"


# ---- envs


def envs() -> str:
    """Every env that has a name, with the options that `env:` takes."""
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS

    text = "\n\n".join(_env(name, path) for name, path in TEXT_ENVS.items())
    games = "\n\n".join(_env(name, path) for name, path in VECTOR_ENVS.items())
    return f"## Envs in words\n\n{text}\n\n## Vectorised games\n\n{games}"


@cache
def _source() -> Any:
    """The package as it is written."""
    return griffe.load("palestra", search_paths=[str(ROOT)])


def _env(name: str, path: str) -> str:
    module, _, cls = path.partition(":")
    found = _source()[f"{module.removeprefix('palestra.')}.{cls}"]
    options = [option for option in found.parameters if option.name != "self"]
    rows = [f"| `{o.name}` | {_annotated(found, str(o.annotation))} | {_option(o.default)} |" for o in options]
    told = found.docstring.value.replace("<", "&lt;") if found.docstring else ""
    return f"### {name}\n\n{told}\n\n" + ("\n".join(["| option | values | default |", "|---|---|---|", *rows]))


def _option(default: Any) -> str:
    return "needed" if default is None else f"`{YAML.get(str(default), str(default).strip(QUOTES))}`"


def _annotated(owner: Any, annotation: str) -> str:
    """An annotation in words, the names of choices replaced by the choices."""
    named = re.sub(r"\b[A-Z]\w+\b(?!\[)", lambda match: _choices(owner, match[0]), annotation)
    told = LITERAL.sub(lambda match: _quoted(match[1]), named).replace("|", "or")
    told = re.sub(r"dict\[(\w+), (\w+)\]", r"mapping of \1 to \2", re.sub(r"list\[([^\]]*)\]", r"list of \1", told))
    return _cell(WORD.sub(lambda match: WRITTEN[match[0]], told))


def _choices(owner: Any, name: str) -> str:
    """The literals that a name stands for where `owner` is defined; else the name."""
    try:
        value = str(_source()[owner.resolve(name).removeprefix("palestra.")].value)
    except (griffe.NameResolutionError, AttributeError, KeyError):
        return name
    return value if LITERAL.fullmatch(value) else name


def _quoted(choices: str) -> str:
    return ", ".join(f"`{choice.strip(QUOTES)}`" for choice in re.split(r",\s*", choices))


PAGES: dict[str, Callable[[], str]] = {"commands": commands, "configs": configs, "envs": envs}
