"""A run's copy in an object store, read and written through fsspec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from palestra.core.config import check_folder_name, check_no_credentials
from palestra.core.files import DamagedFile
from palestra.runs.mirror import is_store_url
from palestra.runs.mirror.manifest import BLOCK_BYTES, Manifest

MAX_OBJECT_BYTES = 2 * BLOCK_BYTES  # of an object or a manifest
NUM_THREADS = 8  # objects sent or read at once
LOCAL = ("file", "local")
EXTRAS = {"s3": "palestra[s3]", "s3a": "palestra[s3]", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


class StoreError(ConnectionError):
    """Raised if a store cannot be reached, or refuses a request."""


class MissingObject(DamagedFile):
    """Raised if an object that a manifest names is missing or damaged."""


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


@contextmanager
def explain_store_errors(url: str) -> Iterator[None]:
    """Context that turns any error of a store's client into StoreError, with the remedy."""
    try:
        yield
    except (StoreError, DamagedFile):
        raise
    except Exception as error:  # each client raises exceptions of its own
        raise StoreError(f"the store {url} does not answer: {_short(error)}; {_remedy(error)}") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _remedy(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "does the bucket or folder exist?"
    if isinstance(error, PermissionError) or "redential" in str(error):
        return "are the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), and may they write?"
    return "is it up, and is its address right (AWS_ENDPOINT_URL, for stores other than Amazon's)?"


class RunStore:
    """The copy of one run at `url`. Methods raise StoreError if the store fails."""

    def __init__(self, url: str) -> None:
        self.url = check_store_url(url)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The fsspec file system, and the path of the copy in it."""
        options = {"auto_mkdir": True} if self.url.partition("://")[0] in LOCAL else {}
        fs, root = url_to_fs(self.url, **options)
        return fs, root

    def object_url(self, sha256: str) -> str:
        """Returns the URL of an object."""
        return f"{self.url}/objects/{sha256}"

    def manifest_url(self, generation: int) -> str:
        """Returns the URL of a manifest."""
        return f"{self.url}/manifests/{generation:08d}"

    def generations(self) -> list[int]:
        """Returns the numbers of all manifests, newest first; [] if there is no copy."""
        return sorted((int(name) for name in self._list("manifests") if name.isdigit()), reverse=True)

    def objects(self) -> set[str]:
        """Returns the names of all objects, those of unfinished uploads included."""
        return set(self._list("objects"))

    def children(self) -> list[str]:
        """Returns the names directly below `url`: the names of runs, if it is a folder of runs."""
        return sorted(self._list(""))

    def read_manifest(self, generation: int) -> Manifest:
        """Returns a manifest. Raises DamagedFile if it is missing or damaged."""
        url = self.manifest_url(generation)
        data = self._read(f"manifests/{generation:08d}")
        if data is None:
            raise DamagedFile(f"{url} is missing; the copy has generations {self.generations()}")
        return Manifest.from_bytes(url, data)

    def read_object(self, sha256: str) -> bytes:
        """Returns an object. Raises MissingObject if it is missing or has another checksum."""
        data = self._read(f"objects/{sha256}")
        if data is None:
            raise MissingObject(f"{self.object_url(sha256)} is missing")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise MissingObject(f"{self.object_url(sha256)} is damaged: it has another checksum than when it was sent")
        return data

    def check_objects(self, manifest: Manifest) -> None:
        """Reads every object of a manifest. Raises MissingObject if one is missing or damaged."""
        self._at_once(self.read_object, manifest.blocks)

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes a manifest."""
        self._write(f"manifests/{manifest.generation:08d}", manifest.to_bytes())

    def write_objects(self, objects: Mapping[str, bytes]) -> None:
        """Writes objects by their SHA-256, several at once. All are stored on return."""
        self._at_once(lambda pair: self._write(f"objects/{pair[0]}", pair[1]), objects.items())

    def delete(self, manifests: Iterable[int], objects: Iterable[str]) -> None:
        """Deletes manifests, then objects; those that are missing are skipped."""
        for names in ([f"manifests/{number:08d}" for number in manifests], [f"objects/{name}" for name in objects]):
            self._at_once(self._delete, names)

    def _at_once(self, act: Callable[[Any], object], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(act, items))

    def _list(self, folder: str) -> list[str]:
        with explain_store_errors(self.url):
            fs, root = self._opened
            fs.invalidate_cache()
            try:
                found = fs.ls(f"{root}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def _read(self, name: str) -> bytes | None:
        with explain_store_errors(self.url):
            fs, root = self._opened
            try:
                data: bytes = fs.cat_file(f"{root}/{name}", start=0, end=MAX_OBJECT_BYTES + 1)
            except FileNotFoundError:
                return None
        if len(data) > MAX_OBJECT_BYTES:
            raise DamagedFile(f"{self.url}/{name} is larger than anything that palestra writes")
        return data

    def _write(self, name: str, data: bytes) -> None:
        with explain_store_errors(self.url):
            fs, root = self._opened
            fs.pipe_file(f"{root}/{name}", data)

    def _delete(self, name: str) -> None:
        with explain_store_errors(self.url), suppress(FileNotFoundError):
            fs, root = self._opened
            fs.rm_file(f"{root}/{name}")  # not `rm`, which expands * and ? in names


def run_url(folder: str, name: str) -> str:
    """Returns the URL of the copy of run `name` in a store's folder of runs."""
    return f"{check_store_url(folder)}/{check_folder_name(name)}"


def newest_manifest(store: RunStore) -> tuple[Manifest | None, list[str]]:
    """Returns the newest manifest that can be read (None if there is none), and a message on each newer one."""
    passed_over: list[str] = []
    for generation in store.generations():
        try:
            return store.read_manifest(generation), passed_over
        except DamagedFile as error:
            passed_over.append(f"generation {generation} is passed over: {error}")
    return None, passed_over
