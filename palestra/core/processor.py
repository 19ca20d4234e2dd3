"""The processor of this machine: another one rounds otherwise."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

INSTRUCTIONS = {"AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "AVX2": {"avx2", "fma"}}


@cache
def processor() -> str:
    """Returns the name of this machine's processor and the instructions that PyTorch uses on it."""
    name = platform.processor() or platform.machine()
    flags: set[str] = set()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
            break
    there = [kind for kind, needed in INSTRUCTIONS.items() if needed <= flags]
    return f"{name}, {os.environ.get('ATEN_CPU_CAPABILITY', '').upper() or (there or ['DEFAULT'])[0]}"
