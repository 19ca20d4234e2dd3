"""Actor processes that play while the learner trains: no actor waits for the learner.

Each actor plays its own games with the newest weights into one of its slots in shared memory, and sends one small
message per batch. The learner takes the next batch that is ready. An actor whose slots are all full overwrites the
oldest, so that batches are as recent as possible; a batch is still some updates old, which the algorithm must correct
for (V-trace). An actor that dies is replaced, and its games start anew.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.core.failures import RunFailed
from palestra.core.seeding import derive_seed
from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Arrays, VectorEnv
from palestra.parallel.processes import SPAWN_CONTEXT, PipeProcess, leave_signals_to_parent
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.rollouts.rollout import TimeLimit, VectorRollout, empty_batch

SLOTS_PER_ACTOR = 3  # one to write, one to read, one in between
MAX_ACTOR_FAILURES = 3  # consecutive deaths of an actor without a batch
CACHE_LINE_BYTES = 64  # bytes of a cache line; arrays are aligned to it
# sent with the message: their sizes vary
VARIABLE_SIZE_FIELDS = ("end_index", "final_obs", "final_state", "recurrent_state", "episode_stats")


class ActorSpec(Protocol):
    """The parts of an actor: its envs, and players whose weights are the tensors that `acting_tensors` lists."""

    env: VectorEnv
    time_limit: TimeLimit

    def players(self, progress: float) -> Sequence[VectorPolicy]: ...
    def acting_tensors(self) -> list[Tensor]: ...


class SharedBuffers:
    """Weights and batch slots of one actor in shared memory, created new or attached by name. Access is guarded by a
    lock.

    `slot_marks [SLOTS_PER_ACTOR]` int64: the number of the batch in a slot, 0 for none, -1 while it is read or written.
    `weights` is float32.
    """

    def __init__(self, weights: int, batch: RolloutBatch, name: str | None = None) -> None:
        fixed = [field.name for field in fields(RolloutBatch) if field.name not in VARIABLE_SIZE_FIELDS]
        arrays = {name: getattr(batch, name) for name in fixed}
        self.array_specs = {k: (a.shape, a.dtype) for k, a in arrays.items() if isinstance(a, np.ndarray)}
        space = 4 * CACHE_LINE_BYTES + 4 * weights + CACHE_LINE_BYTES
        space += SLOTS_PER_ACTOR * sum(
            int(np.prod(shape)) * dtype.itemsize + CACHE_LINE_BYTES for shape, dtype in self.array_specs.values()
        )
        self.shared_memory = SharedMemory(name, create=name is None, size=space)
        self._used = 0
        self.slot_marks = self._array((SLOTS_PER_ACTOR,), np.dtype(np.int64))
        self.version = self._array((1,), np.dtype(np.int64))  # of the weights: counts the learner's publications
        self.weights = self._array((weights,), np.dtype(np.float32))
        self.slots = [
            {key: self._array(*kind) for key, kind in self.array_specs.items()} for _ in range(SLOTS_PER_ACTOR)
        ]

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array: np.ndarray = np.ndarray(shape, dtype, self.shared_memory.buf, self._used)
        self._used += -(-array.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return array

    def close(self) -> None:
        del self.slot_marks, self.version, self.weights, self.slots
        with suppress(BufferError):
            self.shared_memory.close()


def _actor_main(pipe: Connection, lock: Any, make: Callable[[], ActorSpec], horizon: int, seed: int, name: str) -> None:
    """Main loop of an actor: plays until the pipe closes or the learner is gone."""
    leave_signals_to_parent()
    torch.set_num_threads(1)
    spec = make()
    parent = os.getppid()
    first = derive_seed(seed, "games") >> 1 | 1 << 33  # evaluations have seeds below 2**32
    seeds = first + np.arange(spec.env.num_envs)
    rollout = VectorRollout(spec.env, seeds, time_limit=spec.time_limit)
    weights = spec.acting_tensors()
    buffers = SharedBuffers(sum(w.numel() for w in weights), empty_batch(spec.env, rollout.vector_step, horizon), name)
    number = 0
    with suppress(BrokenPipeError, EOFError, ConnectionError):
        while os.getppid() == parent and not pipe.poll():
            number += 1
            with lock:
                version = int(buffers.version[0])
                flat = torch.from_numpy(buffers.weights.copy())
            _spread(flat, weights)
            try:
                batch = rollout.collect(spec.players(0.0), horizon, derive_seed(seed, number))
            except RunFailed as error:
                pipe.send(error)
                return
            with lock:  # the oldest that is not being read; free ones (0) come first
                slot = min(
                    (i for i in range(SLOTS_PER_ACTOR) if buffers.slot_marks[i] >= 0),
                    key=lambda i: buffers.slot_marks[i],
                )
                dropped = bool(buffers.slot_marks[slot])
                buffers.slot_marks[slot] = -1
            for key, array in buffers.slots[slot].items():
                array[...] = getattr(batch, key)
            with lock:
                buffers.slot_marks[slot] = number
            pipe.send((slot, number, version, dropped, {key: getattr(batch, key) for key in VARIABLE_SIZE_FIELDS}))


def _spread(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copies flat weights into the tensors `into`."""
    with torch.no_grad():
        for tensor, values in zip(into, flat.split([w.numel() for w in into]), strict=True):
            tensor.copy_(values.view_as(tensor))


class ActorPool:
    """Drop-in for a `VectorRollout` that plays in other processes: `collect` publishes the current weights to all
    actors and returns the next batch.

    `spec` has the learner's own env and players; `make[i]` builds those of actor i in its process, with the same number
    of games. `batch.rollout_metrics` has the batch's age in updates (`lag`), the number of batches overwritten unread
    (`dropped`), and the number of actor replacements (`restarts`).
    """

    def __init__(self, spec: ActorSpec, make: Sequence[Callable[[], ActorSpec]], horizon: int, seed: int) -> None:
        self.spec = spec
        self.env = spec.env
        self.make = make
        self.horizon = horizon
        self.seed = seed
        self.version = 0
        self.restarts = 0
        self.weights = spec.acting_tensors()
        frame = spec.env.reset(np.arange(spec.env.num_envs))
        self.batch = empty_batch(spec.env, frame, horizon)
        num_weights = sum(tensor.numel() for tensor in self.weights)
        self.all_buffers = [SharedBuffers(num_weights, self.batch) for _ in make]
        self.locks: list[Any] = [None for _ in make]
        self.actors: list[PipeProcess] = []  # none until the first weights are published
        self.failures = [0 for _ in make]
        self._release = weakref.finalize(self, _release, self.actors, self.all_buffers)

    def collect(self, players: Sequence[VectorPolicy], steps: int, seed: int) -> RolloutBatch:
        """Returns the next batch, which is valid until the next call; ignores `players`, `steps`
        and `seed`, which the actors choose themselves. Raises RunFailed if an actor's env failed,
        and ValueError if an actor dies repeatedly."""
        self._publish()
        dropped = 0
        while True:
            ready = wait(list(chain.from_iterable((actor.pipe, actor.process.sentinel) for actor in self.actors)))
            for step in range(1, len(self.make) + 1):  # round robin: a fast actor must not starve the others
                i = (self.batch.worker + step) % len(self.make)
                if self.actors[i].pipe in ready and (got := self._receive(i)) is not None:
                    slot, number, version, overwrote, small = got
                    dropped += overwrote
                    if self._read(i, slot, number):
                        self.failures[i] = 0
                        for key, value in small.items():
                            setattr(self.batch, key, value)
                        notes = {"lag": self.version - version, "dropped": dropped, "restarts": self.restarts}
                        self.batch.rollout_metrics = {key: float(value) for key, value in notes.items()}
                        self.batch.worker = i
                        return self.batch
                elif not self.actors[i].process.is_alive() and not self.actors[i].pipe.poll():
                    self._replace(i)

    def _publish(self) -> None:
        """Writes the current weights for all actors; starts the actors that do not run yet."""
        self.version += 1
        flat = torch.cat([w.detach().flatten().float() for w in self.weights]).cpu().numpy()
        for i, buffers in enumerate(self.all_buffers):
            if i == len(self.actors):
                buffers.weights[:], buffers.version[:] = flat, self.version
                self.actors.append(self._start(i))
            else:
                with self.locks[i]:
                    buffers.weights[:], buffers.version[:] = flat, self.version

    def _start(self, i: int) -> PipeProcess:
        self.all_buffers[i].slot_marks[:] = 0
        self.locks[i] = SPAWN_CONTEXT.Lock()
        seed = derive_seed(self.seed, "actor", i, self.restarts)
        name = self.all_buffers[i].shared_memory.name
        return PipeProcess(_actor_main, self.locks[i], self.make[i], self.horizon, seed, name, daemon=True)

    def _replace(self, i: int) -> None:
        """Starts a new actor in place of a dead one, with a new lock: the old one may have died holding it."""
        self.failures[i] += 1
        if self.failures[i] >= MAX_ACTOR_FAILURES:
            raise ValueError(
                f"actor {i} died {MAX_ACTOR_FAILURES} times in a row without a batch "
                f"({self.actors[i].exit_reason()}): its own message is above; "
                "num_actors: 0 plays in this process and shows the whole error"
            )
        self.restarts += 1
        self.actors[i].pipe.close()
        self.actors[i].process.join()
        self.actors[i] = self._start(i)

    def _receive(self, i: int) -> Any:
        """Returns an actor's next message, or None if the actor is gone. Raises the RunFailed that its env caused."""
        try:
            message = self.actors[i].pipe.recv()
        except (EOFError, OSError):
            self._replace(i)
            return None
        if isinstance(message, RunFailed):
            raise message
        return message

    def _read(self, i: int, slot: int, number: int) -> bool:
        """Copies a slot into the batch; returns False if the slot was overwritten since."""
        buffers = self.all_buffers[i]
        with self.locks[i]:
            if buffers.slot_marks[slot] != number:
                return False
            buffers.slot_marks[slot] = -1
        for key, array in buffers.slots[slot].items():
            getattr(self.batch, key)[...] = array
        with self.locks[i]:
            buffers.slot_marks[slot] = 0
        return True

    def restart(self, seeds: np.ndarray) -> None:
        """Does nothing: actors start their games themselves."""

    def save(self) -> None:
        """Saves nothing: a resume starts with reset games."""

    def load(self, saved: Arrays, players: Sequence[VectorPolicy]) -> None:
        """Does nothing: nothing was saved."""

    def close(self) -> None:
        """Stops the actors and frees the shared memory."""
        self._release()


def _release(actors: list[PipeProcess], all_buffers: list[SharedBuffers]) -> None:
    for actor in actors:
        actor.pipe.close()
    for actor in actors:
        actor.stop(1.0)
    for buffers in all_buffers:
        with suppress(FileNotFoundError):
            buffers.shared_memory.unlink()
        buffers.close()
    all_buffers.clear()
