"""What the tools of one episode share: its private files, the programs it ran, the documents it may search.

The files are a mapping, not a folder. A path never reaches a disk, so nothing leads out of it; only the sandbox writes
the files down, in a folder of its own, and what comes back is held to the same limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

LONGEST_PATH, LONGEST_PART = 200, 100  # characters of a path, and of a name in it
MOST_FILES = 64
MOST_TEXT = 256 * 2**10  # characters in all files together
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")


class Found(NamedTuple):
    """A document that a search found: its title, and the words in it that fit."""

    title: str
    snippet: str


class Library(Protocol):
    """Documents to search, which nobody changes."""

    def search(self, query: str, k: int) -> Sequence[Found]:
        """At most `k` documents, best first; none where the query has no words."""

    def read(self, title: str) -> str | None:
        """The text of the document of that title, in whatever case; None where there is none."""


class Nothing:
    """A library without documents."""

    def search(self, query: str, k: int) -> Sequence[Found]:
        return ()

    def read(self, title: str) -> str | None:
        return None


class Cell(NamedTuple):
    """A program that went well, and the files it began with."""

    source: str
    files: Mapping[str, str]


@dataclass
class Scratch:
    """The state of an episode, as a tool with a parameter of this type gets it: a copy of its own, which counts if the
    call succeeds in time. `notes` are for tools of a user's: give them values that nobody changes in place.

    Raises ValueError, which tells the agent what it did wrong, for a path or a size that is not allowed.
    """

    library: Library = field(default_factory=Nothing)
    files: dict[str, str] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    def fork(self) -> Self:
        return replace(self, files=dict(self.files), notes=dict(self.notes))

    def read(self, path: str) -> str:
        name = clean(path)
        if name not in self.files:
            there = ", ".join(sorted(self.files)) or "no files"
            raise ValueError(f"there is no file {path!r}; there is: {there}")
        return self.files[name]

    def write(self, path: str, text: str) -> None:
        files = {**self.files, clean(path): text}
        check(files)
        self.files = files


def clean(path: str) -> str:
    """The path as files are kept by it: "./a.txt" is "a.txt". Raises ValueError for one that leads out, or is odd."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise ValueError(
            f"{path[:LONGEST_PATH]!r} leads out of the scratch folder: give a plain name such as notes.txt"
        )
    if not parts or path.endswith("/"):
        raise ValueError(f"{path[:LONGEST_PATH]!r} names no file: give a name such as notes.txt")
    if len(path) > LONGEST_PATH or max(len(part.encode()) for part in parts) > LONGEST_PART:
        raise ValueError(f"the path has {len(path)} characters: give at most {LONGEST_PART} bytes a name")
    if _ODD.search(path):
        raise ValueError(f"{path!r} holds characters that no path may: use letters, digits, '.', '-' and '_'")
    return "/".join(parts)


def check(files: Mapping[str, str]) -> None:
    """Raises ValueError where these are too many files or too large, or a file stands where a folder must."""
    if len(files) > MOST_FILES:
        raise ValueError(f"the scratch folder holds at most {MOST_FILES} files")
    size = sum(map(len, files.values()))
    if size > MOST_TEXT:
        raise ValueError(f"the scratch folder would hold {size} characters; it holds at most {MOST_TEXT}")
    for path in files:
        folders = ["/".join(path.split("/")[:end]) for end in range(1, path.count("/") + 1)]
        if taken := [folder for folder in folders if folder in files]:
            raise ValueError(f"{taken[0]!r} is a file, so there can be no {path!r}")


def write_file(path: str, text: str, scratch: Scratch) -> str:
    """Writes a text file in the scratch folder; a file of that name is replaced.

    path: the file's name, such as notes.txt
    text: all that the file shall hold
    """
    scratch.write(path, text)
    return f"wrote {clean(path)}: {len(text)} characters"


def read_file(path: str, scratch: Scratch, start: int = 0) -> str:
    """Reads a text file of the scratch folder.

    path: the file's name
    start: the first character to show, for files that are too long to be shown at once
    """
    if start < 0:
        raise ValueError("start must be 0 or more")
    return scratch.read(path)[start:]


def list_files(scratch: Scratch) -> str:
    """Lists the files of the scratch folder."""
    return "\n".join(f"{path}: {len(text)} characters" for path, text in sorted(scratch.files.items())) or "no files"


FILE_TOOLS: tuple[Callable[..., str], ...] = (write_file, read_file, list_files)
