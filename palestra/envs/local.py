"""Envs without an importable name: classes of a notebook or of a function, and functions that make envs.

They exist in this process only, under the name "local:Name". A config that names one cannot be used by another process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from typing import Any, get_type_hints

from palestra.core.config.user_modules import import_path
from palestra.envs.base import Env
from palestra.envs.vector_base import VectorEnv

LOCAL_PREFIX = "local:"
EnvClass = type[Env] | type[VectorEnv]

_local_envs: dict[str, EnvClass] = {}
_sources: dict[str, Any] = {}  # the class or function that each was made from


def env_type(env: EnvClass | Callable[..., Env | VectorEnv]) -> str:
    """Returns the name by which a config refers to an env class, or to a function that returns an env.

    It is "module:Class" if the class can be imported by that name. Otherwise the env is registered in this process as
    "local:Name", or "local:Name-2", ... if another env has that name; one with a `name` of its own replaces an earlier
    one of that name. The keyword arguments of a function are the options of its env; a function that returns a
    `VectorEnv` has the argument `num_envs`. Raises ValueError for anything else.
    """
    if inspect.isclass(env) and issubclass(env, Env | VectorEnv):
        name = env.__name__
        cls = env
        if path := import_path(env):
            return path
    elif callable(env) and not inspect.isclass(env):
        cls = _factory_class(env)
        if own := getattr(env, "name", ""):
            return _register(own, env, cls)
        name = cls.__name__
    else:
        raise ValueError(
            f"env is {env!r:.60}: give a name, a config ({{'type': ...}}), a subclass of palestra.Env or "
            "palestra.VectorEnv, or a function without required arguments that returns one (lambda: MyEnv(size=4))"
        )
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return _register(next(n for n in names if _sources.get(f"{LOCAL_PREFIX}{n}", env) is env), env, cls)


def _register(name: str, source: Any, cls: EnvClass) -> str:
    """Registers an env class made from `source`; returns its name with the prefix."""
    key = f"{LOCAL_PREFIX}{name}"
    _local_envs[key], _sources[key] = cls, source
    return key


def find_local_env(type: str) -> EnvClass:
    """Returns the class registered as `type`. Raises ValueError if this process has none of that name."""
    if type not in _local_envs:
        raise ValueError(
            f'env "{type}" was a class without an importable name, such as one defined in a notebook, and exists only '
            "in the process that defined it: a run of it cannot be resumed or played in another one. Move the class "
            'to a module and start a new run with it, as env: {type: "module:Class"}'
        )
    return _local_envs[type]


def _factory_class(factory: Callable[..., Any]) -> EnvClass:
    """Returns a class that makes envs by calling `factory`: a subclass of their class, with the options of `factory`.

    Raises ValueError if `factory` does not return an env.
    """
    signature = inspect.signature(factory)
    made = factory(**({"num_envs": 1} if "num_envs" in signature.parameters else {}))
    if not isinstance(made, Env | VectorEnv):
        raise ValueError(f"env: {factory!r:.60} returned a {type(made).__name__}, and not an Env or VectorEnv")

    def options(self: Any, **_: Any) -> None:  # only its annotations are used: they are the schema of the options
        raise NotImplementedError

    options.__annotations__ = get_type_hints(factory if inspect.isroutine(factory) else type(factory).__call__)
    parts = {
        "__new__": lambda cls, **chosen: factory(**chosen),
        "__init__": options,
        "__signature__": signature,
        "__module__": type(made).__module__,
    }
    return type(type(made).__name__, (type(made),), parts)
