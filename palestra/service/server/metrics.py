"""Metrics of the service in the text format of Prometheus, at /metrics, if it is started with --metrics.

    palestra_http_request_seconds    histogram of answered requests by method, endpoint and status class ("2xx")
    palestra_requests_waiting        training and sampling calls that have no answer yet
    palestra_request_bytes_waiting   bytes of their bodies
    palestra_oldest_request_seconds  age of the oldest of them
    palestra_models                  models in training
    process_...                      CPU, memory and open files of the front end

Names of models, owners and keys are in none of them. An endpoint is the name of the function that answers, such as
`create_model`, so that the number of series is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.service.server.deps import OwnerDep
from palestra.service.storage.store import Store
from palestra.service.storage.tables import models

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # upper ends of the buckets
UNKNOWN = "unknown"  # the endpoint of requests to addresses that the service does not have

router = APIRouter()


class ServiceMetrics:
    """The metrics of one front end; the queue metrics cover all front ends on its store."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "palestra_http_request_seconds",
            "Seconds from a request to the end of its answer",
            ["method", "endpoint", "status"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(_QueueCollector(store))
        ProcessCollector(registry=self.registry)


class _QueueCollector(Collector):
    """Reads the gauges from the store at each scrape."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def describe(self) -> list[Metric]:
        """Returns no metric: registering must not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges."""
        depth = self.store.queue_depth()
        since = self.store.oldest_request()
        age = 0.0 if since is None else max(0.0, time.time() - since)
        for name, text, value in (
            ("requests_waiting", "Training and sampling calls without an answer", depth.num_requests),
            ("request_bytes_waiting", "Bytes of the bodies of calls without an answer", depth.num_bytes),
            ("oldest_request_seconds", "Age of the oldest call without an answer", age),
            ("models", "Models in training", self.store.count(models, models.c.state == "live")),
        ):
            yield GaugeMetricFamily(f"palestra_{name}", text, value=value)


class MetricsMiddleware:
    """ASGI middleware that measures each request by the function that answered it."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        # if an error leaves the request unanswered
        start = time.perf_counter()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            endpoint = getattr(scope.get("endpoint"), "__name__", UNKNOWN)
            series = self.metrics.requests.labels(scope["method"], endpoint, f"{status // 100}xx")
            series.observe(time.perf_counter() - start)


@router.get("/metrics")
def metrics(request: Request, owner: OwnerDep) -> Response:
    """Returns the metrics. Needs an API key, as everything else: Prometheus sends it as `authorization`."""
    found: ServiceMetrics = request.app.state.metrics
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)
