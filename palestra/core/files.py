"""Crash-safe files: atomic writes, fsync, locks, checksums and JSON lines."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from safetensors.numpy import load_file, save_file

from palestra.core.plain_values import short_repr

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TEMPORARY_PREFIX = ".tmp-"  # prefix of unfinished files and folders; after a crash they can be removed
MAX_NAME_BYTES = 255  # bytes of one path component
OLDER_HINT = "; if an older version of palestra wrote the run, use that version"
EDITED_HINT = "was the file edited? Bring it back from a copy, or remove that line"
MAX_READ_BYTES = 2**32  # of a file that is read as a whole
MAX_JSON_BYTES = 2**26  # of a JSON file
MAX_FOLDER_ENTRIES = 1_000_000  # files and folders in a received folder
JSON_TYPES = {str, int, bool, type(None)}
CHECKSUM_PATTERN = re.compile(rb', "checksum": "([0-9a-f]{16})"\}$')  # end of a line with a checksum
T = TypeVar("T")


class DamagedFile(ValueError):
    """Raised if files differ from what was written, or a path leads out of its folder: a fault of the disk, of a copy
    or of the sender, not of the user's input."""


def atomic_write(path: str | Path, data: bytes, mode: int | None = None) -> None:
    """Writes a file so that a reader, or a crash, sees either the old bytes or the new ones. The bytes are on disk when
    it returns. It has the permissions `mode` from its first byte on (None: those of the umask)."""
    path = Path(path)
    with open(_temporary(path), "wb", opener=partial(os.open, mode=mode or 0o666)) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)  # whatever the umask, and a file that a crash left
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(_temporary(path), path)
    fsync_path(path.parent)


def _temporary(path: Path) -> Path:
    """Returns the path at which a file is written before its rename. A symbolic link found there is removed."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    if temporary.is_symlink():
        temporary.unlink()
    return temporary


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path for a file of any size. It replaces `path` if the block succeeds and is
    deleted if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_folder(
    path: Path,
    write: Callable[[Path], None],
    *,
    durable: bool = True,
    commit: Callable[[Path], None] = lambda folder: None,
) -> dict[str, int]:
    """Lets `write` fill a folder that appears at `path` once it is complete and, if `durable`, on disk.

    An existing folder at `path` is replaced. `commit` is called with the complete folder just before its rename.
    Returns the sizes of its files in bytes, by relative path.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    remove_path(temporary)
    temporary.mkdir(parents=True)
    write(temporary)
    if durable:
        for written in [*temporary.rglob("*"), temporary]:
            fsync_path(written)
    sizes = {
        str(file.relative_to(temporary)): file_size(file) for file in sorted(temporary.rglob("*")) if file.is_file()
    }
    commit(temporary)
    remove_path(path)
    os.rename(temporary, path)
    if durable:
        fsync_path(path.parent)
    return sizes


def remove_path(folder: Path) -> None:
    """Removes a folder, file or symbolic link if it exists; of a link, never its target. A folder is renamed first, so
    that a half-deleted one never passes for a complete one."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)  # a thread that wrote it may have renamed it since
    elif folder.exists():
        doomed = folder.with_name(f"{TEMPORARY_PREFIX}old-{folder.name.removeprefix(TEMPORARY_PREFIX)}")
        if doomed.is_symlink() or doomed.is_file():
            doomed.unlink()
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def fsync_path(path: Path) -> None:
    """Calls fsync on a file, or on a folder to persist the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_inside(root: str | Path, relative: str) -> Path:
    """Returns `root / relative`, for a `relative` that was read from data. Every such path must be checked here before
    use.

    Raises DamagedFile unless it consists of names joined by "/" that stay inside `root`: not for an absolute path,
    "..", an empty or too long name, a NUL, or a symbolic link that leads out.
    """
    path = Path(root, str(relative))
    is_plain = isinstance(relative, str) and all(map(_is_plain_name, relative.split("/")))
    if not is_plain or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise DamagedFile(
            f"{short_repr(relative)} is not a path inside {root}: it must name something there, without links that "
            "leave"
        )
    return path


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and len(name.encode(errors="replace")) <= MAX_NAME_BYTES


def check_folder(root: str | Path, *, except_for: Collection[str] = ()) -> None:
    """Checks that a folder holds only files and folders, at any depth, and no link that leads out of it.

    `except_for`: folders in it, as relative paths, whose contents are not checked. Raises DamagedFile if it holds a
    symbolic link that leads out of it, or something that is neither a file nor a folder (reading a pipe would block
    forever), or holds more than `MAX_FOLDER_ENTRIES`.
    """
    inside = os.path.realpath(root)
    folders = [str(root)]
    count = 0
    unchecked = {os.path.join(root, path) for path in except_for}
    while folders:
        for count, entry in enumerate(_entries(folders.pop()), count + 1):  # noqa: B020 (goes on counting)
            if count > MAX_FOLDER_ENTRIES:
                raise DamagedFile(f"{root} holds more than {MAX_FOLDER_ENTRIES:,} files: it is no folder of ours")
            if entry.is_symlink():
                if not Path(os.path.realpath(entry.path)).is_relative_to(inside):
                    raise DamagedFile(
                        f"{entry.path} is a link that leads out of {root}: remove it, or copy in its target"
                    )
            elif entry.is_dir():
                if entry.path not in unchecked:
                    folders.append(entry.path)
            elif not entry.is_file() and os.path.lexists(entry.path):
                raise DamagedFile(f"{entry.path} is neither a file nor a folder: remove it, or copy the folder again")


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of a folder; none if it was removed since it was found: a run that trains prunes its own."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns size in bytes and SHA-256 of each file in a folder, at any depth, by relative path."""
    return {str(path.relative_to(folder)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def checksum(path: Path) -> dict[str, Any]:
    """Returns size in bytes and SHA-256 of a file: {"bytes": 3, "sha256": "ba78..."}."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a message on the first of `expected` (a result of `checksums`) that is missing or differs; "" if none
    does.

    Files whose size differs are reported without reading any.
    """
    for name in sorted(expected, key=lambda name: file_size(path_inside(folder, name)) == expected[name]["bytes"]):
        path = path_inside(folder, name)
        if not path.is_file():
            return f"{path} is missing"
        if checksum(path) != expected[name]:
            return f"{path} is damaged: it has another checksum than when it was written"
    return ""


def file_size(path: Path) -> int:
    """Returns the size of a file in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def acquire_lock(path: Path, what: str, *, wait: bool = False) -> BinaryIO:
    """Returns a file that holds an exclusive lock while it is open. The system releases it when the process dies.

    If the lock is taken it waits, with `wait`, or raises ValueError, which names the process that holds the lock and
    `what` it is writing.
    """
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (held until close)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode(errors="replace") or "another process"
        file.close()
        raise ValueError(f"{owner} is writing {what}; wait for it, stop it, or start a new one") from None
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError:
        file.close()
        raise
    return file


class JsonlWriter:
    """A .jsonl file open for appending whole lines, unbuffered. An incomplete last line is removed on opening."""

    def __init__(self, path: Path) -> None:
        new = not path.exists()
        data = b"" if new else path.read_bytes()
        self.num_bytes = data.rfind(b"\n") + 1
        self._sum = hashlib.sha256(memoryview(data)[: self.num_bytes])
        if len(data) > self.num_bytes:
            os.truncate(path, self.num_bytes)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (held until close)
        if new:
            fsync_path(path.parent)

    def write(self, line: bytes) -> None:
        """Appends a line, which must end with a newline. Raises OSError if it cannot be written completely."""
        left = memoryview(line)
        while left:  # on a full disk a write is partial before the next one fails
            left = left[self._file.write(left) :]
        self.num_bytes += len(line)
        self._sum.update(line)

    @property
    def checksum(self) -> dict[str, Any]:
        """Same as the function `checksum`, for the whole file, without reading it."""
        return {"bytes": self.num_bytes, "sha256": self._sum.hexdigest()}

    def fsync(self) -> None:
        """Calls fsync on the file."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def to_json_line(values: Mapping[str, Any] | DataclassInstance) -> bytes:
    """Returns one line of JSON with a newline, of `to_json_types`."""
    return json.dumps(to_json_types(values), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def to_checksummed_line(values: Mapping[str, Any]) -> bytes:
    """Returns `to_json_line(values)` with a checksum of it as last entry, which `read_checksummed` verifies."""
    bare = to_json_line(values)[:-1]
    return bare[:-1] + f', "checksum": "{_seal(bare)}"}}\n'.encode()


def read_checksummed(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a .jsonl file that `to_checksummed_line` made, without the checksums. An incomplete last
    line is ignored.

    Raises OSError if there is no such file, and DamagedFile with the line number if a line differs from what was
    written.
    """
    lines = read_bytes(path).split(b"\n")[:-1]
    return [parse_checksummed(path, number, line) for number, line in enumerate(lines, start=1)]


def parse_checksummed(path: Path | str, number: int, line: bytes) -> dict[str, Any]:
    """Returns line `number` of a file of lines that `to_checksummed_line` made, without the checksum. Raises
    DamagedFile if it differs from what was written."""
    found = CHECKSUM_PATTERN.search(line)
    bare = line[: found.start()] + b"}" if found else b""
    if not found or _seal(bare) != found[1].decode():
        why = "the file was edited or damaged; bring it back from a copy"
        raise DamagedFile(f"{path}, line {number} is not as it was written: {why}{'' if found else OLDER_HINT}")
    return parse_line(path, number, bare, EDITED_HINT)


def _seal(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:16]


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a .jsonl file; [] if it does not exist. An incomplete last line is ignored.

    Raises DamagedFile with the line number if a line is not a JSON object.
    """
    path = Path(path)
    lines = read_bytes(path).split(b"\n")[:-1] if path.exists() else []
    try:
        return [parse_line(path, number, line, EDITED_HINT) for number, line in enumerate(lines, start=1)]
    except ValueError as error:
        raise DamagedFile(str(error)) from error


def check_is_file(path: Path) -> Path:
    """Returns `path`. Raises DamagedFile if it is a folder, a pipe or a device: reading a pipe would block forever."""
    if path.exists() and not path.is_file():
        raise DamagedFile(f"{path} is not a file: remove it, or bring the file back from a copy")
    return path


def read_bytes(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Returns the contents of a file. Raises OSError if there is none, and DamagedFile if it is a pipe or a device, or
    has more than `max_bytes` bytes."""
    if file_size(check_is_file(path)) > max_bytes:
        raise DamagedFile(f"{path} has more than the {max_bytes:,} bytes that are read: bring it back from a copy")
    return path.read_bytes()


def read_json(path: Path, kind: type[T], missing: T | None = None) -> T:
    """Returns the JSON value in a file, a `kind`; `missing`, if it is given and there is no such file. Raises
    DamagedFile if the value cannot be read or is not a `kind`."""
    if missing is not None and not path.exists():
        return missing
    try:
        found = parse_json(read_bytes(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        why = error if isinstance(error, DamagedFile) else f"cannot read {path}: {error}; bring it back from a copy"
        raise DamagedFile(str(why)) from error
    if not isinstance(found, kind):
        raise DamagedFile(f"{path} holds {type(found).__name__}, not {kind.__name__}: bring it back from a copy")
    return found


class RepeatedKey(ValueError):
    """An object of a JSON text has a key twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises RepeatedKey if a key is there twice, of which a mapping would keep the last."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = max(keys, key=keys.count)
        raise RepeatedKey(f"the key {twice!r} is there twice")
    return mapping


def parse_json(text: bytes | str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is none, or an object has a key twice."""
    return json.loads(text, object_pairs_hook=unique_keys)


def parse_line(path: Path | str, number: int, line: bytes, hint: str) -> dict[str, Any]:
    """Returns the JSON object of line `number` of a .jsonl file.

    Raises ValueError, with `hint` as the likely cause, if the line is not a JSON object.
    """
    try:
        found = parse_json(line)
    except (ValueError, RecursionError) as error:
        why = hint
        if b"\0" in line:
            why = "it is not UTF-8: save it as UTF-8"
        elif isinstance(error, RepeatedKey):
            why = "remove one of the two"
        raise ValueError(f"{path}, line {number} is not a JSON object: {error}; {why}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number} is not a JSON object, but {type(found).__name__}; {hint}")
    return found


def filter_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites a .jsonl file without the lines for which `keep` is false and without an incomplete last one."""
    if path.exists():
        old = path.read_bytes()
        pairs = zip(old.split(b"\n"), read_lines(path), strict=False)
        if (new := b"".join(raw + b"\n" for raw, line in pairs if keep(line))) != old:
            atomic_write(path, new)


def to_json_types(value: Any) -> Any:
    """Returns `value` as JSON types: NumPy and torch values as Python's, dataclasses as objects of their fields, and
    NaN and infinity as null."""
    kind = type(value)
    if kind in JSON_TYPES:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if is_dataclass(kind):
        return {field.name: to_json_types(getattr(value, field.name)) for field in fields(kind)}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as one safetensors file and creates its folder. Not atomic: use it inside folders that are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file that `write_arrays` wrote."""
    found: dict[str, np.ndarray] = load_file(path)
    return found
