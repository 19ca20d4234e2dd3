"""The socket that servers of ours listen at, and how its address is written."""

from __future__ import annotations

import socket


def listening(host: str, port: int) -> socket.socket:
    """A socket that clients reach, with TCP_NODELAY, which accepted ones inherit: asyncio sets it only on sockets that
    name their protocol, and without it each answer waits 40 ms for the client to acknowledge the headers. Raises
    ValueError where the port is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}. Choose another --port.") from error
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return door


def bracketed(host: str) -> str:
    """A host as addresses have it: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
