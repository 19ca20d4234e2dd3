"""A running server, for tests that ask it as clients do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PUBLIC = "Qwen/Qwen3-0.6B"


@contextmanager
def serving(data: Path, *options: str) -> Iterator[str]:
    """The address of a server of the tiny base, on a free port."""
    program = [sys.executable, "-c", "from palestra.cli import app; app()"]
    command = [*program, "serve", "--port", "0", "--data", str(data), "--alias", f"{PUBLIC}=tiny", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"TINKER_BASE_URL=(\S+)", line)
        assert found, line
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
