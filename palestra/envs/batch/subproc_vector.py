"""Vector env of single games, spread over subprocesses that share its arrays.

Each process runs a `SyncVectorEnv` over its part of the games, whose frame lies in shared memory. A step sends each
process one small message and waits for one answer; observations are not sent through pipes.
"""

from __future__ import annotations

import pickle
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from palestra.envs.batch.sync_vector import MakeSingleEnv, SyncVectorEnv, VectorEnvSpec, combine_seeds
from palestra.envs.support.options import check_at_least
from palestra.envs.vector_base import Arrays, GamesDiffer, RenderFrame, VectorEnv, VectorStep, zero_actions
from palestra.parallel.processes import PipeProcess, leave_signals_to_parent, pickle_factory

MAX_FAILURES = 3  # failures of a process without a complete step in between
START_TIMEOUT_S = 300.0  # seconds for a process to import its package and make its games
CACHE_LINE_BYTES = 64  # bytes; arrays are aligned to cache lines


class _Memory(SharedMemory):
    def __del__(self) -> None:
        with suppress(BufferError):  # an array in a traceback still refers to it and frees it later
            super().__del__()


class SharedStep:
    """A frame of all games and their next actions in shared memory: a new block, or the existing block `name`."""

    def __init__(self, spec: VectorEnvSpec, num_envs: int, name: str | None = None) -> None:
        vector_step = spec.empty_step(num_envs)
        actions = zero_actions(spec.action_spaces, (num_envs,))
        arrays = [actions, *vector_step.arrays().values()]
        size = sum(array.nbytes + CACHE_LINE_BYTES for array in arrays)
        self.shared_memory = _Memory(name, create=name is None, size=size)
        self._used = 0
        self.vector_step: VectorStep | None = vector_step.map_arrays(self._allocate)
        self.actions: np.ndarray | None = self._allocate(actions)

    def _allocate(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of the same shape and dtype in the next free part of the memory."""
        placed = np.ndarray(array.shape, array.dtype, self.shared_memory.buf, self._used)
        self._used += -(-array.nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return placed

    def close(self) -> None:
        """Detaches from the shared memory."""
        self.vector_step = self.actions = None  # memory with live array views cannot be released
        with suppress(BufferError):
            self.shared_memory.close()


# ---- in the processes


def _work(pipe: Connection, make: bytes, part: slice, games: int) -> None:
    """Process main: plays the games `part` of `games`. Sends their spec, receives the name of the
    memory, then executes commands. If one fails, sends the traceback and ends."""
    leave_signals_to_parent()  # which closes the pipe
    with suppress(EOFError, ConnectionError):  # the parent closed the pipe or ended
        try:
            _play(pipe, SyncVectorEnv(pickle.loads(make), part.stop - part.start), part, games)
        except (EOFError, ConnectionError):
            raise
        except Exception:
            pipe.send(traceback.format_exc())


def _play(pipe: Connection, loop: SyncVectorEnv, part: slice, games: int) -> None:
    pipe.send(loop.spec)
    shared = SharedStep(loop.spec, games, pipe.recv()[1])
    try:
        loop.vector_step = shared.vector_step.map_arrays(lambda array: array[part])  # type: ignore[union-attr]
        while True:
            what, value = pipe.recv()
            pipe.send(_execute(loop, what, shared.actions[part] if what == "step" else value))  # type: ignore[index]
    finally:
        loop.close()
        del loop.vector_step
        shared.close()


def _execute(loop: SyncVectorEnv, what: str, value: Any) -> Arrays | GamesDiffer | None:
    """Executes one command. Frames stay in shared memory; only the result of `save` is returned,
    and the GamesDiffer of `load`, after which games may be reset."""
    if what == "save":
        return loop.save()
    try:
        getattr(loop, what)(value)
    except GamesDiffer as error:
        return error
    return None


# ---- in the parent


class _ProcessFailed(Exception):
    """A process ended; the message is the reason."""


class _Worker:
    """One process and its `part` of the games. `failures` counts failures since its last complete step."""

    def __init__(self, make: bytes, part: slice, games: int, timeout_s: float) -> None:
        self.part = part
        self.timeout_s = timeout_s
        self.failures = 0
        self._job = (make, part, games)
        self.start()

    def start(self) -> None:
        self.child = PipeProcess(_work, *self._job, daemon=True)

    def send(self, what: str, value: Any = None) -> None:
        with suppress(ConnectionError):  # `receive` reports an ended process
            self.child.pipe.send((what, value))

    def receive(self, starting: bool = False) -> Any:
        """Returns the next answer of the process; raises _ProcessFailed if it failed, ended or did
        not answer in time."""
        patience = max(START_TIMEOUT_S, self.timeout_s) if starting else self.timeout_s
        try:
            if not self.child.pipe.poll(patience):
                self.child.process.kill()
                raise _ProcessFailed(f"it did not answer for {patience:g} s")
            answer = self.child.pipe.recv()
        except (EOFError, OSError):
            self.child.process.join()
            raise _ProcessFailed(f"the process ended with {self.child.exit_reason()}") from None
        if isinstance(answer, str):
            raise _ProcessFailed(answer)
        return answer

    def stop(self, timeout_s: float) -> None:
        """Closes the pipe, which ends the process; kills it if it has not ended after `timeout_s` seconds."""
        self.child.stop(timeout_s)
        self.child.process.close()


def _release(workers: list[_Worker], memory: list[SharedStep]) -> None:
    for worker in workers:
        worker.child.pipe.close()
    for worker in workers:
        worker.stop(1.0)
    for shared in memory:
        shared.shared_memory.unlink()
        shared.close()
    workers.clear()
    memory.clear()


class SubprocVectorEnv(VectorEnv):
    """B games spread over K processes, several games each; `make` must be picklable.

    Games play as in a `SyncVectorEnv`. A process that dies, fails or does not answer for `timeout_s` seconds is
    replaced, and its games start anew from new seeds: the step reports these games as `truncated`, with the last known
    observation and no reward, and `restarts` counts it. Other games are not affected.

    Raises ValueError, with the traceback of the process, if games cannot be made, or fail `MAX_FAILURES` times without
    a complete step in between; and if `num_envs` or `num_processes` is below 1.
    """

    def __init__(self, make: MakeSingleEnv, num_envs: int, num_processes: int, *, timeout_s: float = 300.0) -> None:
        check_at_least("num_envs", num_envs, 1, "nothing is played in fewer")
        check_at_least("num_processes", num_processes, 1, "nothing is played in fewer")
        self.num_envs = num_envs
        self.restarts = 0
        self._seeds = [0] * num_envs
        bounds = np.linspace(0, num_envs, min(num_envs, num_processes) + 1).astype(int).tolist()
        parts = [slice(low, high) for low, high in pairwise(bounds)]
        self._workers: list[_Worker] = []
        self._memory: list[SharedStep] = []
        self._release = weakref.finalize(self, _release, self._workers, self._memory)
        with _closed_on_error(self):
            self._workers += [_Worker(pickle_factory(make, "a game"), part, num_envs, timeout_s) for part in parts]
            specs = [self._receive_spec(worker) for worker in self._workers]
            self.spec = specs[0]
            self._memory.append(SharedStep(self.spec, num_envs))
            for worker in self._workers:
                worker.send("memory", self._memory[0].shared_memory.name)
        self.adopt_spaces(self.spec)
        self.vector_step = self.spec.empty_step(num_envs)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        self._seeds = [int(seed) for seed in seeds]
        with _closed_on_error(self):
            for worker in self._open():
                worker.send("reset", np.array(self._seeds[worker.part]))
            self._replace_failed(_failures(self._receive_all()))
        return self.vector_step

    def step(self, actions: np.ndarray) -> VectorStep:
        workers = self._open()
        self._memory[0].actions[:] = actions  # type: ignore[index]
        marked = self.vector_step.seat_terminated
        if marked is not None:
            dead = marked & ~self.vector_step.done[:, None]  # in the running episodes
        with _closed_on_error(self):
            for worker in workers:
                worker.send("step")
            failed = _failures(self._receive_all())
            for worker in workers:
                if worker not in failed:
                    worker.failures = 0
            self._replace_failed(failed)
        for worker in failed:
            self.vector_step.truncated[worker.part] = True
            if marked is not None:
                marked[worker.part] = dead[worker.part]
        return self.vector_step

    def save(self) -> Arrays | None:
        with _closed_on_error(self):
            for worker in self._open():
                worker.send("save")
            parts = list(self._receive_all().values())
        if any(part is None or isinstance(part, _ProcessFailed) for part in parts):
            return None  # the next step handles a process that ended
        kept = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return kept | {f"frame.{name}": array for name, array in self.vector_step.copy().arrays().items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        self._seeds = saved["seeds"].tolist()
        before = np.concatenate([[0], np.cumsum(saved["made"])])
        with _closed_on_error(self):
            for worker in self._open():
                part = {name: array[worker.part] for name, array in saved.items() if name != "moves"}
                actions = saved["moves"][before[worker.part.start] : before[worker.part.stop]]
                worker.send("load", part | {"moves": actions})
            heard = self._receive_all()
            if failed := _failures(heard):
                raise ValueError(f"saved games cannot be replayed: {next(iter(failed.values()))}")
        if differ := [answer for answer in heard.values() if isinstance(answer, GamesDiffer)]:
            raise differ[0]
        for name, array in self.vector_step.arrays().items():
            array[:] = saved[f"frame.{name}"]
        self._gather()
        return self.vector_step

    def close(self) -> None:
        self._release()

    def _open(self) -> list[_Worker]:
        if not self._workers:
            raise ValueError("these games are closed: make a new env")
        return self._workers

    def _receive_all(self) -> dict[_Worker, Any]:
        """Returns the answer of every process; a _ProcessFailed for those that failed."""
        heard: dict[_Worker, Any] = {}
        for worker in self._workers:
            try:
                heard[worker] = worker.receive()
            except _ProcessFailed as error:
                heard[worker] = error
        return heard

    def _replace_failed(self, failed: dict[_Worker, str]) -> None:
        """Replaces failed processes and gathers the frame; the last observations of lost games
        become their final ones."""
        for worker, why in failed.items():
            self.vector_step.final_obs[worker.part] = self.vector_step.obs[worker.part]
            if self.vector_step.state is not None and self.vector_step.final_state is not None:
                self.vector_step.final_state[worker.part] = self.vector_step.state[worker.part]
            self._replace(worker, why)
        self._gather()

    def _replace(self, worker: _Worker, why: str) -> None:
        """Starts the games of a failed process in a new one, with retries."""
        part = worker.part
        begun = False
        while not begun:
            worker.failures += 1
            if worker.failures >= MAX_FAILURES:
                raise ValueError(
                    f"games failed {MAX_FAILURES} times without a complete step in between, the last time with:\n{why}"
                )
            self.restarts += 1
            worker.stop(0.0)
            worker.start()
            self._seeds[part] = [combine_seeds(seed, self.restarts, 1) for seed in self._seeds[part]]
            try:
                worker.receive(starting=True)
                worker.send("memory", self._memory[0].shared_memory.name)
                worker.send("reset", np.array(self._seeds[part]))
                worker.receive()
                begun = True
            except _ProcessFailed as error:
                why = str(error)

    def _receive_spec(self, worker: _Worker) -> VectorEnvSpec:
        """Returns the spec of the games that a process made."""
        try:
            return worker.receive(starting=True)
        except _ProcessFailed as error:
            raise ValueError(f"the games cannot be made in a process of their own: {error}") from None

    def _gather(self) -> None:
        """Copies the shared frame: a dying process may leave its arrays half-written, and they end with `close`."""
        shared = self._memory[0].vector_step
        own = self.vector_step
        assert shared is not None
        over = shared.done
        for name, array in shared.arrays().items():
            where = over if name in ("final_obs", "final_state") else slice(None)
            getattr(own, name)[where] = array[where]


def _failures(heard: dict[_Worker, Any]) -> dict[_Worker, str]:
    return {worker: str(answer) for worker, answer in heard.items() if isinstance(answer, _ProcessFailed)}


@contextmanager
def _closed_on_error(env: SubprocVectorEnv) -> Iterator[None]:
    """Closes the env if the block fails or is interrupted: answers left in the pipes would not match later messages."""
    try:
        yield
    except BaseException:
        env.close()
        raise


class PackageVectorEnv(VectorEnv):
    """B games of a package whose envs play one game at a time: in this process (`num_processes` 0) or in
    `num_processes` subprocesses. `label` is the package's name of the env, for messages.

    Raises ValueError if `num_processes` is negative or `num_envs` below 1.
    """

    def __init__(self, make: MakeSingleEnv, num_envs: int, num_processes: int, label: str = "") -> None:
        if num_processes < 0:
            raise ValueError(f"num_processes is {num_processes}: 0 plays in this process, more in as many others")
        self.inner: SyncVectorEnv | SubprocVectorEnv
        if num_processes:
            self.inner = SubprocVectorEnv(make, num_envs, num_processes)
        else:
            self.inner = SyncVectorEnv(make, num_envs)
        self.num_envs = num_envs
        self.adopt_spaces(self.inner)
        self._label = label

    @property
    def label(self) -> str:
        return self._label or super().label

    @property
    def restarts(self) -> int:
        return getattr(self.inner, "restarts", 0)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        return self.inner.reset(seeds)

    def step(self, actions: np.ndarray) -> VectorStep:
        return self.inner.step(actions)

    def save(self) -> Arrays | None:
        return self.inner.save()

    def load(self, saved: Mapping[str, np.ndarray]) -> VectorStep:
        return self.inner.load(saved)

    def render(self, game: int) -> RenderFrame | None:
        return self.inner.render(game)

    def close(self) -> None:
        self.inner.close()
