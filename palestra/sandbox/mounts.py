"""A size-limited tmpfs for one program's folder, visible only to this process and its descendants.

It limits every block, including those of deleted open files, unnamed files and files that are only mapped. It vanishes
with the last of these processes, so nothing needs to be removed. Root mounts it in a mount namespace, other users in a
mount and a user namespace; if neither is allowed, the folder is measured instead (`workdir.exceeds_limit`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

# flags of unshare
CLONE_NEWNS = 0x2_0000
CLONE_NEWUSER = 0x1000_0000
RECURSIVE_SLAVE = 0x4000 | 0x8_0000  # MS_REC | MS_SLAVE
NOSUID_NODEV_NOEXEC = 2 | 4 | 8  # MS_NOSUID | MS_NODEV | MS_NOEXEC


def is_supported(root: Path) -> bool:
    """Returns True if `mount` works in a child process and further namespaces can be created in it."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(OSError):
            mount(root, 2**20, 16)
            _new_namespaces()
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def mount(root: Path, size: int, files: int) -> None:
    """Mounts a tmpfs of at most `size` bytes and `files` inodes over `root`. Raises OSError if that is not allowed."""
    _new_namespaces()
    _mount(None, "/", None, RECURSIVE_SLAVE, "")  # the mount must not propagate to the parent namespace
    options = f"size={size},nr_inodes={files},mode=0755,huge=never"
    try:
        _mount("palestra", str(root), "tmpfs", NOSUID_NODEV_NOEXEC, options)
    except OSError:  # a kernel without huge pages rejects the last option
        _mount("palestra", str(root), "tmpfs", NOSUID_NODEV_NOEXEC, options.removesuffix(",huge=never"))


def _new_namespaces() -> None:
    user = os.geteuid()
    group = os.getegid()
    _call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), options.encode())


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
