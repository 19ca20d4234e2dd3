"""Reads, overrides, validates and prints YAML configs, with error messages that name the path and the fix.

Schemas stand beside the code they configure; this module handles trees and models in general. YAML is read as version
1.2: `1e-4` is a number; `on`, `no`, `1:30` and `2026-01-31` are text; a repeated key is an error.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

Tree = dict[str, Any]
Loc = tuple[int | str, ...]  # location of a pydantic error: field names, keys, indices and union tags


MAX_ERRORS_SHOWN = 20  # errors in one message
MAX_NAME_CHARS = 100  # characters of a run's or policy's name
MAX_CONFIG_CHARS = 1_000_000  # characters of a config
MAX_DEPTH = 64  # levels of nesting
MAX_VALUES = 20_000  # values, with aliases followed
ALLOWED_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class StrictModel(BaseModel):
    """Base of every config model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),  # allows names such as `model_path`
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the text below a field is its description
    )


M = TypeVar("M", bound=BaseModel)


def check_folder_name(name: str) -> str:
    """Returns `name` unchanged. Raises ValueError if it cannot be the name of a folder."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "/" in name or name.startswith("."):
        raise ValueError(
            f"{_short(name)} cannot be the name of a run: use a plain folder name, without / and control characters, "
            f"not starting with a point, of at most {MAX_NAME_CHARS} characters"
        )
    return name


def check_policy_names(names: Iterable[str], *reserved: str) -> None:
    """Checks the names of policies.

    Raises ValueError if a name cannot be a folder, a log entry and a part of RUN:NAME and NAME@VERSION, or is one of
    the reserved names `reserved`.
    """
    for name in names:
        if len(name) > MAX_NAME_CHARS or not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name in reserved:
            raise ValueError(
                f'a policy cannot be called "{_short(name)[1:-1]}": use at most {MAX_NAME_CHARS} letters, digits, "_", '
                f'"-" and ".", and not {" or ".join(reserved)}, which have another meaning'
            )


def check_keep_every(keep_every: int, checkpoint_every: int) -> None:
    """Raises ValueError unless `keep_every` is a multiple of `checkpoint_every`."""
    if keep_every % checkpoint_every:
        raise ValueError(
            f"keep_every: {keep_every} is no multiple of checkpoint_every: {checkpoint_every}, and only checkpoints "
            f"can be kept: set keep_every to a multiple, or checkpoint_every to {keep_every}"
        )


RunName = Annotated[str, AfterValidator(check_folder_name)]


def load(path: str | Path) -> Tree:
    """Returns the tree of a YAML file; {} if it is empty. Raises ValueError with file and line if it cannot be read as
    a config."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no config: it is not text in UTF-8 (byte {error.start})") from error
    return parse(text, str(path))


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
        raise ValueError(f"{source}: a config is a mapping of keys to values, this is {_kind(tree)}")
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
        _place(tree, keys, _value(text, setting), setting)
    return tree


def validate(model: type[M], tree: Tree) -> M:
    """Returns `tree` as an instance of `model`.

    Raises one ValueError that lists every error with its path and, for an unknown key or type, the nearest spelling.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        faults = dict.fromkeys(_fault(model, e) for e in error.errors(include_url=False))
        lines = list(faults)
        if len(lines) == 1:
            raise ValueError(lines[0]) from None
        shown = [f"  {line}" for line in lines[:MAX_ERRORS_SHOWN]]
        shown += [f"  ... and {len(lines) - MAX_ERRORS_SHOWN} more"] if len(lines) > MAX_ERRORS_SHOWN else []
        raise ValueError("\n".join([f"{len(lines)} faults in the config:", *shown])) from None


def dump(config: BaseModel) -> str:
    """Returns the resolved config as YAML, defaults included. `validate(type(config), parse(dump(config)))` restores
    it."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


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
            raise _marked(f"nested deeper than {MAX_DEPTH} levels, and no config is", event.start_mark)
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in ALLOWED_TAGS:
            raise _marked(f"tag {tag!r} is not allowed, a config is plain data: remove the tag", event.start_mark)


def _marked(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _check_data(value: Any) -> None:
    """Raises ValueError for data that contains itself, grows too large through aliases, or cannot be encoded."""
    waiting, seen = [(value, 0)], 0
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
            _check_scalar(part)


def _check_scalar(value: Any) -> None:
    if isinstance(value, str) and not _encodable(value):
        raise ValueError(f"{value!a} is no text: it has half of a surrogate pair; write the character itself")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("a whole number does not fit into 64 bits: make it smaller")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _whole(loader: Any, node: yaml.ScalarNode) -> int:
    try:
        return int(yaml.constructor.SafeConstructor.construct_yaml_int(loader, node))
    except ValueError:
        raise yaml.MarkedYAMLError(
            problem=f"{_short(node.value)} is no whole number of at most 64 bits", problem_mark=node.start_mark
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
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _what(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error)


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _value(text: str, setting: str) -> Any:
    try:
        return _read(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"the value of the setting {_short(setting)} is not YAML: {_what(error)}") from error


def _place(tree: Tree, keys: Sequence[str], value: Any, setting: str) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        below: Any = {} if tree.get(key) is None else tree[key]
        if not isinstance(below, dict):
            path = ".".join(keys[:depth])
            raise ValueError(f"cannot set {setting!r}: {path} is {_kind(below)}, not a mapping; set {path} as a whole")
        tree[key] = below
        tree = below
    tree[keys[-1]] = value


def _fault(model: type[BaseModel], error: Any) -> str:
    """Formats one pydantic error as one line."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        path, owner = _resolve(model, error["loc"][:-1])
        return _unknown_key(path, str(error["loc"][-1]), _keys(owner))
    path, _ = _resolve(model, error["loc"])
    if kind == "union_tag_invalid":
        return _unknown_type(_join(path, context["discriminator"].strip("'")), context)
    if kind == "union_tag_not_found":
        return f"{_join(path, context['discriminator'].strip(chr(39)))} is missing: it picks the variant"
    if kind == "missing":
        return f"{path} is missing"
    if kind == "value_error":
        return f"{path}: {context['error']}" if path else str(context["error"])
    return f"{path or 'config'}: {_sentence(error['msg'])}, not {_shown(error['input'])}"


def _unknown_key(path: str, key: str, known: Sequence[str]) -> str:
    return f"unknown key {_join(path, key)}{_nearest(key, known)}" + (f" (keys: {', '.join(known)})" if known else "")


def _unknown_type(path: str, context: dict[str, Any]) -> str:
    known = re.findall(r"'([^']*)'", context["expected_tags"])
    return f"unknown {path} {context['tag']!r}{_nearest(str(context['tag']), known)} (types: {', '.join(known)})"


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else ""


def _sentence(message: str) -> str:
    return message.removeprefix("Input ").removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else _kind(value)


def _short(text: str) -> str:
    """Returns `text` quoted and, if it is long, with its middle left out."""
    return repr(text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _resolve(annotation: Any, loc: Loc) -> tuple[str, Any]:
    """Returns the path as the user wrote it, and the annotation found there.

    pydantic puts the tag of a union into the location; walking along the annotations distinguishes a tag from a key.
    """
    annotation = _unwrap(annotation)
    if not loc:
        return "", annotation
    variants = _variants(annotation)
    if variants:
        chosen = next((v for v in variants if str(loc[0]) in _tags(v)), None)
        return _resolve(chosen, loc[1:])
    path, end = _resolve(_child(annotation, loc[0]), loc[1:])
    here = f"[{loc[0]}]" if isinstance(loc[0], int) else str(loc[0])
    return here + (path if path.startswith("[") or not path else f".{path}"), end


def _unwrap(annotation: Any) -> Any:
    """Strips Annotated, and the None of an optional."""
    if get_origin(annotation) is Annotated:
        return _unwrap(get_args(annotation)[0])
    options = _options(annotation)
    return _unwrap(options[0]) if len(options) == 1 else annotation


def _options(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return [option for option in get_args(annotation) if option is not type(None)] if is_union else []


def _variants(annotation: Any) -> list[Any]:
    return [_unwrap(option) for option in _options(annotation)]


def _tags(variant: Any) -> set[str]:
    """Names that pydantic may use for this variant in a location: the literals of its fields, or its type's name."""
    names = {getattr(variant, "__name__", str(variant))}
    for field in _fields(variant).values():
        if get_origin(field.annotation) is Literal:
            names |= {str(value) for value in get_args(field.annotation)}
    return names


def _child(annotation: Any, key: int | str) -> Any:
    """Annotation of a model's field, of a mapping's values or of a list's items; Any if it is none of these."""
    if key in _fields(annotation):
        return _fields(annotation)[str(key)].annotation
    arguments = get_args(annotation)
    return arguments[-1] if arguments and arguments[-1] is not Ellipsis else arguments[0] if arguments else Any


def _fields(annotation: Any) -> dict[str, Any]:
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return {field.alias or name: field for name, field in annotation.model_fields.items()} if is_model else {}


def _keys(annotation: Any) -> list[str]:
    return list(_fields(annotation))


def type_choices(model: type[BaseModel], field: str) -> list[str]:
    """Values that `type:` may take in a field that holds one of several config types, or a mapping of names to them."""
    waiting, found = [model.model_fields[field].annotation], list[str]()
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append(str(part.model_fields["type"].default))
        else:
            waiting += get_args(part)
    return found
