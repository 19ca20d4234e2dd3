"""One server for all official clients. These tests are run by `make test-clients` alone."""

from collections.abc import Iterator

import pytest
from helpers.official import BASES, Official, seed_hub
from helpers.processes import Server


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    root = tmp_path_factory.mktemp("official")
    seed_hub(root / "hf")
    server = Server(root / "data", *[option for base in BASES for option in ("--alias", f"{base}=tiny")])
    yield Official(server.url, root / "hf")
    server.process.terminate()
    server.process.communicate(timeout=120)
    assert server.process.returncode == 0
