"""Ways to damage a run: each returns a function of the run's folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palestra.core.files import to_checksummed_line

Damage = Callable[[Path], object]


def flip(name: str, at: int) -> Damage:
    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[at] ^= 1
        (run / name).write_bytes(data)

    return damage


def cut(name: str, length: int) -> Damage:
    """Cuts a file to `length` bytes; if negative, removes that many bytes at its end."""
    return lambda run: os.truncate(run / name, length if length >= 0 else (run / name).stat().st_size + length)


def write(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data)


def append(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + data)


def remove(name: str) -> Damage:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def zero(name: str) -> Damage:
    """Zeroes the second half of a file; in a learner's file that is the optimizer."""

    def damage(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))

    return damage


def pipe(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return damage


def folder(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name / "deep").mkdir(parents=True)

    return damage


def link(name: str, target: str) -> Damage:
    """Replaces a file or folder by a link to `target`; it is moved there if nothing is there."""

    def damage(run: Path) -> None:
        to = run / target
        if (run / name).exists() and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(run / name, to)
        elif (run / name).exists():
            remove(name)(run)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(to)

    return damage


def both(*damages: Damage) -> Damage:
    return lambda run: [damage(run) for damage in damages]


def swap(left: str, right: str) -> Damage:
    def damage(run: Path) -> None:
        (run / left).rename(run / "between")
        (run / right).rename(run / left)
        (run / "between").rename(run / right)

    return damage


def copy(source: str, target: str) -> Damage:
    def damage(run: Path) -> None:
        shutil.rmtree(run / target)
        shutil.copytree(run / source, run / target)

    return damage


def lines(change: Callable[[list[bytes]], list[bytes]], name: str = "checkpoints.jsonl") -> Damage:
    def damage(run: Path) -> None:
        kept = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(change(kept)))

    return damage


def forge(number: int = 0, **changes: object) -> Damage:
    """Changes a line of checkpoints.jsonl, and gives it the checksum of its new contents."""

    def change(kept: list[bytes]) -> list[bytes]:
        line = json.loads(kept[number]) | changes
        del line["checksum"]
        kept[number] = to_checksummed_line({key: value for key, value in line.items() if value is not None})
        return kept

    return lines(change)


def again(**changes: object) -> Damage:
    """Appends a second line for the newest checkpoint, with changes."""
    return both(lines(lambda kept: [*kept, kept[-1]]), forge(-1, **changes))


def config(old: str, new: str) -> Damage:
    return lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(old, new))


def meta(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda run: (run / "meta.json").write_text(json.dumps(change(json.loads((run / "meta.json").read_text()))))


def foreign(name: str) -> Damage:
    """Replaces a file or folder by that of a run with another seed, which lies beside this one."""

    def damage(run: Path) -> None:
        remove(name)(run)
        source = run.parent / "foreign" / name
        shutil.copytree(source, run / name) if source.is_dir() else shutil.copyfile(source, run / name)

    return damage
