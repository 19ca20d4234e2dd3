"""The base of config models, and validation with error messages that name the path and the fix.

Schemas stand beside the code they configure; this module handles models in general.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue

from palestra.core.config.descriptions import class_docstring, docstring_with_keys, field_docstrings
from palestra.core.config.key_hints import hint, nearest
from palestra.core.config.tree import Tree, name_kind, shorten, to_yaml

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

Loc = tuple[int | str, ...]  # location of a pydantic error: field names, keys, indices and union tags

MAX_ERRORS_SHOWN = 20  # errors in one message
MAX_KEYS_SHOWN = 12  # keys that are listed although one of them, or of another place, was probably meant
MAX_NAME_CHARS = 100  # characters of a run's or policy's name


class DocumentedType(ModelMetaclass):
    """Metaclass of config models: `__doc__` has the keys too, for `help()`. It is computed when it is read, since it
    takes parsing the source."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override] # noqa: N805 - a metaclass
        return docstring_with_keys(cls)  # type: ignore[arg-type]

    def __call__(cls, *args: Any, **keys: Any) -> Any:  # noqa: N805 - a metaclass
        """Returns a config made in Python. Raises ValueError with the same message as `validate`."""
        model: Any = cls
        if args and model.__init__ is BaseModel.__init__:
            raise ValueError(f"{cls.__name__} takes its keys by name: {cls.__name__}(KEY=...)")
        with _explain(model, keys):
            return super().__call__(*args, **keys)


class StrictModel(BaseModel, metaclass=DocumentedType):
    """Base of every config model: immutable, and an unknown key is an error. The text below a field is its
    description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),  # allows names such as `model_path`
        allow_inf_nan=False,
    )

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Returns `obj` as a config. Raises ValueError as `validate` does."""
        with _explain(cls, obj):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Returns a config in JSON. Raises ValueError as `validate` does."""
        with _explain(cls, {}):
            return super().model_validate_json(json_data, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self).__name__
        raise ValueError(f"a config does not change: make another, {cls}({name}=...), or copy it with replaced keys")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        schema["description"] = class_docstring(cls)
        for name, text in field_docstrings(cls).items():
            schema["properties"].get(name, {}).setdefault("description", text)
        return reference


M = TypeVar("M", bound=BaseModel)


def check_folder_name(name: str) -> str:
    """Returns `name` unchanged. Raises ValueError if it cannot be the name of a folder."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "/" in name or name.startswith("."):
        raise ValueError(
            f"{shorten(name)} cannot be the name of a run: use a plain folder name, without / and control characters, "
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
                f'a policy cannot be called "{shorten(name)[1:-1]}": use at most {MAX_NAME_CHARS} letters, digits, '
                f'"_", "-" and ".", and not {" or ".join(reserved)}, which have another meaning'
            )


RunName = Annotated[str, AfterValidator(check_folder_name)]


def validate(model: type[M], tree: Tree) -> M:
    """Returns `tree` as an instance of `model`.

    Raises one ValueError that lists every error with its path and, for an unknown key or type, the nearest spelling.
    """
    with _explain(model, tree):
        return model.model_validate(tree)


@contextmanager
def _explain(model: type[BaseModel], tree: Any) -> Iterator[None]:
    """Context that replaces pydantic's error by one in the words of a config: a line, or a list of them."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(_faults(model, tree, error)) from None


def _faults(model: type[BaseModel], tree: Any, error: ValidationError) -> str:
    lines = list(dict.fromkeys(_fault(model, tree, each) for each in error.errors(include_url=False)))
    if len(lines) == 1:
        return lines[0]
    shown = [f"  {line}" for line in lines[:MAX_ERRORS_SHOWN]]
    if len(lines) > MAX_ERRORS_SHOWN:
        shown.append(f"  ... and {len(lines) - MAX_ERRORS_SHOWN} more")
    return "\n".join([f"{len(lines)} faults in the config:", *shown])


def is_changed(config: BaseModel, key: str) -> bool:
    """Returns whether a config has the key, with a value that is not its default."""
    field = type(config).model_fields.get(key)
    return field is not None and getattr(config, key) != field.default


def dump(config: BaseModel) -> str:
    """Returns the resolved config as YAML, defaults included. `validate(type(config), parse(dump(config)))` restores
    it."""
    return to_yaml(config.model_dump(mode="json"))


def _fault(model: type[BaseModel], tree: Any, error: Any) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        path, owner = _resolve(model, error["loc"][:-1])
        key = str(error["loc"][-1])
        known = list(_fields(owner))
        meant = hint(path, key, known, partial(_places, model, tree))
        listed = f" (keys: {', '.join(known)})" if known and not (meant and len(known) > MAX_KEYS_SHOWN) else ""
        return f"unknown key {_join(path, key)}{meant}{listed}"
    path, _ = _resolve(model, error["loc"])
    if kind == "union_tag_invalid":
        return _unknown_type(_join(path, context["discriminator"].strip("'")), context)
    if kind == "union_tag_not_found":
        return f"{_join(path, context['discriminator'].strip(chr(39)))} is missing: it picks the variant"
    if kind == "missing":
        return f"{path} is missing"
    if kind == "value_error":
        return f"{path}: {context['error']}".removeprefix(": ")
    shown = _quote(error["input"])
    if kind in ("list_type", "tuple_type"):
        return f"{path or 'config'}: should be a list, such as [{shown}], not {shown}"
    return f"{path or 'config'}: {_sentence(error['msg'])}, not {shown}"


def _places(annotation: Any, tree: Any, key: str) -> Iterator[str]:
    """Yields the paths at which a config of this annotation may have `key`, in mappings under the names in `tree`."""
    annotation = _unwrap(annotation)
    inner = tree if isinstance(tree, Mapping) else {}
    variants = [_unwrap(option) for option in _options(annotation)]
    if variants:
        named = [v for v in variants if str(inner.get("type")) in _tags(v)] if "type" in inner else variants
        for variant in named:
            yield from _places(variant, tree, key)
    for name, field in _fields(annotation).items():
        if name == key:
            yield name
        yield from (f"{name}.{path}" for path in _places(field.annotation, inner.get(name), key))
    if get_origin(annotation) is dict:
        for name in inner or ["NAME"]:
            yield from (f"{name}.{path}" for path in _places(get_args(annotation)[1], inner.get(name), key))


def _unknown_type(path: str, context: dict[str, Any]) -> str:
    known = re.findall(r"'([^']*)'", context["expected_tags"])
    return f"unknown {path} {context['tag']!r}{nearest(str(context['tag']), known)} (types: {', '.join(known)})"


def _sentence(message: str) -> str:
    """Returns pydantic's message in the words of a config."""
    plain = message.removeprefix("Input ").removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"a valid dictionary( or (object to extract fields from|instance of \w+))?", "a mapping", plain)


def _quote(value: Any) -> str:
    if len(text := repr(value)) <= 60:
        return text
    return name_kind(value)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}".removeprefix(".")


def _resolve(annotation: Any, loc: Loc) -> tuple[str, Any]:
    """Returns the path as the user wrote it, and the annotation found there.

    pydantic puts the tag of a union into the location; walking along the annotations distinguishes a tag from a key.
    """
    annotation = _unwrap(annotation)
    if not loc:
        return "", annotation
    if variants := [_unwrap(option) for option in _options(annotation)]:
        chosen = next((v for v in variants if str(loc[0]) in _tags(v)), None)
        return _resolve(chosen, loc[1:])
    path, end = _resolve(_child(annotation, loc[0]), loc[1:])
    if path and not path.startswith("["):
        path = f".{path}"
    if isinstance(loc[0], int):
        return f"[{loc[0]}]{path}", end
    return f"{loc[0]}{path}", end


def _unwrap(annotation: Any) -> Any:
    """Strips Annotated, and the None of an optional."""
    if get_origin(annotation) is Annotated:
        return _unwrap(get_args(annotation)[0])
    options = _options(annotation)
    if len(options) == 1:
        return _unwrap(options[0])
    return annotation


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [option for option in get_args(annotation) if option is not type(None)]


def _tags(variant: Any) -> set[str]:
    """Returns the names that pydantic may use for this variant in a location: the literals of its fields, or its type's
    name."""
    names = {getattr(variant, "__name__", str(variant))}
    for field in _fields(variant).values():
        if get_origin(field.annotation) is Literal:
            names |= {str(value) for value in get_args(field.annotation)}
    return names


def _child(annotation: Any, key: int | str) -> Any:
    """Returns the annotation of a model's field, of a mapping's values or of a list's items; Any for other types."""
    if key in _fields(annotation):
        return _fields(annotation)[str(key)].annotation
    return [Any, *(argument for argument in get_args(annotation) if argument is not Ellipsis)][-1]


def _fields(annotation: Any) -> dict[str, Any]:
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
        return {}
    return {field.alias or name: field for name, field in annotation.model_fields.items()}


def type_choices(model: type[BaseModel], field: str) -> list[str]:
    """Returns the values that `type:` may take in a field that holds one of several config types, or a mapping of names
    to them."""
    waiting = [model.model_fields[field].annotation]
    found = list[str]()
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append(str(part.model_fields["type"].default))
        else:
            waiting += get_args(part)
    return found
