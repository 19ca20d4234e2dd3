"""Imports the objects that configs name as "module:name". Importing a module runs it.

Only commands that play or train look for such modules in the working folder, after all installed ones: a folder that
somebody else made can neither replace a package nor run code when it is only looked at.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.core.config.import_errors import explain_import_error

_folders: list[str] = []


def allow_modules_in(folder: str | Path) -> None:
    """Lets this process, and those that it starts, import the modules in `folder` that a config names."""
    _folders.append(str(folder))


def import_object(path: str) -> Any:
    """Returns the object at "module:name". Raises ImportError, AttributeError or ValueError if there is none."""
    module, _, name = path.partition(":")
    return getattr(import_user_module(module), name)


def import_user_module(module: str) -> ModuleType:
    """Returns the module of this name. Raises ImportError or ValueError if there is none."""
    if not module.startswith("palestra."):
        sys.path += [folder for folder in _folders if folder not in sys.path]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not _folders and error.name == module and Path(f"{module.partition('.')[0]}.py").exists():
            raise ImportError(
                f"this command runs no module of the working folder; if {module} is yours: PYTHONPATH=. palestra ..."
            ) from error
        raise


def load_object(path: str, what: str) -> Any:
    """Returns the object at "module:name", which a config names. Raises ValueError, which calls the object `what`, if
    there is none."""
    try:
        return import_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'{what} "{path}" cannot be loaded: {explain_import_error(path, error)}') from error
