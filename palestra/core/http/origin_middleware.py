"""Checks of the Origin and Host headers: which web pages may call a server.

A browser sends requests for any page that it shows, from inside the user's machine and network, and names the page's
site in the Origin header. Two attacks are rejected. Cross-site requests: a page of another site sends a request, whose
answer it cannot read but whose effect occurs; the Origin header identifies it. DNS rebinding: a page makes its own name
resolve to this machine and so counts as a page of the server; the Host header identifies it. An IP address in the Host
header is always accepted, since no name server can redirect it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class OriginPolicy:
    """The web origins and host names that a server accepts.

    `allowed_origins` are origins of other sites' pages that may call it ("https://chat.example.org"). `allowed_hosts`
    are the host names that it accepts besides IP addresses and localhost; None accepts any. `has_pages` is true for a
    server with pages of its own; without it, requests of browser pages are rejected unless their origin is in
    `allowed_origins`.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    has_pages: bool = True

    @classmethod
    def for_host(
        cls, host: str, allowed: Collection[str] = (), hosts: Collection[str] = (), *, pages: bool = True
    ) -> OriginPolicy:
        """Returns the rules for a server that listens at `host`. On loopback only loopback names and `hosts`
        are accepted, on other addresses any name, unless `hosts` are given. Raises ValueError for an element of
        `allowed` that is not an origin."""
        for origin in allowed:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or not parts.netloc
                or origin != f"{parts.scheme}://{parts.netloc}"
            ):
                raise ValueError(
                    f'"{origin}" is not an origin of a web page: write https://chat.example.org, without a path'
                )
        proxied = {name for origin in allowed if (name := host_name(urlsplit(origin).netloc))}
        names = {name.lower() for name in hosts} | proxied
        return cls(tuple(allowed), frozenset(names) if is_loopback(host) or hosts else None, pages)

    def rejection_reason(self, headers: Mapping[str, str]) -> str | None:
        """Returns the reason to reject a request with these headers, or None to accept it. `headers` has lower-case or
        case-insensitive keys."""
        if page := self.foreign_page(headers):
            return f'web pages of "{page[:200]}" may not call this server; `palestra serve` has --allow-origin for them'
        host = headers.get("host", "")
        if not self.accepts_host(host):
            return (
                f'this server is not called "{host[:200]}": use its address, localhost, or a name given as '
                "--allow-host (of `palestra serve`: the origin https://NAME as --allow-origin)"
            )
        return None

    def foreign_page(self, headers: Mapping[str, str]) -> str | None:
        """Returns the origin of the requesting page if it is not accepted; None for accepted pages and other
        programs."""
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        if origin in self.allowed_origins:
            return None
        if origin is None:
            return "another site" if site != "none" and not self.has_pages else None
        host = headers.get("host", "").lower()
        if self.has_pages and origin.lower() in (f"http://{host}", f"https://{host}"):
            return None
        return origin

    def accepts_host(self, host: str) -> bool:
        """Returns True if a Host header holds an accepted name of this server."""
        name = host_name(host)
        return self.allowed_hosts is None or name == "localhost" or _is_address(name) or name in self.allowed_hosts


def is_loopback(host: str) -> bool:
    """Returns True if a server that listens at `host` is reachable from this machine only."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def host_name(host: str) -> str:
    """Returns the name or address in a Host header, in lower case and without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
