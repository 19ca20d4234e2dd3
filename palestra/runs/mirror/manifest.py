"""The manifest of a run's copy: which objects make up which files, as of one whole state."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from palestra.core.files import MAX_FOLDER_ENTRIES, DamagedFile, parse_checksummed, path_inside, to_checksummed_line

FORMAT = 1
MIB = 2**20
BLOCK_BYTES = 32 * MIB  # size of an object; a file of several blocks sends those that changed
LOG_BLOCK_BYTES = MIB  # of a .jsonl file, whose last block is sent again whenever it has grown
MAX_NAME_CHARS = 1024  # of a file, with its folders
FIELD_TYPES = {"generation": int, "writer": str, "run": str, "progress": int, "unit": str, "time": str}
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


class FileEntry(NamedTuple):
    """Size of a file in bytes, and the SHA-256 of each of its blocks; none if it is empty."""

    num_bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """A whole state of a run.

    `generation` counts the manifests of a run's copy from 1; `writer` names the process that wrote this one. `run` is
    the time of creation in the run's meta.json, which distinguishes runs of one name. `progress` counts the `unit`
    done: training steps up to the newest checkpoint, or tasks of a population. `time` is the time of writing, in ISO
    8601.
    """

    generation: int
    writer: str
    run: str
    progress: int
    unit: str
    time: str
    files: dict[str, FileEntry]

    @property
    def state(self) -> str:
        """The state in words: "20 steps"."""
        return f"{self.progress:,} {self.unit}"

    @property
    def blocks(self) -> set[str]:
        """SHA-256 of all objects that it names."""
        return {block for entry in self.files.values() for block in entry.blocks}

    @property
    def num_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(entry.num_bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the manifest as a line of JSON with a checksum."""
        return to_checksummed_line({"format": FORMAT, **asdict(self), "files": self.files})

    @classmethod
    def from_bytes(cls, url: str, data: bytes) -> Manifest:
        """Returns the manifest that was read from `url`.

        Raises DamagedFile if it is incomplete, differs from what was written, or names a path outside a run.
        """
        line = parse_checksummed(url, 1, data.removesuffix(b"\n"))
        if line.pop("format", None) != FORMAT:
            raise DamagedFile(f"{url} is of another version of palestra: update this one")
        try:
            files = {name: _entry(name, *value) for name, value in line.pop("files").items()}
            made = cls(files=files, **line)
            if not all(type(getattr(made, name)) is kind for name, kind in FIELD_TYPES.items()):
                raise TypeError("a field is of another kind")
            _check_names(files)
            return made
        except (TypeError, AttributeError, KeyError, DamagedFile) as error:
            raise DamagedFile(f"{url} is not a manifest ({error}): bring it back from a copy") from error


def _entry(name: str, num_bytes: Any, blocks: Any) -> FileEntry:
    path_inside("/", name)
    if any(part.startswith(".") for part in name.split("/")):
        raise DamagedFile(f"{name} is not a file of a run")
    if len(name) > MAX_NAME_CHARS or type(num_bytes) is not int or not isinstance(blocks, list):
        raise DamagedFile(f"{name[:80]} has no valid name, size and blocks")
    if not all(SHA256_PATTERN.fullmatch(str(block)) for block in blocks):
        raise DamagedFile(f"{name} has no valid blocks")
    if num_bytes < 0 or len(blocks) != -(-num_bytes // block_bytes(name)):
        raise DamagedFile(f"{name} has {len(blocks)} blocks, which are not {num_bytes:,} bytes")
    return FileEntry(num_bytes, tuple(blocks))


def _check_names(files: dict[str, FileEntry]) -> None:
    """Raises DamagedFile if there are too many files, or one has the name of a folder of another."""
    if len(files) > MAX_FOLDER_ENTRIES:
        raise DamagedFile(f"it names more than {MAX_FOLDER_ENTRIES:,} files")
    for name in files:
        folder = name
        while folder := folder.rpartition("/")[0]:
            if folder in files:
                raise DamagedFile(f"{folder} is both a file and a folder")


def block_bytes(name: str) -> int:
    """Returns the size of the blocks of a file, in bytes."""
    return LOG_BLOCK_BYTES if name.endswith(".jsonl") else BLOCK_BYTES
