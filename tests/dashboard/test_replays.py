"""The API of recorded games, and of files that are not replays."""

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from palestra.dashboard import replays
from palestra.dashboard.app import build_dashboard
from palestra.runs import Run
from palestra.runs.eval_files import eval_file
from palestra.runs.replays import GameReplay, ReplayFrame, ReplayHeader

HEADER = ReplayHeader(
    env="toy", seats=["a", "b"], players=["net", "script"], action_names=["stay", "go"], seat_colours=[(1, 2, 3)]
)
PNG = replays.PNG_START + b"the rest"
FRAMES = [
    ReplayFrame(picture=PNG, text=None, acts=[True, False], actions=[[1], [0]], rewards=[0.5, 0]),
    ReplayFrame(
        picture=b"<svg onload=alert(1)>", text=None, acts=[True, True], actions=[[0], [1]], rewards=[0, float("nan")]
    ),
    ReplayFrame(picture=None, text="x . o", acts=[False, True], actions=[[0], [1]], rewards=[0, 1]),
]
REPLAYS = [GameReplay(7, FRAMES, "terminated", True), GameReplay(8, FRAMES[2:], "cut")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Run.create(tmp_path, "name: a\nenv: {type: toy}\nenv_steps: 1\n", "a") as run:
        for step in (-1, 11, 3):
            run.write_replays(step, "held out/50 %", HEADER, REPLAYS)
    with Run.create(tmp_path, "name: b\nenv: {type: toy}\n", "b"):
        pass
    return tmp_path


@pytest.fixture
def client(root: Path) -> TestClient:
    return TestClient(build_dashboard(root), base_url="http://127.0.0.1")


def test_evaluations_and_steps_are_listed(client: TestClient):
    assert client.get("/api/runs/a/replays").json() == {"evals": [{"name": "held out/50 %", "steps": [0, 4, 12]}]}
    assert client.get("/api/runs/b/replays").json() == {"evals": []}
    assert [client.get(f"/api/runs/{name}").json()["has_replays"] for name in "ab"] == [True, False]


def test_games_have_pictures_texts_and_actions(client: TestClient):
    found = client.get("/api/runs/a/replays/held%20out%2F50%20%25", params={"step": 4}).json()
    assert found["seats"] == ["a", "b"] and found["players"] == ["net", "script"]
    assert found["seat_colours"] == [[1, 2, 3]] and found["action_names"] == ["stay", "go"]
    first, second = found["episodes"]
    assert (first["seed"], first["end"], first["success"]) == (7, "terminated", True)
    assert (second["seed"], second["end"], second["success"]) == (8, "cut", None)
    assert first["frames"][0]["picture"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert first["frames"][0]["actions"] == [[1.0], [0.0]] and first["frames"][0]["rewards"] == [0.5, 0.0]
    assert first["frames"][1]["picture"] is None, "only a PNG is sent"
    assert first["frames"][1]["rewards"] == [0.0, None]
    assert second["frames"][0]["text"] == "x . o"


@pytest.mark.parametrize(
    "name, step", [("held out", 4), ("held out%2F50 %25", 3), ("%2E%2E", 0), ("%2E%2E%2F%2E%2E", 4)]
)
def test_missing_replays_are_404(client: TestClient, name: str, step: int):
    assert client.get(f"/api/runs/a/replays/{name}", params={"step": step}).status_code == 404


def test_files_that_are_not_replays_are_explained(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch):
    path, address = (
        root / "a" / eval_file("replays", "held out/50 %", 3),
        "/api/runs/a/replays/held%20out%2F50%20%25?step=4",
    )
    path.write_bytes(b"nothing")
    answer = client.get(address)
    assert answer.status_code == 400 and "is not a file of replays" in answer.json()["error"]
    pq.write_table(pa.table({"episode": [0]}), path)
    assert client.get(address).status_code == 422
    monkeypatch.setattr(replays, "MAX_FILE_BYTES", 10)
    assert "larger than" in client.get(address).json()["error"]
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert client.get(address).status_code == 404
