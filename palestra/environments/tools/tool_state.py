"""State shared by the tools of one episode: its private files, the programs it ran, and the documents it may search.

The files are a mapping, not a folder: paths never reach a disk, so none can escape. Only the sandbox writes the files
to a folder of its own, and files that it returns are held to the same limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

# characters of a path, and bytes of a name in it
MAX_PATH_CHARS = 200
MAX_NAME_BYTES = 100
MAX_FILES = 64
MAX_TOTAL_CHARS = 256 * 2**10  # characters in all files together
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")


class SearchHit(NamedTuple):
    """A search hit: the document's title, and the matching passage."""

    title: str
    snippet: str


class Library(Protocol):
    """Read-only documents to search."""

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        """Returns at most `k` hits, best first; none if the query has no words."""

    def read(self, title: str) -> str | None:
        """Returns the text of the document with that title, ignoring case; None if there is none."""


class EmptyLibrary:
    """A library without documents."""

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        return ()

    def read(self, title: str) -> str | None:
        return None


class ReplCell(NamedTuple):
    """A program that ran successfully, and the files at its start."""

    source: str
    files: Mapping[str, str]


@dataclass
class ToolState:
    """The state of an episode. A tool with a parameter of this type receives a copy, which is kept if the call
    succeeds in time. `notes` are for users' tools: store values that are never changed in place.

    Raises ValueError, whose message the agent receives, for a path or size that is not allowed.
    """

    library: Library = field(default_factory=EmptyLibrary)
    files: dict[str, str] = field(default_factory=dict)
    cells: tuple[ReplCell, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    def fork(self) -> Self:
        """Returns a copy with its own `files` and `notes` mappings."""
        return replace(self, files=dict(self.files), notes=dict(self.notes))

    def read(self, path: str) -> str:
        """Returns the text of a file. Raises ValueError if there is none."""
        name = normalize_path(path)
        if name not in self.files:
            known = ", ".join(sorted(self.files)) or "no files"
            raise ValueError(f"there is no file {path!r}; there is: {known}")
        return self.files[name]

    def write(self, path: str, text: str) -> None:
        """Writes a file. Raises ValueError for an invalid path or beyond a size limit."""
        files = {**self.files, normalize_path(path): text}
        check_files(files)
        self.files = files


def normalize_path(path: str) -> str:
    """Returns the normalised path under which a file is stored: "./a.txt" becomes "a.txt".

    Raises ValueError if it leaves the scratch folder, is too long or holds invalid characters.
    """
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or ".." in names:
        raise ValueError(
            f"{path[:MAX_PATH_CHARS]!r} leads out of the scratch folder: give a plain name such as notes.txt"
        )
    if not names or path.endswith("/"):
        raise ValueError(f"{path[:MAX_PATH_CHARS]!r} names no file: give a name such as notes.txt")
    if len(path) > MAX_PATH_CHARS or max(len(name.encode()) for name in names) > MAX_NAME_BYTES:
        raise ValueError(f"the path has {len(path)} characters: give at most {MAX_NAME_BYTES} bytes a name")
    if _ODD.search(path):
        raise ValueError(f"{path!r} holds characters that no path may: use letters, digits, '.', '-' and '_'")
    return "/".join(names)


def check_files(files: Mapping[str, str]) -> None:
    """Raises ValueError if there are too many files, too much text, or a file where a folder must be."""
    if len(files) > MAX_FILES:
        raise ValueError(f"the scratch folder holds at most {MAX_FILES} files")
    size = sum(map(len, files.values()))
    if size > MAX_TOTAL_CHARS:
        raise ValueError(f"the scratch folder would hold {size} characters; it holds at most {MAX_TOTAL_CHARS}")
    for path in files:
        folders = ["/".join(path.split("/")[:end]) for end in range(1, path.count("/") + 1)]
        if files_as_folders := [folder for folder in folders if folder in files]:
            raise ValueError(f"{files_as_folders[0]!r} is a file, so there can be no {path!r}")


def write_file(path: str, text: str, scratch: ToolState) -> str:
    """Writes a text file in the scratch folder; a file of that name is replaced.

    path: the file's name, such as notes.txt
    text: all that the file shall hold
    """
    scratch.write(path, text)
    return f"wrote {normalize_path(path)}: {len(text)} characters"


def read_file(path: str, scratch: ToolState, start: int = 0) -> str:
    """Reads a text file of the scratch folder.

    path: the file's name
    start: the first character to show, for files that are too long to be shown at once
    """
    if start < 0:
        raise ValueError("start must be 0 or more")
    return scratch.read(path)[start:]


def list_files(scratch: ToolState) -> str:
    """Lists the files of the scratch folder."""
    return "\n".join(f"{path}: {len(text)} characters" for path, text in sorted(scratch.files.items())) or "no files"
