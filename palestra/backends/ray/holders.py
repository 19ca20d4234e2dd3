"""An object in an actor of its own, asked by name: where weights in training live on a cluster."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from palestra.backends.ray import cluster
from palestra.backends.ray.cluster import Needs, no_room, put
from palestra.backends.weights import Lost


class _Actor:
    """The object, once it is made."""

    def make(self, make: Callable[[], Any]) -> str | None:
        """Makes it; the traceback where that raises."""
        try:
            self._held = make()
        except Exception:
            return traceback.format_exc()
        return None

    def ask(self, verb: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._held, verb)(*arguments)


class RayHolder:
    """Holds what `make` makes in an actor with these needs. `what` names it where no actor can be placed."""

    def __init__(self, make: Callable[[], Any], needs: Needs, what: str) -> None:
        self._make, self._needs, self._what = put(make), needs, what
        self._actor: Any = None

    def start(self) -> None:
        """A new object in a new actor, in place of the one there was."""
        self.close()
        self._actor = ray.remote(_Actor).options(scheduling_strategy="SPREAD", **self._needs.options).remote()
        self._made: Any = self._actor.make.remote(self._make)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What the object's method `verb` returns; what it raises is raised here. Raises Lost where its actor is."""
        try:
            if self._made is not None:
                self._ready()
            return ray.get(self._actor.ask.remote(verb, arguments))
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else ValueError(str(error)) from error
        except RayError as error:
            raise Lost(f"{type(error).__name__}: {error}") from error

    def _ready(self) -> None:
        try:
            wrong = ray.get(self._made, timeout=cluster.PATIENCE)
        except GetTimeoutError:
            raise no_room(self._what, self._needs.options) from None
        if wrong:
            raise ValueError(f"{self._what} cannot be made: {wrong}")
        self._made = None

    def close(self) -> None:
        """Ends the actor."""
        if self._actor is not None and ray.is_initialized():
            with suppress(RayError):
                ray.kill(self._actor)
        self._actor = None
