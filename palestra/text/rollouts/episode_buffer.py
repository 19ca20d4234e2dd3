"""Finished episodes on disk, one file each, stored until no checkpoint needs them.

    buffer/episode-000123@12.parquet   episode number 123, started after 12 training steps
    buffer/first                       the smallest number that has not been dropped

Training always reads the files, so a resumed run trains on exactly the same bytes.
"""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from palestra.core.files import DamagedFile, atomic_write
from palestra.core.types import Episode
from palestra.runs.episodes import load_episodes, to_table

EPISODE_FILE = re.compile(r"episode-(\d+)@(\d+)\.parquet")
FIRST_NUMBER_FILE = "first"


class StoredEpisode(NamedTuple):
    """An episode, and the number of training steps taken when it began."""

    episode: Episode
    start_step: int


class EpisodeBuffer:
    """The finished episodes in `folder` by number; the caller needs those from `first` on. If some of these are already
    dropped, the run was reset by hand to an earlier checkpoint: the remaining files are of later steps and are dropped
    too."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        names = [match for file in folder.iterdir() if (match := EPISODE_FILE.fullmatch(file.name))]
        self._began = {int(match[1]): int(match[2]) for match in names}
        mark = folder / FIRST_NUMBER_FILE
        if mark.exists() and _number(mark) > first:
            self.drop(max(self._began, default=-1) + 1)
            mark.unlink()

    def __contains__(self, number: int) -> bool:
        return number in self._began

    async def put(self, number: int, began: int, episode: Episode) -> None:
        """Writes an episode that began after `began` training steps, on a thread; returns once it is on disk."""
        await asyncio.to_thread(self._write, number, began, episode)
        self._began[number] = began

    def get(self, number: int) -> StoredEpisode:
        """Returns the episode of that number. Raises KeyError if it is not stored, and `DamagedFile` if its file cannot
        be read."""
        began = self._began[number]
        path = self._path(number, began)
        try:
            return StoredEpisode(load_episodes(path)[0], began)
        except (ValueError, IndexError) as error:
            raise DamagedFile(
                f"{path} is damaged ({error}): remove it, and resume the run, which plays that episode again"
            ) from error

    def drop(self, before: int) -> None:
        """Removes the episodes with numbers less than `before`."""
        atomic_write(self.folder / FIRST_NUMBER_FILE, str(before).encode())
        for number in [number for number in self._began if number < before]:
            self._path(number, self._began.pop(number)).unlink()

    def drop_failed(self, first: int) -> None:
        """Removes the episodes with numbers of at least `first` that failed, in all branches or in some."""
        for number in [number for number in self._began if number >= first]:
            if self.get(number).episode.failed_share:
                self._path(number, self._began.pop(number)).unlink()

    def close(self) -> None:
        """Removes the folder and its contents."""
        self._began.clear()
        shutil.rmtree(self.folder)

    def _write(self, number: int, began: int, episode: Episode) -> None:
        data = io.BytesIO()
        pq.write_table(to_table(began, [episode], first=number), data, write_page_checksum=True)
        atomic_write(self._path(number, began), data.getvalue())

    def _path(self, number: int, began: int) -> Path:
        return self.folder / f"episode-{number:06d}@{began}.parquet"


def _number(mark: Path) -> int:
    text = mark.read_text(errors="replace")
    if not text.isdecimal():
        raise DamagedFile(
            f"{mark} holds {text[:20]!r}, not a number: remove {mark.parent}; its episodes are then played again"
        )
    return int(text)
