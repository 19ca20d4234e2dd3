"""Prometheus sink: the newest metrics of a run at http://HOST:PORT/metrics, for a server that scrapes them.

palestra_steps{run}                    completed training steps, or tasks of a population
palestra_metrics{run,policy,key}       values of metrics.jsonl: policy="planner", key="loss"
palestra_timings{run,policy,key}       values of timings.jsonl: key="rollout_s"
palestra_evals{run,policy,key}         values of evals.jsonl; `policy` is the evaluation's name
process_...                            CPU, memory and open files of the run's process
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.process_collector import ProcessCollector

from palestra.sinks.base import LOG_PREFIXES, Metrics, PrometheusConfig

FAMILIES = {LOG_PREFIXES[f"{name}.jsonl"]: f"palestra_{name}" for name in ("timings", "evals", "metrics")}


class PrometheusSink:
    """Serves gauges until it is closed. Raises OSError if the port is taken."""

    def __init__(self, config: PrometheusConfig, run: Path, folder: Path) -> None:
        registry = CollectorRegistry()
        self.run = run.name
        self.steps = Gauge("palestra_steps", "Completed training steps", ["run"], registry=registry)
        self.families = {
            prefix: Gauge(
                name, f"Newest values of the run's {name[9:]}.jsonl", ["run", "policy", "key"], registry=registry
            )
            for prefix, name in FAMILIES.items()
        }
        ProcessCollector(registry=registry)
        self.server, self.thread = start_http_server(config.port, config.host, registry)

    def write(self, step: int, metrics: Metrics) -> None:
        self.steps.labels(self.run).set(step)
        for name, value in metrics.items():
            prefix = next(prefix for prefix in FAMILIES if name.startswith(prefix))  # that of metrics, "", is the last
            policy, _, key = name.removeprefix(prefix).partition("/")
            self.families[prefix].labels(self.run, policy, key).set(value)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
