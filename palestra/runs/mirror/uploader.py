"""Sends whole states of a run to its copy in a store."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from palestra.core.files import DamagedFile
from palestra.runs.mirror.manifest import FileEntry, Manifest, block_bytes
from palestra.runs.mirror.snapshot import STAGING_FOLDER, Changed, Snapshot, SourceFile, stage, take_snapshot
from palestra.runs.mirror.store import MissingObject, RunStore, newest_manifest

NUM_KEPT = 2  # newest states that are kept in the store: one more in case an object of the newest is damaged
BATCH_BYTES, BATCH_OBJECTS = 64 * 2**20, 64  # objects held in memory at once, about
MAX_SNAPSHOTS = 5  # taken in a row while files change


class MirrorTaken(ValueError):
    """Raised if the copy belongs to another run, or another process has begun to write it."""


class Uploader:
    """The writer of a run's copy at `url`. `open` must be called first; `sync` sends the newest state.

    `manifest` is the newest manifest in the store, None before `open`. `sent_bytes` and `sent_objects` count what this
    process sent. Methods raise StoreError if the store fails, and can be called again.
    """

    def __init__(self, run: Path, url: str) -> None:
        self.run, self.store = run, RunStore(url)
        self.writer = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self.manifest: Manifest | None = None
        self.sent_bytes = self.sent_objects = 0
        self._kept: list[Manifest] = []  # manifests in the store, newest first
        self._stored: set[str] = set()  # objects in the store
        self._tried: set[str] = set()  # objects that may be in the store
        self._entries: dict[tuple[str, int, int, int], FileEntry] = {}  # by name, size, inode and time of change

    def open(self) -> None:
        """Takes the copy over, or begins it with the current state: a process that wrote it before can write no more.

        Raises MirrorTaken if the copy is of another run, or ahead of this folder. Deletes what unfinished uploads left.
        """
        shutil.rmtree(self.run / STAGING_FOLDER, ignore_errors=True)
        own = take_snapshot(self.run)
        newest, _ = newest_manifest(self.store)
        generations = self.store.generations()
        self._kept = [newest, *self._earlier(newest)] if newest else []
        if newest and not self._continues(own, newest):
            newest = None
            del self._kept[0]
        objects = self.store.objects()
        self._stored = {block for manifest in self._kept for block in manifest.blocks} & objects
        if newest:
            self._write(newest.files, newest.progress, newest.unit, newest.run, after=generations[0])
        else:
            self._send(own, after=generations[0] if generations else 0)
        self._collect_garbage(objects)

    def sync(self) -> bool:
        """Sends the newest state. Returns False if the store has it already. Raises MirrorTaken if another process has
        begun to write the copy, and DamagedFile if a file of a checkpoint differs from what was written."""
        self._check_owner()
        for left in range(MAX_SNAPSHOTS - 1, -1, -1):
            try:
                return self._send(stage(self.run, take_snapshot(self.run)), self._kept[0].generation)
            except Changed:
                if not left:
                    raise
            finally:
                shutil.rmtree(self.run / STAGING_FOLDER, ignore_errors=True)
        return False

    def _continues(self, own: Snapshot, newest: Manifest) -> bool:
        """True if this folder continues the newest state in the store, False if that state is damaged and the folder
        continues an earlier one. Raises MirrorTaken otherwise."""
        if newest.run != own.run:
            raise MirrorTaken(
                f"{self.store.url} is the copy of another run, created {newest.run}: give this run another --name, or "
                "choose another folder in the store"
            )
        if own.progress >= newest.progress:
            return True
        try:
            self.store.check_objects(newest)
        except MissingObject:
            return False
        raise MirrorTaken(
            f"{self.store.url} has this run after {newest.state}, and {self.run} has it after {own.progress:,} only: "
            f"move that folder away and resume with: palestra train --resume {self.store.url}"
        )

    def _check_owner(self) -> None:
        """Raises MirrorTaken if the newest manifest is not of this process."""
        assert self.manifest
        newest, _ = newest_manifest(self.store)
        if newest is None or newest.writer != self.writer:
            raise MirrorTaken(
                f"{newest.writer if newest else 'something'} has taken over {self.store.url}, to continue this run "
                "(or to remove it): what this process trains is no longer mirrored. Stop one of the two"
            )
        self.manifest = newest  # the reply to its upload may have been lost

    def _earlier(self, newest: Manifest) -> list[Manifest]:
        found = []
        for generation in self.store.generations():
            if generation < newest.generation:
                try:
                    found.append(self.store.read_manifest(generation))
                except DamagedFile:  # its objects are then garbage
                    continue
        return found

    def _send(self, snapshot: Snapshot, after: int) -> bool:
        """Sends the objects that the store lacks, then the manifest."""
        batch: dict[str, bytes] = {}
        files = {source.name: self._send_file(source, batch) for source in snapshot.sources}
        self._flush(batch)
        if self.manifest and self.manifest.files == files:
            return False
        self._write(files, snapshot.progress, snapshot.unit, snapshot.run, after)
        self._collect_garbage(self._stored | self._tried)
        return True

    def _send_file(self, source: SourceFile, batch: dict[str, bytes]) -> FileEntry:
        """Adds the blocks of a file that the store lacks to `batch`, which is sent whenever it is large."""
        try:
            stat = source.path.stat()
            key = (source.name, source.num_bytes, stat.st_ino, stat.st_mtime_ns)
            known = self._entries.get(key)
            if known and self._stored.issuperset(known.blocks):
                return known
            blocks, whole, num_bytes = [], hashlib.sha256(), 0
            for block in read_blocks(source):
                whole.update(block)
                num_bytes += len(block)
                blocks.append(hashlib.sha256(block).hexdigest())
                if blocks[-1] not in self._stored:
                    batch[blocks[-1]] = block
                if len(batch) >= BATCH_OBJECTS or sum(map(len, batch.values())) >= BATCH_BYTES:
                    self._flush(batch)
        except FileNotFoundError as error:
            raise Changed(str(error)) from error
        if num_bytes != source.num_bytes:
            raise Changed(f"{source.path} has become shorter")
        if source.sha256 and whole.hexdigest() != source.sha256:
            raise DamagedFile(
                f"{source.path} differs from what was written, and is not mirrored: check that disk; a resume goes "
                "back to the checkpoint before"
            )
        self._entries[key] = FileEntry(num_bytes, tuple(blocks))
        return self._entries[key]

    def _flush(self, batch: dict[str, bytes]) -> None:
        self._tried |= batch.keys()
        self.store.write_objects(batch)
        self._stored |= batch.keys()
        self.sent_bytes += sum(map(len, batch.values()))
        self.sent_objects += len(batch)
        batch.clear()

    def _write(self, files: dict[str, FileEntry], progress: int, unit: str, run: str, after: int) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        made = Manifest(after + 1, self.writer, run, progress, unit, time, files)
        self.store.write_manifest(made)
        self.manifest = made
        self._kept.insert(0, made)

    def _collect_garbage(self, objects: set[str]) -> None:
        """Deletes the manifests beyond the newest `NUM_KEPT` states, and the `objects` that no remaining manifest
        names."""
        states: list[dict[str, FileEntry]] = []
        kept = []
        for manifest in self._kept:
            if manifest.files not in states:
                states.append(manifest.files)
            if len(states) <= NUM_KEPT:
                kept.append(manifest)
        needed = {block for manifest in kept for block in manifest.blocks}
        known = {manifest.generation for manifest in kept}
        old = [generation for generation in self.store.generations() if generation not in known]
        garbage = objects - needed
        self.store.delete(old, garbage)
        self._kept = kept
        self._tried.clear()
        self._stored = (self._stored - garbage) | needed
        names = set(kept[0].files)
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] in names}


def read_blocks(source: SourceFile) -> Iterator[bytes]:
    """Yields the file in blocks, up to its recorded size."""
    size, left = block_bytes(source.name), source.num_bytes
    with open(source.path, "rb") as file:
        while left > 0 and (block := file.read(min(size, left))):
            yield block
            left -= len(block)
