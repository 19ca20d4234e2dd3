"""Names of a package that are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module

# As in typing, which is not imported here: `python -m palestra` would take it from the folder in which it is typed.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def load_name(package: str, modules: Mapping[str, Sequence[str]], name: str) -> Any:
    """Returns the attribute `name` of `package` from the module of it that gives the name, and keeps it there.

    `modules` maps each module, without the package's name, to its names; "module as name" renames one. Raises
    AttributeError for other names.
    """
    for module, names in modules.items():
        for original, _, alias in (given.partition(" as ") for given in names):
            if name == (alias or original):
                value = getattr(import_module(f"{package}.{module}"), original)
                setattr(sys.modules[package], name, value)
                return value
    meant = name.lower().removesuffix("trainer").removesuffix("config")
    hints = [f": did you mean {known}?" for known in public_names(modules) if known.lower() == meant]
    if package != "palestra" and hasattr(sys.modules["palestra"], name):
        hints = [f": it is palestra.{name}"]
    raise AttributeError(f"module {package!r} has no attribute {name!r}{''.join(hints)}")


def public_names(modules: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the sorted names that `load_name` finds."""
    return sorted(given.rpartition(" as ")[2] for names in modules.values() for given in names)
