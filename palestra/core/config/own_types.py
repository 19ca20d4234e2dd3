"""Configs of a user's own classes: `type: "module:Class"`, or the name that an installed package registered for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo
from pydantic_core import core_schema

from palestra.core.config.model import validate
from palestra.core.config.presets import Preset, expand_preset
from palestra.core.config.user_modules import entry_point_paths, import_path, load_object


@dataclass(frozen=True, eq=False)
class OwnTypes:
    """Annotation of a union of configs on `type`: a config may also be of a class outside the union, a subclass of
    `base`, that `type` names as "module:Class" or by an entry point of `group`. A `what` is the thing in messages.

    A class that is no config, but what `config` configures (a network, an optimizer), is named likewise; its options
    are keys of `config`. `presets` are further names, for types of the union with settings.
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
            tree = expand_preset(tree, self.presets)
            shipped = {variant.model_fields["type"].default for variant in get_args(source)}
            path = self._own_path(tree["type"], shipped) if isinstance(tree, Mapping) and "type" in tree else ""
            return self._load(path, {**tree, "type": path}) if path else known(tree)

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
            return self._path_of(named)
        if not isinstance(named, str) or named in shipped:
            return ""
        return named if ":" in named else entry_point_paths(self.group).get(named, "")

    def _path_of(self, cls: type) -> str:
        path = import_path(cls)
        if not path:
            raise ValueError(
                f"{self.what} {cls.__qualname__} is defined in a script, a notebook or a function, where a resumed run "
                f'would not find it: move it to a module, and name it by type: "module:{cls.__name__}"'
            )
        return path

    def _load(self, path: str, tree: dict[str, Any]) -> BaseModel:
        """Returns the config of the class at `path`. Raises ValueError if it is of another kind."""
        cls = load_object(path, self.what)
        if isinstance(cls, type) and issubclass(cls, self.base):
            return validate(cls, tree)
        if self.config is not None:
            return validate(self.config, tree)
        raise ValueError(f"{path} is not a subclass of {self.base.__module__}.{self.base.__name__}")
