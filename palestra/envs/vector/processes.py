"""Vector env of single games, spread over subprocesses that share its arrays.

Each process runs a `Loop` over its part of the games, whose frame lies in shared memory. A step sends each process one
small message and waits for one answer; observations are not sent through pipes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from palestra.envs.vector.base import Arrays, Frame, VectorEnv
from palestra.envs.vector.loop import GameSpec, Loop, MakeGame, at_least_one, derived_seed
from palestra.roll import start_shielded

CONTEXT = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
TRIES = 3  # failures of a process without a complete step in between
STARTING = 300.0  # seconds for a process to import its package and make its games
LINE = 64  # bytes; arrays are aligned to cache lines


class _Memory(SharedMemory):
    def __del__(self) -> None:
        with suppress(BufferError):  # an array in a traceback still refers to it and frees it later
            super().__del__()


class Shared:
    """A frame of all games and their next actions in shared memory: a new block, or the existing block `name`."""

    def __init__(self, spec: GameSpec, games: int, name: str | None = None) -> None:
        frame, actions = spec.frame(games), spec.blank_actions(games)
        arrays = [actions, *(array for _, array in _arrays(frame))]
        self.memory = _Memory(name, create=name is None, size=sum(array.nbytes + LINE for array in arrays))
        self._used = 0
        self.frame: Frame | None = frame.map(self._placed)
        self.actions: np.ndarray | None = self._placed(actions)

    def _placed(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of the same shape and dtype in the next free part of the memory."""
        placed = np.ndarray(array.shape, array.dtype, self.memory.buf, self._used)
        self._used += -(-array.nbytes // LINE) * LINE
        return placed

    def close(self) -> None:
        """Detaches from the shared memory."""
        self.frame = self.actions = None  # memory with live array views cannot be released
        with suppress(BufferError):
            self.memory.close()


# ---- in the processes


def _work(pipe: Connection, make: bytes, part: slice, games: int) -> None:
    """Process main: plays the games `part` of `games`. Sends their spec, receives the name of the memory, then executes
    commands. If one fails, sends the traceback and ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then closes the pipe
    with suppress(EOFError, ConnectionError):  # the parent closed the pipe or ended
        try:
            _play(pipe, Loop(pickle.loads(make), part.stop - part.start), part, games)
        except (EOFError, ConnectionError):
            raise
        except Exception:
            pipe.send(traceback.format_exc())


def _play(pipe: Connection, loop: Loop, part: slice, games: int) -> None:
    pipe.send(loop.spec)
    shared = Shared(loop.spec, games, pipe.recv()[1])
    try:
        loop.frame = shared.frame.map(lambda array: array[part])  # type: ignore[union-attr]
        while True:
            what, value = pipe.recv()
            pipe.send(_done(loop, what, shared.actions[part] if what == "step" else value))  # type: ignore[index]
    finally:
        loop.close()
        del loop.frame
        shared.close()


def _done(loop: Loop, what: str, value: Any) -> Arrays | None:
    """Executes one command. Frames stay in shared memory; only the result of `save` is returned."""
    if what == "save":
        return loop.save()
    getattr(loop, what)(value)
    return None


# ---- in the parent


class _Failed(Exception):
    """A process ended; the message is the reason."""


class _Worker:
    """One process and its `part` of the games. `failures` counts failures since its last complete step."""

    def __init__(self, make: bytes, part: slice, games: int, patience: float) -> None:
        self.part, self.patience, self.failures = part, patience, 0
        self._job = (make, part, games)
        self.start()

    def start(self) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(theirs, *self._job), daemon=True)
        start_shielded(self.process)
        theirs.close()  # so that the pipe closes when the process ends

    def tell(self, what: str, value: Any = None) -> None:
        with suppress(ConnectionError):  # `answer` reports an ended process
            self.pipe.send((what, value))

    def answer(self, starting: bool = False) -> Any:
        """Returns the next answer of the process; raises _Failed if it failed, ended or did not answer in time."""
        patience = max(STARTING, self.patience) if starting else self.patience
        try:
            if not self.pipe.poll(patience):
                self.process.kill()
                raise _Failed(f"it was silent for {patience:g} s")
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise _Failed(f"the process ended with exit code {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise _Failed(answer)
        return answer

    def stop(self, patience: float) -> None:
        """Closes the pipe, which ends the process; kills it if it has not ended after `patience` seconds."""
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _release(workers: list[_Worker], memory: list[Shared]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.stop(1.0)
    for shared in memory:
        shared.memory.unlink()
        shared.close()
    workers.clear()
    memory.clear()


class Processes(VectorEnv):
    """B games spread over K processes, several games each; `make` must be picklable.

    Games play as in a `Loop`. A process that dies, fails or does not answer for `patience` seconds is replaced, and its
    games start anew from new seeds: the step reports these games as `truncated`, with the last known observation and no
    reward, and `restarts` counts it. Other games are not affected.

    Raises ValueError, with the traceback of the process, if games cannot be made, or fail `TRIES` times without a
    complete step in between; and if `games` or `processes` is below 1.
    """

    def __init__(self, make: MakeGame, games: int, processes: int, *, patience: float = 300.0) -> None:
        at_least_one("games", games)
        at_least_one("processes", processes)
        self.games, self.restarts, self._seeds = games, 0, [0] * games
        bounds = np.linspace(0, games, min(games, processes) + 1).astype(int).tolist()
        parts = [slice(low, high) for low, high in pairwise(bounds)]
        self._workers: list[_Worker] = []
        self._memory: list[Shared] = []
        self._release = weakref.finalize(self, _release, self._workers, self._memory)
        with _closed_on_error(self):
            self._workers += [_Worker(_pickled(make), part, games, patience) for part in parts]
            specs = [self._meet(worker) for worker in self._workers]
            self.spec = specs[0]
            self._memory.append(Shared(self.spec, games))
            for worker in self._workers:
                worker.tell("memory", self._memory[0].memory.name)
        self.seats, self.views, self.actions = self.spec.seats, self.spec.views, self.spec.actions
        self.state_size, self.frame = self.spec.state_size, self.spec.frame(games)

    def reset(self, seeds: np.ndarray) -> Frame:
        self._seeds = [int(seed) for seed in seeds]
        with _closed_on_error(self):
            for worker in self._open():
                worker.tell("reset", np.array(self._seeds[worker.part]))
            self._mend(_failures(self._heard()))
        return self.frame

    def step(self, actions: np.ndarray) -> Frame:
        workers = self._open()
        self._memory[0].actions[:] = actions  # type: ignore[index]
        marked = self.frame.seat_terminated
        dead = np.zeros(0, bool) if marked is None else marked & ~self.frame.over[:, None]  # in the running episodes
        with _closed_on_error(self):
            for worker in workers:
                worker.tell("step")
            failed = _failures(self._heard())
            for worker in workers:
                worker.failures = worker.failures if worker in failed else 0
            self._mend(failed)
        for worker in failed:
            self.frame.truncated[worker.part] = True
            if self.frame.seat_terminated is not None:
                self.frame.seat_terminated[worker.part] = dead[worker.part]
        return self.frame

    def save(self) -> Arrays | None:
        with _closed_on_error(self):
            for worker in self._open():
                worker.tell("save")
            parts = list(self._heard().values())
        if any(part is None or isinstance(part, _Failed) for part in parts):
            return None  # the next step handles a process that ended
        kept = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return kept | {f"frame.{name}": array.copy() for name, array in _arrays(self.frame)}

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        self._seeds, before = saved["seeds"].tolist(), np.concatenate([[0], np.cumsum(saved["made"])])
        with _closed_on_error(self):
            for worker in self._open():
                part = {name: array[worker.part] for name, array in saved.items() if name != "moves"}
                moves = saved["moves"][before[worker.part.start] : before[worker.part.stop]]
                worker.tell("load", part | {"moves": moves})
            if failed := _failures(self._heard()):
                raise ValueError(f"saved games cannot be played again: {next(iter(failed.values()))}")
        for name, array in _arrays(self.frame):
            array[:] = saved[f"frame.{name}"]
        self._gather()
        return self.frame

    def close(self) -> None:
        self._release()

    def _open(self) -> list[_Worker]:
        if not self._workers:
            raise ValueError("these games are closed: make the env anew")
        return self._workers

    def _heard(self) -> dict[_Worker, Any]:
        """Returns the answer of every process; a _Failed for those that failed."""
        heard: dict[_Worker, Any] = {}
        for worker in self._workers:
            try:
                heard[worker] = worker.answer()
            except _Failed as error:
                heard[worker] = error
        return heard

    def _mend(self, failed: dict[_Worker, str]) -> None:
        """Replaces failed processes and gathers the frame; the last observations of lost games become their final
        ones."""
        for worker, why in failed.items():
            self.frame.final_obs[worker.part] = self.frame.obs[worker.part]
            if self.frame.state is not None and self.frame.final_state is not None:
                self.frame.final_state[worker.part] = self.frame.state[worker.part]
            self._replace(worker, why)
        self._gather()

    def _replace(self, worker: _Worker, why: str) -> None:
        """Starts the games of a failed process in a new one, with retries."""
        part, begun = worker.part, False
        while not begun:
            worker.failures += 1
            if worker.failures >= TRIES:
                raise ValueError(f"games failed {TRIES} times without one whole step between, the last time so:\n{why}")
            self.restarts += 1
            worker.stop(0.0)
            worker.start()
            self._seeds[part] = [derived_seed(seed, self.restarts, 1) for seed in self._seeds[part]]
            try:
                worker.answer(starting=True)
                worker.tell("memory", self._memory[0].memory.name)
                worker.tell("reset", np.array(self._seeds[part]))
                worker.answer()
                begun = True
            except _Failed as error:
                why = str(error)

    def _meet(self, worker: _Worker) -> GameSpec:
        """Returns the spec of the games that a process made."""
        try:
            return worker.answer(starting=True)
        except _Failed as error:
            raise ValueError(f"the games cannot be made in a process of their own: {error}") from None

    def _gather(self) -> None:
        """Copies the shared frame: a dying process may leave its arrays half-written, and they end with `close`."""
        shared, own = self._memory[0].frame, self.frame
        assert shared is not None
        over = shared.over
        for name, array in _arrays(shared):
            where = over if name in ("final_obs", "final_state") else slice(None)
            getattr(own, name)[where] = array[where]


def _arrays(frame: Frame) -> list[tuple[str, np.ndarray]]:
    return [(name, array) for name, array in vars(frame).items() if array is not None]


def _failures(heard: dict[_Worker, Any]) -> dict[_Worker, str]:
    return {worker: str(answer) for worker, answer in heard.items() if isinstance(answer, _Failed)}


@contextmanager
def _closed_on_error(env: Processes) -> Iterator[None]:
    """Closes the env if the block fails or is interrupted: answers left in the pipes would not match later messages."""
    try:
        yield
    except BaseException:
        env.close()
        raise


def _pickled(make: MakeGame) -> bytes:
    try:
        return pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fix = "use a function of a module, or functools.partial of one"
        raise ValueError(f"what makes a game cannot be sent to another process ({error}): {fix}") from error


class Hosted(VectorEnv):
    """B games of a package whose envs play one game at a time: in this process (`processes` 0) or in `processes`
    subprocesses.

    Raises ValueError if `processes` is negative or `games` below 1.
    """

    def __init__(self, make: MakeGame, games: int, processes: int) -> None:
        if processes < 0:
            raise ValueError(f"processes is {processes}: 0 plays in this process, more in as many others")
        self.inner = Processes(make, games, processes) if processes else Loop(make, games)
        self.games, self.seats, self.views = games, self.inner.seats, self.inner.views
        self.actions, self.state_size = self.inner.actions, self.inner.state_size

    @property
    def restarts(self) -> int:
        """How often a subprocess was replaced."""
        return self.inner.restarts if isinstance(self.inner, Processes) else 0

    def reset(self, seeds: np.ndarray) -> Frame:
        return self.inner.reset(seeds)

    def step(self, actions: np.ndarray) -> Frame:
        return self.inner.step(actions)

    def save(self) -> Arrays | None:
        return self.inner.save()

    def load(self, saved: Mapping[str, np.ndarray]) -> Frame:
        return self.inner.load(saved)

    def close(self) -> None:
        self.inner.close()
