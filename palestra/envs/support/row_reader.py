"""Reads rows of a table: JSON Lines, a JSON list, Parquet, a folder saved by `datasets`, or a dataset by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet

from palestra.core.files import check_is_file, parse_json, parse_line, read_json

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
SAVED_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")  # of a folder that `datasets` saved
NOTES = re.compile(r"[._].*|(readme|licen[cs]e|notice|citation)\b.*|.*\.md", re.IGNORECASE)  # files beside the data
DATASET_NAME = re.compile(r"[\w.-]+/[\w.-]+(:.*)?")  # of the hub, or a folder; then its config and its split


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a .jsonl, .json or .parquet file, of all such files in a folder (by name), of a folder
    that `datasets` saved (`save_to_disk`), or of a dataset that `datasets` loads by its name, OWNER/NAME, with the
    names of its config and split after colons: "openai/gsm8k:main:train[:1000]". The split is "train" by default.

    Raises ValueError if the path does not exist, has an unknown format, or holds no rows.
    """
    if not path.exists() and DATASET_NAME.fullmatch(str(path)) and path.suffix not in SUFFIXES:
        rows = _named_dataset(str(path))
    elif not path.exists():
        raise ValueError(f"{path} does not exist: give a .jsonl, .json or .parquet file, or a folder of them")
    else:
        rows = _folder(path) if path.is_dir() else _file(path)
    if not rows:
        raise ValueError(f"{path} holds no rows: give a file with at least one")
    return rows


def find_column(row: Row, wanted: str | None, default_names: Sequence[str], field: str, location: str) -> str:
    """Returns the name of the column for `field`: `wanted` if given, else the first of `default_names` that exists, in
    any case.

    Raises ValueError with the missing column, the existing ones, and how to name another.
    """
    spelled = {name.lower(): name for name in row}
    if wanted is not None and wanted in row:
        return wanted
    if wanted is None and (found := [spelled[name] for name in default_names if name in spelled]):
        return found[0]
    missing = f'column "{wanted}"' if wanted is not None else f"column {' or '.join(default_names)}"
    raise ValueError(
        f"{location} has no {missing} for the {field}; its columns: {', '.join(row)}. "
        f"Name the one that holds it: columns: {{{field}: ...}}"
    )


def _file(path: Path) -> list[Row]:
    check_is_file(path)
    if path.suffix == ".jsonl":
        lines = path.read_bytes().split(b"\n")
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        return [parse_line(path, number, line, "was the file cut off?") for number, line in numbered]
    if path.suffix == ".parquet":
        try:
            rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        return rows
    if path.suffix == ".json":
        return _json_list(path)
    raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; give .jsonl, .json or .parquet")


def _json_list(path: Path) -> list[Row]:
    try:
        rows = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; for a JSON object a line, name it .jsonl") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of objects; give [{{...}}, ...], or an object a line in a .jsonl")
    return rows


def _folder(path: Path) -> list[Row]:
    if (path / "dataset_info.json").exists() or (path / "state.json").exists():
        return _saved_dataset(path)
    if is_saved_dataset(path):
        parts = read_json(path / "dataset_dict.json", dict).get("splits")
        names = ", ".join(map(str, parts)) if isinstance(parts, list) else "its splits"
        raise ValueError(f"{path} holds several data sets; give the folder of one: {names} in {path}")
    return list(chain.from_iterable(_file(file) for file in data_files(path)))


def is_saved_dataset(folder: Path) -> bool:
    """True for a folder that the `datasets` library saved."""
    return any((folder / name).exists() for name in SAVED_FILES)


def data_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder, by name. Raises ValueError if there is anything else in it than notes (a
    README, a licence, hidden files), since its rows would be left out."""
    content = sorted(file for file in folder.iterdir() if not NOTES.fullmatch(file.name))
    if other := [file.name for file in content if file.suffix not in SUFFIXES or file.is_dir()]:
        names = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise ValueError(
            f"{folder} also holds {names}, which would be left out: name the files to read, one by one or by a glob "
            '("FOLDER/*.jsonl", "FOLDER/**/*.parquet"), or move the others away; rows are .jsonl, .json or .parquet'
        )
    return content


def _named_dataset(named: str) -> list[Row]:
    """Returns the rows of "OWNER/NAME:CONFIG:SPLIT"."""
    datasets = _datasets_package(f"{named} is no file or folder here, and datasets of the hub are read")
    name, config, split = [*named.split(":", 2), "", ""][:3]
    datasets.disable_progress_bars()
    try:
        rows: list[Row] = datasets.load_dataset(name, config or None, split=split or "train").to_list()
    except Exception as error:  # the package raises exceptions of any kind, of the network and of files
        why = " ".join(str(error).split())
        raise ValueError(
            f"{named} is no file or folder here, and no dataset that can be read as OWNER/NAME:CONFIG:SPLIT: {why}"
        ) from error
    return rows


def _saved_dataset(path: Path) -> list[Row]:
    datasets = _datasets_package(f"{path} was saved")
    for file in path.glob("*"):
        check_is_file(file)
    try:
        rows: list[Row] = datasets.load_from_disk(str(path)).to_list()
    except Exception as error:  # the package raises exceptions of any kind for a damaged folder
        raise ValueError(f"{path} is not whole, `datasets` says: {type(error).__name__}: {error}") from error
    return rows


def _datasets_package(what: str) -> Any:
    """Returns the package `datasets`. Raises ValueError, with `what` needs it, if it is missing."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{what} by the package `datasets`, which is missing: pip install datasets") from error
    return datasets
