"""Prometheus sink: the newest metrics of a run at http://HOST:PORT/metrics, for a server that scrapes them.

palestra_steps{run}                    completed training steps, or tasks of a population
palestra_metrics{run,policy,key}       values of metrics.jsonl: policy="planner", key="loss"
palestra_timings{run,policy,key}       values of timings.jsonl: key="rollout_s"
palestra_evals{run,policy,key}         values of evals.jsonl; `policy` is the evaluation's name
palestra_worker_...{run,kind,where}    what workers in other processes did, from workers.jsonl: done, lost, seconds
palestra_process_...{run,pid,name}     memory, threads and CPU seconds of the run's processes on this machine
palestra_machine_...{run}              cores, load and memory of this machine
process_...                            CPU, memory and open files of the process that serves this

Workers, processes and the machine are read at each scrape, by the functions that the dashboard's System page uses.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from palestra.core.http.limits import AdmissionMiddleware, HttpLimits, Receive, Scope, Send
from palestra.core.http.listen import open_listener
from palestra.core.http.origin_middleware import OriginPolicy
from palestra.core.http.server import HttpServer, run_in_thread
from palestra.runs.metric_log import MetricLog
from palestra.runs.sinks.base import LOG_PREFIXES, Metrics, PrometheusConfig, Sink
from palestra.runs.system_metrics import COUNTED, HELP, system_samples

LIMITS = HttpLimits(max_body_bytes=0, max_requests=16)
KEEP_ALIVE_S = 75
FAMILIES = {LOG_PREFIXES[f"{name}.jsonl"]: f"palestra_{name}" for name in ("timings", "evals", "metrics")}


class SystemCollector(Collector):
    """Reads a run's workers and processes at each scrape."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.log = MetricLog(run / "workers.jsonl", "worker")

    def describe(self) -> list[Metric]:
        """Returns no metric: registering must not read anything."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each available metric."""
        samples = sorted(system_samples(self.run, self.log), key=lambda sample: sample.name)
        for name, own in groupby(samples, key=lambda sample: sample.name):
            rows = list(own)
            kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
            family = kind(f"palestra_{name}", HELP[name], labels=["run", *rows[0].labels])
            for row in rows:
                family.add_metric([self.run.name, *row.labels.values()], row.value)
            yield family


class PrometheusSink(Sink):
    """Serves gauges until it is closed. Raises ValueError if the port is taken."""

    def __init__(self, config: PrometheusConfig, run: Path, folder: Path) -> None:
        self.registry = registry = CollectorRegistry()
        self.run = run.name
        self.steps = Gauge("palestra_steps", "Completed training steps", ["run"], registry=registry)
        self.families = {
            prefix: Gauge(
                name, f"Newest values of the run's {name[9:]}.jsonl", ["run", "policy", "key"], registry=registry
            )
            for prefix, name in FAMILIES.items()
        }
        registry.register(SystemCollector(run))
        ProcessCollector(registry=registry)
        listener = open_listener(config.host, config.port)
        origins = OriginPolicy.for_host(config.host, pages=False)
        self.server = HttpServer(AdmissionMiddleware(self._answer, origins, LIMITS), 0, KEEP_ALIVE_S)
        self.thread = threading.Thread(target=run_in_thread, args=(self.server, listener), daemon=True)
        self.thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        self.steps.labels(self.run).set(step)
        for name, value in metrics.items():
            prefix = next(prefix for prefix in FAMILIES if name.startswith(prefix))  # the prefix "" of metrics is last
            policy, _, key = name.removeprefix(prefix).partition("/")
            self.families[prefix].labels(self.run, policy, key).set(value)

    def close(self) -> None:
        self.server.stop()
        self.thread.join()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers GET /metrics; an ASGI app."""
        status = 404
        body = b"metrics are at /metrics"
        if scope["path"] == "/metrics":
            status = 405
            body = b"metrics are read with GET"
            if scope["method"] == "GET":  # off the event loop, since it reads logs and processes
                status = 200
                body = await asyncio.to_thread(generate_latest, self.registry)
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
