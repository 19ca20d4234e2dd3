"""What the C allocator does with freed memory, which decides a tenth to a third of the CPU seconds of small models; and
whether a machine has the memory that is asked for."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # the parameters' numbers in glibc's malloc.h


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory rather than hand it back, for the life of this process; a no-op elsewhere.

    Large tensors otherwise cost a page fault per page, every time. The process keeps its peak memory until
    `give_back_freed_memory`.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Returns freed memory to the system, at the price of a page fault per page when it is needed again; a no-op where
    the C library is not glibc."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def physical_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def must_fit(size: float, what: str, fix: str) -> None:
    """Raises ValueError where `what`, of at least `size` bytes, is more than this machine can hold: said before it is
    allocated, since most systems promise more memory than there is and kill the process that uses it."""
    if size > physical_memory():
        raise ValueError(
            f"{what} needs at least {size / 2**30:,.0f} GiB, and this machine has {physical_memory() / 2**30:,.0f} GiB "
            f"of memory: {fix}"
        )
