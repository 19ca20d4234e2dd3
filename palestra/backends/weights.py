"""Weights that are trained in another process and survive its loss.

The remote side is a `Shop`: the weights of several learners, which share what they can, such as a resident base. This
side keeps, for each learner, a copy of its state (weights and optimizer, as in a checkpoint), taken after an optimizer
step, and a log of the calls since. If the other process dies, a new one loads the copy and replays the log. A loss
costs only time, because equal state and equal calls give equal results.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from palestra.backends.folders import Files, packed, unpacked
from palestra.backends.waiting import TRIES
from palestra.engine.lora import Snapshot
from palestra.engine.trainer import AdamConfig
from palestra.learners.lm import Resident
from palestra.types import Metrics, Sample

READS = ("logprobs", "values", "publish", "save")  # methods that do not change the weights


class Lost(Exception):
    """The other process died, with its state."""


class Call(NamedTuple):
    """A call to a method (`verb`) of `Weights`. Folders are passed as `Files`."""

    verb: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


# ---- the remote side


class Shop:
    """Weights of several learners, by name, in the process that trains them."""

    def __init__(self, weights: Mapping[str, Resident]) -> None:
        self.weights = weights

    def do(self, name: str, call: Call, copy: bool) -> tuple[Any, Files | None]:
        """Returns the result of a call and, if `copy`, the learner's state after it (else None)."""
        weights = self.weights[name]
        if call.verb in ("save", "publish"):
            return _written(getattr(weights, call.verb)), None
        if call.verb == "load":
            self._load(weights, *call.arguments)
            return None, None
        result = getattr(weights, call.verb)(*call.arguments, **call.options)
        return result, _written(weights.save) if copy else None

    def _load(self, weights: Resident, files: Files) -> None:
        with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
            weights.load(unpacked(files, Path(folder)))


def _written(write: Callable[[Path], None]) -> Files:
    with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
        write(Path(folder))
        return packed(Path(folder))


# ---- this side


class Holder(Protocol):
    """Handle of the process that runs a `Shop`."""

    def start(self) -> None:
        """Starts a new process with a new shop, replacing the previous one."""
        ...

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Returns or raises what the shop's method returns or raises. Raises Lost if the process died."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


@dataclass
class Past:
    """Recovery log of one learner: the last state copy (None: initial weights), the calls since, and the number of
    optimizer steps among them."""

    copy: Files | None = None
    calls: list[Call] = field(default_factory=list)
    steps: int = 0

    def note(self, call: Call, copy: Files | None) -> None:
        """Adds a call: with a copy of the state, starts the log anew; without, appends the call unless it is
        read-only."""
        if copy is not None:
            self.copy, self.calls, self.steps = copy, [], 0
        elif call.verb not in READS:
            self.calls.append(call)
            self.steps += call.verb == "optim_step"


class Bench:
    """One shop and the recovery logs of its learners. Thread-safe: calls run one after the other.

    A state copy is taken every `copy_every` optimizer steps. Raises ValueError if `TRIES` processes in a row die at a
    call.
    """

    def __init__(self, holder: Callable[[], Holder], copy_every: int = 1) -> None:
        self._open, self.copy_every = holder, copy_every
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._pasts: dict[str, Past] = {}
        self._whole = False  # whether the shop's state matches the recovery logs
        self.losses = 0

    def start(self) -> None:
        """Starts the process, unless it runs."""
        with self._lock:
            self._started()

    def ask(self, name: str, call: Call) -> Any:
        """Returns the result of a call to the weights of learner `name`."""
        with self._lock:
            for _ in range(TRIES):
                try:
                    return self._told(name, call)
                except Lost as lost:
                    why, self._whole = lost, False
                    self.losses += 1
            raise ValueError(
                f"{TRIES} processes in a row died that train {name}, the last so: {why}. Memory that runs out ends a "
                "process like that: lower pack_tokens, or ask for more in placement.train"
            )

    def close(self) -> None:
        """Ends the process. The recovery logs are kept, so a later call starts it again in the same state."""
        with self._lock:
            if self._holder:
                self._holder.close()
            self._holder, self._whole = None, False

    def _told(self, name: str, call: Call) -> Any:
        holder = self._mended()
        past = self._pasts.setdefault(name, Past())
        due = call.verb == "begin" or (call.verb == "optim_step" and past.steps + 1 >= self.copy_every)
        result, copy = holder.ask("do", name, call, due)
        past.note(call, call.arguments[0] if call.verb == "load" else copy)
        return result

    def _started(self) -> Holder:
        if self._holder is None:
            self._holder = self._open()
            self._holder.start()
            self._whole = True
        return self._holder

    def _mended(self) -> Holder:
        """Returns the handle; rebuilds the shop's state first, if its process was lost."""
        holder = self._started()
        if not self._whole:
            holder.start()
            for name, past in self._pasts.items():
                if past.copy is not None:
                    holder.ask("do", name, Call("load", (past.copy,)), False)
                for call in past.calls:
                    holder.ask("do", name, call, False)
            self._whole = True
        return holder


class Distant:
    """`Weights` of one learner that is trained in a `Shop`. They are not sampled from here, but from their published
    copies."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name = bench, name

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return self.bench.ask(self.name, Call(verb, arguments, options))

    def forward_backward(self, samples: Sequence[Sample], loss: Callable, **options: Any) -> Metrics:
        return dict(self._ask("forward_backward", samples, loss, **options))

    def optim_step(self, adam: AdamConfig, *, lr: float) -> Metrics:
        return dict(self._ask("optim_step", adam, lr=lr))

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        return list(self._ask("logprobs", samples, reference=reference))

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return list(self._ask("values", samples))

    def begin(self) -> None:
        self._ask("begin")

    def snapshot(self, name: str) -> Snapshot | None:
        """Raises ValueError: these weights cannot be sampled in this process."""
        raise ValueError(f"the weights of {name} are in another process: play with what `publish` writes of them")

    def publish(self, folder: Path) -> None:
        unpacked(self._ask("publish"), folder)

    def save(self, folder: Path) -> None:
        unpacked(self._ask("save"), folder)

    def load(self, folder: Path) -> None:
        self._ask("load", packed(folder))
