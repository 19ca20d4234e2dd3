"""The Prometheus sink, scraped while a run writes its logs."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.raw import ask, many

from palestra.core.config import validate
from palestra.core.http import server
from palestra.runs import Run
from palestra.runs.sinks.base import SinksConfig
from palestra.runs.sinks.factory import check_sinks
from palestra.runs.sinks.log_tailer import SinkCursor, follow_run

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the sink of an open run."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 1.0)
    port = free_port()
    (config,) = validate(SinksConfig, {"sinks": [{"type": "prometheus", "port": port}]}).sinks
    with Run.create(tmp_path, "name: demo\n", "demo") as run:
        cursor = SinkCursor(run.path, config)
        run.log_metrics(0, "planner", {"loss": 0.5})
        cursor.send()
        yield f"http://127.0.0.1:{port}"
        cursor.close()


def test_pages_and_other_names_are_refused(url: str) -> None:
    assert ask(url, "GET", "/metrics").status == 200
    assert ask(url, "GET", "/metrics", Host="localhost").status == 200
    origins = ("https://evil.example", "null", "http://127.0.0.1:3000", "file://", url)
    refused = [{"Origin": origin} for origin in origins]
    refused += [{"Origin": origin, "Host": "evil.example"} for origin in origins]
    refused += [{"Host": host} for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "a@b", "")]
    sites = ("cross-site", "same-site", "same-origin")
    refused += [{"Sec_Fetch_Site": site} for site in sites]
    refused += [{"Sec_Fetch_Site": site, "Origin": "null"} for site in sites]
    refused += [{"Origin": "", "Host": "evil.example", "Sec_Fetch_Site": "none"}]
    assert len(refused) == 22
    answers = {str(headers): ask(url, "GET", "/metrics", **headers) for headers in refused}
    assert {headers: reply.status for headers, reply in answers.items() if reply.status != 403} == {}
    assert not any(b"palestra_" in reply.body for reply in answers.values())
    preflight = {"Origin": "https://evil.example", "Access_Control_Request_Method": "GET"}
    assert ask(url, "OPTIONS", "/metrics", **preflight).status == 403


def test_other_methods_paths_and_bodies_are_refused(url: str) -> None:
    assert ask(url, "POST", "/metrics").status == 405
    assert ask(url, "GET", "/").status == 404
    assert ask(url, "POST", "/metrics", b"x").status == 413


def test_half_sent_headers_are_hung_up_on_and_take_no_threads(url: str) -> None:
    before = threading.active_count()
    with many(url, 150, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") as wires:
        assert threading.active_count() <= before + 1
        assert ask(url, "GET", "/metrics").status == 200
        assert [wire.recv(1) for wire in wires] == [b""] * 150


def test_newest_values_of_every_log_are_served(tmp_path: Path) -> None:
    port = free_port()
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
    assert (
        len(warnings) == 1
        and "the sink prometheus fails, training continues without it: ValueError: cannot listen" in warnings[0]
    )
