"""The Prometheus sink, scraped while a run writes its logs."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

from palestra.config import validate
from palestra.runs import Run
from palestra.sinks.base import SinksConfig
from palestra.sinks.factory import check_sinks
from palestra.sinks.log_tailer import SinkCursor, follow_run

parser = pytest.importorskip("prometheus_client.parser", reason="pip install 'palestra[prometheus]'")


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """The samples by name and labels, as Prometheus parses them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    order = ("run", "policy", "key")
    return {
        (each.name, *(each.labels[label] for label in order if label in each.labels)): each.value
        for family in families
        for each in family.samples
    }


def test_newest_values_of_every_log_are_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = validate(SinksConfig, {"sinks": [{"type": "prometheus", "port": port}]}).sinks
    check_sinks(config)
    with Run.create(tmp_path, "name: demo\n", "demo") as run:
        cursor = SinkCursor(run.path, config[0])
        for step, loss in enumerate((0.5, 0.25)):
            run.log_metrics(step, "planner", {"loss": loss, "note": "text"})
            run.log_timings(step, "planner", {"train_s": 2.0})
            run.log_eval(step, "test", {"returns": {"planner": 1.5}})
            cursor.send()
            found = scraped(port)
            assert found["palestra_metrics", "demo", "planner", "loss"] == loss
            assert found["palestra_steps", "demo"] == step + 1
        assert found["palestra_timings", "demo", "planner", "train_s"] == 2.0
        assert found["palestra_evals", "demo", "test", "returns/planner"] == 1.5
        assert found["process_resident_memory_bytes",] > 1e6
        assert not [key for key in found if "note" in key]
        cursor.close()
    with pytest.raises(OSError):
        scraped(port)


def test_taken_port_is_only_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken, Run.create(tmp_path, "name: demo\n", "demo") as run:
        config = validate(SinksConfig, {"sinks": [{"type": "prometheus", "port": taken.getsockname()[1]}]}).sinks
        run.log_metrics(0, "team", {"success": 1.0})
        with follow_run(run.path, config, warnings.append):
            pass
    assert len(warnings) == 1 and "the sink prometheus fails, training continues without it: OSError" in warnings[0]
