"""Traces of OpenTelemetry: which process spent how long on which step, task and episode. Off unless started.

    with tracing_to("http://collector:4318"):  # OTLP over HTTP
        with span("step", step=3):
            context = trace_context()  # plain data, for another process

    with continue_trace(context), span("work"):  # there: a child of that step's span
        ...

While tracing is off `span` returns one shared null context and nothing of OpenTelemetry is imported. Spans are few: for
a step, a task, an episode, never for a token or a step of an env. A background thread exports them once a second; while
the collector cannot be reached they are dropped with a warning, and the run continues.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

EXPORT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 5.0  # seconds that the last spans have to reach the collector, at most
LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
TraceContext = Mapping[str, str]  # "traceparent" (W3C Trace Context) and the collector's "url"

_OFF: AbstractContextManager[Any] = nullcontext()
_tracing: _Tracing | None = None
_base: ContextVar[Any] = ContextVar("base", default=None)  # the context continued from another process, if any


class _OnceEach(logging.Filter):
    """Passes each kind of message once: while a collector is down, every batch logs the same message."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.msg not in self.seen
        self.seen.add(record.msg)
        return is_new


class _Tracing:
    """The tracer of this process, and the spans that were begun by `shared_span` and not ended."""

    def __init__(self, url: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(
                f"traces need OpenTelemetry's SDK ({error}): pip install 'palestra[otel]', on every node"
            ) from error
        self.url = url
        facts: dict[str, str | int] = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "palestra")}
        facts |= {"host.name": socket.gethostname(), "process.pid": os.getpid()}
        self.provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
        self.provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_S * 1000))
        self.tracer = self.provider.get_tracer("palestra")
        self.shared: dict[str, Any] = {}
        self.filter = _OnceEach()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self.filter)

    def stop(self) -> None:
        for span in self.shared.values():
            span.end()
        stopping = threading.Thread(target=self.provider.shutdown, daemon=True)  # it may wait for half a minute
        stopping.start()
        stopping.join(STOP_TIMEOUT_S)
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self.filter)


@contextmanager
def tracing_to(url: str | None) -> Iterator[None]:
    """Context in which this process, and those that work for it, export spans to the collector at `url`; None: no
    tracing. Raises ValueError if the SDK is not installed, or `url` is not an HTTP address."""
    if url is None:
        yield
        return
    if not url.startswith(("http://", "https://")):
        raise ValueError(f'traces go to a collector over HTTP: "{url}" must be an address like http://localhost:4318')
    _start(url)
    try:
        yield
    finally:
        stop_tracing()


def _start(url: str) -> None:
    global _tracing
    if _tracing is None or _tracing.url != url:
        stop_tracing()
        _tracing = _Tracing(url)


def stop_tracing() -> None:
    """Ends all open spans and exports what is left; does nothing while tracing is off."""
    global _tracing
    if _tracing is not None:
        _tracing.stop()
    _tracing = None


def is_tracing() -> bool:
    """True while this process exports spans."""
    return _tracing is not None


def export_wait_s() -> float:
    """Returns how many seconds a process that is ending may take to export its last spans; 0 while tracing is off."""
    return 0.0 if _tracing is None else STOP_TIMEOUT_S


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[Any]:
    """Context of a span below the current one; its value is the span, or None while tracing is off. An exception raised
    in it is recorded."""
    if _tracing is None:
        return _OFF
    return _tracing.tracer.start_as_current_span(name, attributes=attributes)


def shared_span(key: str, name: str, **attributes: str | int | float | bool) -> AbstractContextManager[Any]:
    """Context in which the span of `key` is the current one. The first of these contexts begins the span,
    `end_shared_span` ends it; no span of this process is its parent. So a step's span can begin with its first episode,
    while an earlier step is trained."""
    if _tracing is None:
        return _OFF
    from opentelemetry.trace import use_span

    if key not in _tracing.shared:
        _tracing.shared[key] = _tracing.tracer.start_span(name, context=_base_context(), attributes=attributes)
    return use_span(_tracing.shared[key])


def end_shared_span(key: str) -> None:
    """Ends the span of `key`, if there is one."""
    if _tracing is not None and (ended := _tracing.shared.pop(key, None)):
        ended.end()


def trace_context() -> TraceContext | None:
    """Returns the current span as plain data; None while tracing is off."""
    if _tracing is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if not carrier:
        return None
    return carrier | {"url": _tracing.url}


def continue_trace(context: TraceContext | None) -> AbstractContextManager[Any]:
    """Context in which new spans are children of `context`, from another process or thread. Starts tracing in this
    process; with None it does nothing. Raises ValueError if the SDK is not installed here."""
    if context is None:
        return _OFF
    return _continue_in(context)


@contextmanager
def _continue_in(carrier: TraceContext) -> Iterator[None]:
    _start(carrier["url"])
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(carrier)
    base = _base.set(context)
    current = attach(context)
    try:
        yield
    finally:
        detach(current)
        _base.reset(base)


def _base_context() -> Any:
    from opentelemetry.context import Context

    return _base.get() or Context()
