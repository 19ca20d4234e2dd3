"""A run's copy in an object store, read and written through fsspec: its files, and which process writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from palestra.core.config import check_folder_name, check_no_credentials
from palestra.core.failures import one_line
from palestra.core.files import (
    MAX_FOLDER_ENTRIES,
    TEMPORARY_PREFIX,
    DamagedFile,
    file_size,
    parse_checksummed,
    path_inside,
    to_checksummed_line,
)
from palestra.runs.mirror import is_store_url

EXTRAS = {"s3": "palestra[s3]", "s3a": "palestra[s3]", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
WRITER_FILE = "writer.json"  # in the store
RENAMING_STORES = ("file", "local", "sftp", "ssh", "smb", "hdfs")  # in others, objects appear whole
MAX_WRITER_BYTES = 2**16
MAX_NAME_CHARS = 1024  # of a file, with its folders
NUM_THREADS = 8  # files sent or read at once


class StoreError(ConnectionError):
    """Raised if a store cannot be reached, or refuses a request."""


@dataclass(frozen=True)
class CopyState:
    """Contents of writer.json: the process that writes the copy, and the state of the run in the copy.

    `run` is the time of creation in the run's meta.json, which distinguishes runs of one name.
    `progress` counts the `unit` done: training steps up to the newest checkpoint, or tasks of a
    population; 0: there are no files yet. `time` is the time at which that state was sent, in ISO
    8601, `num_bytes` the size of all files.
    """

    writer: str
    run: str
    progress: int
    unit: str
    time: str
    num_bytes: int

    @property
    def text(self) -> str:
        """The state in words: "20 steps"."""
        return f"{self.progress:,} {self.unit}"

    @classmethod
    def from_bytes(cls, url: str, data: bytes) -> Self:
        """Returns the state read from `url`. Raises DamagedFile if it is not as it was written."""
        line = parse_checksummed(url, 1, data.removesuffix(b"\n"))
        kinds = {"writer": str, "run": str, "progress": int, "unit": str, "time": str, "num_bytes": int}
        if {name: type(value) for name, value in line.items()} != kinds:
            raise DamagedFile(f"{url} is not the state of a copy: another version wrote it, or it was edited")
        return cls(**line)


class RunStore:
    """The copy of one run at `url`. Methods raise StoreError, with the remedy, if the store fails."""

    def __init__(self, url: str) -> None:
        self.url = check_store_url(url)
        self.renames = self.url.partition("://")[0] in RENAMING_STORES

    @cached_property
    def _client(self) -> tuple[Any, str]:
        fs, root = url_to_fs(self.url)
        return fs, root.rstrip("/")

    @contextmanager
    def _file_system(self) -> Iterator[tuple[Any, str]]:
        """Context with the file system and the copy's path; any error becomes StoreError."""
        try:
            yield self._client
        except DamagedFile:
            raise
        except Exception as error:  # each client raises exceptions of its own
            why = one_line(error)[:300]
            raise StoreError(f"the store {self.url} does not answer: {why}; {_remedy(error)}") from error

    def read_state(self) -> CopyState | None:
        """Returns the state of the copy; None if there is no copy. Raises DamagedFile if it cannot be read."""
        data = self.read(WRITER_FILE, MAX_WRITER_BYTES)
        if data is None:
            return None
        return CopyState.from_bytes(f"{self.url}/{WRITER_FILE}", data)

    def write_state(self, state: CopyState) -> None:
        """Writes the state of the copy."""
        self.put(WRITER_FILE, to_checksummed_line(asdict(state)))

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Returns a file; None if it is missing. Raises DamagedFile if it has more than `max_bytes` bytes."""
        with self._file_system() as (fs, root):
            try:
                self._check_kind(name, fs.info(f"{root}/{name}"))
                data: bytes = fs.cat_file(f"{root}/{name}", start=0, end=max_bytes + 1)
            except FileNotFoundError:
                return None
        if len(data) > max_bytes:
            raise DamagedFile(f"{self.url}/{name} is larger than anything that palestra writes")
        return data

    def download(self, name: str, num_bytes: int, path: Path) -> None:
        """Writes a file to `path`. Raises DamagedFile if it has fewer than the `num_bytes` bytes that were listed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._file_system() as (fs, root), suppress(FileNotFoundError):
            fs.get_file(f"{root}/{name}", str(path))
        if file_size(path) < num_bytes or not path.exists():
            raise DamagedFile(f"{self.url}/{name} is missing, or shorter than it was listed")

    def put(self, name: str, source: bytes | Path) -> None:
        """Writes a file, which appears whole."""
        with self._file_system() as (fs, root):
            folder, _, last = f"{root}/{name}".rpartition("/")
            written = f"{folder}/{TEMPORARY_PREFIX if self.renames else ''}{last}"
            if self.renames:
                fs.makedirs(folder, exist_ok=True)
            if isinstance(source, bytes):
                fs.pipe_file(written, source)
            else:
                fs.put_file(str(source), written)
            if self.renames:
                fs.mv(written, f"{folder}/{last}")

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files, and the folders that are then empty. Those that are missing are skipped."""
        with self._file_system() as (fs, root):
            for name in names:
                with suppress(FileNotFoundError):
                    fs.rm_file(f"{root}/{name}")  # not `rm`, which expands * and ? in names
                while self.renames and "/" in name:
                    name = name.rpartition("/")[0]
                    with suppress(OSError):  # not empty
                        fs.rmdir(f"{root}/{name}")

    def children(self) -> list[str]:
        """Returns the names directly below `url`: the names of runs, if it is a folder of runs."""
        return sorted(name for name, _ in self._list_folder(""))

    def list_files(self) -> dict[str, int]:
        """Returns the sizes of the copy's files in bytes, by name, without writer.json.

        Raises DamagedFile if it holds links, pipes, hidden files, names outside a run, or too many
        files: a copy may come from anybody.
        """
        sizes: dict[str, int] = {}
        folders = {"": None}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for base, entry in self._list_folder(folder):
                name = f"{folder}/{base}".lstrip("/")
                self._check_kind(name, entry)
                path_inside("/", name)
                if base.startswith(".") or len(name) > MAX_NAME_CHARS or name in folders or name in sizes:
                    raise DamagedFile(f"{self.url}/{name[:80]} is hidden, too long, or both file and folder")
                if entry["type"] == "directory":
                    folders[name] = None
                    waiting.append(name)
                else:
                    sizes[name] = int(entry["size"])
                if len(sizes) + len(folders) > MAX_FOLDER_ENTRIES:
                    raise DamagedFile(f"{self.url} holds more than {MAX_FOLDER_ENTRIES:,} files: it is no copy of ours")
        sizes.pop(WRITER_FILE, None)
        return sizes

    def _check_kind(self, name: str, entry: Mapping[str, Any]) -> None:
        """Raises DamagedFile for a link, which may lead out, and for a pipe, reading which would block forever."""
        if entry["type"] not in ("file", "directory") or entry.get("islink"):
            raise DamagedFile(f"{self.url}/{name} is neither a file nor a folder: no run has that")

    def _list_folder(self, folder: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns name and entry of what is in a folder, but for files that are being written."""
        with self._file_system() as (fs, root):
            fs.invalidate_cache()
            path = f"{root}/{folder}".rstrip("/")
            try:
                entries = fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
        inside = [entry for entry in entries if entry["name"].strip("/") != path.strip("/")]  # S3 may list the folder
        named = [(str(entry["name"]).rstrip("/").rpartition("/")[2], entry) for entry in inside]
        return [(name, entry) for name, entry in named if not name.startswith(TEMPORARY_PREFIX)]


def _remedy(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "does the bucket or folder exist?"
    if isinstance(error, PermissionError) or "redential" in str(error):
        return "are the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), and may they write?"
    return "is it up, and is its address right (AWS_ENDPOINT_URL, for stores other than Amazon's)?"


def check_store_url(url: str) -> str:
    """Returns the URL without a slash at its end. Raises ValueError if it is not the URL of a store that can be opened
    here, or holds a password."""
    protocol = url.partition("://")[0]
    if not is_store_url(url) or "::" in url:
        raise ValueError(f"{url} is not the URL of a store: write s3://bucket/runs, or file:///path for a folder")
    check_no_credentials(url, "the URL of the store")
    if urlsplit(url).query:
        raise ValueError(
            f"the URL of the store at {protocol}://{urlsplit(url).hostname} holds options, and would be written to the "
            "run's config: give them in the environment, for example as AWS_ENDPOINT_URL"
        )
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        needs = EXTRAS.get(protocol, "its fsspec package")
        raise ValueError(f"{url} needs a package: pip install '{needs}' ({error})") from error
    except ValueError as error:
        raise ValueError(f"{url}: fsspec knows no stores of the kind {protocol}:// (s3://, gs://, file://)") from error
    return url.rstrip("/")


def run_url(folder: str, name: str) -> str:
    """Returns the URL of the copy of run `name` in a store's folder of runs."""
    return f"{check_store_url(folder)}/{check_folder_name(name)}"
