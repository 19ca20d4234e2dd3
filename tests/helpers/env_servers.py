"""Env servers in processes of their own, which tests start, kill and restart."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from helpers.warm_processes import start_palestra

from palestra.envs.remote import SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.address import parse_env_servers
from palestra.envs.remote.connection import auth_metadata


class EnvServer:
    """`palestra serve-envs`, always started at the same address."""

    def __init__(self, envs: str, *options: object, environment: dict[str, str] | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"localhost:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        self.words = ["serve-envs", "--envs", envs, "--port", port, *options]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | (environment or {})
        self.start()

    def start(self) -> None:
        """Starts the process; returns once it serves."""
        self.process = start_palestra(*self.words, env=self.environment, with_stderr=False)
        self.first_line = self.process.stdout.readline()
        assert self.first_line.startswith("serving "), self.first_line + self.process.stdout.read()

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> str:
        """Ends it by SIGTERM; returns its output since it served."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, out
        return out


@contextmanager
def serving(envs: str, *options: object, **more: Any) -> Iterator[EnvServer]:
    """A server that is killed at the end if it still runs."""
    server = EnvServer(envs, *options, **more)
    try:
        yield server
    finally:
        server.kill()


def describe_env(address: str, **kind: Any) -> pb.Description:
    """Returns the server's description of an env, over plain gRPC."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Describe", pb.Kind.SerializeToString, pb.Description.FromString)
        description: pb.Description = call(
            pb.Kind(**kind), timeout=10, metadata=auth_metadata(parse_env_servers([address]))
        )
        return description


def count_sessions(address: str) -> int:
    """The number of open sessions of the server."""
    return int(describe_env(address).load)


def wait_until_closed(address: str) -> None:
    """Waits until the server has no open session; sessions of dropped envs are closed when they are collected."""
    gc.collect()
    wait_for_value(lambda: count_sessions(address), 0)


def wait_for_value(figure: Any, expected: Any, seconds: float = 10.0) -> None:
    """Waits until `figure()` equals `expected`."""
    end = time.monotonic() + seconds
    while (found := figure()) != expected:
        assert time.monotonic() < end, f"{found}, not {expected}, after {seconds} s"
        time.sleep(0.02)
