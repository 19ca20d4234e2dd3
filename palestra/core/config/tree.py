"""Reads, overrides and writes configs as YAML trees.

YAML is read as version 1.2: `1e-4` is a number; `on`, `no`, `1:30` and `2026-01-31` are text; a repeated key is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from palestra.core.config.credentials import check_no_credentials
from palestra.core.config.shipped import find_config, suggest_config

Tree = dict[str, Any]

MAX_CONFIG_CHARS = 1_000_000  # characters of a config
MAX_DEPTH = 64  # levels of nesting
MAX_VALUES = 20_000  # values, with aliases followed
ALLOWED_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
SURROGATE = re.compile("[\\ud800-\\udfff]")  # half of a pair, which is no character


def load(path: str | Path) -> Tree:
    """Returns the tree of a YAML file, which may be a shipped one, such as configs/demo.yaml. Raises ValueError with
    file and line if it cannot be read as a config, is empty, or holds credentials."""
    path = Path(path)
    try:
        path = find_config(path)
        if path.exists() and not path.is_file() and not _is_open_pipe(path):
            raise ValueError(f"{path} is not a config, but a folder, a pipe or a device")
        with open(path, "rb") as file:
            data = file.read(4 * MAX_CONFIG_CHARS + 1)
        if len(data) > 4 * MAX_CONFIG_CHARS:
            raise ValueError(f"{path} is not a config: it has more than {4 * MAX_CONFIG_CHARS:,} bytes")
        text = data.decode()
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}{suggest_config(path)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a config: it is not text in UTF-8 (byte {error.start})") from error
    tree = parse(text, str(path))
    if not tree and "{}" not in text:
        raise ValueError(f"{path} is empty: `palestra init` lists configs to start from")
    check_no_credentials(tree)
    return tree


def _is_open_pipe(path: Path) -> bool:
    """Returns True for a pipe that was opened for this process, as by `palestra train <(...)`. Any other pipe may
    block for ever."""
    return path.is_fifo() and (path == Path("/dev/stdin") or path.parent == Path("/dev/fd"))


def parse(text: str, source: str = "config") -> Tree:
    """Returns the tree of YAML text: mappings, lists, strings, numbers, booleans and nulls.

    Raises ValueError with `source` and line if the text is not valid, or exceeds the limits `MAX_CONFIG_CHARS`,
    `MAX_DEPTH` and `MAX_VALUES`.
    """
    try:
        tree = _read(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source}{_where(error)}: {_what(error)}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{source}: a config is a mapping of keys to values, this is {name_kind(tree)}")
    return tree


def override(tree: Tree, settings: Iterable[str]) -> Tree:
    """Returns a copy of `tree` with settings such as "algorithm.clip=0.3" applied in order. Values are YAML.

    Missing mappings on the path are created; `validate` then reports misspelt ones. Raises ValueError if a setting has
    no `=`, its value is not YAML, or its path leads through something that is not a mapping.
    """
    tree = _copy(tree)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"cannot read the setting {setting!r}: write key=value, for example algorithm.clip=0.3")
        value = _value(text, setting)
        check_no_credentials({path.strip(): value})
        _place(tree, keys, value, setting)
    return tree


def merge(tree: Tree, changes: Tree) -> Tree:
    """Returns `tree` with `changes`: mappings are merged key by key, other values are replaced."""
    result = dict(tree)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge(old, value)
        result[key] = value
    return result


def to_yaml(tree: Tree) -> str:
    """Returns `tree` as YAML. `parse(to_yaml(tree))` restores it."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def shorten(text: str) -> str:
    """Returns `text` quoted and, if it is long, with its middle left out."""
    return repr(text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}")


def name_kind(value: Any) -> str:
    """Returns the kind of a value in words, such as "a mapping" or "nothing"."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return (names | {type(None): "nothing"}).get(type(value), f"a {type(value).__name__}")


def _read(text: str) -> Any:
    """Returns the data in YAML text. Raises YAMLError or ValueError if it is not plain data of a bounded size."""
    if len(text) > MAX_CONFIG_CHARS:
        raise ValueError(f"a config has at most {MAX_CONFIG_CHARS:,} characters, and this one {len(text):,}")
    _check_events(text)
    value = yaml.load(text, _Loader)
    _check_data(value)
    return value


def _check_events(text: str) -> None:
    """Raises YAMLError for nesting too deep to compose, and for tags other than those of plain data."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _mark_error(f"nested deeper than {MAX_DEPTH} levels, and no config is", event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None and tag not in ALLOWED_TAGS:
            raise _mark_error(f"tag {tag!r} is not allowed, a config is plain data: remove the tag", event.start_mark)


def _mark_error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _check_data(value: Any) -> None:
    """Raises ValueError for data that contains itself, grows too large through aliases, or cannot be encoded."""
    waiting = [(value, 0)]
    seen = 0
    while waiting:
        part, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels: an alias (*) stands inside what it names")
        if seen > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values once its aliases (*) are followed: use fewer of them")
        if isinstance(part, dict):
            waiting += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif isinstance(part, list):
            waiting += [(inner, depth + 1) for inner in part]
        else:
            if isinstance(part, str) and SURROGATE.search(part):
                raise ValueError(f"{part!a} is not text: it has half of a surrogate pair; write the character itself")
            if isinstance(part, int) and abs(part) >= 2**63:
                raise ValueError("a whole number does not fit into 64 bits: make it smaller")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's where it is built in
    """SafeLoader with YAML 1.2 numbers and booleans, and without silently repeated keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"merges (<<) make more than {MAX_VALUES:,} keys: use fewer of them",
                problem_mark=node.start_mark,
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _whole(loader: Any, node: yaml.ScalarNode) -> int:
    try:
        return int(yaml.constructor.SafeConstructor.construct_yaml_int(loader, node))
    except ValueError:
        raise yaml.MarkedYAMLError(
            problem=f"{shorten(node.value)} is not a whole number of at most 64 bits", problem_mark=node.start_mark
        ) from None


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly the text that `_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_INT = re.compile(r"^[-+]?(0|[1-9][0-9]*)$|^0x[0-9a-fA-F]+$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in pairs if tag.endswith((":null", ":merge"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # PyYAML tries the resolvers of a first letter in order: integers come first and win over floats.
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))


def _where(error: yaml.YAMLError) -> str:
    if mark := getattr(error, "problem_mark", None) or getattr(error, "context_mark", None):
        return f", line {mark.line + 1}, column {mark.column + 1}"
    return ""


def _what(error: Exception) -> str:
    """Returns the reason in one line: of a control character, PyYAML tells the position in a second one."""
    return " ".join((getattr(error, "problem", None) or str(error)).split())


def _copy(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _copy(item) for key, item in value.items()}


def _value(text: str, setting: str) -> Any:
    if not text.strip():
        raise ValueError(f"the setting {shorten(setting)} has no value: write null, or '' for an empty text")
    try:
        return _read(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"the value of the setting {shorten(setting)} is not YAML: {_what(error)}") from error


def _place(tree: Tree, keys: Sequence[str], value: Any, setting: str) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        if tree.get(key) is None:
            tree[key] = {}
        below = tree[key]
        if not isinstance(below, dict):
            path = ".".join(keys[:depth])
            kind = name_kind(below)
            raise ValueError(f"cannot set {setting!r}: {path} is {kind}, not a mapping; set {path} as a whole")
        tree = below
    tree[keys[-1]] = value
