"""Imports the objects that configs name as "module:name". Importing a module runs it.

Only commands that play or train look for such modules in the working folder, after all installed ones: a folder that
somebody else made can neither replace a package nor run code when it is only looked at.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FOLDERS_VARIABLE = "PALESTRA_MODULE_FOLDERS"  # of the environment, which other processes of a run inherit


def allow_modules_in(folder: str | Path) -> None:
    """Lets this process, and those that it starts, import the modules in `folder` that a config names."""
    os.environ[FOLDERS_VARIABLE] = os.pathsep.join(dict.fromkeys([*_allowed_folders(), str(folder)]))


def _allowed_folders() -> list[str]:
    return [folder for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]


def import_object(path: str) -> Any:
    """Returns the object at "module:name". Raises ImportError, AttributeError or ValueError if there is none."""
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    if not module.startswith("palestra."):
        sys.path += [folder for folder in _allowed_folders() if folder not in sys.path]  # after all others
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        is_here = Path(f"{package}.py").exists() or Path(package).is_dir()
        if is_here and error.name == package and not _allowed_folders():
            raise ImportError(
                f"this command runs no module of the working folder; if {package} is yours: PYTHONPATH=. palestra ..."
            ) from error
        raise
    except (ImportError, AttributeError, ValueError):
        raise
    except (Exception, SystemExit) as error:  # of the module's own code
        raise ImportError(f"{module} fails when it is imported: {type(error).__name__}: {error}") from error


def load_object(path: str, what: str) -> Any:
    """Returns the object at "module:name", which a config names. Raises ValueError, which calls the object `what`, if
    there is none."""
    try:
        return import_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'{what} "{path}" cannot be loaded: {explain_import_error(path, error)}') from error


def import_path(named: Any) -> str:
    """Returns the "module:name" by which other processes can import a class or function; "" if there is none."""
    is_found = getattr(sys.modules.get(named.__module__), named.__qualname__, None) is named
    return f"{named.__module__}:{named.__qualname__}" if is_found and named.__module__ != "__main__" else ""


def entry_point_paths(group: str) -> dict[str, str]:
    """Returns the "module:Class" of every name that installed packages register in a group of entry points."""
    return {point.name: point.value for point in entry_points(group=group)}


def explain_import_error(path: str, error: Exception) -> str:
    """Returns why "module:name" cannot be imported: for a missing module its name, and the folders searched."""
    module, _, name = path.partition(":")
    if not (module and name):
        return "write module:name"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing:
        return str(error)
    if f"{module}.".startswith(f"{missing}."):
        folders = dict.fromkeys(folder or os.getcwd() for folder in sys.path if not is_installed(folder))
        return f"there is no module {missing} in {', '.join(folders)} or the installed packages"
    return f"{module} needs the package {missing.partition('.')[0]}, which is not installed"


def is_installed(path: str) -> bool:
    """Returns True for paths in the standard library and in installed packages."""
    return "site-packages" in path or path.startswith((sys.base_prefix, "__editable__"))
