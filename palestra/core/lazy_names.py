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
    if package != "palestra" and hasattr(import_module("palestra"), name):
        raise AttributeError(f"module {package!r} has no attribute {name!r}: it is palestra.{name}")
    from difflib import get_close_matches  # which importing palestra does not need

    by_lower = {known.lower(): known for known in public_names(modules)}
    near = get_close_matches(name.lower().removesuffix("trainer").removesuffix("config"), by_lower, 1, 0.8)
    meant = f": did you mean {by_lower[near[0]]}?" if near else ""
    raise AttributeError(f"module {package!r} has no attribute {name!r}{meant}")


def public_names(modules: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the sorted names that `load_name` finds."""
    return sorted(given.rpartition(" as ")[2] for names in modules.values() for given in names)
