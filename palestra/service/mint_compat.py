"""Compatibility layer over the official `tinker` client for MinT's older examples.

Usage: `import palestra.service.mint_compat as mint`. It re-exports all names of `tinker` and changes the following:

- The return values of a training client's `..._async` methods have `.result_async()` and `.result()`. The request is
  sent before the method returns, so that requests keep the order of their calls. As in the official client, awaiting
  the return value gives a future, and awaiting that future gives the result.
- The result of forward and forward_backward has `.loss`: the sum over tokens, `metrics["loss:sum"]`. Divide by the
  number of trained tokens for a mean.
- `MINT_BASE_URL` and `MINT_API_KEY` take precedence over the `TINKER_...` variables. Official clients reject keys that
  do not start with "tml-": other keys, such as MinT's "sk-...", are sent with this prefix, which `palestra serve`
  removes.

Advantages of length 1 need no change here: the server broadcasts them to every token.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

try:
    import tinker
except ImportError as error:
    raise ImportError("palestra.service.mint_compat needs the official client: pip install tinker") from error

types = tinker.types
KEY_PREFIX = "tml-"
ACCEPTED_PREFIXES = (KEY_PREFIX, "eyJ")  # prefixes of keys, and of tokens that newer clients accept
WRAPPED_METHODS = (
    "forward",
    "forward_backward",
    "optim_step",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
)


def __getattr__(name: str) -> Any:
    """Forwards all other names to the official client."""
    return getattr(tinker, name)


class ForwardBackwardOutput(tinker.ForwardBackwardOutput):
    """The official result with a `loss` property."""

    @property
    def loss(self) -> float:
        """Loss summed over tokens."""
        return self.metrics["loss:sum"]


class Future:
    """The result of a request that has been sent."""

    def __init__(self, official: Any) -> None:
        self._official = official

    def result(self, timeout: float | None = None) -> Any:
        """Blocks until the result arrives and returns it."""
        return _with_loss(self._official.result(timeout))

    async def result_async(self, timeout: float | None = None) -> Any:
        """Awaits and returns the result."""
        return _with_loss(await self._official.result_async(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()


class AsyncFuture(Future):
    """Return value of an `..._async` method; as in the official client, awaiting it gives the future."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return Future(self._official)


class TrainingClient:
    """Wrapper of an official training client whose calls return the futures above."""

    def __init__(self, official: Any) -> None:
        self._official = official

    def __getattr__(self, name: str) -> Any:
        verb = name.removesuffix("_async")
        if verb not in WRAPPED_METHODS:
            return getattr(self._official, name)
        kind = Future if name == verb else AsyncFuture
        return partial(_send, kind, getattr(self._official, verb))


class ServiceClient:
    """Wrapper of an official service client that creates the training clients above."""

    def __init__(self, **options: Any) -> None:
        for option in ("base_url", "api_key"):
            if (given := os.environ.get(f"MINT_{option.upper()}")) and options.get(option) is None:
                options[option] = given
        if (key := options.get("api_key")) and not key.startswith(ACCEPTED_PREFIXES):
            options["api_key"] = KEY_PREFIX + key
        self._official = tinker.ServiceClient(**options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._official, name)
        if not name.startswith("create_") or "training_client" not in name:
            return found
        return partial(_create_client_async if name.endswith("_async") else _create_client, found)


def _send(kind: type[Future], send: Callable[..., Any], *args: Any, **options: Any) -> Future:
    return kind(send(*args, **options))


def _with_loss(result: Any) -> Any:
    if not isinstance(result, tinker.ForwardBackwardOutput):
        return result
    fields = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    return ForwardBackwardOutput(**{name: getattr(result, name) for name in fields})


def _create_client(make: Callable[..., Any], *args: Any, **options: Any) -> TrainingClient:
    """Wraps a new training client. Newer official clients return a future of it, older ones the client itself."""
    official = make(*args, **options)
    return TrainingClient(official.result() if isinstance(official, tinker.APIFuture) else official)


async def _create_client_async(make: Callable[..., Any], *args: Any, **options: Any) -> TrainingClient:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer clients deprecate the calls of older programs
        official = await make(*args, **options)
    return TrainingClient(await official if isinstance(official, tinker.APIFuture) else official)
