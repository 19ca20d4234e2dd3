"""What the loops ask of a run, what stands for it beside the first process answers, too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from palestra.runs import Run
from palestra.runs.null_run import NullRun, ReadOnlyRun
from palestra.training import async_loop, vector_loop
from palestra.training import loop as train


@pytest.mark.parametrize("loop", [train, async_loop, vector_loop], ids=lambda module: module.__name__)
def test_whatever_a_loop_asks_of_a_run_is_there(loop: ModuleType) -> None:
    asked = set(re.findall(r"\brun\.(\w+)", inspect.getsource(loop)))
    stands = [ReadOnlyRun(Path()), *([NullRun()] if loop is vector_loop else [])]
    assert len(asked) >= 3 and all(hasattr(Run, name) or name in ("path", "next_step") for name in asked)
    assert [name for one in stands for name in sorted(asked) if not hasattr(one, name)] == []
