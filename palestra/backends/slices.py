"""Episodes as tasks: a step's episodes are divided into slices, which workers play. `oracles/play.py` is the worker's
side.

A slice is one task. It lists its episodes by number, which determines everything drawn in them, and the members that
play: each learner's current weights, published under its version (`planner@12`) when a slice first needs them, and
removed when the learner has newer weights and the last slice that uses them is done. A run of any length therefore
stores only a few.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.backends.desk import Desk
from palestra.learners.lm import LanguageLearner
from palestra.populations.tasks import Task
from palestra.roll import roll
from palestra.rollouts.play import Branching
from palestra.rollouts.sources import MEASURED, Games, Told
from palestra.train import Exam
from palestra.types import Episode, Memory, Metrics

EPISODES = "episodes.pickle"  # a slice's output; pickle keeps answers that siblings share as one object


@dataclass(frozen=True)
class Cast:
    """The published learners of one moment: `members` (`name@version`), and the config of each learner, by name."""

    members: tuple[str, ...]
    settings: Mapping[str, Any]


class Troupe:
    """Publishes learners as members and submits slices of episodes to the backend."""

    def __init__(self, learners: Mapping[str, LanguageLearner], desk: Desk) -> None:
        self.learners, self.desk = learners, desk
        self.numbers = 0  # slices so far
        self.wall = self.cpu = 0.0  # seconds, summed over workers: wall-clock and CPU time
        self.shared: dict[str, Path] = {}
        self._needed: Counter[str] = Counter()  # number of `hold`s of each member
        self._scratch = Path(tempfile.mkdtemp(prefix="palestra-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def now(self) -> Cast:
        """Returns the learners' current versions; publishes those that are not published yet."""
        names = self._names()
        for name, member in names.items():
            if member not in self.shared:
                folder = self._scratch / member
                self.learners[name].publish(folder)
                self.desk.share(member, folder)
                self.shared[member] = folder
        self._let_go()
        settings = {name: learner.config.model_dump(mode="json") for name, learner in self.learners.items()}
        return Cast(tuple(names.values()), settings)

    def hold(self, cast: Cast) -> None:
        """Keeps the members' files until `release` is called, even if the learners move on."""
        self._needed.update(cast.members)

    def release(self, cast: Cast) -> None:
        """Undoes one `hold`."""
        self._needed -= Counter(cast.members)

    async def play(self, cast: Cast, order: Mapping[str, Any]) -> list[Episode]:
        """Runs one slice and returns its episodes. `cast` must be held."""
        self.numbers += 1
        name = f"slice-{self.numbers}"
        task = Task(name, "play", {**order, "settings": cast.settings}, cast.members, makes=name)
        done = await self.desk.do(task)
        roll.add(done.result.get("roll", []))
        self.wall, self.cpu = self.wall + done.seconds, self.cpu + done.result["cpu_s"]
        assert done.folder is not None
        return await asyncio.to_thread(_taken, done.folder)

    def _names(self) -> dict[str, str]:
        return {name: f"{name}@{learner.version}" for name, learner in self.learners.items()}

    def _let_go(self) -> None:
        """Removes members that are neither a learner's current version nor held."""
        now = set(self._names().values())
        for member in [member for member in self.shared if member not in now and member not in self._needed]:
            self.desk.forget(member)
            shutil.rmtree(self.shared.pop(member))


@dataclass
class Sliced:
    """Source that has workers play the episodes of `games`, which belong to stage number `stage`, `size` per slice.

    Requests made in the same iteration of the event loop are divided together, whether for a whole step or for one
    episode each.
    """

    games: Games
    troupe: Troupe
    stage: int
    size: int
    _asked: dict[str, Batch] = field(default_factory=dict)  # in this iteration of the event loop
    _played: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(
        self, numbers: Sequence[int], branching: Branching, memory: Memory, told: Told = None
    ) -> list[Episode]:
        """Returns the episodes with these numbers, in order, played by the learners' current weights."""
        cast = self.troupe.now()
        order = {"stage": self.stage, "branching": asdict(branching), "measured": dict(memory.get(MEASURED, {}))}
        key = repr((cast.members, order))
        if key not in self._asked:
            self._asked[key] = Batch(self.troupe, cast, order, self.size)
            asyncio.get_running_loop().call_soon(self._begin, key)
        return list(await asyncio.gather(*(self._asked[key].ask(number, told) for number in numbers)))

    def observe(self, episodes: Sequence[Episode], memory: Memory) -> Metrics:
        """Passes the episodes on to the wrapped source."""
        return self.games.observe(episodes, memory)

    def _begin(self, key: str) -> None:
        task = asyncio.get_running_loop().create_task(self._asked.pop(key).play())
        self._played.add(task)
        task.add_done_callback(self._played.discard)


class Batch:
    """Episodes requested together. Each is reported to its callback, and its future is set, when its slice is done."""

    def __init__(self, troupe: Troupe, cast: Cast, order: Mapping[str, Any], size: int) -> None:
        self.troupe, self.cast, self.order, self.size = troupe, cast, order, size
        self._asked: dict[int, tuple[asyncio.Future[Episode], Told]] = {}
        troupe.hold(cast)

    def ask(self, number: int, told: Told) -> asyncio.Future[Episode]:
        """Adds an episode by number and returns its future."""
        future: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._asked[number] = (future, told)
        return future

    async def play(self) -> None:
        """Plays all slices. An error is raised to the coroutines that wait for that slice's episodes."""
        try:
            await asyncio.gather(*(self._slice(numbers) for numbers in cut(list(self._asked), self.size)))
        finally:
            self.troupe.release(self.cast)

    async def _slice(self, numbers: Sequence[int]) -> None:
        waiting = [self._asked[number] for number in numbers]
        try:
            episodes = await self.troupe.play(self.cast, {**self.order, "numbers": list(numbers)})
        except Exception as error:
            for future, _ in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for (future, told), episode in zip(waiting, episodes, strict=True):
            if told:
                told(episode)
            if not future.done():  # cancelled
                future.set_result(episode)


@dataclass
class SlicedExam(Exam):
    """Evaluation whose episodes workers play, `size` per slice."""

    troupe: Troupe = field(kw_only=True)
    size: int = field(kw_only=True)

    async def play(self, seed: int) -> list[Episode]:
        cast = self.troupe.now()
        parts = cut(range(self.episodes), self.size)
        orders = [{"exam": self.name, "seed": seed, "numbers": list(part)} for part in parts]
        self.troupe.hold(cast)
        try:
            played = await asyncio.gather(*(self.troupe.play(cast, order) for order in orders))
        finally:
            self.troupe.release(cast)
        return [episode for part in played for episode in part]


def cut(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Splits `numbers` into consecutive parts of `size`; the last may be shorter."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def size_of(episodes: int, slices: int) -> int:
    """Episodes per slice, rounded up."""
    return math.ceil(episodes / slices)


def _taken(folder: Path) -> list[Episode]:
    episodes: list[Episode] = pickle.loads((folder / EPISODES).read_bytes())
    shutil.rmtree(folder)
    return episodes
