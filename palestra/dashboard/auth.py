"""Access control of the dashboard and of games in the browser: a token, and the checks of every HTTP server.

Without a token anyone who reaches the port may read, so the server then answers only to host names that a foreign web
page cannot take over (DNS rebinding): IP addresses, localhost, and the allowed names. With a token every request needs
it: in the URL the first time, which sets a cookie, or as a bearer token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, MutableMapping
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, RedirectResponse, Response

from palestra.core.http.limits import AdmissionMiddleware, AsgiApp, HttpLimits, Receive, Scope, Send, bearer_token
from palestra.core.http.origin_middleware import OriginPolicy

COOKIE_NAME = "palestra_dashboard"
COOKIE_LIFETIME_S = 365 * 24 * 3600
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TOKEN_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>palestra</title><h1>This page needs its token</h1>
<p>It is in the address that <code>palestra</code> printed.</p>
<form method="get"><label>Token <input name="token" type="password" autocomplete="off" autofocus></label>
<button>Open</button></form></html>"""


def guard(
    app: AsgiApp, token: str, hosts: Collection[str], limits: HttpLimits, *, cookie: str = COOKIE_NAME
) -> AsgiApp:
    """Returns `app` behind all checks of a server with pages. `hosts` are accepted host names besides IP addresses and
    localhost; with a token every name is. Two servers on one host need different `cookie` names."""
    origins = OriginPolicy(allowed_hosts=None if token else frozenset(hosts))
    admission = AdmissionMiddleware(app, origins, limits, error_body=lambda status, reason: {"error": reason})
    return TokenMiddleware(admission, token, cookie)


class TokenMiddleware:
    """ASGI middleware that asks for `token`, unless it is empty, and adds security headers to every response."""

    def __init__(self, app: AsgiApp, token: str, cookie: str) -> None:
        self.app = app
        self.cookie = cookie
        self.token_hash = _hash(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        answer: AsgiApp = self.app
        if self.token_hash:
            answer = self._ask(scope) or self.app
        await answer(scope, receive, _with_security_headers(send))

    def _ask(self, scope: Scope) -> Response | None:
        """Returns None if the request has the token as cookie or bearer; 401 if not; if the token is in the URL, a
        redirect to the URL without it that sets the cookie."""
        request = HTTPConnection(scope)
        token = request.query_params.get("token")
        if token is not None and self._right(_hash(token)):
            address = "/" + scope["path"].lstrip("/\\")  # `//host` would redirect to another server
            others = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            if rest := urlencode(others):
                address += f"?{rest}"
            response = RedirectResponse(address, 303)
            response.set_cookie(
                self.cookie,
                self.token_hash,
                COOKIE_LIFETIME_S,
                httponly=True,
                samesite="strict",
                secure=scope.get("scheme") == "https",
            )
            return response
        bearer = _hash(bearer_token(request.headers))
        if self._right(request.cookies.get(self.cookie, "")) or self._right(bearer):
            return None
        return HTMLResponse(TOKEN_PAGE, 401)

    def _right(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode(), self.token_hash.encode())


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def with_token(address: str, token: str) -> str:
    """Returns the address that opens a page of a server; `token` may be "" (none)."""
    return f"{address}?token={token}" if token else address


def _with_security_headers(send: Send) -> Send:
    """Adds the security headers to every response."""

    async def with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(SECURITY_HEADERS)
            headers.setdefault("Cache-Control", "no-cache")
        await send(message)

    return with_headers
