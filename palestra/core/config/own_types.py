"""Configs of a user's own classes: `type: "module:Class"`, or the name that an installed package registered for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, SerializationInfo, create_model
from pydantic_core import core_schema

from palestra.core.config.model import StrictModel, validate
from palestra.core.config.presets import Preset, expand_preset
from palestra.core.config.user_modules import entry_point_paths, import_path, load_object
from palestra.core.user_functions import check_overrides

Class = type[Any]


@dataclass(frozen=True, eq=False)
class OwnTypes:
    """Annotation of a union of configs on `type`: a config may also be of a class outside the union, a subclass of
    `base`, that `type` names as "module:Class" or by an entry point of `group`. A `what` is the thing in messages.

    A class that is no config, but what `config` configures (a network, an optimizer), is named likewise; its options
    are keys of `config`. `presets` are further names, for types of the union with settings. A name alone is a config of
    that type.
    """

    what: str
    base: type[BaseModel]
    config: type[BaseModel] | None = None
    presets: Mapping[str, Preset] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The group of entry points of packages that bring types of their own."""
        return f"palestra.{self.what}s"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def serialize(config: BaseModel, info: SerializationInfo) -> dict[str, Any]:
            return config.model_dump(mode=info.mode)  # all keys of its own class, not those of the union alone

        def resolve(tree: Any, known: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if isinstance(tree, self.base):
                return tree
            if isinstance(tree, str):
                tree = {"type": tree}
            tree = expand_preset(tree, self.presets)
            shipped = {variant.model_fields["type"].default for variant in get_args(source)}
            if isinstance(tree, Mapping) and (path := self._own_path(tree.get("type", ""), shipped)):
                return self._load(path, {**tree, "type": path})
            return known(tree)

        return core_schema.no_info_wrap_validator_function(
            resolve,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(
                serialize, info_arg=True, return_schema=core_schema.dict_schema()
            ),
        )

    def _own_path(self, named: Any, shipped: set[str]) -> str:
        """Returns "module:Class" for the type of a user's own class; "" for any other."""
        if isinstance(named, type):
            if not (path := import_path(named)):
                raise ValueError(
                    f"{self.what} {named.__qualname__} is defined in a script, a notebook or a function, where a "
                    "resumed run would not find it: move it to a module, and name it by "
                    f'type: "module:{named.__name__}"'
                )
            return path
        if not isinstance(named, str) or not named or named in shipped:
            return ""
        if ":" in named:
            return named
        return entry_point_paths(self.group).get(named, "")

    def _load(self, path: str, tree: dict[str, Any]) -> BaseModel:
        """Returns the config of the class at `path`. Raises ValueError if it is of another kind."""
        cls = load_object(path, self.what)
        if isinstance(cls, type) and issubclass(cls, self.base):
            check_overrides(cls, path)
            return validate(cls, tree)
        if self.config is not None:
            return validate(self.config, tree)
        raise ValueError(f"{path} is not a subclass of {self.base.__module__}.{self.base.__name__}")


@cache
def init_options(cls: Any, leave_out: tuple[str, ...] = ()) -> type[BaseModel]:
    """Returns the arguments of `cls.__init__` as a model, with types and defaults, but for those that `leave_out`
    names."""
    parameters = [p for p in inspect.signature(cls).parameters.values() if p.name not in leave_out]
    hints = get_type_hints(cls.__init__, include_extras=True)
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    fields: dict[str, Any] = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    config = ConfigDict(extra="allow" if free else "forbid", arbitrary_types_allowed=True)
    return create_model(f"{cls.__name__}Options", __config__=config, __doc__=cls.__doc__, **fields)


class OwnObject(StrictModel):
    """What a user's own class makes, which is no config: `type` names the class, other keys are its options."""

    model_config = ConfigDict(extra="allow")
    type: str
    """The class, as "module:Class"."""

    def check_class(self, base: Class, what: str, leave_out: tuple[str, ...]) -> None:
        """Raises ValueError if the class is no subclass of `base`, or its constructor does not take the options.
        `leave_out` names its arguments that are no options."""
        cls = load_object(self.type, what)
        fits = inspect.isclass(cls) and issubclass(cls, base)
        if not fits:
            raise ValueError(f"{self.type} is not a subclass of {base.__module__}.{base.__qualname__}")
        validate(init_options(cls, leave_out), self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options that the config sets."""
        return dict(self.model_extra or {})

    def build(self, *arguments: Any, **more: Any) -> Any:
        """Returns a new object of the class, from `arguments` and the options."""
        return load_object(self.type, "class")(*arguments, **more, **self.options)
