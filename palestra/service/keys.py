"""Who may use the server: API keys, of which only hashes are kept, and the short-lived tokens given for them.

The file has a line for each key, `<name> <SHA-256 of the key>`. Keys are 32 random bytes, so that one round of SHA-256
cannot be turned back. Without a file everybody is "anyone" and any key will do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path

import jwt

from palestra.files import atomic_write

ANYONE = "anyone"
PREFIX = "tml-"  # of the keys that are made here, as official clients want it
TOKEN_LIFE = 3600.0  # seconds
_NAME = re.compile(r"[A-Za-z0-9_.@\-]{1,100}")


class Keys:
    """The keys in a file, read again when it changes: a key that is removed is refused at once.

    `secret` signs tokens and addresses. One that outlives the process keeps clients going over a restart, who never ask
    for a second token before the first one's hour is over."""

    def __init__(self, path: Path | None, secret: str | None = None) -> None:
        self.path = path
        self._read_at = 0.0
        self._owners: dict[str, str] = {}
        self._secret = secret or secrets.token_hex(32)
        if path and not path.exists():
            raise ValueError(f"no file of keys at {path}: make one with `palestra keys add NAME --auth {path}`")

    def owner(self, key: str | None) -> str | None:
        """The owner of a key or token, or None. A key of another kind ("sk-...") may come with "tml-" in front, without
        which official clients send none."""
        if self.path is None:
            return ANYONE
        if not key:
            return None
        table = self._table()
        return table.get(_hash(key)) or table.get(_hash(key.removeprefix(PREFIX))) or self._of_token(key)

    def token(self, owner: str) -> str:
        """A signed token that stands for the owner's key for an hour."""
        now = int(time.time())
        claims = {"sub": owner, "iat": now, "exp": now + int(TOKEN_LIFE)}
        return jwt.encode(claims, self._secret, algorithm="HS256")

    def sign(self, text: str) -> str:
        """A signature that only this server can make."""
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    def signed(self, text: str, signature: str) -> bool:
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
            self._owners, self._read_at = {hashed: name for name, hashed in read_keys(self.path)}, changed
        return self._owners


def read_keys(path: Path) -> list[tuple[str, str]]:
    """(name, hash) of each line. Raises ValueError for a line that is neither empty nor a comment nor a key."""
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 2 or not re.fullmatch("[0-9a-f]{64}", line[1]):
            raise ValueError(f'{path}: "{line[0]} ..." is no line of a name and a SHA-256 sum; use `palestra keys add`')
    return [(name, hashed) for name, hashed in lines]


def add_key(path: Path, name: str) -> str:
    """A new key for `name`, which is shown this once. An owner may have several."""
    if not _NAME.fullmatch(name) or name == ANYONE:
        raise ValueError(f'"{name}" cannot own keys: use letters, digits and "_.@-", and not "{ANYONE}"')
    key = PREFIX + secrets.token_urlsafe(32)
    old = path.read_bytes() if path.exists() else b"# name and SHA-256 of each API key\n"
    atomic_write(path, old + f"{name} {_hash(key)}\n".encode())
    path.chmod(0o600)
    return key


def remove_keys(path: Path, name: str) -> int:
    """Removes the keys of `name`; how many there were."""
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.split()[:1] != [name]]
    atomic_write(path, "".join(kept).encode())
    path.chmod(0o600)
    return len(lines) - len(kept)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
