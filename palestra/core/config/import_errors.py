"""Explains why an object that a config names as "module:name" cannot be imported."""

from __future__ import annotations

import os
import sys


def explain_import_error(path: str, error: Exception) -> str:
    """Returns why "module:name" cannot be imported: for a missing module its name, and the folders searched."""
    module, _, name = path.partition(":")
    if not (module and name):
        return "write module:name"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing:
        return str(error)
    if f"{module}.".startswith(f"{missing}."):
        folders = dict.fromkeys(folder or os.getcwd() for folder in sys.path if not _is_installed(folder))
        return f"there is no module {missing} in {', '.join(folders)} or the installed packages"
    return f"{module} needs the package {missing.partition('.')[0]}, which is not installed"


def _is_installed(folder: str) -> bool:
    """Returns True for folders of the standard library and of installed packages."""
    return "site-packages" in folder or folder.startswith((sys.base_prefix, "__editable__"))
