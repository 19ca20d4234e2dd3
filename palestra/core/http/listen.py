"""Listening sockets of the HTTP servers, and formatting of their addresses."""

from __future__ import annotations

import socket


def open_listener(host: str, port: int) -> socket.socket:
    """Opens a listening socket with TCP_NODELAY, which accepted sockets inherit.

    asyncio sets it only on sockets that name their protocol; without it each answer waits 40 ms until the client
    acknowledges the headers. Raises ValueError if the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}. Choose another --port.") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_host(host: str) -> str:
    """Returns the host as written in URLs: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
