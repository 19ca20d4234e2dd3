"""Which web pages may ask. A browser sends what a page tells it to, from inside the user's machine and network, and
says in Origin whose page it was: a page of another site gets 403, unless it was allowed.

A page can also have its own name point to this machine (DNS rebinding), and then passes for the server's own: a server
that listens on loopback therefore answers to loopback's names alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Origins:
    """`allowed` are the origins of other sites' pages that may ask ("https://chat.example.org"); `hosts` the names that
    the server answers to beside theirs, None for any."""

    allowed: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None

    @classmethod
    def of(cls, host: str, allowed: tuple[str, ...]) -> Origins:
        """Those of a server that listens at `host`. Raises ValueError for what is no origin."""
        for origin in allowed:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or not parts.netloc
                or origin != f"{parts.scheme}://{parts.netloc}"
            ):
                raise ValueError(
                    f'"{origin}" is no origin of a web page: write https://chat.example.org, without a path'
                )
        return cls(allowed, LOOPBACK if host in LOOPBACK else None)

    def refusal(self, headers: Headers) -> str | None:
        """Why a request with these headers is refused; None where it is not."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if origin is not None and origin not in self.allowed and origin.lower().partition("://")[2] != host:
            return f'pages of "{origin[:200]}" may not use this server: `palestra serve --allow-origin` lets them'
        ours = self.hosts is None or _name(host) in self.hosts
        if not ours and host not in [urlsplit(allowed).netloc for allowed in self.allowed]:
            return f'this server listens on loopback and does not answer to "{host[:200]}": ask at 127.0.0.1'
        return None


def _name(host: str) -> str | None:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Gate:
    """Answers 403 where `origins` has a reason to."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.origins.refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse({"detail": refusal}, 403)(scope, receive, send)
