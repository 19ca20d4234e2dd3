"""Verification of a run's config on resume: it must equal the one it started with, unless extended by
`Run.go_on_with`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palestra.config import Tree, parse
from palestra.files import Damaged, atomic_write, plain_file

META = "meta.json"
CONFIG = "config.yaml"
SHOWN = 5  # settings listed in a message


def check_config(path: Path) -> str:
    """Returns the config.yaml of the run at `path`. Raises ValueError, naming each setting that differs, if it is not
    the config in meta.json.

    If the run died while it was extended, only meta.json has the new config; config.yaml is then updated.
    """
    try:
        text = plain_file(path / CONFIG).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read config {path / CONFIG}: {error.strerror}; is {path} a run?") from error
    except UnicodeDecodeError as error:
        raise Damaged(f"cannot read config {path / CONFIG}: {error}; {RESTORE}") from error
    meta = read_meta(path)
    if text == meta["config"]:
        return text
    if [text] == [change.get("config") for change in meta.get("changed", [])[-1:]]:
        atomic_write(path / CONFIG, meta["config"].encode())
        return str(meta["config"])
    if changed := changed_settings(parse(meta["config"], META), parse(text, str(path / CONFIG))):
        raise Damaged(
            f"{path / CONFIG} was edited after the run began ({_first(changed)}), and a run goes on as it began: put "
            "the old values back, or start a new run with the new ones. Only the length of a run may change, by --set"
        )
    return text


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the content of meta.json of the run at `path`. Raises Damaged if it is incomplete."""
    try:
        meta = json.loads(plain_file(path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"cannot read {path / META}: {error}; {RESTORE}") from error
    changes = meta.get("changed", []) if isinstance(meta, dict) else None
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise Damaged(f"{path / META} is not the object that a run begins with; {RESTORE}")
    if not isinstance(meta.get("config"), str):
        raise Damaged(f"{path / META} does not have the config that the run began with; {RESTORE}")
    return dict(meta)


def _first(changed: list[str]) -> str:
    more = f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return "; ".join(changed[:SHOWN]) + more


RESTORE = "bring it back from a copy, or start a new run"


def changed_settings(old: Tree, new: Tree) -> list[str]:
    """Returns the settings in which two configs differ: ["seed: 0 -> 3", ...]."""
    before, now = flat(old), flat(new)
    return [
        f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in dict.fromkeys([*before, *now])
        if key not in before or key not in now or before[key] != now[key]
    ]


def flat(tree: Any, at: str = "") -> dict[str, Any]:
    """Returns a tree as dotted keys, as in `--set`: {"algorithm.clip": 0.2}."""
    if isinstance(tree, dict) and tree:
        return {key: value for name, sub in tree.items() for key, value in flat(sub, f"{at}.{name}".strip(".")).items()}
    return {at: tree}
