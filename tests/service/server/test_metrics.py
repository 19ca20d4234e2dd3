"""/metrics of a real server, scraped over HTTP and parsed by Prometheus's own parser."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.processes import Server, serving
from prometheus_client.parser import text_string_to_metric_families

from palestra.service.server.api_keys import add_key

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # by name and labels


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def key(key_file: Path) -> str:
    return add_key(key_file, "ada")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key_file: Path, key: str) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server") / "data", "--auth", str(key_file), "--metrics")
    yield started
    started.kill()


def scrape(server: Server, key: str) -> Samples:
    answer = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=30)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain"), answer.text
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def count(found: Samples, endpoint: str, status: str) -> float:
    return sum(
        value
        for (name, labels), value in found.items()
        if name == "palestra_http_request_seconds_count" and {("endpoint", endpoint), ("status", status)} <= set(labels)
    )


def test_requests_are_counted_by_route_and_status(server: Server, key: str) -> None:
    before = scrape(server, key)
    headers = {"X-API-Key": key}
    for _ in range(3):
        httpx.get(f"{server.url}/api/v1/healthz").raise_for_status()
    httpx.get(f"{server.url}/api/v1/nowhere/at/all", headers=headers)
    httpx.post(f"{server.url}/api/v1/create_session", headers={"X-API-Key": "wrong"}, json={})
    after = scrape(server, key)

    def increase_of(endpoint: str, status: str) -> float:
        return count(after, endpoint, status) - count(before, endpoint, status)

    assert increase_of("healthz", "2xx") == 3
    assert increase_of("unknown", "4xx") == 1
    assert increase_of("create_session", "4xx") == 1
    assert increase_of("metrics", "2xx") == 1  # the previous scrape; this one has not ended when it is written
    labels = (("endpoint", "healthz"), ("le", "+Inf"), ("method", "GET"), ("status", "2xx"))
    assert after["palestra_http_request_seconds_bucket", labels] >= 3


def test_gauges_follow_models_and_waiting_calls(server: Server, key: str) -> None:
    assert scrape(server, key)["palestra_models", ()] == 0
    headers = {"X-API-Key": key}
    session = httpx.post(
        f"{server.url}/api/v1/create_session",
        headers=headers,
        json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"},
    ).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    call = httpx.post(f"{server.url}/api/v1/create_model", headers=headers, json=body).json()
    wait = {"request_id": call["request_id"]}
    for _ in range(60):
        done = httpx.post(f"{server.url}/api/v1/retrieve_future", headers=headers, json=wait, timeout=60).json()
        if done.get("type") != "try_again":
            break
    found = scrape(server, key)
    assert found["palestra_models", ()] == 1, done
    assert found["palestra_requests_waiting", ()] == 0 and found["palestra_oldest_request_seconds", ()] == 0
    assert found["process_resident_memory_bytes", ()] > 2**20
    assert key not in str(found) and "ada" not in {value for _, labels in found for _, value in labels}


def test_metrics_need_a_key(server: Server) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_metrics_are_off_by_default(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as url:
        assert httpx.get(f"{url}/metrics").status_code == 404
