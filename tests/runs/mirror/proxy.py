"""A TCP proxy between a process and a server that can be slow or down."""

import contextlib
import socket
import threading
import time

CHUNK_BYTES = 4096


class Proxy:
    """Forwards connections to `port` of this machine from `self.port`.

    `bytes_per_s` limits what clients send (None: unlimited); `sent_bytes` counts it. While `is_down`, new and open
    connections are closed at once.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.bytes_per_s: float | None = None
        self.sent_bytes = 0
        self.is_down = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.is_down = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_down:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self.target))
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with contextlib.suppress(OSError):
            source.settimeout(0.1)
            while not self.is_down:
                try:
                    data = source.recv(CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    break
                target.sendall(data)
                if is_upload:
                    self.sent_bytes += len(data)
                    if self.bytes_per_s:
                        time.sleep(len(data) / self.bytes_per_s)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
