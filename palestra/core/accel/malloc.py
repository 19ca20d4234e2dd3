"""Settings of glibc's malloc: without them, allocating freed memory again takes up to a third of the CPU time of small
models. Also the sizes of the machine's memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# parameter numbers from glibc's malloc.h
TRIM_THRESHOLD = -1
TOP_PAD = -2
MMAP_MAX = -4
MIN_MAPPED_BYTES = 2**22  # smaller tensors would spend more time on page faults than memory is worth


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system, for the life of this process. Does nothing
    on other C libraries.

    Otherwise large tensors cost a page fault per page on every allocation. The process keeps its peak memory until
    `release_freed_memory` is called.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(TOP_PAD, 64 * 2**20)


def release_freed_memory() -> None:
    """Returns freed memory to the system; using it again costs a page fault per page. Does nothing if the C library is
    not glibc."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def mapped_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns zeros of `shape` with the dtype and device of `like`. On CPU a large tensor has its own mapping: the
    system provides pages as they are written to, and gets them back when the tensor is freed.

    With `keep_freed_memory` malloc would keep that memory, in pieces too small for a slightly larger tensor.
    """
    size = torch.Size(shape).numel() * like.element_size()
    if like.device.type != "cpu" or size < MIN_MAPPED_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return like.new_zeros(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {size / 2**20:,.0f} MiB of memory left ({error})") from error
    return torch.frombuffer(memory, dtype=like.dtype).view(*shape)


def physical_memory() -> int:
    """Returns the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: str = "cpu") -> int:
    """Returns the free memory of a device in bytes. Memory of the machine that caches could give back counts as
    free."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_memory()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), physical_memory())


def check_fits_memory(size: float, what: str, fix: str) -> None:
    """Raises ValueError if `what`, of at least `size` bytes, exceeds this machine's memory. Checked before the
    allocation, since most systems overcommit memory and kill the process that uses it."""
    if size > physical_memory():
        raise ValueError(
            f"{what} needs at least {size / 2**30:,.0f} GiB, and this machine has {physical_memory() / 2**30:,.0f} GiB "
            f"of memory: {fix}"
        )
