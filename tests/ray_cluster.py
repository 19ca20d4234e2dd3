"""Ray clusters whose nodes are all on this machine, each a set of processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster


@contextmanager
def worker_environment() -> Iterator[None]:
    """Sets the environment of clusters that are started in this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # so that actors find toy_tasks
        patch.setenv("RAY_worker_niceness", "0")  # beside other work on the machine, Ray's 15 would starve them
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
        finally:  # of a test that failed too: the next one must not meet its cluster
            ray.shutdown()
            found.shutdown()
