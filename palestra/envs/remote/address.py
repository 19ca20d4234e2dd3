"""Config of remote env servers (`at` of an env), their counters and tokens. Does not import gRPC.

env: {type: math, difficulty: 2, at: [host1:50051, host2:50051]}
env: {type: math, difficulty: 2, at: servers.txt}        # one address per line, re-read every second
env: {type: math, difficulty: 2, at: {servers: [host1:50051], ca: ca.pem, request_timeout: 30}}
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from palestra.core.config import StrictModel, validate

ADDRESS_PATTERN = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+", re.ASCII)
TOKEN_VARIABLE = "PALESTRA_ENV_TOKEN"
DRY_RUN_WAIT_S = 3.0  # seconds that a dry run waits for an env's servers
METRIC_NAMES = ("env_sessions", "env_lost", "env_replays", "env_replayed_steps")

counters: Counter[str] = Counter()  # events of remote envs in this process, by name in METRIC_NAMES


class EnvServersConfig(StrictModel):
    """The servers of a remote env. Every server must serve the env."""

    servers: tuple[str, ...] | str
    """Addresses `HOST:PORT`, or the path of a file with one address per line (`#` starts a
    comment). The file is re-read every second, so servers can be added and removed during a run."""
    token_env: str = TOKEN_VARIABLE
    """Name of the environment variable that holds the servers' token. Unused if `token_file` is set."""
    token_file: str | None = None
    """Path of a file that holds the servers' token. Null: use `token_env`."""
    tls: bool = False
    """Connect with TLS and verify the server's certificate against the system's trusted authorities."""
    ca: str | None = None
    """Path of a PEM file with the certificate authorities to trust instead of the system's. Implies TLS."""
    request_timeout: float = Field(60.0, gt=0)
    """Seconds until an unanswered request counts as lost; its session is then replayed on another
    connection. Raise it for envs with slow steps."""
    server_timeout: float = Field(120.0, ge=0)
    """Seconds that an env waits for a reachable server before its episode fails. Raise it if servers restart slowly."""

    @field_validator("servers")
    @classmethod
    def _addresses(cls, servers: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(servers, str) and not ADDRESS_PATTERN.fullmatch(servers):
            return servers
        return _checked((servers,) if isinstance(servers, str) else servers, "at")

    def addresses(self) -> tuple[str, ...]:
        """Returns the current server addresses. Raises ValueError if the address file is unreadable or malformed."""
        if not isinstance(self.servers, str):
            return self.servers
        path = Path(self.servers)
        try:
            lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise ValueError(
                f"at: {path} is neither the address of an env server, such as localhost:50051, nor a file with one a "
                f"line that can be read: {error.strerror}"
            ) from error
        return _checked(tuple(dict.fromkeys(line for line in lines if line)), str(path))

    def token(self) -> str | None:
        """Returns the servers' token, or None. Raises ValueError if `token_file` is unreadable or empty."""
        return read_token(self.token_env, self.token_file)


def parse_env_servers(at: Any) -> EnvServersConfig:
    """Parses `at` of an env config: an address, a list of addresses, a file path or a mapping of `EnvServersConfig`
    fields.

    Raises ValueError if it is invalid.
    """
    try:
        return validate(EnvServersConfig, dict(at) if isinstance(at, Mapping) else {"servers": at})
    except ValueError as error:
        raise ValueError(f"at of an env: {error}") from error


def pop_metrics() -> dict[str, float]:
    """Returns and resets the counters of remote envs in this process; empty if nothing happened since the last call.

    `env_sessions`: sessions opened for episodes. `env_lost`: sessions lost with a server or by a missed deadline.
    `env_replays`: lost sessions restored by replay, in `env_replayed_steps` joint steps. A session that is lost and not
    restored is a failed episode.
    """
    found = {name: float(counters[name]) for name in METRIC_NAMES} if counters else {}
    counters.clear()
    return found


def read_token(variable: str, file: str | Path | None) -> str | None:
    """Returns the token in `file`, or, if `file` is None, in the environment variable `variable` (None if unset).

    Raises ValueError if the file is unreadable or empty.
    """
    if file is None:
        return os.environ.get(variable) or None
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read the token in {file}: {error.strerror}") from error
    if not token:
        raise ValueError(f"there is no token in {file}: write a long random word into it")
    return token


def _checked(addresses: tuple[str, ...], where: str) -> tuple[str, ...]:
    if wrong := [address for address in addresses if not ADDRESS_PATTERN.fullmatch(address)]:
        raise ValueError(
            f"{where} names {wrong[0]!r}, which is not an address: write HOST:PORT, such as localhost:50051"
        )
    return addresses


def with_short_waits(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the config `tree` whose envs wait at most `DRY_RUN_WAIT_S` seconds for a
    server; used for dry runs."""
    changed = dict(tree)
    if isinstance(tree.get("env"), Mapping):
        changed["env"] = _hasty(tree["env"])
    if isinstance(envs := tree.get("envs"), Mapping):
        changed["envs"] = {name: _hasty(env) if isinstance(env, Mapping) else env for name, env in envs.items()}
    return changed


def _hasty(env: Mapping[str, Any]) -> dict[str, Any]:
    at = env.get("at")
    if isinstance(at, str | list | tuple) and at:
        return {**env, "at": {"servers": at, "server_timeout": DRY_RUN_WAIT_S}}
    if isinstance(at, Mapping) and isinstance(at.get("server_timeout", DRY_RUN_WAIT_S), int | float):
        return {**env, "at": {**at, "server_timeout": min(DRY_RUN_WAIT_S, at.get("server_timeout", DRY_RUN_WAIT_S))}}
    return dict(env)
