"""API keys, stored as hashes, and the short-lived tokens issued for them.

The file has one line for each key, `<name> <SHA-256 of the key>`. Keys have 32 random bytes, so that one round of
SHA-256 cannot be inverted. Without a file every client is "anyone" and any key is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path
from typing import BinaryIO

import jwt

from palestra.core.files import acquire_lock, atomic_write

ANONYMOUS_OWNER = "anyone"
KEY_PREFIX = "tml-"  # of generated keys; official clients require it
TOKEN_TTL_S = 3600.0  # seconds
PRIVATE = 0o600  # permissions of the file
_NAME = re.compile(r"[A-Za-z0-9_.@\-]{1,100}")


class ApiKeys:
    """The keys in a file, which is read again when it changes: a removed key is rejected at once.

    `secret` signs tokens and URLs. A secret that outlives the process keeps clients connected over a restart, since
    they request no second token before the first expires after an hour. Raises ValueError if the file does not exist.
    """

    def __init__(self, path: Path | None, secret: str | None = None) -> None:
        self.path = path
        self._read_at = 0.0
        self._owners: dict[str, str] = {}
        self._secret = secret or secrets.token_hex(32)
        if path and not path.exists():
            raise ValueError(f"no file of keys at {path}: make one with `palestra keys add NAME --auth {path}`")

    def owner_of(self, key: str | None) -> str | None:
        """Returns the owner of a key or token, or None. A key of another kind ("sk-...") may be prefixed with "tml-",
        without which official clients refuse to send it."""
        if self.path is None:
            return ANONYMOUS_OWNER
        if not key:
            return None
        table = self._table()
        return table.get(_hash(key)) or table.get(_hash(key.removeprefix(KEY_PREFIX))) or self._of_token(key)

    def issue_token(self, owner: str) -> str:
        """Returns a signed token that is valid for the owner for an hour."""
        now = int(time.time())
        claims = {"sub": owner, "iat": now, "exp": now + int(TOKEN_TTL_S)}
        return jwt.encode(claims, self._secret, algorithm="HS256")

    def sign(self, text: str) -> str:
        """Returns the HMAC-SHA256 signature of `text` with the server's secret."""
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    def is_signed(self, text: str, signature: str) -> bool:
        """Returns True if `signature` is the server's signature of `text`."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode())

    def _of_token(self, token: str) -> str | None:
        try:
            owner = jwt.decode(token, self._secret, algorithms=["HS256"])["sub"]
        except (jwt.PyJWTError, UnicodeError):
            return None
        return owner if owner in self._table().values() else None

    def _table(self) -> dict[str, str]:
        assert self.path is not None
        changed = self.path.stat().st_mtime
        if changed != self._read_at:
            self._owners = {hashed: name for name, hashed in read_keys(self.path)}
            self._read_at = changed
        return self._owners


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Returns (name, hash) of each line. Raises ValueError for a line that is not empty, a comment or a key."""
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 2 or not re.fullmatch("[0-9a-f]{64}", line[1]):
            raise ValueError(
                f'{path}: "{line[0]} ..." is not a line of a name and a SHA-256 sum; use `palestra keys add`'
            )
    return [(name, hashed) for name, hashed in lines]


def add_key(path: Path, name: str) -> str:
    """Adds a new key for `name` and returns it; it is not stored in plain text. An owner may have several. Raises
    ValueError if the name is not allowed."""
    if not _NAME.fullmatch(name) or name == ANONYMOUS_OWNER:
        raise ValueError(f'"{name}" cannot own keys: use letters, digits and "_.@-", and not "{ANONYMOUS_OWNER}"')
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    with _exclusive(path):
        old = path.read_bytes() if path.exists() else b"# name and SHA-256 of each API key\n"
        atomic_write(path, old + f"{name} {_hash(key)}\n".encode(), PRIVATE)
    return key


def remove_keys(path: Path, name: str) -> int:
    """Removes the keys of `name` and returns their number."""
    with _exclusive(path):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.split()[:1] != [name]]
        atomic_write(path, "".join(kept).encode(), PRIVATE)
    return len(lines) - len(kept)


def _exclusive(path: Path) -> BinaryIO:
    """Returns a context in which no other process changes a file of keys."""
    return acquire_lock(path.with_name(f".{path.name}.lock"), f"the keys in {path}", wait=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
