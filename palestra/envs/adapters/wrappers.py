"""Wrappers of package envs by config: Gymnasium's, SuperSuit's, or a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.core.config.user_modules import load_object
from palestra.core.failures import one_line

Wrappers = Sequence[Mapping[str, Any]] | None

EXAMPLE = "{type: TimeLimit, max_episode_steps: 200}"
# Their means are over earlier episodes, which no checkpoint holds: a resumed run would go on with others.
REMEMBERING = {
    "NormalizeObservation": "set normalize_observations of the policy",
    "NormalizeReward": "set value_norm of the algorithm",
}


def reset_arguments(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments beside the seed with which an env is reset: none without options, since
    not every `reset` takes them."""
    return {"options": options} if options else {}


def wrap(env: Any, wrappers: Wrappers, home: str) -> Any:
    """Returns `env` within `wrappers`, the first of them innermost.

    Each has a `type`, "module:name" or a name in the module `home`, and the options that this class or function takes
    beside the env. Raises ValueError if one cannot be found or made, or keeps what a checkpoint does not hold.
    """
    for index, wrapper in enumerate(wrappers or ()):
        place = f"wrappers[{index}]"
        if not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("type"), str):
            raise ValueError(f'{place} has no type: write {EXAMPLE}, or "module:Class" as its type')
        path = wrapper["type"] if ":" in wrapper["type"] else f"{home}:{wrapper['type']}"
        if remedy := REMEMBERING.get(path.rpartition(":")[2]):
            raise ValueError(f"{place}, {path}, normalises by statistics that a resumed run would not have: {remedy}")
        make = load_object(path, place)
        options = {name: value for name, value in wrapper.items() if name != "type"}
        try:
            env = make(env, **options)
        except Exception as error:  # a wrapper may fail in any way
            given = options or "no options"
            raise ValueError(f"{place}, {path}, cannot wrap {env} with {given}: {one_line(error)}") from error
    return env
