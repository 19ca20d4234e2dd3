"""Ray clusters whose nodes are all on this machine, each a group of processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster


@contextmanager
def worker_environment() -> Iterator[None]:
    """Sets the environment for clusters that are started in this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # so that actors import toy_tasks
        patch.setenv("RAY_worker_niceness", "0")  # on a busy machine Ray's default of 15 would be too short
        yield


@contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster of nodes with these resources, joined; the first is its head."""
    with worker_environment():
        found = Cluster(True, head_node_args=nodes[0])
        try:
            for node in nodes[1:]:
                found.add_node(**node)
            found.wait_for_nodes(90)
            ray.init(found.address, log_to_driver=False, logging_level="ERROR")
            yield found
        finally:  # also after a failed test, so that the next one starts its own cluster
            ray.shutdown()
            found.shutdown()
