"""An object in its own Ray actor, called by method name: on a cluster, weights are trained in such actors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from palestra.core.tracing import TraceContext, continue_trace, export_wait_s, stop_tracing, trace_context
from palestra.parallel.processes import ProcessLost
from palestra.parallel.ray import cluster
from palestra.parallel.ray.cluster import ActorResources, placement_error, put_factory


class _Actor:
    """Actor that builds the object and calls its methods."""

    def make(self, make: Callable[[], Any]) -> str | None:
        """Builds the object; returns the traceback if that raises, else None."""
        try:
            self._held = make()
        except Exception:
            return traceback.format_exc()
        return None

    def ask(self, verb: str, arguments: tuple[Any, ...], trace: TraceContext | None) -> Any:
        with continue_trace(trace):
            return getattr(self._held, verb)(*arguments)

    def end(self) -> None:
        """Exports the last spans."""
        stop_tracing()


class RayActorHandle:
    """Handle of the object that `make` builds, in an actor with these resources. `what` names it in error messages."""

    def __init__(self, make: Callable[[], Any], needs: ActorResources, what: str) -> None:
        self._make = put_factory(make)
        self._needs = needs
        self._what = what
        self._actor: Any = None

    def start(self) -> None:
        """Starts a new actor with a new object, replacing the previous one."""
        self.close()
        self._actor = ray.remote(_Actor).options(scheduling_strategy="SPREAD", **self._needs.options).remote()
        self._made: Any = self._actor.make.remote(self._make)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Returns or raises what the object's method `verb` returns or raises. Raises ProcessLost if the actor died,
        ValueError if it could not be placed or built."""
        try:
            if self._made is not None:
                try:
                    wrong = ray.get(self._made, timeout=cluster.PLACEMENT_TIMEOUT_S)
                except GetTimeoutError:
                    raise placement_error(self._what, self._needs.options) from None
                if wrong:
                    raise ValueError(f"{self._what} cannot be made: {wrong}")
                self._made = None
            return ray.get(self._actor.ask.remote(verb, arguments, trace_context()))
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else ValueError(str(error)) from error
        except RayError as error:
            raise ProcessLost(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Kills the actor."""
        if self._actor is not None and ray.is_initialized():
            with suppress(RayError):
                if wait_s := export_wait_s():
                    ray.wait([self._actor.end.remote()], timeout=wait_s)
                ray.kill(self._actor)
        self._actor = None
