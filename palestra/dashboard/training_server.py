"""What the dashboard shows of a training server: its console, asked for in the dashboard's own name.

The API key of the operator is read from TINKER_API_KEY (or MINT_API_KEY); the browser never gets it.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

TIMEOUT_S = 5.0  # seconds for an answer
MAX_BYTES = 2**22  # of an answer
NO_SERVER = "no server is watched here: start with `palestra dashboard --engine http://127.0.0.1:8000`"


class TrainingServer:
    """The server at `url`, or none if it is "". Raises ValueError if it is not the address of a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f'--engine is the address of a server, such as http://127.0.0.1:8000, not "{url}"')
        if parts.username is not None:
            raise ValueError("--engine: leave the key out of the address, and set TINKER_API_KEY")
        self.url = url.rstrip("/")

    def view(self, request: Request) -> dict[str, Any]:
        """Returns the server's address with its console, or with the reason why there is none, in `error`."""
        console: dict[str, Any] | None = None
        error = ""
        try:
            console = self._console()
        except ValueError as reason:
            error = str(reason)
        return {"url": self.url, "error": error, "console": console}

    def _console(self) -> dict[str, Any]:
        """Returns the console. Raises ValueError if the server does not answer, or refuses."""
        if not self.url:
            raise ValueError(NO_SERVER)
        try:
            status, body = _get(f"{self.url}/api/v1/console")
        except OSError as error:
            raise ValueError(f"the server at {self.url} does not answer ({error}): does it run?") from None
        try:
            answer = dict(json.loads(body))
        except (ValueError, TypeError):
            raise ValueError(f"what answers at {self.url} is not `palestra serve`") from None
        if status != 200:
            raise ValueError(f"the server at {self.url} refuses: {answer.get('detail', status)}")
        return answer


def _get(url: str) -> tuple[int, bytes]:
    """Returns status and body of the answer. Raises OSError if there is none."""
    # here, since most dashboards watch no server, and the client takes longer to load than all else
    import http.client
    import urllib.error
    import urllib.request

    key = os.environ.get("TINKER_API_KEY") or os.environ.get("MINT_API_KEY") or ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as `palestra train --engine` does
    try:
        with opener.open(urllib.request.Request(url, headers={"X-API-Key": key}), timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(MAX_BYTES)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read(MAX_BYTES)
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    except http.client.HTTPException as error:
        raise OSError(repr(error)) from None
