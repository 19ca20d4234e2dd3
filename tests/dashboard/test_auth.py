"""Security of the dashboard: read-only, no access from other origins or without the token, no files outside its folder,
no executed text."""

import os

import pytest
from helpers.long_runs import write_long_run
from starlette.testclient import TestClient

from palestra.core.files import to_checksummed_line
from palestra.core.http.origin_middleware import OriginPolicy
from palestra.dashboard.app import build_dashboard
from palestra.dashboard.catalog import NotFound, RunCatalog
from palestra.runs.checkpoints import CHECKSUMMED_LOGS

HERE = "http://127.0.0.1"
SECRET = "for nobody's eyes"
TRICKS = [
    "%2e%2e",
    "%2e",
    "..%2f",
    "%2e%2e%2f",
    "..%2foutside",
    "..%5coutside",
    "..;",
    "good%00",
    "good%2f..%2f..%2foutside",
    "%252e%252e%252foutside",
    "good%2fconfig.yaml",
    "linked",
    "~",
    "%2Fetc",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A valid run, a run outside the folder, and links that lead there."""
    tmp_path = tmp_path_factory.mktemp("guarded")
    outside = write_long_run(tmp_path, "outside", steps=1)
    (outside / "config.yaml").write_text(f"name: {SECRET}\n")
    root = tmp_path / "runs"
    good = write_long_run(root, "good", steps=2)
    (root / "linked").symlink_to(outside)
    (root / "notarun").mkdir()
    half = write_long_run(root, "half", steps=2, episodes=3)
    (half / "episodes" / "step-000001.parquet").unlink()
    (half / "episodes" / "step-000001.parquet").symlink_to(outside / "episodes" / "step-000000.parquet")
    sly = write_long_run(root, "sly", steps=1)
    (sly / "config.yaml").unlink()
    (sly / "config.yaml").symlink_to(outside / "config.yaml")
    spoilt = write_long_run(root, "spoilt", steps=1)
    (spoilt / "meta.json").unlink()
    (spoilt / "meta.json").symlink_to(outside / "config.yaml")
    weights = '[{"name": "sly", "player": "a", "weights": "../../outside"}]'
    (good / "population.json").write_text(weights)
    (good / "checkpoints.jsonl").write_bytes(checkpoint_line("../../outside", "."))
    return root


def checkpoint_line(path, name):
    """A valid line of checkpoints.jsonl, with its checksum, that names this folder."""
    logs = {log: {"bytes": 0, "sha256": "0" * 64} for log in CHECKSUMMED_LOGS}
    return to_checksummed_line(
        {"step": 0, "path": path, "names": {"red": name}, "files": {}, "logs": logs, "keep": True}
    )


@pytest.fixture
def client(root):
    return TestClient(build_dashboard(root), base_url=HERE)


def test_only_runs_inside_the_folder_are_listed(client):
    assert sorted(run["name"] for run in client.get("/api/runs").json()["runs"]) == ["good", "half"]


def test_invalid_run_names_are_not_found(root):
    library = RunCatalog(root)
    for name in ("", ".", "..", "/", "../outside", "good/../../outside", "linked", "sly", "notarun", "good\0", "a\\b"):
        with pytest.raises(NotFound):
            library.run(name)
    with pytest.raises(NotFound):
        library.run("good").file("../half/config.yaml")


@pytest.mark.parametrize("rest", ["", "/config", "/episodes", "/agents", "/system", "/checkpoints/1/x.zip"])
def test_path_traversal_is_refused(client, rest):
    for name in TRICKS:
        answer = client.get(f"/api/runs/{name}{rest}")
        assert answer.status_code == 404, name
        assert SECRET not in answer.text


def test_files_outside_the_page_are_not_served(client):
    for path in ("/../pyproject.toml", "/..%2f..%2f__init__.py", "/%2e%2e/app.py", "//etc/passwd", "/.hidden"):
        assert client.get(path).status_code == 404, path


def test_symlinks_in_a_run_are_not_followed(client):
    assert client.get("/api/runs/spoilt").status_code == 404
    assert client.get("/api/runs/half/episodes/2/0").status_code == 404
    assert client.get("/api/runs/half/episodes").json()["of"] == 3


def test_weights_outside_the_run_are_not_sent(client):
    assert client.get("/api/runs/good/members/sly.zip").status_code == 404
    assert client.get("/api/runs/good/checkpoints/1/red.zip").status_code == 422
    agents = client.get("/api/runs/good/agents")
    assert agents.status_code == 422 and "do not resume a run that you do not trust" in agents.text


@pytest.mark.parametrize("name", ["/usr", "../../../outside", "..", "", "a\0b", "link"])
def test_checkpoint_paths_outside_the_run_are_refused(tmp_path, name):
    """The response does not even give the sizes of files outside."""
    run = write_long_run(tmp_path / "runs", "sly", steps=1)
    outside = write_long_run(tmp_path, "outside", steps=1)
    folder = run / "checkpoints" / "step-000000"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (run / "checkpoints.jsonl").write_bytes(checkpoint_line("checkpoints/step-000000", name))
    client = TestClient(build_dashboard(tmp_path / "runs"), base_url=HERE)
    for page in ("agents", "checkpoints/1/red.zip"):
        answer = client.get(f"/api/runs/sly/{page}")
        assert answer.status_code == 422 and "bytes" not in answer.text


def test_write_methods_are_refused(client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


def test_cross_origin_reads_are_refused(client):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:3000"):
        answer = client.get("/api/runs", headers={"Origin": origin})
        assert answer.status_code == 403 and "may not call this server" in answer.json()["error"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/runs", headers={"Origin": HERE}).status_code == 200


def test_large_request_bodies_are_refused(client):
    assert client.request("GET", "/api/runs", content=b"x" * 2**15).status_code == 413


def test_responses_have_security_headers(client):
    for path in ("/", "/api/runs", "/api/none", "/app.js"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
    page = client.get("/").text
    assert "<script>" not in page and "style=" not in page and "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:6070", True),
        ("localhost", True),
        ("[::1]:6070", True),
        ("192.168.1.7:80", True),
        ("box", True),
        ("BOX:6070", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:6070", False),
        ("", False),
    ],
)
def test_unknown_host_headers_are_refused(root, host, ours):
    assert OriginPolicy(allowed_hosts=frozenset({"box"})).accepts_host(host) == ours
    client = TestClient(build_dashboard(root, hosts={"box"}), base_url=HERE)
    assert client.get("/api/runs", headers={"Host": host}).status_code == (200 if ours else 403)


# ---- the token


@pytest.fixture
def locked(root):
    return TestClient(build_dashboard(root, token="open sesame"), base_url=HERE, follow_redirects=False)


def test_requests_without_the_token_get_401(locked):
    for path in ("/", "/app.js", "/api/runs", "/api/runs/good", "/api/events", "/?token=wrong", "/api/runs?token="):
        answer = locked.get(path)
        assert answer.status_code == 401 and "good" not in answer.text
    assert locked.get("/api/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert locked.get("/api/runs", headers={"Cookie": "palestra_dashboard=wrong"}).status_code == 401


def test_token_in_the_url_becomes_a_cookie(locked):
    answer = locked.get("/", params={"token": "open sesame", "x": "1"})
    assert answer.status_code == 303 and answer.headers["location"] == "/?x=1"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "sesame" not in cookie
    assert locked.get("/api/runs").status_code == 200  # the client keeps cookies


def test_token_is_accepted_as_bearer(locked):
    assert locked.get("/api/runs", headers={"Authorization": "Bearer open sesame"}).status_code == 200


def test_any_host_header_is_accepted_with_a_token(root):
    client = TestClient(build_dashboard(root, token="t"), base_url="http://runs.example.org")
    assert client.get("/api/runs", headers={"Authorization": "Bearer t"}).status_code == 200


def test_requests_write_nothing_to_the_runs(root, client):
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    for path in ("runs", "runs/half", "runs/half/episodes", "runs/half/system", "runs/half/agents", "runs/half/alarms"):
        assert client.get(f"/api/{path}").status_code == 200
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before
    assert not [name for name in os.listdir(root) if name.startswith(".")]
