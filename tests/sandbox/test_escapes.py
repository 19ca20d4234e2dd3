"""Attempts to escape the sandbox, to reach other processes, or to exceed a limit fail.

The attempts (`attempts.py`) print whether they succeed, and the state outside is compared afterwards. Control tests
show that they are real: without a sandbox they succeed.
"""

import time

import pytest
from sandbox.attempts import BOMBS, MORE, REAL
from sandbox.world import LIMITS, MISTAKES, World, attempt

from palestra.sandbox import ResourceLimits, client

ALL = REAL | MORE | BOMBS
SOME = ("outlive its parent", "a fork bomb", "all memory", "all of the disk", "endless output", "answer never")
QUICK = {*REAL, *MORE, *SOME}


@pytest.mark.parametrize("backend", ["sandlock", pytest.param("bubblewrap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ALL])
def test_escape_attempt_fails_in_the_sandbox(name: str, backend: str, world: World) -> None:
    if reason := client.backend_problem(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    began = time.monotonic()
    outcome = attempt(backend, ALL[name], world)
    assert time.monotonic() - began < LIMITS.wall + 7  # the machine may be busy for a while
    assert "ESCAPED" not in outcome.stdout, outcome
    assert not any(mistake in outcome.stderr for mistake in MISTAKES), outcome.stderr
    assert world.state() == world.before
    assert world.survivors() == []


FEW = ("read a file", "list the user's home", "change a file's mode", "connect to a server", "limit a process")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in REAL])
def test_escape_attempt_succeeds_without_a_sandbox(name: str, world: World) -> None:
    """A control: it shows that the test above can fail."""
    outcome = attempt("unsafe", REAL[name], world, ResourceLimits())
    time.sleep(0.02)
    happened = "ESCAPED" in outcome.stdout or world.state() != world.before
    world.restore()
    assert happened, outcome
