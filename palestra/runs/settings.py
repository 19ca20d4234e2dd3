"""Check of a run's config on resume: only `Run.replace_config` may have changed it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from palestra.core.config import Tree, parse
from palestra.core.config.shipped import find_config
from palestra.core.files import (
    MAX_JSON_BYTES,
    OLDER_HINT,
    DamagedFile,
    atomic_write,
    check_folder,
    file_size,
    read_bytes,
    read_json,
)

META_FILE = "meta.json"
CONFIG_FILE = "config.yaml"
META_TYPES = {"created": str, "command": list, "config": str, "changed": list, "seed": int, "inputs": dict}
MAX_SHOWN = 5  # settings listed in a message
WANDB_FOLDER = "sinks/wandb/wandb"  # the W&B package writes it, with symbolic links to log files outside the run


def find_run(path: str | Path) -> Path:
    """Returns the folder of a run, from which files may be read after this call. Raises ValueError if `path` is not a
    run, and DamagedFile as `check_run_folder` does."""
    path = Path(path)
    if find_config(path).is_file():
        raise ValueError(f"{path} is a file, not a run: `palestra train {path}` starts a run of a config")
    if path.is_dir():
        check_run_folder(path)
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"{path} is not a run: it has no config.yaml; `palestra runs` lists the runs there are")
    if file_size(path / CONFIG_FILE) > MAX_JSON_BYTES:
        raise DamagedFile(f"{path / CONFIG_FILE} has more bytes than any config: bring it back from a copy")
    return path


def resume_command(path: Path) -> str:
    """Returns the command that continues the run at `path`."""
    return f"palestra train --resume {shlex.quote(str(path))}"


def check_run_folder(path: Path) -> None:
    """Checks that a run's or agent's folder has no special files and no links that lead out, but in
    W&B's. Raises DamagedFile as `check_folder` does."""
    check_folder(path, except_for=[WANDB_FOLDER])


def check_config(path: Path) -> str:
    """Returns the config.yaml of the run at `path`. Raises ValueError, naming each setting that differs, if it is not
    the config in meta.json.

    If the run died while it was extended, only meta.json has the new config; config.yaml is then updated.
    """
    try:
        text = read_bytes(path / CONFIG_FILE).decode()
    except OSError as error:
        raise ValueError(f"cannot read config {path / CONFIG_FILE}: {error.strerror}; is {path} a run?") from error
    except UnicodeDecodeError as error:
        raise DamagedFile(f"cannot read config {path / CONFIG_FILE}: {error}; {RESTORE_HINT}") from error
    meta = read_meta(path)
    if text == meta["config"]:
        return text
    if [text] == [change.get("config") for change in meta.get("changed", [])[-1:]]:
        atomic_write(path / CONFIG_FILE, meta["config"].encode())
        return str(meta["config"])
    if changed := diff_settings(parse(meta["config"], META_FILE), parse(text, str(path / CONFIG_FILE))):
        raise DamagedFile(
            f"{path / CONFIG_FILE} was edited after the run began ({_first(changed)}), and a run keeps its config: put "
            "the old values back, or start a new run with the new ones. Only the length of a run may change, by --set"
        )
    return text


def read_meta(path: Path, *, needs_config: bool = True) -> dict[str, Any]:
    """Returns the content of meta.json of the run at `path`; without `needs_config`, {} if there is none. Raises
    DamagedFile if it is incomplete, or a value is not of the kind that a run writes."""
    meta = read_json(path / META_FILE, dict, None if needs_config else {})
    wrong = [key for key, kind in META_TYPES.items() if not isinstance(meta.get(key, kind()), kind)]
    if wrong or not all(isinstance(change, dict) for change in meta.get("changed", [])):
        raise DamagedFile(f"{path / META_FILE} is not the object that a run begins with; {RESTORE_HINT}")
    if needs_config and "config" not in meta:
        raise DamagedFile(
            f"{path / META_FILE} does not have the config that the run began with; {RESTORE_HINT}{OLDER_HINT}"
        )
    return dict(meta)


def _first(changed: list[str]) -> str:
    shown = changed[:MAX_SHOWN]
    if len(changed) > MAX_SHOWN:
        shown.append(f"and {len(changed) - MAX_SHOWN} more")
    return "; ".join(shown)


RESTORE_HINT = "bring it back from a copy, or start a new run"


def diff_settings(old: Tree, new: Tree) -> list[str]:
    """Returns the settings in which two configs differ: ["seed: 0 -> 3", ...]."""
    before = flatten_tree(old)
    now = flatten_tree(new)
    return [
        f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in dict.fromkeys([*before, *now])
        if key not in before or key not in now or before[key] != now[key]
    ]


def flatten_tree(tree: Any, at: str = "", *, separator: str = ".") -> dict[str, Any]:
    """Returns the values of a tree by their paths, as in `--set`: {"algorithm.clip": 0.2}."""
    if not isinstance(tree, dict) or not tree:
        return {at: tree}
    flat: dict[str, Any] = {}
    for name, branch in tree.items():
        flat |= flatten_tree(branch, f"{at}{separator}{name}" if at else str(name), separator=separator)
    return flat
