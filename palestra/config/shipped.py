"""The configs that ship with the package, under the paths that they have in the documents: configs/demo.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent
FOLDERS = ("configs", "examples")  # in the package; in a checkout they are links to the folders of that name


class Template(NamedTuple):
    """A shipped config: its name, its path as in the documents, and its first comment."""

    name: str
    path: Path
    description: str

    @property
    def group(self) -> str:
        """The folder that the config is in: "games", "populations", "examples"."""
        return self.path.parent.name

    @property
    def text(self) -> str:
        """The config itself."""
        return (PACKAGE / self.path).read_text(encoding="utf-8")


def find_config(path: Path) -> Path:
    """Returns `path`, or the shipped config of that path if there is no such file here."""
    shipped = PACKAGE / path
    is_shipped = path.parts[:1] and path.parts[0] in FOLDERS and ".." not in path.parts and shipped.is_file()
    return shipped if is_shipped and not path.exists() else path


def templates() -> list[Template]:
    """Returns the shipped configs, those in `configs` itself first, then by folder and name."""
    found = [_template(path) for folder in FOLDERS for path in _yaml_files(PACKAGE / folder)]
    return sorted(found, key=lambda one: (one.group != "configs", one.path.parent, one.name))


def _yaml_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            yield from _yaml_files(path)
        elif path.suffix == ".yaml":
            yield path


def _template(path: Path) -> Template:
    return Template(path.stem, path.relative_to(PACKAGE), _first_sentence(path.read_text(encoding="utf-8")))


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a config's leading comment, without the sign of comments; "" if it has none."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#") or (lines and not line.strip("# ")):
            break
        lines.append(line.lstrip("# ").rstrip())
    return re.split(r"(?<!et al)\. ", f"{' '.join(lines)} ")[0].strip().rstrip(".:")
