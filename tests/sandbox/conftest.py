"""The state outside the sandbox, which no program may change."""

from collections.abc import Iterator

import pytest
from sandbox.world import World, begin_victim


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"), begin_victim())
    yield world
    world.close()
