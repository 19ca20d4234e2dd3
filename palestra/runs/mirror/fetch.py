"""Downloads the copy of a run from a store into a local folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from palestra.core.config import check_folder_name
from palestra.core.files import DamagedFile, atomic_folder, file_size, path_inside
from palestra.runs.mirror.manifest import FileEntry, Manifest
from palestra.runs.mirror.snapshot import has_state_of
from palestra.runs.mirror.store import NUM_THREADS, MissingObject, RunStore, newest_manifest

GIB = 2**30
DEFAULT_MAX_GIB = 100  # size of a run that is fetched without a question
MAX_ATTEMPTS = 5  # while the run's process writes newer states and deletes those that are read


class Fetched(NamedTuple):
    """A run at `path`, downloaded now or there already (`is_new` False), and messages about newer states that could not
    be read."""

    path: Path
    manifest: Manifest
    is_new: bool
    passed_over: list[str]


class MirroredRun(NamedTuple):
    """One run in a store's folder of runs: its newest whole state; None, with the reason, if none can be read."""

    name: str
    manifest: Manifest | None
    damage: str


def fetch_run(url: str, root: Path, generation: int | None = None, max_bytes: float = DEFAULT_MAX_GIB * GIB) -> Fetched:
    """Downloads the newest whole state of the run at `url`, or the state `generation`, into the folder `root`.

    A run that is there already is left as it is. Raises StoreError if the store fails; ValueError if there is no copy,
    it has more than `max_bytes` bytes or more than the disk has free, or `root` has an older one or another run of the
    name; DamagedFile if an object is damaged, with the newest generation that is whole.
    """
    store = RunStore(url)
    name = check_folder_name(store.url.rpartition("/")[2])
    for _ in range(MAX_ATTEMPTS):
        manifest, passed_over = _chosen(store, generation)
        path = root / name
        if path.exists() and has_state_of(path, manifest):
            return Fetched(path, manifest, False, passed_over)
        try:
            root.mkdir(parents=True, exist_ok=True)
            _check_size(store.url, manifest, root, max_bytes)
            atomic_folder(path, lambda folder, manifest=manifest: download(store, manifest, folder))  # type: ignore[misc]
        except MissingObject as error:
            if manifest.generation not in store.generations():
                continue  # a running process has deleted it meanwhile, and has written newer ones
            raise DamagedFile(f"{error}. {_whole_hint(store, manifest)}") from error
        return Fetched(path, manifest, True, passed_over)
    raise DamagedFile(f"{store.url} changes faster than it can be read: stop the process that writes it, or try again")


def _check_size(url: str, manifest: Manifest, root: Path, max_bytes: float) -> None:
    size, free = manifest.num_bytes, shutil.disk_usage(root).free
    if size > max_bytes:
        raise ValueError(
            f"the run has {size / GIB:,.1f} GiB, and {max_bytes / GIB:,.1f} are fetched unless you say so: "
            f"palestra fetch {url} --root {root} --max-gib {math.ceil(size / GIB)}"
        )
    if size > free:
        raise ValueError(f"the run has {size / GIB:,.1f} GiB, and the disk of {root} has {free / GIB:,.1f} free")


def _chosen(store: RunStore, generation: int | None) -> tuple[Manifest, list[str]]:
    if generation is not None:
        return store.read_manifest(generation), []
    manifest, passed_over = newest_manifest(store)
    if manifest is None:
        why = f" ({passed_over[0]})" if passed_over else ""
        raise ValueError(f"{store.url} has no copy of a run{why}: `palestra runs --root URL` lists the runs in a store")
    return manifest, passed_over


def download(store: RunStore, manifest: Manifest, folder: Path) -> None:
    """Writes the files of a manifest into a folder, comparing each object with its checksum. Raises MissingObject if
    one is missing or damaged."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, entry in manifest.files.items():
            path = path_inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(path, "wb") as file:
                    for data in _read_blocks(store, entry, pool):
                        if file.tell() + len(data) > entry.num_bytes:
                            break
                        file.write(data)
            except MissingObject as error:
                raise MissingObject(f"{error}; it is a part of {name}") from error
            if file_size(path) != entry.num_bytes:
                raise MissingObject(f"{name} of generation {manifest.generation} has another size than its objects")


def _read_blocks(store: RunStore, entry: FileEntry, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    for start in range(0, len(entry.blocks), NUM_THREADS):
        yield from pool.map(store.read_object, entry.blocks[start : start + NUM_THREADS])


def _whole_hint(store: RunStore, damaged: Manifest) -> str:
    """Returns the sentence that names the newest earlier generation whose objects are all intact."""
    for generation in store.generations():
        if generation >= damaged.generation:
            continue
        try:
            manifest = store.read_manifest(generation)
            store.check_objects(manifest)
        except DamagedFile:
            continue
        return (
            f"Generation {generation}, after {manifest.state}, is whole: palestra fetch {store.url} "
            f"--generation {generation}"
        )
    return "No earlier generation is whole: bring the object back from a copy, or start a new run"


def list_mirrored(folder: str) -> list[MirroredRun]:
    """Returns the runs in a store's folder of runs, by name. Raises StoreError if the store fails."""
    found = []
    for name in RunStore(folder).children():
        manifest, damages = newest_manifest(RunStore(f"{folder.rstrip('/')}/{name}"))
        if manifest or damages:
            found.append(MirroredRun(name, manifest, "" if manifest else damages[0]))
    return found
