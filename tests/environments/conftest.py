"""Fixtures for tests of programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from palestra.environments.code.test_runner import ProgramTestRunner
from palestra.sandbox import client, open_sandbox

if TYPE_CHECKING:
    from palestra.environments.code.env import CoderTester


@pytest.fixture
def sandboxed() -> None:
    if all(client.backend_problem(name) for name in client.BACKENDS_BY_PREFERENCE):
        pytest.skip("no sandbox works here")


@pytest.fixture
def lab(sandboxed: None) -> ProgramTestRunner:
    return ProgramTestRunner(open_sandbox())


@pytest.fixture
def add(tmp_path: Path) -> partial[CoderTester]:
    """The env with one problem, `add`."""
    from helpers.toy_code import (  # not above: it loads pyarrow, which the venv of OpenEnv's tests does not have
        ADD,
        write,
    )

    from palestra.environments.code.env import CoderTester

    return partial(CoderTester, source=write(tmp_path / "add.jsonl", ADD), split="all")
