"""Envs given as objects: classes, and functions that make envs. Those of PettingZoo and Gymnasium are played through
their adapters.

One without an importable name, such as a class of a notebook, exists in this process only, under the name "local:Name".
A config that names it cannot be used by another process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import Any, get_type_hints

from palestra.core.config.user_modules import import_path
from palestra.core.failures import describe_in_line, exit_as_error
from palestra.envs.base import Env
from palestra.envs.vector_base import VectorEnv

LOCAL_PREFIX = "local:"
EnvClass = type[Env] | type[VectorEnv]
PACKAGE_ENVS = {("pettingzoo", "ParallelEnv"), ("pettingzoo", "AECEnv"), ("gymnasium", "Env")}
KEYS_OF_PATHS = {"pettingzoo": "env", "gymnasium": "id"}  # the option of the adapter that names a class or function

_local_envs: dict[str, EnvClass] = {}
_sources: dict[str, Any] = {}  # the class or function that each was made from


def env_config(env: Any) -> dict[str, Any]:
    """Returns the config of an env class, or of a function that returns an env.

    A class that can be imported is named "module:Class"; of PettingZoo and Gymnasium also a function, as an option of
    their adapters. Otherwise the env is registered in this process as "local:Name", or "local:Name-2", ... if another
    env has that name; one with a `name` of its own replaces an earlier one of that name. The keyword arguments of a
    function are the options of its env; a function that returns a `VectorEnv` has the argument `num_envs`. Raises
    ValueError for anything else.
    """
    cls = made_class(env)
    package = package_of(cls)
    if (inspect.isclass(env) or (package and inspect.isfunction(env))) and (path := import_path(env)):
        if package:
            return {"type": package, KEYS_OF_PATHS[package]: path}
        return {"type": path}
    name = cls.__name__
    if package:
        factory = adapt_env(env, cls)
        cls = _factory_class(factory, type(new_env(factory, {"num_envs": 1})))
    elif not inspect.isclass(env):
        cls = _factory_class(env, cls)
        if own := getattr(env, "name", ""):
            return {"type": _register(own, env, cls)}
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return {"type": _register(next(n for n in names if _sources.get(f"{LOCAL_PREFIX}{n}", env) is env), env, cls)}


def made_class(env: Any) -> type:
    """Returns the class of the env that a class or function makes. Raises ValueError if it makes none."""
    if inspect.isclass(env):
        cls, what = env, f"{env!r:.60}"
    elif callable(env):
        made = new_env(env, {"num_envs": 1} if "num_envs" in inspect.signature(env).parameters else {})
        cls, what = type(made), f"{env!r:.60}, which returned a {type(made).__name__}"
        if (close := getattr(made, "close", None)) and not inspect.iscoroutinefunction(close):
            close()
    elif isinstance(env, Env | VectorEnv) or package_of(type(env)):
        name = type(env).__name__
        known = ""
        if getattr(env, "spec", None):
            known = f', or {{"type": "gymnasium", "id": "{env.spec.id}"}}'
        raise ValueError(f"env is an instance, and several are played: give {name}, or lambda: {name}(...){known}")
    else:
        cls, what = type(env), f"{env!r:.60}"
    if not (issubclass(cls, Env | VectorEnv) or package_of(cls)):
        raise ValueError(
            f"env is {what}: give a name, a config ({{'type': ...}}), a subclass of palestra.Env or palestra.VectorEnv "
            "or of an env of PettingZoo or Gymnasium, or a function without required arguments that returns one "
            "(lambda: MyEnv(size=4)); of rows of prompts, palestra.Prompts(rows, reward=...)"
        )
    return cls


def new_env(make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Returns the env that a class or function makes. Raises ValueError, with the place, if its
    code fails, and if an env has no seats."""
    name = getattr(make, "__name__", "")
    try:
        with exit_as_error():
            env = make(**options)
    except (ValueError, ConnectionError, MemoryError):
        raise
    except Exception as error:  # of a user's code
        raise ValueError(f"env {name} cannot be made: {describe_in_line(error)}") from error
    if isinstance(env, Env | VectorEnv) and not getattr(env, "seats", None):
        raise ValueError(f'env {type(env).__name__} has no seats: set seats = ("player", ...) in the class')
    return env


def package_of(cls: type) -> str:
    """Returns the package of whose env `cls` is a subclass, "pettingzoo" or "gymnasium"; "" if of neither."""
    bases = [(base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__]
    return next((base[0] for base in bases if base in PACKAGE_ENVS), "")


def adapt_env(env: Callable[[], Any], cls: type) -> Callable[[int], VectorEnv]:
    """Returns a function that makes copies of the env of PettingZoo or Gymnasium that `env` makes, of class `cls`."""
    if package_of(cls) == "pettingzoo":
        from palestra.envs.adapters.pettingzoo.games import games_of
    else:
        from palestra.envs.adapters.gymnasium import games_of

    def make(num_envs: int = 16) -> VectorEnv:
        return games_of(env, num_envs, cls.__name__)

    make.__name__ = cls.__name__
    return make


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


def _factory_class(factory: Callable[..., Any], cls: EnvClass) -> EnvClass:
    """Returns a class that makes envs by calling `factory`: a subclass of their class `cls`, with
    the options of `factory`."""

    def options(self: Any, **_: Any) -> None:  # only its annotations are used: they are the schema of the options
        raise NotImplementedError

    options.__annotations__ = get_type_hints(factory if inspect.isroutine(factory) else type(factory).__call__)
    parts = {
        "__new__": lambda cls, **chosen: factory(**chosen),
        "__init__": options,
        "__signature__": inspect.signature(factory),
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), parts)
