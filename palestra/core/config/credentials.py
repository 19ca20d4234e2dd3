"""Finds credentials in configs, and hides them in texts. A config is written to the run's folder, which others may
read, and from there to dashboards, reports, trackers and published cards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "REDACTED"  # plain text in YAML and in URLs
REMEDY = "give them in an environment variable (key_env: NAME, or the client's own, such as AWS_SECRET_ACCESS_KEY)"
# A user without a password is none there: container@account of Azure's stores, a login that needs a key or a ticket.
USER_IS_NO_SECRET = ("abfs", "abfss", "wasb", "wasbs", "sftp", "ssh", "git+ssh", "hdfs", "smb")
_WORDS = r"api[_-]?key|apikey|pass(?:word|wd|phrase)|(?:access|secret|private)[_-]?key|client[_-]?secret|authorization"
_WORDS += r"|(?:auth|access|bearer|refresh|api|hf)[_-]?token"
_NAME = re.compile(rf"(?:.*[_-])?(?:{_WORDS})|token|secret|credentials?", re.IGNORECASE)
_KEYS = r"(?:api|access|account|subscription|secret|private)[_-]?key(?:[_-]?id)?"
_ENDS = rf"token|secret|password|signature|credentials?|access[_-]?id|{_KEYS}"
_QUERY_NAME = re.compile(rf"(?:.*[._-])?(?:{_WORDS}|sig|auth|pass|pwd)|key|.*(?:{_ENDS})", re.IGNORECASE)
_TOKEN_OF_TEXT = re.compile(r"\D{0,11}")  # an env's "token: x": keys and tokens of services are longer or have digits
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://\S*", re.IGNORECASE)  # bounded: else long words take quadratic time
_ASSIGNED = re.compile(
    rf"\b((?:\w*[_-])?(?:{_WORDS})\b[\"']?\s*[:=]\s*(?:Bearer\s+)?[\"']?)[^\s\"',}}\]]+", re.IGNORECASE
)
_BEARER = re.compile(r"\b(Bearer\s+)[\w.~+/=-]{8,}")


def check_no_credentials(tree: Any, what: str = "") -> None:
    """Raises ValueError, with the key but not the value, if a config or a URL holds credentials. `what` names it."""
    for place in _places(tree, what):
        raise ValueError(f"{place} holds credentials, which would be written to the run's files: {REMEDY}")


def hide_credentials(text: str) -> str:
    """Returns a text with the credentials of its URLs, and the values of names such as `api_key`, as "REDACTED"."""
    text = _URL.sub(lambda found: _hidden_url(found[0]), text)
    return _BEARER.sub(rf"\1{HIDDEN}", _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def _places(value: Any, path: str) -> Iterator[str]:
    """Yields the dotted key of each value that is a credential."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = str(key).rpartition(".")[2]
            if isinstance(inner, str) and inner and _NAME.fullmatch(name) and not _is_token_of_text(name, inner):
                yield _join(path, key)
            else:
                yield from _places(inner, _join(path, key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _places(inner, path)
    elif isinstance(value, str) and _URL.fullmatch(value) and _hidden_url(value) != value:
        yield path or "the URL"


def _is_token_of_text(name: str, value: str) -> bool:
    """Returns True for the value of a key `token` that is a token of a vocabulary or a word, such as "x" or "<pad>"."""
    return name.lower() == "token" and _TOKEN_OF_TEXT.fullmatch(value) is not None


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _hidden_url(url: str) -> str:
    """Returns a URL with its user, password and secret parameters hidden."""
    scheme, _, rest = url.partition("://")
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, _ = place.rpartition("@")
    if at and (scheme.lower() not in USER_IS_NO_SECRET or ":" in user):
        rest = HIDDEN + rest[len(user) :]
    return re.sub(r"([?&;]([^=?&;#\s]+)=)([^&;#,\s\"')]+)", _hidden_parameter, f"{scheme}://{rest}")


def _hidden_parameter(found: re.Match[str]) -> str:
    return found[1] + HIDDEN if _QUERY_NAME.fullmatch(found[2]) else found[0]
