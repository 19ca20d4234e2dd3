"""A client of any endpoint that speaks OpenAI's chat completions: tries again, gives up in time, keeps its key."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from palestra.chat import Json

if TYPE_CHECKING:
    import httpx

PASSING = (408, 409, 425, 429)  # and all of 500: worth another try
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between tries, twice as long after each
QUOTED = 300  # characters of a refusal that an error shows


class EndpointError(RuntimeError):
    """An endpoint that gave no answer: what it said, and how often it was asked."""


@dataclass(frozen=True)
class Endpoint:
    """`url` ends before `/chat/completions`. The key is read from the environment variable `key_env` for each call.

    A call fails after `retries` tries beyond the first, or `timeout` seconds in all, waits included.
    """

    url: str
    model: str
    key_env: str | None = None
    timeout: float = 60.0
    retries: int = 4

    async def complete(self, messages: Sequence[Json], **settings: Any) -> Json:
        """The message that the model answers. Raises `EndpointError` where none comes, and ValueError where the key is
        not in the environment."""
        body = {"model": self.model, "messages": list(messages), **settings}
        try:
            async with asyncio.timeout(self.timeout):
                return await self._tries(body)
        except TimeoutError:
            raise EndpointError(f"{self.model} at {self.url} gave no answer within {self.timeout:g} seconds") from None

    async def _tries(self, body: Json) -> Json:
        httpx, wait, heard = _httpx(), FIRST_WAIT, ""
        async with httpx.AsyncClient(verify=_certificates(), timeout=self.timeout) as client:
            for tried in range(self.retries + 1):
                if tried:
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
                try:
                    response = await client.post(self._address, json=body, headers=self._headers())
                except httpx.TransportError as error:
                    heard = f"{type(error).__name__}: {error}"
                    continue
                if response.is_success:
                    return self._message(response)
                heard = f"HTTP {response.status_code}: {response.text[:QUOTED]}"
                if response.status_code not in PASSING and response.status_code < 500:
                    raise EndpointError(f"{self.model} at {self.url} refused: {heard}")
                wait = max(wait, _asked_to_wait(response))
        raise EndpointError(f"{self.model} at {self.url} failed {self.retries + 1} times, last with {heard}")

    @property
    def _address(self) -> str:
        return f"{self.url.rstrip('/')}/chat/completions"

    def _headers(self) -> dict[str, str]:
        if self.key_env is None:
            return {}
        if self.key_env not in os.environ:
            raise ValueError(f"the key for {self.url} is not in the environment: set {self.key_env}")
        return {"Authorization": f"Bearer {os.environ[self.key_env]}"}

    def _message(self, response: httpx.Response) -> Json:
        try:
            message = response.json()["choices"][0]["message"]
        except (ValueError, LookupError, TypeError):
            message = None
        if not isinstance(message, dict):
            raise EndpointError(f"{self.model} at {self.url} sent no chat completion: {response.text[:QUOTED]}")
        return message


def _asked_to_wait(response: httpx.Response) -> float:
    """The seconds of Retry-After; its form as a date is left to our own waits."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.replace(".", "", 1).isdigit() else 0.0


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ValueError(f"asking an endpoint needs {error.name}: pip install 'palestra[endpoint]'") from error
    return httpx


@cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes 30 ms, longer than a call to a machine nearby."""
    context: ssl.SSLContext = _httpx().create_ssl_context()
    return context
