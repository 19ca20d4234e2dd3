"""Descriptions of config models: the keys with their values, defaults and docstrings.

Docstrings of fields are read from the source when they are first asked for. pydantic's `use_attribute_docstrings` reads
them whenever a class is made, which slows every import.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise, product
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything", NoneType: "null"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
REQUIRED = "required"  # in place of a default
# of the keys in a class's `__doc__`
INDENT = "    "
MAX_LINE_CHARS = 100
DOCUMENT_END = "...\n"  # ends a YAML document that is one word


class KeyDescription(NamedTuple):
    """A key of a config: its name, and as Markdown its values, its default and its meaning."""

    key: str
    values: str
    default: str
    text: str

    @property
    def values_and_default(self) -> str:
        """Values and default on one line."""
        return f"{self.values}; {'' if self.default == REQUIRED else 'default '}{self.default}"


def describe_keys(model: type[BaseModel]) -> list[KeyDescription]:
    """Returns the keys of `model` in order, without the `type` that selects it."""
    texts = field_docstrings(model)
    return [
        KeyDescription(name, _values(field), _default(field), field.description or texts.get(name, ""))
        for name, field in model.model_fields.items()
        if name != "type" or not type_name(model)
    ]


def type_name(model: Any) -> str | None:
    """Returns the value of `type:` that selects `model`; None if `type:` does not select a model."""
    field = getattr(model, "model_fields", {}).get("type")
    return field.default if field and get_args(field.annotation) == (field.default,) else None


def nested_models(root: type[BaseModel]) -> dict[type[BaseModel], str]:
    """Returns `root` and all models below it, in the order in which they are first used, each with the key that takes
    it; "" for `root`."""
    keys: dict[type[BaseModel], str] = {root: ""}
    waiting = [root]
    for model in waiting:
        for key, field in model.model_fields.items():
            new = dict.fromkeys(below for below in _models(field.annotation) if below not in keys)
            keys |= dict.fromkeys(new, key)
            waiting += new
    return keys


def class_docstring(model: type[BaseModel]) -> str:
    """Returns the docstring of a class as it is written, without its keys."""
    return inspect.cleandoc(vars(model).get("__doc__") or "")


def docstring_with_keys(model: type[BaseModel]) -> str:
    """Returns the docstring of a class, followed by its keys."""
    keys = "\n".join(map(_paragraph, describe_keys(model)))
    return f"{class_docstring(model)}\n\nKeys:\n\n{keys}".strip()


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring of each field, on one line. A field that a subclass declares again without a docstring
    keeps the inherited one."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _own_docstrings(cls)
    return {name: text for name, text in found.items() if name in model.model_fields}


@cache
def _own_docstrings(cls: type) -> dict[str, str]:
    """Returns the docstrings of the fields that `cls` itself declares; {} if its source is not available."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _paragraph(key: KeyDescription) -> str:
    text = textwrap.fill(key.text, MAX_LINE_CHARS, initial_indent=INDENT, subsequent_indent=INDENT)
    return f"{key.key}: {key.values_and_default}\n{text}".rstrip()


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _values(field: Any) -> str:
    """Returns type and bounds of a field: "whole number, ≥ 1"."""
    bounds = []
    for found, (name, sign) in product(field.metadata, BOUNDS.items()):
        value = getattr(found, name, None)
        if isinstance(value, int | float):
            bounds.append(f"{sign} {value:g}")
    return ", ".join([_type(field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {_type(parts[0])} to {_type(parts[1])}"
    if kind := type_name(annotation):
        return f"`type: {kind}`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "nested keys"
    if parts:
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not Ellipsis))
    return str(NAMES.get(annotation) or getattr(annotation, "__name__", annotation))


def _default(field: Any) -> str:
    """Returns the default as YAML; `REQUIRED` if there is none."""
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        kind = getattr(value, "type", None)
        return f"`{{type: {kind}}}`" if kind else "`{}`"
    plain = TypeAdapter(Any).dump_python(value, mode="json", warnings=False)
    return f"`{yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix(DOCUMENT_END).strip()}`"
