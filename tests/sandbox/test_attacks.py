"""Attacks on limits, locks, flags, kernel memory and the supervisor are contained.

The table of docs/sandbox.md counts these. Control tests show that many of them succeed without a sandbox.
"""

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from sandbox.attacks import ATTACKS, DISK, FILES, HELPERS, LEFTOVERS, OTHERS, REAL_ATTACKS, SOCKETS
from sandbox.attempts import PRELUDE
from sandbox.world import LIMITS, MISTAKES, World, attempt

from palestra.sandbox import ResourceLimits, Sandbox, client

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="attacks are on Linux"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are those of x86-64"),
]
OURS = replace(LIMITS, cpu=1.5, wall=4.0)
MOST = 3 * OURS.wall + 7  # seconds: twice the wall limit in addition on a busy machine, and the clean-up
QUICK = {*DISK, *OTHERS, *SOCKETS, *FILES, *LEFTOVERS} - {"folders 10,000 deep", "very long names"}
QUICK |= {"shared memory that it unmaps page by page", "memory of threads whose first one is gone", "large pipes"}


@pytest.mark.parametrize("backend", ["sandlock", pytest.param("bubblewrap", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ATTACKS]
)
def test_attack_is_contained(name: str, backend: str, world: World) -> None:
    if reason := client.backend_problem(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    began = time.monotonic()
    outcome = attempt(backend, HELPERS + ATTACKS[name], world, OURS)
    assert time.monotonic() - began < MOST
    assert "ESCAPED" not in outcome.stdout, outcome
    assert not any(mistake in outcome.stderr for mistake in MISTAKES), outcome.stderr
    assert world.state() == world.before
    assert world.survivors() == []


@pytest.mark.parametrize("backend", ["sandlock", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def test_hostile_leftover_files_do_not_block_readers(backend: str) -> None:
    """Pipes, cycles of links, names that are not valid text, sparse files, and a deep folder."""
    if reason := client.backend_problem(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    names = ("pipes and sockets in its folder", "links that go round", "names that are no text", "holes")
    source = "import os\n" + "\n".join(LEFTOVERS[name] for name in names) + "\nopen('last', 'w').write('here')\n"
    source += "for n in range(300): os.mkdir('d'); os.chdir('d')"
    began = time.monotonic()
    outcome = asyncio.run(Sandbox(backend).run_python(source, limits=replace(OURS, disk=2**22), keep=True))
    assert time.monotonic() - began < MOST
    assert outcome.ok and outcome.files["last"] == b"here"
    assert {"a\nb", "-rf", os.fsdecode(b"\xff\xfe")} <= outcome.files.keys()
    assert sum(map(len, outcome.files.values())) <= 2**22
    assert not {"p", "q", "r", "a", "b", "c"} & outcome.files.keys()


GENEROUS = ResourceLimits(wall=20.0, cpu=15.0, memory=2**30, processes=32, disk=2**26)
FEW = ("files that never had a name", "a signal by way of a socket", "a lock on the library")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in REAL_ATTACKS]
)
def test_attack_succeeds_without_a_sandbox(name: str, world: World) -> None:
    outcome = attempt("unsafe", HELPERS + ATTACKS[name], world, GENEROUS)
    time.sleep(0.02)
    happened = "ESCAPED" in outcome.stdout or world.state() != world.before
    world.restore()
    assert happened, outcome


# Runs programs while `unshare` fails, so that nothing can be mounted. Prints why the backend does not work, or the
# outcome.
WITHOUT_MOUNTS = """
import asyncio, ctypes, json, sys
path, backend, limits, programs = json.load(sys.stdin)
sys.path[:] = path
from palestra.sandbox import ResourceLimits, Sandbox, client, seccomp
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]
one, unshare = seccomp.instruction, 272
refuse = [one(seccomp.EQUAL, unshare, skip_if_false=1), one(seccomp.RETURN, seccomp.ERRNO | 1)]
rules = [one(seccomp.LOAD, seccomp.CALL_OFFSET), *refuse, one(seccomp.RETURN, seccomp.ALLOW)]
program = Program(len(rules), b"".join(rules))
control = ctypes.CDLL(None).prctl
assert not control(38, 1, 0, 0, 0) and not control(22, 2, ctypes.byref(program))
for source in programs:
    reason = client.backend_problem(backend)
    outcome = None if reason else asyncio.run(Sandbox(backend).run_python(source, limits=ResourceLimits(**limits)))
    print(json.dumps([reason, outcome and outcome.stdout, outcome and outcome.ended]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["sandlock", "bubblewrap"])
def test_disk_use_is_limited_without_mount_permission(backend: str, world: World) -> None:
    """Then the folder and files without a name are measured; no process may become unmeasurable. A program that ends
    between two measurements is found out afterwards."""
    attacks = DISK | {"another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])"}
    programs = [PRELUDE.format(world=world.prelude_values()) + HELPERS + source for source in attacks.values()]
    asked = json.dumps([sys.path, backend, asdict(OURS), ["import os; print(os.statvfs('.').f_blocks)", *programs]])
    done = subprocess.run([sys.executable, "-c", WITHOUT_MOUNTS], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if reason := results[0][0]:
        pytest.skip(f"{backend} does not work where nobody may mount: {reason}")
    assert int(results[0][1]) > 2 * OURS.disk // 4096  # no separate file system
    for name, (_, stdout, ended) in zip(attacks, results[1:], strict=True):
        is_found_out = name == "what was written at once and is gone" and ended == "output"
        assert "ESCAPED" not in stdout or is_found_out, (name, ended)
    assert world.state() == world.before
