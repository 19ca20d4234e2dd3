"""Which web pages may call a server. A browser sends requests for any page it shows, from inside the user's machine and
network, and names the page's site in the Origin header.

Two attacks are refused. A page of another site sends a request (its answer is hidden from it, its effect is not): the
Origin header gives it away. A page lets its own name point to this machine (DNS rebinding) and passes for a page of the
server: the Host header gives it away. An address in the Host header is always accepted, since no name server can point
it elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Origins:
    """The pages and names that a server accepts.

    `allowed` are origins of other sites' pages that may call it ("https://chat.example.org"). `hosts` are the names it
    is called by, besides addresses and localhost; None accepts any. `pages` is true for a server that shows pages of
    its own; one that does not accepts no request of a browser's page but those of `allowed`.
    """

    allowed: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    pages: bool = True

    @classmethod
    def of(
        cls, host: str, allowed: Collection[str] = (), hosts: Collection[str] = (), *, pages: bool = True
    ) -> Origins:
        """The rule for a server that listens at `host`: on loopback it is called by loopback's names and `hosts` alone,
        elsewhere by any. Raises ValueError for an element of `allowed` that is no origin."""
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
        proxied = {name for origin in allowed if (name := host_name(urlsplit(origin).netloc))}
        names = {name.lower() for name in hosts} | proxied
        return cls(tuple(allowed), frozenset(names) if is_loopback(host) or hosts else None, pages)

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """The reason to refuse a request with these headers (their names in any case); None to accept it."""
        if page := self.foreign_page(headers):
            return f'web pages of "{page[:200]}" may not call this server; `palestra serve` has --allow-origin for them'
        host = headers.get("host", "")
        if not self.is_called(host):
            return f'this server is not called "{host[:200]}": use its address, localhost, or a name it was given'
        return None

    def foreign_page(self, headers: Mapping[str, str]) -> str | None:
        """The origin of the page that sends the request, where it may not; None for programs and accepted pages."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin in self.allowed:
            return None
        if origin is None:
            return "another site" if site != "none" and not self.pages else None
        host = headers.get("host", "").lower()
        own = origin.lower() in (f"http://{host}", f"https://{host}")
        return None if own and self.pages else origin

    def is_called(self, host: str) -> bool:
        """True if a Host header holds a name of this server."""
        name = host_name(host)
        return self.hosts is None or name == "localhost" or _is_address(name) or name in self.hosts


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens at `host`."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def host_name(host: str) -> str:
    """The name or address in a Host header, in lower case, without the port; empty where it has none."""
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
