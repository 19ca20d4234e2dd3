"""Reference pages generated from the code, as Markdown: the command line, config keys, envs and their options.

Commands and configs are read from the objects that the program uses; envs are read from their source, since some need
packages that are not installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import typer
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the reference describes this source tree, not an installed package

from palestra.core.config.descriptions import (  # noqa: E402
    NAMES,
    REQUIRED,
    class_docstring,
    describe_keys,
    nested_models,
    type_name,
)
from palestra.runs.metric_catalog import METRICS  # noqa: E402

WRITTEN = {kind.__name__: words for kind, words in NAMES.items()} | {"Any": "anything", "None": "null", "Path": "path"}
WORD = re.compile(rf"(?<![\w'`])({'|'.join(WRITTEN)})(?![\w'`])")
YAML = {"None": "null", "True": "true", "False": "false"}
QUOTES = "'\""
LITERAL = re.compile(r"Literal\[([^\]]*)\]")
EXAMPLE = re.compile(r"(?:^    .*\n+)+", re.MULTILINE)


# ---- the command line


def commands() -> str:
    """The reference of all commands: help, examples, arguments and options."""
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
    text = f"{head} {context.command_path}\n\n```text\n{usage}\n```\n\n{_examples(command.help or '')}\n"
    records = [(record, p.param_type_name) for p in command.params if (record := p.get_help_record(context))]
    rows = [f"| `{what.replace('|', chr(92) + '|')}` | {_cell(about)} |" for (what, about), _ in records]
    return text + ("\n".join(["\n| | |", "|---|---|", *rows]) if rows else "")


def _examples(text: str) -> str:
    """Help text with its indented lines as blocks of commands."""

    def block(match: re.Match[str]) -> str:
        return "```bash\n" + "\n".join(line.strip() for line in match[0].splitlines() if line.strip()) + "\n```\n\n"

    return EXAMPLE.sub(block, f"{text.rstrip()}\n\n").replace("Examples:\n", "").strip()


def _cell(text: str) -> str:
    """Text for a table cell: on one line, with markup escaped."""
    plain = re.sub(r"  \[([^\]]*)\]$", r" (\1)", text)
    return " ".join(plain.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[")


# ---- configs


def configs() -> str:
    """The reference of the configs of each kind of run, with all nested models."""
    from palestra.populations.build.language import LanguagePopulationConfig
    from palestra.text.config import TextConfig
    from palestra.vector.config import VectorConfig

    titles: dict[type[BaseModel], str] = {
        TextConfig: "Runs of language agents",
        VectorConfig: "Runs in vector envs",
        LanguagePopulationConfig: "Runs of populations",
    }
    return "\n\n".join(_tree(model, title) for model, title in titles.items())


def _tree(root: type[BaseModel], title: str) -> str:
    """The tables of `root` and its nested models, each once, in the order of their first use."""
    models = nested_models(root).items()
    return "\n\n".join(f"{_heading(model, key) if key else f'## {title}'}\n\n{_table(model)}" for model, key in models)


def _heading(model: type[BaseModel], key: str) -> str:
    return f"### {key}, type: {kind}" if (kind := type_name(model)) else f"### {key}"


def _table(model: type[BaseModel]) -> str:
    rows = [f"| `{row.key}` | {row.values} | {row.default} | {_cell(row.text)} |" for row in describe_keys(model)]
    prose = class_docstring(model).replace("<", "&lt;")
    return "\n".join([f"{prose}\n", "| key | values | default | |", "|---|---|---|---|", *rows])


# ---- envs


def envs() -> str:
    """The reference of all named envs, with the options that `env:` takes."""
    from palestra.envs import TEXT_ENVS, VECTOR_ENVS

    text = "\n\n".join(_env(name, path) for name, path in TEXT_ENVS.items())
    games = "\n\n".join(_env(name, path) for name, path in VECTOR_ENVS.items())
    return f"## Text envs\n\n{text}\n\n## Vector envs\n\n{games}"


@cache
def _source() -> Any:
    """The package's source, parsed by griffe."""
    return griffe.load("palestra", search_paths=[str(ROOT)])


def _env(name: str, path: str) -> str:
    module, _, cls = path.partition(":")
    found = _source()[f"{module.removeprefix('palestra.')}.{cls}"]
    options = [option for option in found.parameters if option.name != "self"]
    rows = [f"| `{o.name}` | {_annotated(found, str(o.annotation))} | {_option(o.default)} |" for o in options]
    description = found.docstring.value.replace("<", "&lt;") if found.docstring else ""
    return f"### {name}\n\n{description}\n\n" + ("\n".join(["| option | values | default |", "|---|---|---|", *rows]))


def _option(default: Any) -> str:
    return REQUIRED if default is None else f"`{YAML.get(str(default), str(default).strip(QUOTES))}`"


def _annotated(owner: Any, annotation: str) -> str:
    """An annotation in words, with aliases of literals replaced by the literals."""
    named = re.sub(r"\b[A-Z]\w+\b(?!\[)", lambda match: _choices(owner, match[0]), annotation)
    readable = LITERAL.sub(lambda match: _quoted(match[1]), named).replace("|", "or")
    readable = re.sub(
        r"dict\[(\w+), (\w+)\]", r"mapping of \1 to \2", re.sub(r"list\[([^\]]*)\]", r"list of \1", readable)
    )
    return _cell(WORD.sub(lambda match: WRITTEN[match[0]], readable))


def _choices(owner: Any, name: str) -> str:
    """The literals that `name` is an alias of in the module of `owner`; otherwise the name itself."""
    try:
        value = str(_source()[owner.resolve(name).removeprefix("palestra.")].value)
    except (griffe.NameResolutionError, AttributeError, KeyError):
        return name
    return value if LITERAL.fullmatch(value) else name


def _quoted(choices: str) -> str:
    return ", ".join(f"`{choice.strip(QUOTES)}`" for choice in re.split(r",\s*", choices))


# ---- metrics


def metrics() -> str:
    """The table of the metrics that the catalogue names."""
    rows = [
        f"| `{each.name}` | {each.title} | {each.unit} | {each.log}{', evals' if each.has_evals else ''} |"
        for each in METRICS
    ]
    return "\n".join(["| metric | title | unit | file |", "|---|---|---|---|", *rows])


# ---- names of the package


def names() -> str:
    """The table of the names of `import palestra`: what each is in a sentence, and the module that defines it."""
    import palestra

    values = {name: getattr(palestra, name) for name in palestra.__all__}
    rows = [f"| `{name}` | {_cell(_about(value))} | `{_module(value)}` |" for name, value in values.items()]
    return "\n".join(["| name | | from |", "|---|---|---|", *rows])


def _about(value: Any) -> str:
    """The first sentence of a docstring."""
    is_config = isinstance(value, type) and issubclass(value, BaseModel)
    text = class_docstring(value) if is_config else value.__doc__ or ""
    return re.split(r"(?<!al)(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def _module(value: Any) -> str:
    return getattr(value, "__module__", value.__name__)


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configs": configs,
    "envs": envs,
    "metrics": metrics,
    "names": names,
}
