"""`palestra dashboard`: runs in the browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from palestra.api.console import print_line, require_packages, user_errors


def dashboard(
    root: Annotated[Path, typer.Option(help="the folder that holds runs")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 6070,
    host: Annotated[str, typer.Option(help="the address to listen on; any other than localhost needs a --token")] = (
        "127.0.0.1"
    ),
    token: Annotated[
        str, typer.Option(help="require this token (or set PALESTRA_DASHBOARD_TOKEN, which `ps` does not show)")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="show this `palestra serve` too; set TINKER_API_KEY if it wants the operator's key")
    ] = "",
    allow_host: Annotated[list[str] | None, typer.Option(help="a host name of the server, besides its address")] = None,
) -> None:
    """Show runs in the browser, live: curves, episodes, populations, alarms.

    It reads run folders only, and needs no account and no network. With --engine it also shows a training server: who
    is connected, queues, adapters, memory, shares of API keys, last errors.

    Examples:

        palestra dashboard
        palestra dashboard --root experiments --port 8080
        palestra dashboard --engine http://127.0.0.1:8000
        palestra dashboard --host 0.0.0.0 --token "$(openssl rand -hex 16)"
    """
    with user_errors():
        require_packages("the dashboard", "dashboard", "starlette", "uvicorn", "httptools")
        from palestra.dashboard.app import serve

        token = token or os.environ.get("PALESTRA_DASHBOARD_TOKEN", "")
        serve(root, host, port, token, allow_host or [], engine, print_line)
