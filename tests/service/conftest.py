"""Front ends over a real store and vault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fronts import Front

from palestra.service.bell import Bell
from palestra.service.context import Context, Limits
from palestra.service.keys import Keys, add_key
from palestra.service.serve import describe
from palestra.service.store import Store
from palestra.service.vault import Vault

PUBLIC = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def tiny() -> Any:
    return describe("tiny", "tiny", {PUBLIC: "tiny"})


@pytest.fixture
def context(tmp_path: Path, tiny: Any) -> Iterator[Context]:
    store = Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    ours, theirs = Bell.pair()
    limits = Limits(body=200_000, poll=0.05, models=3, queue=50)
    vault = Vault(tmp_path / "weights")
    yield Context(store=store, vault=vault, keys=Keys(None), bases={"tiny": tiny}, bell=ours, limits=limits)
    store.close()
    ours.end.close()
    theirs.end.close()


@pytest.fixture
def front(context: Context) -> Front:
    """Everybody is "anyone"."""
    return Front(context)


@pytest.fixture
def shared(context: Context, tmp_path: Path) -> Front:
    """Two owners with keys, ada and bob."""
    keys = {name: add_key(tmp_path / "keys", name) for name in ("ada", "bob")}
    context.keys = Keys(tmp_path / "keys")
    front = Front(context)
    front.keys = keys
    return front
