"""Cgroups of runs: what is written where, in a tree of plain files, and real cgroups if the kernel allows them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.sandbox import ResourceLimits, Sandbox, cgroup, client, open_sandbox

SHARED = "cpu memory pids"
OWN = "user.slice/run-1.scope"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """/proc/self of a process in OWN, in a hierarchy whose user.slice delegates its controllers."""
    mount, folder = tmp_path / "cgroup", tmp_path / "proc"
    folder.mkdir()
    for inner, shared in ((mount / OWN, ""), (mount / "user.slice", SHARED), (mount, SHARED)):
        inner.mkdir(parents=True, exist_ok=True)
        for file, text in (("cgroup.controllers", SHARED), ("cgroup.subtree_control", shared), ("cgroup.procs", "")):
            (inner / file).write_text(text)
    (folder / "cgroup").write_text(f"4:memory:/elsewhere\n0::/{OWN}\n")
    (folder / "mountinfo").write_text(
        "24 1 0:20 / /proc rw - proc proc rw\n"
        f"30 1 0:26 / {mount} rw,nosuid shared:9 master:2 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    return folder


def test_nearest_ancestor_that_delegates_memory_and_pids_is_used(proc: Path, tmp_path: Path) -> None:
    assert cgroup.own_cgroup(proc) == tmp_path / "cgroup" / OWN
    assert cgroup.find_parent("auto", proc) == tmp_path / "cgroup/user.slice"
    (tmp_path / "cgroup/user.slice/cgroup.subtree_control").write_text("cpu memory")
    assert cgroup.find_parent("auto", proc) == tmp_path / "cgroup"
    (tmp_path / "cgroup/cgroup.subtree_control").write_text("")
    assert cgroup.find_parent("auto", proc) is None


def test_no_cgroup_without_a_version_2_hierarchy(proc: Path) -> None:
    (proc / "mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    assert cgroup.find_parent("auto", proc) is None
    assert cgroup.find_parent("auto", proc / "nothing") is None


def test_configured_folder_must_be_a_cgroup(proc: Path, tmp_path: Path) -> None:
    assert cgroup.find_parent("off", proc) is None
    assert cgroup.find_parent(str(tmp_path / "cgroup" / OWN), proc) == tmp_path / "cgroup" / OWN
    with pytest.raises(ValueError, match=r"PALESTRA_CGROUP=.*is not a cgroup of version 2 .*set auto or off"):
        cgroup.find_parent(str(tmp_path), proc)
    (tmp_path / "cgroup" / OWN / "cgroup.controllers").write_text("hugetlb pids")
    with pytest.raises(ValueError, match=r"cgroup.controllers lacks memory"):
        cgroup.find_parent(str(tmp_path / "cgroup" / OWN), proc)


def test_limits_of_a_run_are_written_to_its_cgroup(tmp_path: Path) -> None:
    folder = cgroup.make_run(tmp_path, "17", ResourceLimits(memory=2**28, disk=2**20, processes=3))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": str(2**28 + 2**20 + cgroup.SPARE_BYTES),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(3 * 16 + cgroup.SPARE_TASKS),
    }
    with pytest.raises(FileExistsError):
        cgroup.make_run(tmp_path, "17", ResourceLimits())


def test_kernel_kills_are_reported_and_removal_kills_first(tmp_path: Path) -> None:
    folder = cgroup.make_run(tmp_path, "17", ResourceLimits())
    assert not cgroup.ran_out_of_memory(folder)
    for count in (0, 2):
        (folder / "memory.events").write_text(f"low 0\nmax 9\noom 1\noom_kill {count}\noom_group_kill 1\n")
        assert cgroup.ran_out_of_memory(folder) == bool(count)
    assert not cgroup.remove(folder)  # plain files remain; those of a cgroup disappear with it
    assert (folder / "cgroup.kill").read_text() == "1"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert cgroup.remove(folder)


def test_folder_that_no_process_can_enter_is_detected(proc: Path, tmp_path: Path) -> None:
    """Writes to a tree of plain files succeed, but move no process."""
    folder = cgroup.make_run(tmp_path / "cgroup", "17", ResourceLimits())
    with pytest.raises(OSError, match="not a cgroup that a process can enter"), cgroup.entered_cgroup(folder, proc):
        pytest.fail("entered")
    assert (folder / "cgroup.procs").read_text() == "0"
    assert (tmp_path / "cgroup" / OWN / "cgroup.procs").read_text() == "0"  # and back


@pytest.fixture
def unusable_cgroup(tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    client.stop_fork_server()
    client.backend_problem.cache_clear()
    monkeypatch.setenv(cgroup.SETTING, str(tmp_path / "cgroup"))
    yield
    client.stop_fork_server()
    client.backend_problem.cache_clear()


def test_nothing_runs_if_the_configured_cgroup_is_unusable(
    unusable_cgroup: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder looks like a cgroup; only the trial shows that it is not one."""
    with pytest.raises(ValueError, match="programs cannot be run safely here"):
        open_sandbox()
    with pytest.raises(ValueError, match=r"PALESTRA_CGROUP=.*no cgroup can be used there"):
        cgroup.open_group("palestra-sandbox-test")
    monkeypatch.setenv(cgroup.SETTING, "/nowhere")
    with pytest.raises(ValueError, match=r"PALESTRA_CGROUP=/nowhere: it is not a cgroup"):
        open_sandbox(unsafe=True)


# Enters a cgroup, leaves a child and a grandchild in a new session there, returns, and waits.
TWO_LEFT_BEHIND = """
import os, subprocess, sys, time
from pathlib import Path
from palestra.sandbox import cgroup
with cgroup.entered_cgroup(Path(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(600)
print("back", flush=True)
time.sleep(600)
"""


def test_processes_of_a_cgroup_and_no_others_are_killed_with_it() -> None:
    """In any version 2 hierarchy in which this user may make a cgroup, also without its controllers."""
    own = cgroup.own_cgroup()
    if own is None or not (os.access(own, os.W_OK) and os.access(own / "cgroup.procs", os.W_OK)):
        pytest.skip(f"this user may make no cgroup of version 2 here ({own})")
    folder = own / f"palestra-test-{os.getpid()}"
    folder.mkdir()
    try:
        command = [sys.executable, "-c", TWO_LEFT_BEHIND, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "back\n"
            inside = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
            assert inside and process.pid not in inside
            assert cgroup.remove(folder)
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in inside)
    finally:
        cgroup.remove(folder)


HOGS = {
    "memory": "held = []\nwhile True: held.append(b'x' * 2**24)",
    "tasks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}


@pytest.mark.parametrize("program", HOGS)
def test_run_is_limited_by_a_real_cgroup(program: str, tmp_path: Path) -> None:
    if (parent := cgroup.find_parent("auto")) is None:
        pytest.skip("no cgroup of version 2 that shares out memory and pids, and that this user may write, is here")
    limits = ResourceLimits(memory=2**27, wall=20.0, cpu=10.0)
    outcome = asyncio.run(Sandbox(open_sandbox().name).run_python(HOGS[program], limits=limits))
    assert outcome.ended == "memory"
    groups = [one for one in parent.glob("palestra-sandbox-*") if one.is_dir()]
    assert groups and not any(inner.is_dir() for group in groups for inner in group.iterdir())
    client.stop_fork_server()
    assert not any(group.exists() for group in groups)
