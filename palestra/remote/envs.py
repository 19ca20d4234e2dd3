"""Envs by their config: played in this process, or `at` the servers that it names. Nothing here needs gRPC.

env: {type: math, difficulty: 2, at: [host1:50051, host2:50051]}
env: {type: math, difficulty: 2, at: servers.txt}        # one address a line; read again when it changes
env: {type: math, difficulty: 2, at: {servers: [host1:50051], ca: ca.pem, deadline: 30}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from palestra.envs import Env, env_class, env_options
from palestra.remote.place import place_of

OWN = ("type", "at")  # keys of an env that are no options of its class


def env_maker(env: Mapping[str, Any]) -> Callable[[], Env]:
    """What makes an env (its type, options and place), checked now so that a mistake is heard before anything is
    loaded. Raises ValueError for one, and where no server answers."""
    kind, options = env["type"], {key: value for key, value in env.items() if key not in OWN}
    if env.get("at"):
        return remote_kind(env)
    cls: Any = env_class(kind)
    checked = env_options(cls, options)
    return lambda: cls(**checked)


def make_env(**env: Any) -> Env:
    """A new env, here or elsewhere: `make_env(type="math", at=["host:50051"])`."""
    return env_maker(env)()


def takes(env: Mapping[str, Any], option: str) -> bool:
    """Whether an env has an option of that name."""
    if env.get("at"):
        return option in remote_kind(env).options
    return option in inspect.signature(env_class(env["type"])).parameters


def remote_kind(env: Mapping[str, Any]) -> Any:
    """What a server says of an env, which makes such envs when called."""
    try:
        from palestra.remote.env_client import described
    except ImportError as error:
        raise ValueError(
            f"envs on other machines need more packages ({error}): pip install 'palestra[grpc]'"
        ) from error
    options = {key: value for key, value in env.items() if key not in OWN}
    return described(place_of(env["at"]), env["type"], options)
