"""Weights that are trained in another process and survive its loss.

The remote side is a `WeightHost`: the weights of several learners, which share what they can, such as a resident base.
This side keeps, for each learner, a copy of its state (weights and optimizer, as in a checkpoint), taken at a
checkpoint or after some optimizer steps, and a log of the calls since. If the other process dies, a new one loads the
copy and replays the log. A loss costs only time, because equal state and equal calls give equal results.

Files come from the other process by the hash of their content: what this side has already, such as the adapter of a
copy that is then published, is not sent again.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from palestra.core.losses import LossFunction
from palestra.core.tracing import span
from palestra.core.types import Metrics, Sample
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.training.adapter_weights import OptimConfig
from palestra.parallel.config import COPY_EVERY
from palestra.parallel.file_bundle import FileBundle, pack_folder, unpack_folder
from palestra.parallel.processes import ProcessLost
from palestra.parallel.task_queue import MAX_ATTEMPTS
from palestra.text.learners.lm import Weights

trainer_traffic: Counter[str] = Counter()  # `returned_bytes` of files from trainers, `known_bytes` that were not sent
READ_ONLY_METHODS = ("logprobs", "values", "export")  # methods that do not change the weights


class WeightsCall(NamedTuple):
    """A call to a method (`method`) of `Weights`. Folders are passed as `FileBundle`."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


class SentFile(NamedTuple):
    """A file by the SHA-256 of its content, with its bytes (uint8), or None if the receiver has them."""

    digest: str
    data: np.ndarray | None


SentFiles = dict[str, SentFile]  # by relative path


# ---- the remote side


class WeightHost:
    """Weights of several learners, by name, in the process that trains them."""

    def __init__(self, weights: Mapping[str, Weights]) -> None:
        self.weights = weights

    def do(self, name: str, call: WeightsCall, copy: bool, known: Collection[str] = ()) -> tuple[Any, SentFiles | None]:
        """Returns the result of a call and, if `copy`, the learner's state after it (else None). Files whose hashes are
        `known` are not sent."""
        weights = self.weights[name]
        if call.method in ("save", "export"):
            return _sent_files(getattr(weights, call.method), known), None
        if call.method == "load":
            with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
                weights.load(unpack_folder(call.arguments[0], Path(folder)))
            return None, None
        with span(call.method, policy=name):
            result = getattr(weights, call.method)(*call.arguments, **call.options)
        return result, _sent_files(weights.save, known) if copy else None


def _sent_files(write: Callable[[Path], None], known: Collection[str]) -> SentFiles:
    with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
        write(Path(folder))
        files = pack_folder(Path(folder))
    digests = {name: hashlib.sha256(data.data).hexdigest() for name, data in files.items()}
    return {name: SentFile(digest, None if digest in known else files[name]) for name, digest in digests.items()}


# ---- this side


class ProcessHandle(Protocol):
    """Handle of the process that runs a `WeightHost`."""

    def start(self) -> None:
        """Starts a new process with a new `WeightHost`, replacing the previous one."""
        ...

    def call(self, verb: str, *arguments: Any) -> Any:
        """Returns or raises what the host's method `verb` returns or raises. Raises ProcessLost if the process died."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


@dataclass
class RecoveryLog:
    """Recovery log of one learner: the last state copy (None: initial weights), the calls since, and the number of
    optimizer steps among them. `contents` are the last files received under each name, with their hashes."""

    state: FileBundle | None = None
    calls: list[WeightsCall] = field(default_factory=list)
    steps: int = 0
    contents: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)

    def file_digests(self) -> set[str]:
        """Returns the hashes of the files that are here."""
        return {digest for digest, _ in self.contents.values()}

    def receive(self, sent: SentFiles) -> FileBundle:
        """Returns the files that were received, together with those that were not sent because they are here."""
        here = {digest: data for digest, data in self.contents.values()}
        new = {name: here[file.digest] if file.data is None else file.data for name, file in sent.items()}
        for name, file in sent.items():
            trainer_traffic["known_bytes" if file.data is None else "returned_bytes"] += new[name].nbytes
            self.contents[name] = file.digest, new[name]
        return new

    def record(self, call: WeightsCall, copy: FileBundle | None) -> None:
        """Adds a call: with a copy of the state, starts the log anew; without, appends the call unless it is
        read-only."""
        if copy is not None:
            self.state = copy
            self.calls = []
            self.steps = 0
        elif call.method not in READ_ONLY_METHODS:
            self.calls.append(call)
            self.steps += call.method == "optim_step"


class RecoverableWeights:
    """A `WeightHost` in another process and the recovery logs of its learners. Thread-safe: calls run one after the
    other.

    What is written as a checkpoint is a state copy; without one, a copy is taken every `copy_every` optimizer steps,
    and where a stage begins. Raises ValueError if `MAX_ATTEMPTS` processes in a row die at a call.
    """

    def __init__(self, holder: Callable[[], ProcessHandle], copy_every: int = COPY_EVERY) -> None:
        self._open = holder
        self.copy_every = copy_every
        self._lock = threading.Lock()
        self._holder: ProcessHandle | None = None
        self._pasts: dict[str, RecoveryLog] = {}
        self._whole = False  # whether the host's state matches the recovery logs
        self.num_losses = 0

    def start(self) -> None:
        """Starts the process, unless it runs."""
        with self._lock:
            self._open_holder()

    def call(self, name: str, call: WeightsCall) -> Any:
        """Returns the result of a call to the weights of learner `name`."""
        with self._lock:
            for _ in range(MAX_ATTEMPTS):
                try:
                    return self._send_call(name, call)
                except ProcessLost as lost:
                    why = lost
                    self._whole = False
                    self.num_losses += 1
            raise ValueError(
                f"{MAX_ATTEMPTS} processes in a row that train {name} died, the last one: {why}. Memory that runs out "
                "ends a process like that: lower micro_batch_tokens, or ask for more in placement.train"
            )

    def close(self) -> None:
        """Ends the process. The recovery logs are kept, so a later call starts it again in the same state."""
        with self._lock:
            if self._holder:
                self._holder.close()
            self._holder = None
            self._whole = False

    def _send_call(self, name: str, call: WeightsCall) -> Any:
        holder = self._rebuild_holder()
        past = self._pasts.setdefault(name, RecoveryLog())
        due = call.method == "start_stage" or (call.method == "optim_step" and past.steps + 1 >= self.copy_every)
        result, sent = holder.call("do", name, call, due, past.file_digests())
        if call.method in ("save", "export"):
            result = past.receive(result)
        copy = past.receive(sent) if sent is not None else None
        past.record(call, call.arguments[0] if call.method == "load" else result if call.method == "save" else copy)
        return result

    def _open_holder(self) -> ProcessHandle:
        if self._holder is None:
            self._holder = self._open()
            self._holder.start()
            self._whole = True
        return self._holder

    def _rebuild_holder(self) -> ProcessHandle:
        """Returns the handle; rebuilds the host's state first, if its process was lost."""
        holder = self._open_holder()
        if not self._whole:
            holder.start()
            for name, past in self._pasts.items():
                if past.state is not None:
                    holder.call("do", name, WeightsCall("load", (past.state,)), False)
                for call in past.calls:
                    holder.call("do", name, call, False)
            self._whole = True
        return holder


class HostedWeights(Weights):
    """`Weights` of one learner that is trained in a `WeightHost`. They cannot be sampled in this process; samplers use
    their published copies."""

    def __init__(self, remote: RecoverableWeights, name: str) -> None:
        self.remote = remote
        self.name = name

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return self.remote.call(self.name, WeightsCall(verb, arguments, options))

    def forward_backward(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> Metrics:
        return dict(self._ask("forward_backward", samples, loss, **options))

    def optim_step(self, adam: OptimConfig) -> Metrics:
        return dict(self._ask("optim_step", adam))

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return list(self._ask("logprobs", samples, reference=reference))

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return list(self._ask("values", samples))

    def start_stage(self) -> None:
        self._ask("start_stage")

    def snapshot(self, name: str) -> Snapshot | None:
        """Raises ValueError: these weights cannot be sampled in this process."""
        raise ValueError(f"the weights of {name} are in another process: play with what `export` writes of them")

    def export(self, folder: Path) -> None:
        unpack_folder(self._ask("export"), folder)

    def save(self, folder: Path) -> None:
        unpack_folder(self._ask("save"), folder)

    def load(self, folder: Path) -> None:
        self._ask("load", pack_folder(folder))
