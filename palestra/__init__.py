"""palestra: train language agents and small networks together, in teams, in games and as populations.

Import what you need from the modules (`palestra.envs.base`, `palestra.config`, ...): this package imports nothing by
itself, so that `palestra --help` answers at once. In a notebook, `palestra.load_run(path)` opens a run.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load_run`, which is loaded when it is first asked for (PEP 562)."""
    if name == "load_run":
        return import_module("palestra.report.notebook").load_run
    raise AttributeError(f"module 'palestra' has no attribute {name!r}")
