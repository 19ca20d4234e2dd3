"""Dataset files: parquet, JSON and JSON lines on disk, read into episodes.

Parquet files of palestra (`palestra collect`, the episodes of a run) are read as the trees that were recorded; each row
of another table becomes a tree according to its columns (trl_format.py), with answers that are text only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BeforeValidator

from palestra.core.config import StrictModel
from palestra.core.files import check_is_file
from palestra.core.types import Answer, Episode, Node, Seat
from palestra.envs.support.row_reader import SUFFIXES, data_files, is_saved_dataset, read_rows
from palestra.runs import find_run
from palestra.runs.episodes import load_episodes
from palestra.text.rollouts.trl_format import check_labels, episode_from_row, num_equal_pairs, unused_columns


class DataConfig(StrictModel):
    """Files to train on."""

    path: str
    """A file, a folder (a run's folder stands for its episodes) or a glob."""
    seat: Seat | None = None
    """Seat that gives the answers in table rows. Null: the only seat."""
    tokens: Literal["keep", "retokenize"] = "keep"
    """`keep` uses recorded tokens if they decode to the recorded text; `retokenize` always tokenises prompts and
    answers again."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """Treatment of rows with more tokens than the base takes: `refuse` ends the run before it begins and names the row,
    `cut` drops the end of the answer."""


def _listed(data: Any) -> Any:
    """Returns one path or entry as a list, with each path as an entry."""
    entries = [data] if isinstance(data, str | dict) else data
    if not isinstance(entries, list):
        return entries
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


Data = Annotated[list[DataConfig], BeforeValidator(_listed)]


@dataclass(frozen=True)
class DataFile:
    """The episodes of one file. `has_trees` is True if palestra recorded them, False for rows of a table."""

    path: str
    episodes: list[Episode]
    has_trees: bool
    tokens: Literal["keep", "retokenize"] = "keep"
    too_long: Literal["refuse", "cut"] = "refuse"
    unused: tuple[str, ...] = ()
    """Columns of a table that are not used."""
    equal_pairs: int = 0
    """Number of a table's rows that compare two equal answers."""

    def notes(self) -> list[str]:
        """Returns what the user should know before training on the file, a line each."""
        lines = []
        if self.unused:
            lines.append(f"{self.path}: columns {', '.join(self.unused)} are not used")
        if self.equal_pairs:
            lines.append(f"{self.path}: rows whose chosen and rejected are equal teach nothing: {self.equal_pairs}")
        return lines

    @property
    def seats(self) -> list[Seat]:
        """The seats that answer, in order of first appearance."""
        return list(dict.fromkeys(chain.from_iterable(node.answers for node in self._all_nodes())))

    def nodes(self, seat: Seat) -> list[Node]:
        """Returns the nodes at which a seat answers."""
        return [node for node in self._all_nodes() if seat in node.answers]

    def _all_nodes(self) -> Iterator[Node]:
        return chain.from_iterable(episode.nodes for episode in self.episodes)

    def answers(self, seat: Seat) -> list[Answer]:
        return [node.answers[seat] for node in self.nodes(seat)]


def read_data(data: Sequence[DataConfig], seat: Seat | None) -> list[DataFile]:
    """Returns the files that `data` lists, in order; answers in table rows belong to `seat` unless an entry sets its
    own.

    Failed episodes are left out. Raises ValueError if a file is missing, unreadable, empty or named twice, or if it is
    a table without a seat.
    """
    files: list[DataFile] = []
    read: dict[tuple[Path, Seat | None], str] = {}
    for entry in data:
        for file in _files(entry.path):
            key = file.resolve(), entry.seat
            if key in read:
                raise ValueError(
                    f"data names {file} twice, by {read[key]} and by {entry.path}: its rows would count double. Name "
                    "it once"
                )
            read[key] = entry.path
            files.append(_read(file, entry, seat))
    return files


def _files(path: str) -> list[Path]:
    found = [Path(path)] if Path(path).exists() else sorted(map(Path, glob(path, recursive=True)))
    files: list[Path] = []
    for one in found:
        files += _inside(one) if one.is_dir() else [one]
    if not files:
        raise ValueError(
            f"data: {path} names no file: give a file of {', '.join(SUFFIXES)}, a folder of them, or a glob"
        )
    return files


def _inside(folder: Path) -> list[Path]:
    """Returns the data files of a folder; a folder that the `datasets` library saved counts as one file."""
    if is_saved_dataset(folder):
        return [folder]
    if (folder / "config.yaml").exists():
        return sorted((find_run(folder) / "episodes").glob("*.parquet"))
    return data_files(folder)


def _read(file: Path, entry: DataConfig, seat: Seat | None) -> DataFile:
    if file.suffix == ".parquet" and not file.is_dir() and {"episode", "node", "seat"} <= _columns(file):
        if entry.seat is not None:
            raise ValueError(f"{file} holds episodes, which name their seats: leave out seat: {entry.seat}")
        episodes = [episode for episode in load_episodes(file) if episode.error is None and episode.nodes]
        if not episodes:
            raise ValueError(f"{file} holds no episode to learn from: none was recorded, or all of them failed")
        return DataFile(str(file), episodes, True, entry.tokens, entry.too_long)
    seat = entry.seat or seat
    if seat is None:
        raise ValueError(f"{file} is a table, and several seats are played: name the seat of its answers, seat: NAME")
    table = read_rows(file)
    check_labels(table, str(file))
    rows = [episode_from_row(row, number, seat, str(file)) for number, row in enumerate(table)]
    unused = tuple(unused_columns(table))
    return DataFile(str(file), rows, False, entry.tokens, entry.too_long, unused, num_equal_pairs(table))


def _columns(file: Path) -> set[str]:
    try:
        return set(pq.read_schema(check_is_file(file)).names)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
