"""Weights in training in another process, which may be lost: they are then what they were, in a new one.

The far side is a `Shop`: the weights of some learners that share what they can, such as a resident base. This side
keeps a copy of each learner's state (weights and optimizer, as a checkpoint has them), taken after an optimizer step,
and the calls since. Where the other process dies, a new one is given the copy and told these calls again; so a loss
costs time and nothing else: what follows from equal state and equal calls is equal.
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

READS = ("logprobs", "values", "publish", "save")  # verbs that change nothing


class Lost(Exception):
    """The other process is gone, with all that it held."""


class Call(NamedTuple):
    """A verb of `Weights`, and what it is told. Folders travel as their files."""

    verb: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


# ---- the far side


class Shop:
    """The weights of several learners, by name."""

    def __init__(self, weights: Mapping[str, Resident]) -> None:
        self.weights = weights

    def do(self, name: str, call: Call, copy: bool) -> tuple[Any, Files | None]:
        """What comes of a call, and with `copy` the state that it left."""
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
    """Where a shop is."""

    def start(self) -> None:
        """A new shop in a new process, in place of the one there was."""
        ...

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What a method of the shop returns or raises. Raises Lost where the process died."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


@dataclass
class Past:
    """What makes a learner's weights what they are: a copy of them, or None where they were new, and the calls since.
    `steps` counts the optimizer's since then."""

    copy: Files | None = None
    calls: list[Call] = field(default_factory=list)
    steps: int = 0

    def note(self, call: Call, copy: Files | None) -> None:
        if copy is not None:
            self.copy, self.calls, self.steps = copy, [], 0
        elif call.verb not in READS:
            self.calls.append(call)
            self.steps += call.verb == "optim_step"


class Bench:
    """One shop and the pasts of its learners; a copy is taken every `copy_every` optimizer steps. Calls come from any
    thread, and are told one after the other. Raises ValueError where processes die at a call again and again."""

    def __init__(self, holder: Callable[[], Holder], copy_every: int = 1) -> None:
        self._open, self.copy_every = holder, copy_every
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._pasts: dict[str, Past] = {}
        self._whole = False  # whether the shop is as the pasts say
        self.losses = 0

    def start(self) -> None:
        """Begins to make the shop, where it is not there."""
        with self._lock:
            self._started()

    def ask(self, name: str, call: Call) -> Any:
        """What comes of a call to the weights of `name`."""
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
        """The holder, its shop made as it was where it has been lost."""
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
    """`Weights` of one learner in a shop. They are sampled from where their copies are published."""

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
        raise ValueError(f"the weights of {name} are in another process: play with what `publish` writes of them")

    def publish(self, folder: Path) -> None:
        unpacked(self._ask("publish"), folder)

    def save(self, folder: Path) -> None:
        unpacked(self._ask("save"), folder)

    def load(self, folder: Path) -> None:
        self._ask("load", packed(folder))
