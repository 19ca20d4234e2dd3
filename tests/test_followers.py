"""What the loops ask of a run, what stands for it beside the first process answers, too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from palestra import drill, train, train_async
from palestra.followers import Follower, Onlooker
from palestra.runs import Run


@pytest.mark.parametrize("loop", [train, train_async, drill], ids=lambda module: module.__name__)
def test_whatever_a_loop_asks_of_a_run_is_there(loop: ModuleType) -> None:
    asked = set(re.findall(r"\brun\.(\w+)", inspect.getsource(loop)))
    stands = [Onlooker(Path()), *([Follower()] if loop is drill else [])]
    assert len(asked) >= 3 and all(hasattr(Run, name) or name in ("path", "next_step") for name in asked)
    assert [name for one in stands for name in sorted(asked) if not hasattr(one, name)] == []
