"""A folder of runs, and a client of the dashboard over it in this process."""

from pathlib import Path

import pytest
from helpers.long_runs import write_long_run
from starlette.testclient import TestClient

from palestra.dashboard.app import build_dashboard

HERE = "http://127.0.0.1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps indexes beside the test's other files, not in the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one config, two of them with other seeds, and a longer one."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_long_run(folder, f"seed-{seed}", steps=24, episodes=4, seed=seed)
    write_long_run(folder, "more", steps=30, episodes=2, total=60)
    return folder


@pytest.fixture
def client(root: Path) -> TestClient:
    return TestClient(build_dashboard(root), base_url=HERE)
