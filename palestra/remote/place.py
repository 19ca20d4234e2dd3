"""Where an env is played: in this process, or `at` the servers that its config names. Nothing here needs gRPC.

env: {type: math, difficulty: 2, at: [host1:50051, host2:50051]}
env: {type: math, difficulty: 2, at: servers.txt}        # one address a line; read again when it changes
env: {type: math, difficulty: 2, at: {servers: [host1:50051], ca: ca.pem, deadline: 30}}
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from palestra.config import Strict, validate

ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+", re.ASCII)
TOKEN = "PALESTRA_ENV_TOKEN"
GLANCE = 3.0  # seconds that a dry run waits for the servers of an env
FIGURES = ("env_sessions", "env_lost", "env_replays", "env_replayed_steps")

tally: Counter[str] = Counter()  # what has come to pass with remote envs in this process


class Place(Strict):
    """The servers of an env, all of which serve it: addresses, or a file of them.

    The token is the word in the environment variable `token_env`, or in `token_file`. `tls` asks for a server whose
    certificate the system trusts, `ca` for one that the authorities of that file vouch for. A request that is not
    answered within `deadline` seconds is asked of another server; where none is there, an env waits `patience` seconds
    for one to come."""

    servers: tuple[str, ...] | str
    token_env: str = TOKEN
    token_file: str | None = None
    tls: bool = False
    ca: str | None = None
    deadline: float = Field(60.0, gt=0)
    patience: float = Field(120.0, ge=0)

    @field_validator("servers")
    @classmethod
    def _addresses(cls, servers: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(servers, str) and not ADDRESS.fullmatch(servers):
            return servers
        return _checked((servers,) if isinstance(servers, str) else servers, "at")

    def addresses(self) -> tuple[str, ...]:
        """Of the servers, as of now. Raises ValueError where a file of them cannot be read."""
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
        """The word that servers ask for, if there is one."""
        return read_token(self.token_env, self.token_file)


def place_of(at: Any) -> Place:
    """A place as an env's config has it. Raises ValueError."""
    try:
        return validate(Place, dict(at) if isinstance(at, Mapping) else {"servers": at})
    except ValueError as error:
        raise ValueError(f"at of an env: {error}") from error


def figures() -> dict[str, float]:
    """What has happened to remote envs since this was last asked; nothing where there are none.

    `env_sessions` opened for episodes, `env_lost` with a server or a deadline, `env_replays` that brought one back, in
    `env_replayed_steps`. What was lost and not brought back is an episode that failed."""
    found = {name: float(tally[name]) for name in FIGURES} if tally else {}
    tally.clear()
    return found


def read_token(variable: str, file: str | Path | None) -> str | None:
    """The token in a file, or else in an environment variable. Raises ValueError where the file has none."""
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
    if wrong := [address for address in addresses if not ADDRESS.fullmatch(address)]:
        raise ValueError(f"{where} names {wrong[0]!r}, which is no address: write HOST:PORT, such as localhost:50051")
    return addresses


def impatient(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose envs wait no longer than `GLANCE` seconds for a server: for a check that nobody waits for."""
    changed = dict(tree)
    if isinstance(tree.get("env"), Mapping):
        changed["env"] = _hasty(tree["env"])
    if isinstance(envs := tree.get("envs"), Mapping):
        changed["envs"] = {name: _hasty(env) if isinstance(env, Mapping) else env for name, env in envs.items()}
    return changed


def _hasty(env: Mapping[str, Any]) -> dict[str, Any]:
    at = env.get("at")
    if isinstance(at, str | list | tuple) and at:
        return {**env, "at": {"servers": at, "patience": GLANCE}}
    if isinstance(at, Mapping) and isinstance(at.get("patience", GLANCE), int | float):
        return {**env, "at": {**at, "patience": min(GLANCE, at.get("patience", GLANCE))}}
    return dict(env)
