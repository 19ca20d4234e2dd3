"""Downloads the copy of a run from a store into a local folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from palestra.core.config import check_folder_name
from palestra.core.files import TEMPORARY_PREFIX, DamagedFile, atomic_folder, path_inside
from palestra.runs.checkpoints import CHECKPOINTS_FILE, find_newest_intact
from palestra.runs.mirror.copy import MAX_ATTEMPTS, POPULATION_LISTS, read_run_state
from palestra.runs.mirror.store import NUM_THREADS, CopyState, RunStore

GIB = 2**30
DEFAULT_MAX_GIB = 100  # size of a run that is fetched without a question


class Fetched(NamedTuple):
    """A run at `path`, downloaded now or there already (`is_new` False), and a message on each checkpoint that is newer
    than the newest intact one."""

    path: Path
    state: CopyState
    is_new: bool
    passed_over: list[str]


def fetch_run(url: str, root: Path, max_gib: float = DEFAULT_MAX_GIB) -> Fetched:
    """Downloads the run at `url` into the folder `root`, and compares its checkpoints with their checksums.

    A run that is there already is left as it is. Raises StoreError if the store fails; ValueError if there is no copy,
    it has more than `max_gib` GiB or more than the disk has free, or `root` has an older one or another run of the
    name; DamagedFile if no checkpoint is intact, or the copy holds what no run has.
    """
    store = RunStore(url)
    path = root / check_folder_name(store.url.rpartition("/")[2])
    for _ in range(MAX_ATTEMPTS):
        state = store.read_state()
        if state is None or not state.progress:
            why = "has no copy of a run" if state is None else "has nothing of the run yet"
            raise ValueError(f"{store.url} {why}: `palestra runs --root URL` lists the runs in a store")
        if path.exists():
            _check_has_state(path, state)
            return Fetched(path, state, False, [])
        root.mkdir(parents=True, exist_ok=True)
        passed_over: list[str] = []
        try:
            atomic_folder(path, partial(_download, store, state, max_gib, passed_over))
            return Fetched(path, state, True, passed_over)
        except ValueError as error:
            shutil.rmtree(root / f"{TEMPORARY_PREFIX}{path.name}", ignore_errors=True)
            if not isinstance(error, DamagedFile) or store.read_state() == state:
                raise  # else its writer has pruned checkpoints meanwhile
    raise DamagedFile(f"{store.url} changes faster than it can be read: stop the process that writes it, or try again")


def _download(store: RunStore, state: CopyState, max_gib: float, passed_over: list[str], folder: Path) -> None:
    """Downloads a copy into `folder`; adds messages on checkpoints that are not intact to `passed_over`."""
    is_population = state.unit == "tasks"
    lists = {}
    for name in POPULATION_LISTS if is_population else (CHECKPOINTS_FILE,):
        lists[name] = store.read(name, GIB) or b""
    sizes = store.list_files()
    _check_size(store.url, sum(sizes.values()), folder.parent, max_gib)
    names = sizes.keys() - lists.keys()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda name: store.download(name, sizes[name], path_inside(folder, name)), names))
    for name, data in lists.items():
        (folder / name).write_bytes(data)
    if not is_population:
        try:
            found = find_newest_intact(folder)[1]
        except DamagedFile as error:
            raise DamagedFile(str(error).replace(str(folder), store.url)) from error
        passed_over += [message.replace(str(folder), store.url) for message in found]


def _check_size(url: str, size: int, root: Path, max_gib: float) -> None:
    free = shutil.disk_usage(root).free
    if size > max_gib * GIB:
        raise ValueError(
            f"the run has {size / GIB:,.1f} GiB, and {max_gib:,.1f} are fetched unless you say so: "
            f"palestra fetch {url} --root {root} --max-gib {math.ceil(size / GIB)}"
        )
    if size > free:
        raise ValueError(f"the run has {size / GIB:,.1f} GiB, and the disk of {root} has {free / GIB:,.1f} free")


def _check_has_state(run: Path, state: CopyState) -> None:
    """Raises ValueError unless the run at `run` is the run of a copy, and has progressed at least as far."""
    try:
        own = read_run_state(run)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{run} is there and cannot be read ({error}): remove it, or choose another --root") from error
    if own.created != state.run:
        raise ValueError(f"{run} is another run of that name: choose another folder with --root")
    if own.progress < state.progress:
        raise ValueError(
            f"{run} is an older copy of this run, after {own.progress:,} {own.unit}, and the mirror has it after "
            f"{state.text}: move it away, or choose another folder with --root"
        )


def list_mirrored(folder: str) -> Iterator[tuple[str, CopyState | DamagedFile]]:
    """Yields the runs in a store's folder of runs, by name, each with the state of its copy, or the reason why that
    cannot be read. Raises StoreError if the store fails."""
    for name in RunStore(folder).children():
        try:
            if state := RunStore(f"{folder.rstrip('/')}/{name}").read_state():
                yield name, state
        except DamagedFile as error:
            yield name, error
