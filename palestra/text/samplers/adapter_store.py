"""Adapter folders for remote samplers: each snapshot is written once, in PEFT format, under a unique name.

vLLM's prefix cache is keyed by the adapter's *name*. A new version under an old name would be answered from the old
version's keys and values; each snapshot therefore gets its own name, such as `planner@12.3f9c1a2b.7`, which is unique
to run and snapshot.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from palestra.core.files import atomic_folder, remove_path
from palestra.core.http.retry import RetryPolicy
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.training.peft_format import save_snapshot

MAX_RETRY_S = 10.0  # seconds for which a write that fails is tried again


class AdapterStore:
    """A temporary folder of one sampler, created in `folder` (None: the system's temporary directory).

    `close` deletes it; so does garbage collection of this object or the end of the process.
    """

    def __init__(self, folder: str | None, base: str) -> None:
        self.base = base
        self.token = secrets.token_hex(4)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"palestra-{self.token}-", dir=folder)).absolute()
        self.folder.chmod(0o755)  # servers may run as another user
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def adapter_name(self, snapshot: Snapshot) -> str:
        """Returns the unique adapter name of `snapshot`: its own name, the folder's token and the snapshot's id."""
        label = re.sub(r"[^\w.@-]", "_", snapshot.name, flags=re.ASCII) or "adapter"
        return f"{label}.{self.token}.{snapshot.id}"

    def write(self, snapshot: Snapshot) -> Path:
        """Returns the folder of `snapshot`, writing it first if needed. The folder appears atomically."""
        path = self.folder / self.adapter_name(snapshot)
        if not path.exists():
            atomic_folder(path, lambda folder: save_snapshot(folder, snapshot, self.base))
        return path

    async def write_async(self, snapshot: Snapshot, timeout_s: float) -> Path:
        """Returns the folder of `snapshot`, written on a thread; tries again for up to `timeout_s` seconds, at most
        10. Raises ValueError after that."""
        policy = RetryPolicy(0.1, 1.0, timeout_s=min(timeout_s, MAX_RETRY_S))
        try:
            return await policy.run(lambda: asyncio.to_thread(self.write, snapshot), OSError)
        except OSError as error:
            raise ValueError(f"cannot write an adapter for the samplers: {error}. Is the disk full?") from error

    def delete(self, name: str) -> None:
        """Deletes the folder of the adapter `name`."""
        remove_path(self.folder / name)
