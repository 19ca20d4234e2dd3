"""Client of any OpenAI-compatible chat endpoint, with retries and time limits.

The API key is read from the environment for each request; it is never stored, shown or written.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, field_validator

from palestra.core.chat import Json, part_thought, thought_of
from palestra.core.config import StrictModel
from palestra.core.http.retry import RETRY_STATUSES, RetryPolicy, parse_retry_after

if TYPE_CHECKING:
    import httpx

MAX_ANSWER_BYTES = 32 * 2**20  # bytes of an answer, decompressed
MAX_PAUSE_S = 30.0  # longest pause in seconds between attempts without Retry-After
JITTER = 0.25  # share by which pauses vary, so that calls that failed together do not return together
MAX_REASON_CHARS = 500  # characters of the reason of a refusal
WITHHELD = ("content_filter", "error")  # finish reasons of an answer that is not the model's whole one
# Removed once the body is decompressed; what is no UTF-8 is replaced, whatever encoding the endpoint names.
CONTENT_HEADERS = (b"content-encoding", b"content-type")


class EndpointError(RuntimeError):
    """The endpoint gave no answer. The message states the cause and possible remedies."""


class RequestRefused(EndpointError):
    """The endpoint refused a request, which is not repeated. `status` is the HTTP status, `reason` the endpoint's own
    message and error code, without the API key."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def _check_variable(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
        raise ValueError(
            "key_env is the name of an environment variable, in capitals, such as JUDGE_API_KEY, not the key itself"
        )
    return name


KeyVariable = Annotated[str | None, AfterValidator(_check_variable)]


class Endpoint(StrictModel):
    """Address, credentials and retry policy of a chat endpoint."""

    url: str
    """Base URL of the API, such as https://api.example.com/v1, or the full address of its chat completions."""
    model: str = Field(min_length=1)
    """Model name sent in every request."""
    key_env: KeyVariable = None
    """Name of the environment variable that holds the API key; null sends no key."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that one request may take."""
    retries: int = Field(4, ge=0, le=100)
    """Further attempts, 0 to 100, after a request that fails for a temporary reason."""
    limit: float = Field(300.0, gt=0)
    """Seconds that one answer may take, with all its attempts and pauses."""
    backoff: float = Field(0.5, gt=0)
    """Seconds of the first pause between attempts; it doubles up to 30 s, or is longer if the endpoint sends
    Retry-After."""
    body: dict[str, JsonValue] = {}
    """Additional JSON fields of every request; they override its other fields."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url is not a web address: write the API's base, such as https://api.example.com/v1")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "url holds a name, a password or a query: put the key into a variable and name it: key_env"
            )
        return url

    @property
    def completions_url(self) -> str:
        """The full address of the chat completions."""
        return f"{self._base_url}/chat/completions"

    @property
    def text_completions_url(self) -> str:
        """The full address of the completions of prompts, text or tokens."""
        return f"{self._base_url}/completions"

    @property
    def _base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/chat/completions")

    def check(self) -> None:
        """Raises ValueError if no request could succeed: httpx is not installed, or the key is missing."""
        _httpx()
        _headers(self)


class AttemptFailed(Exception):
    """Raised by an attempt that is worth repeating, `retry_after_s` seconds later if the endpoint asks for it."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RetryingClient:
    """HTTP client for one answer, with retries. `errors` collects the errors so far."""

    endpoint: Endpoint
    client: httpx.AsyncClient
    errors: list[str]

    async def request(self, url: str, fields: Json, parse: Callable[[httpx.Response], Any]) -> Any:
        """Returns what `parse` reads from the response to the JSON `fields`, with retries, also
        where it returns None. Raises EndpointError if all attempts fail."""
        endpoint = self.endpoint
        body = {"model": endpoint.model, **fields, **endpoint.body}
        policy = RetryPolicy(endpoint.backoff, MAX_PAUSE_S, max_attempts=endpoint.retries + 1, jitter=JITTER)
        try:
            return await policy.run(partial(self._try, url, body, parse), AttemptFailed)
        except AttemptFailed:
            raise endpoint_error(endpoint, f"failed {policy.max_attempts} times", self.errors) from None

    async def _try(self, url: str, body: Json, parse: Callable[[httpx.Response], Any]) -> Any:
        """Makes one attempt and returns what `parse` reads. Raises AttemptFailed if another attempt may succeed, else
        EndpointError."""
        endpoint = self.endpoint
        httpx = _httpx()
        try:
            async with asyncio.timeout(endpoint.timeout):  # httpx restarts its own timeout with every byte received
                response = await self._post(url, body)
        except TimeoutError:
            raise self._failure(f"no answer within timeout: {endpoint.timeout:g} seconds") from None
        except httpx.RequestError as error:
            raise self._failure(f"{type(error).__name__}: {quote_masked(endpoint, str(error))}") from None
        status = f"HTTP {response.status_code}"
        if response.status_code in RETRY_STATUSES:
            raise self._failure(status, parse_retry_after(response.headers.get("retry-after", "")))
        if not response.is_success:
            refusal = endpoint_error(endpoint, f"answered {status}: {quote_masked(endpoint, response.text)}", [])
            raise RequestRefused(str(refusal), response.status_code, _reason(endpoint, response))
        if (found := parse(response)) is None:
            raise self._failure(f"{status} without a completion: {quote_masked(endpoint, response.text)}")
        return found

    def _failure(self, reason: str, retry_after_s: float = 0.0) -> Exception:
        """Records why an attempt failed and returns its error: final if the endpoint asks for a longer pause than the
        time limit allows."""
        self.errors.append(reason)
        if retry_after_s > self.endpoint.limit:
            what = f"asks for a pause of {retry_after_s:g} seconds, more than limit allows"
            return endpoint_error(self.endpoint, what, self.errors)
        return AttemptFailed(reason, retry_after_s)

    async def _post(self, url: str, body: Json) -> httpx.Response:
        """Sends the request and reads the response. Raises EndpointError if it is longer than `MAX_ANSWER_BYTES`
        bytes."""
        endpoint = self.endpoint
        content = bytearray()
        async with self.client.stream("POST", url, json=body, headers=_headers(endpoint)) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise endpoint_error(
                        endpoint, f"sent an answer of more than {MAX_ANSWER_BYTES:,} bytes", self.errors
                    )
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in CONTENT_HEADERS]
        return _httpx().Response(response.status_code, headers=headers, content=bytes(content))


async def complete(endpoint: Endpoint, messages: Sequence[Json], **settings: Any) -> Json:
    """Returns the message of the endpoint's first choice; raises as `request_answer` does."""
    body = {"messages": list(messages), **settings}
    return cast("Json", await request_answer(endpoint, endpoint.completions_url, body, _message))


async def request_answer(endpoint: Endpoint, url: str, fields: Json, parse: Callable[[httpx.Response], Any]) -> Any:
    """Returns what `parse` reads from the response to the JSON `fields`, within `endpoint.limit`
    seconds. Raises EndpointError if there is no answer, ValueError if the key is missing. Each
    answer has its own client, so that none waits for another's connections."""
    errors: list[str] = []
    opened = _httpx().AsyncClient(timeout=endpoint.timeout, verify=_certificates())
    try:
        async with asyncio.timeout(endpoint.limit), opened as client:
            return await RetryingClient(endpoint, client, errors).request(url, fields, parse)
    except TimeoutError:
        what = f"gave no answer within limit: {endpoint.limit:g} seconds"
        raise endpoint_error(endpoint, what, errors) from None


def _reason(endpoint: Endpoint, response: httpx.Response) -> str:
    """Returns the message and the code of an error response, or its text if it has another form; at most 500
    characters, with the API key masked."""
    try:
        error = response.json()["error"]
        text = f"{error['message']} ({error.get('code')})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = response.text
    return _mask(endpoint, text)[:MAX_REASON_CHARS]


def _message(response: httpx.Response) -> Json | None:
    """Returns the first choice's message with the choice's `finish_reason`; None if the endpoint withheld it or reports
    a refusal or an error beside it, if its content is no text or its calls no calls, or if it has neither content nor
    calls nor a thought and was not cut at its length."""
    try:
        reply = response.json()
        choice = reply["choices"][0]
        message = choice["message"] | {"finish_reason": choice.get("finish_reason")}
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        is_withheld = message["finish_reason"] in WITHHELD or message.get("refusal")
        is_withheld = is_withheld or reply.get("error") or choice.get("error")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    content = message.get("content")
    if not isinstance(content, str | list | None):
        return None
    says = isinstance(content, str) or names or thought_of(message)
    if is_withheld or not (says or message["finish_reason"] == "length"):
        return None
    return _part_thought(message)


def _part_thought(message: Json) -> Json:
    """Returns a message whose thought is apart from its content. A server without a reader of thoughts writes both into
    the content."""
    content = message.get("content")
    if not isinstance(content, str) or thought_of(message):
        return message
    thought, text = part_thought(content)
    if text == content:
        return message
    return message | {"content": text, "reasoning_content": thought}


# ---- API key and error messages


def _headers(endpoint: Endpoint) -> dict[str, str]:
    if endpoint.key_env is None:
        return {}
    if not (key := os.environ.get(endpoint.key_env, "").strip()):
        raise ValueError(
            f"the endpoint's key is missing: set the environment variable {endpoint.key_env}, or drop key_env"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the variable {endpoint.key_env} holds no key: keys are one line of ASCII without blanks")
    return {"Authorization": f"Bearer {key}"}


def quote_masked(endpoint: Endpoint, text: str) -> str:
    """Returns the beginning of the endpoint's message, with the API key masked, since some endpoints repeat it in
    errors."""
    text = _mask(endpoint, text)
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _mask(endpoint: Endpoint, text: str) -> str:
    if key := os.environ.get(endpoint.key_env or "", "").strip():
        return text.replace(key, "***")
    return text


def endpoint_error(endpoint: Endpoint, what: str, errors: Sequence[str]) -> EndpointError:
    """Returns the error for `endpoint`, with the last three distinct faults."""
    story = f" (last: {'; '.join(list(dict.fromkeys(errors))[-3:])})" if errors else ""
    return EndpointError(
        f"{endpoint.model} at {endpoint.completions_url} {what}{story}. Check url, model, key_env and the endpoint "
        "itself; raise timeout, limit or retries if it is only slow"
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Returns the TLS context. Cached, since loading certificates takes longer than many requests."""
    return _httpx().create_ssl_context()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ValueError(f"asking an endpoint needs httpx ({error}): pip install 'palestra[endpoint]'") from error
    return httpx
