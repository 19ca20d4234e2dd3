"""Finds bases and configs in palestra/data. Documents name configs by their path there: configs/demo.yaml."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import NamedTuple

DATA_DIR = Path(str(resources.files("palestra"))) / "data"
SHIPPED_BASES_DIR = DATA_DIR / "bases"


class Template(NamedTuple):
    """A shipped config: its name, its path as in the documents, and its first comment."""

    name: str
    path: Path
    description: str

    @property
    def group(self) -> str:
        """The folder that the config is in: "games", "populations", "text"."""
        return self.path.parent.name

    @property
    def text(self) -> str:
        """The config itself."""
        return (DATA_DIR / self.path).read_text(encoding="utf-8")


def find_config(path: Path) -> Path:
    """Returns `path`, or if there is no such file here, the shipped config of that path or of that file name."""
    if path.exists():
        return path
    shipped = {one.relative_to(DATA_DIR): one for one in _list_shipped()}
    by_file_name = {Path(one.name): one for one in shipped.values()}
    return shipped.get(path) or by_file_name.get(path) or path


def suggest_config(path: Path) -> str:
    """Returns the hint for a config that does not exist: the shipped one with the nearest file name, if any is near."""
    paths = {one.name: one.relative_to(DATA_DIR) for one in _list_shipped()}
    near = get_close_matches(path.with_suffix(".yaml").name, paths, 1, 0.8)
    return f"; did you mean {paths[near[0]]}, which comes with palestra?" if near else ""


def templates() -> list[Template]:
    """Returns the shipped configs, those in `configs` itself first, then by folder and name."""
    found = []
    for path in _list_shipped():
        found.append(Template(path.stem, path.relative_to(DATA_DIR), _first_sentence(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda one: (one.group != "configs", one.path.parent, one.name))


def _list_shipped() -> list[Path]:
    return sorted((DATA_DIR / "configs").rglob("*.yaml"))


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a config's leading comment, without the sign of comments; "" if it has none."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#") or (lines and not line.strip("# ")):
            break
        lines.append(line.lstrip("# ").rstrip())
    return re.split(r"(?<!et al)\. ", f"{' '.join(lines)} ")[0].strip().rstrip(".:")
