"""`@pytest.mark.few(n)`: n of a test's cases are fast."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = """
import pytest
@pytest.mark.few(3)
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.peers), 1, 2, 3])
def test_pair(a, b): pass
@pytest.mark.few(1)
@pytest.mark.parametrize("a", range(5))
def test_one(a): pass
def test_other(): pass
"""


def test_few_cases_are_fast_and_the_others_slow(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CASES)
    config = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", tmp_path, "-p", "helpers.few_cases", "--noconftest"]
    command = [sys.executable, "-m", "pytest", *config, "--collect-only", "-q", tmp_path]
    fast = subprocess.run(command, capture_output=True, text=True, cwd=TESTS).stdout.split()
    assert [line.split("::")[1] for line in fast if "::" in line] == [
        "test_pair[1-0]",
        "test_pair[2-1]",
        "test_pair[3-2]",
        "test_one[0]",
        "test_other",
    ]
