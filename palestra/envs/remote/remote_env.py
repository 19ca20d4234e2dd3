"""Builds envs from their config: local ones, or remote ones if `at` names servers (address.py).
Imports gRPC only for remote envs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from palestra.envs import Env, load_env_class, new_env, validate_env_options
from palestra.envs.remote.address import parse_env_servers

NON_OPTION_KEYS = ("type", "at")  # keys of an env config that are not options of its class


def env_factory(env: Mapping[str, Any]) -> Callable[[], Env]:
    """Returns a factory for the env with config `env` (`type`, options of the class, `at`).

    The config is checked now, before any model is loaded. Raises ValueError if it is invalid or no server answers.
    """
    kind = env["type"]
    options = {key: value for key, value in env.items() if key not in NON_OPTION_KEYS}
    if env.get("at"):
        return remote_env_spec(env)
    cls: Any = load_env_class(kind)
    checked = validate_env_options(cls, options)
    return lambda: new_env(cls, checked)


def make_env(**env: Any) -> Env:
    """Returns a new env, local or remote: `make_env(type="math", at=["host:50051"])`.

    Errors are those of `env_factory`.
    """
    return env_factory(env)()


def has_option(env: Mapping[str, Any], option: str) -> bool:
    """Returns True if the env class has an option named `option`; asks the server if the env is remote."""
    if env.get("at"):
        return option in remote_env_spec(env).options
    return option in inspect.signature(load_env_class(env["type"])).parameters


def remote_env_spec(env: Mapping[str, Any]) -> Any:
    """Returns the server's `RemoteEnvSpec` for the config `env`; calling it makes such envs.

    Raises ValueError if gRPC is not installed, a server refuses the type or an option, or none answers.
    """
    try:
        from palestra.envs.remote.client import describe_env
    except ImportError as error:
        raise ValueError(
            f"envs on other machines need more packages ({error}): pip install 'palestra[grpc]'"
        ) from error
    options = {key: value for key, value in env.items() if key not in NON_OPTION_KEYS}
    return describe_env(parse_env_servers(env["at"]), env["type"], options)
