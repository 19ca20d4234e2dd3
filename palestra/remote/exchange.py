"""Adapters on their way to samplers: each snapshot once, as a PEFT folder under a name that no other ever had.

vLLM keeps what it computed of prompts by the adapter's *name*. A new version under an old name would be answered from
the old one's keys and values; so each has a name of its own, `planner@12.3f9c1a2b.7`, unique to run and snapshot.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from palestra.engine.checkpoints import save_snapshot
from palestra.engine.lora import Snapshot
from palestra.files import atomic_folder, remove


class Exchange:
    """A folder of this sampler's own, within `folder` or among the machine's temporary ones; gone when it is closed, or
    with the process."""

    def __init__(self, folder: str | None, base: str) -> None:
        self.base, self.token = base, secrets.token_hex(4)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"palestra-{self.token}-", dir=folder)).absolute()
        self.folder.chmod(0o755)  # servers may run as somebody else
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def name(self, snapshot: Snapshot) -> str:
        said = re.sub(r"[^\w.@-]", "_", snapshot.name, flags=re.ASCII) or "adapter"
        return f"{said}.{self.token}.{snapshot.id}"

    def put(self, snapshot: Snapshot) -> Path:
        """The folder of `snapshot`, which appears once it is whole and on the disk."""
        path = self.folder / self.name(snapshot)
        if not path.exists():
            atomic_folder(path, lambda folder: save_snapshot(folder, snapshot, self.base))
        return path

    def drop(self, name: str) -> None:
        remove(self.folder / name)
