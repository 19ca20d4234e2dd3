"""The official `tinker` client, so that MinT's older sample runs as printed: `import palestra.tinker_compat as mint`.

What it adds to the names of `tinker`, all of which are here too:

- What a training client's `..._async` methods return can be asked for `.result_async()` and `.result()` at once. The
  request is on its way when the method returns, so requests keep the order in which they were written. Awaiting it
  gives a future as officially, and awaiting that the result.
- The result of forward and forward_backward has `.loss`: the sum over tokens, `metrics["loss:sum"]`, as the wire has
  it. Divide by the number of trained tokens for a mean.
- `MINT_BASE_URL` and `MINT_API_KEY` are read where `TINKER_...` would be. Official clients refuse keys that do not
  begin with "tml-": other keys, as MinT's "sk-...", are sent with that in front, which `palestra serve` takes off.

Advantages of length 1 need nothing here: the server gives every token the same.
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
    raise ImportError("palestra.tinker_compat stands on the official client: pip install tinker") from error

types = tinker.types
PREFIX = "tml-"
ACCEPTED = (PREFIX, "eyJ")  # keys, and the tokens that newer clients take
VERBS = (
    "forward",
    "forward_backward",
    "optim_step",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
)


def __getattr__(name: str) -> Any:
    """Whatever is not here is the official client's."""
    return getattr(tinker, name)


class ForwardBackwardOutput(tinker.ForwardBackwardOutput):
    """The official result, and its loss."""

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]


class Future:
    """A request on its way."""

    def __init__(self, official: Any) -> None:
        self._official = official

    def result(self, timeout: float | None = None) -> Any:
        return _with_loss(self._official.result(timeout))

    async def result_async(self, timeout: float | None = None) -> Any:
        return _with_loss(await self._official.result_async(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()


class Sent(Future):
    """What a `..._async` method returns: awaiting it gives the future, as officially."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return Future(self._official)


class TrainingClient:
    """An official training client, whose verbs return the futures above."""

    def __init__(self, official: Any) -> None:
        self._official = official

    def __getattr__(self, name: str) -> Any:
        verb = name.removesuffix("_async")
        if verb not in VERBS:
            return getattr(self._official, name)
        kind = Future if name == verb else Sent
        return partial(_sent, kind, getattr(self._official, verb))


class ServiceClient:
    """An official service client, which makes the training clients above."""

    def __init__(self, **options: Any) -> None:
        for option in ("base_url", "api_key"):
            if (given := os.environ.get(f"MINT_{option.upper()}")) and options.get(option) is None:
                options[option] = given
        if (key := options.get("api_key")) and not key.startswith(ACCEPTED):
            options["api_key"] = PREFIX + key
        self._official = tinker.ServiceClient(**options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._official, name)
        if not name.startswith("create_") or "training_client" not in name:
            return found
        return partial(_made_async if name.endswith("_async") else _made, found)


def _sent(kind: type[Future], send: Callable[..., Any], *args: Any, **options: Any) -> Future:
    return kind(send(*args, **options))


def _with_loss(result: Any) -> Any:
    if not isinstance(result, tinker.ForwardBackwardOutput):
        return result
    fields = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    return ForwardBackwardOutput(**{name: getattr(result, name) for name in fields})


def _made(make: Callable[..., Any], *args: Any, **options: Any) -> TrainingClient:
    """Newer official clients return a future of a training client, older ones the client itself."""
    official = make(*args, **options)
    return TrainingClient(official.result() if isinstance(official, tinker.APIFuture) else official)


async def _made_async(make: Callable[..., Any], *args: Any, **options: Any) -> TrainingClient:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer clients deprecate what older programs call
        official = await make(*args, **options)
    return TrainingClient(await official if isinstance(official, tinker.APIFuture) else official)
