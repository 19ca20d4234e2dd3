"""Builds envs from their config: local ones, or remote ones if `at` names servers. Imports gRPC only for remote envs.

env: {type: math, difficulty: 2, at: [host1:50051, host2:50051]}
env: {type: math, difficulty: 2, at: servers.txt}        # one address per line, re-read every second
env: {type: math, difficulty: 2, at: {servers: [host1:50051], ca: ca.pem, deadline: 30}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from palestra.envs import Env, env_class, env_options
from palestra.remote.place import place_of

OWN = ("type", "at")  # keys of an env config that are not options of its class


def env_maker(env: Mapping[str, Any]) -> Callable[[], Env]:
    """Returns a factory for the env with config `env` (`type`, options of the class, `at`).

    The config is checked now, before any model is loaded. Raises ValueError if it is invalid or no server answers.
    """
    kind, options = env["type"], {key: value for key, value in env.items() if key not in OWN}
    if env.get("at"):
        return remote_kind(env)
    cls: Any = env_class(kind)
    checked = env_options(cls, options)
    return lambda: cls(**checked)


def make_env(**env: Any) -> Env:
    """Returns a new env, local or remote: `make_env(type="math", at=["host:50051"])`.

    Errors are those of `env_maker`.
    """
    return env_maker(env)()


def takes(env: Mapping[str, Any], option: str) -> bool:
    """Returns True if the env class has an option named `option`; asks the server if the env is remote."""
    if env.get("at"):
        return option in remote_kind(env).options
    return option in inspect.signature(env_class(env["type"])).parameters


def remote_kind(env: Mapping[str, Any]) -> Any:
    """Returns the server's `RemoteKind` for the config `env`; calling it makes such envs.

    Raises ValueError if gRPC is not installed, a server refuses the type or an option, or none answers.
    """
    try:
        from palestra.remote.env_client import described
    except ImportError as error:
        raise ValueError(
            f"envs on other machines need more packages ({error}): pip install 'palestra[grpc]'"
        ) from error
    options = {key: value for key, value in env.items() if key not in OWN}
    return described(place_of(env["at"]), env["type"], options)
