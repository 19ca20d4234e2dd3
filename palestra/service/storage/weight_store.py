"""Weight storage on disk: folders that are written atomically, never changed, and verified when read.

The server generates folder names, so that no name from a client becomes a file path. The store maps client paths
(`tinker://<model>/weights/<name>`) to folders; a folder without a row is deleted.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

from palestra.core.files import TEMPORARY_PREFIX, atomic_folder, checksums
from palestra.service.wire.schemas.weights import MANIFEST
from palestra.service.wire.schemas.wire_model import BadRequest

MIN_SWEEP_AGE_S = 600.0  # seconds for which a new folder is kept: its row may not be written yet
KIND_SEGMENTS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.\-]{1,200}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,300}")


class TinkerPath(NamedTuple):
    """Path of a checkpoint: `tinker://<run>/<weights|sampler_weights|external_weights>/<name>`; MinT writes mint://."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a path. Raises BadRequest if the text is none."""
        scheme, _, rest = text.partition("://")
        parts = rest.split("/")
        kinds = {word: kind for kind, word in KIND_SEGMENTS.items()}
        good = scheme in ("tinker", "mint") and len(parts) == 3 and parts[1] in kinds
        if not good or not _RUN.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2]):
            raise BadRequest(
                f'"{text[:200]}" is not a path of weights: write tinker://<run>/<{"|".join(kinds)}>/<name>'
            )
        return cls(parts[0], kinds[parts[1]], parts[2])

    def __str__(self) -> str:
        return f"tinker://{self.run}/{KIND_SEGMENTS[self.kind]}/{self.name}"

    @property
    def id(self) -> str:
        """The checkpoint id on the wire, such as "weights/step-10"."""
        return f"{KIND_SEGMENTS[self.kind]}/{self.name}"

    def row(self, **values: Any) -> dict[str, Any]:
        """Returns the row of a new checkpoint at this path, which has no time to live unless `values` give one."""
        own = {"path": str(self), "run": self.run, "kind": self.kind, "created": time.time()}
        return {**own, "expires": None, "public": False, **values}


class WeightsDamaged(ValueError):
    """Weights on disk differ from what was written."""


class WeightStore:
    """Folders under `root`, each with a manifest of the SHA-256 sums of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, fill: Callable[[Path], None], *, synced: bool = True) -> tuple[str, int]:
        """Creates a folder filled by `fill`; returns its name and size in bytes. It is on disk when this returns,
        unless `synced` is false: then it survives this process, but not a power failure."""
        name = uuid.uuid4().hex

        def fill_and_list(folder: Path) -> None:
            fill(folder)
            (folder / MANIFEST).write_text(json.dumps(_sums(folder), indent=1))

        sizes = atomic_folder(self.root / name, fill_and_list, durable=synced)
        return name, sum(sizes.values())

    def read(self, name: str) -> Path:
        """Returns the folder after verifying its files. Raises WeightsDamaged if they differ from the manifest."""
        folder = self.root / name
        try:
            wanted = json.loads((folder / MANIFEST).read_text())
            found = _sums(folder)
        except (OSError, ValueError) as error:
            raise WeightsDamaged(f"the weights in {folder} cannot be read ({error}): save them again") from error
        if wanted != found:
            wrong = sorted(set(wanted.items()) ^ set(found.items()))[0][0]
            raise WeightsDamaged(
                f"the weights in {folder} are damaged: {wrong} is not what was written. Save them again."
            )
        return folder

    def sweep(self, referenced: Iterable[str]) -> int:
        """Deletes folders that are not in `referenced`, and partial ones left by a crash, if older than
        `MIN_SWEEP_AGE_S` seconds. Returns their number."""
        kept = set(referenced)
        now = time.time()
        swept = 0
        for folder in self.root.iterdir():
            if folder.name not in kept and now - folder.stat().st_mtime > MIN_SWEEP_AGE_S:
                doomed = folder.rename(folder.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"))
                shutil.rmtree(doomed, ignore_errors=True)
                swept += 1
        return swept


def _sums(folder: Path) -> dict[str, str]:
    return {name: file["sha256"] for name, file in checksums(folder).items() if name != MANIFEST}
