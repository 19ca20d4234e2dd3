"""`palestra serve-envs`: envs for training runs on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palestra.api.console import print_line, require_packages, user_errors


def serve_envs(  # noqa: PLR0913 - a parameter for each option
    envs: Annotated[str, typer.Option(help="envs to serve, separated by commas: names, or module:Class")],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 accepts other machines")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 50051,
    workers: Annotated[int, typer.Option(min=1, help="number of worker processes, which share the port")] = 1,
    cert: Annotated[Path | None, typer.Option(help="TLS: this server's certificate chain, as PEM")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS: the certificate's private key, as PEM")] = None,
    token_env: Annotated[
        str, typer.Option(help="environment variable with the token that clients must send")
    ] = "PALESTRA_ENV_TOKEN",
    token_file: Annotated[Path | None, typer.Option(help="a file with that token")] = None,
    lease: Annotated[
        float, typer.Option(min=1, help="seconds of silence after which a client counts as disconnected")
    ] = 60.0,
    grace: Annotated[float, typer.Option(min=0, help="seconds that open sessions are given to end on shutdown")] = 30.0,
    sessions: Annotated[int, typer.Option(min=1, help="maximum number of open sessions per worker")] = 16_384,
    idle: Annotated[
        float, typer.Option(min=1, help="seconds without a request after which a session is closed")
    ] = 3600.0,
    limit: Annotated[float, typer.Option(min=1, help="maximum seconds of one env call")] = 120.0,
) -> None:
    """Serve envs over gRPC. A run whose config has `at: [HOST:PORT]` plays them on this machine.

    Examples:

        palestra serve-envs --envs math,code,debate --workers 4 --host 0.0.0.0
        PALESTRA_ENV_TOKEN=... palestra serve-envs --envs tools --host 0.0.0.0 --cert cert.pem --key key.pem
        palestra train configs/demo.yaml --set env.at=[localhost:50051]

    Ctrl-C or SIGTERM ends the server after open sessions have ended, at most --grace seconds later; a second one ends
    it at once. Clients may give an env any option, including ones that name files or programs on this machine: set a
    token.
    """
    with user_errors():
        require_packages("serving envs", "grpc", "grpc", "grpc_health", "grpc_reflection")
        from palestra.envs.remote.address import read_token
        from palestra.envs.remote.serve import serve
        from palestra.envs.remote.server import EnvServerOptions
        from palestra.envs.remote.session import SessionLimits

        named = tuple(dict.fromkeys(name.strip() for name in envs.split(",") if name.strip()))
        if not named:
            raise ValueError("--envs names no env: pass --envs math,code; `palestra info` lists them")
        token = read_token(token_env, token_file)
        bounds = SessionLimits(
            max_sessions=sessions,
            max_sessions_per_client=max(1, sessions // 2),
            idle_timeout_s=idle,
            call_timeout_s=limit,
        )
        serve(EnvServerOptions(named, host, port, workers, cert, key, token, lease, grace, bounds), print_line)
