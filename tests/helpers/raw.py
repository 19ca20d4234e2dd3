"""Raw HTTP requests to servers on this machine, as browsers and attackers send them."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class Reply:
    """A status and a body; status 0 if the server hung up without a response."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        self.head = head.decode("latin-1").lower()
        self.status = int(head.split()[1]) if head else 0
        length = re.search(r"content-length: (\d+)", self.head)
        self.whole = bool(length) and len(self.body) >= int(length[1])

    def json(self) -> Any:
        return json.loads(self.body)


def connected(url: str, timeout: float = 20.0) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout)


def ask(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    """The reply to one request; headers such as `Content_Length` replace the correct ones."""
    with connected(url) as wire:
        wire.sendall(head(url, method, path, body, **headers) + body)
        return answer(wire)


def head(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    fields = {"Host": urlsplit(url).netloc, "Connection": "close", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer(wire: socket.socket) -> Reply:
    """The bytes received until the server hangs up, or has sent all that its headers announced."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while not Reply(data).whole and (piece := wire.recv(2**16)):
            data += piece
    return Reply(data)


def endless(url: str, path: str, megabytes: int, **headers: str) -> tuple[Reply, int]:
    """The reply to a chunked body of `megabytes` MiB, and how many MiB were sent before the server hung up."""
    piece = b"100000\r\n" + b"1" * 2**20 + b"\r\n"
    with connected(url) as wire:
        wire.sendall(head(url, "POST", path, Content_Length="", Transfer_Encoding="chunked", **headers))
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < megabytes:
                wire.sendall(piece)
                sent += 1
        return answer(wire), sent


def resident(pid: int, *, peak: bool = False) -> int:
    """Memory of a process [MiB], now or at its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) // 1024


@contextlib.contextmanager
def many(url: str, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """`count` open connections, on each of which `first` was sent."""
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connected(url)) for _ in range(count)]
        for wire in wires:
            wire.sendall(first)
        yield wires
