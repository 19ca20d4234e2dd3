"""Every method that training calls on a run exists on the no-op runs of other ranks."""

import inspect
import re
from types import ModuleType

import pytest

from palestra.runs import Run, loop
from palestra.runs.null_run import NullRun
from palestra.text.training import async_rollouts
from palestra.text.training import trainer as text
from palestra.vector import trainer as vector


@pytest.mark.parametrize("module", [loop, text, async_rollouts, vector], ids=lambda module: module.__name__)
def test_null_run_has_every_method_training_calls(module: ModuleType) -> None:
    asked = set(re.findall(r"\brun\.(\w+)", inspect.getsource(module)))
    assert len(asked) >= 2 and all(hasattr(Run, name) or name in ("path", "next_step") for name in asked)
    assert [name for name in sorted(asked) if not hasattr(NullRun(), name)] == []
