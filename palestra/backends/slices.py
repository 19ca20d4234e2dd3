"""A step's episodes, cut into slices that workers play: the driver's side of `oracles/play.py`.

A slice is a task. It names its episodes by their numbers, from which all follows that is drawn in them, and the members
that play: every learner as it stands, published under its version (`planner@12`) when a slice first needs it, and let
go of when the learner has gone on and the last slice with it is done. So a run of any length keeps a handful.
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

EPISODES = "episodes.pickle"  # what a worker makes of a slice: episodes as they are, shared answers too


@dataclass(frozen=True)
class Cast:
    """Who plays: the members, and how each learner speaks now, by its name."""

    members: tuple[str, ...]
    settings: Mapping[str, Any]


class Troupe:
    """The learners as members that workers find, and the desk where slices are handed in."""

    def __init__(self, learners: Mapping[str, LanguageLearner], desk: Desk) -> None:
        self.learners, self.desk = learners, desk
        self.numbers = 0  # of slices so far
        self.wall = self.cpu = 0.0  # seconds that workers played, and computed, all together
        self.shared: dict[str, Path] = {}
        self._needed: Counter[str] = Counter()  # how often a member is held
        self._scratch = Path(tempfile.mkdtemp(prefix="palestra-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def now(self) -> Cast:
        """The learners as they stand: published, where they were not yet."""
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
        """Keeps its members until they are released, whatever the learners are then."""
        self._needed.update(cast.members)

    def release(self, cast: Cast) -> None:
        self._needed -= Counter(cast.members)

    async def play(self, cast: Cast, order: Mapping[str, Any]) -> list[Episode]:
        """The episodes of a slice, by a cast that is held."""
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
        """Forgets the members that no learner is any more and nobody holds."""
        now = set(self._names().values())
        for member in [member for member in self.shared if member not in now and member not in self._needed]:
            self.desk.forget(member)
            shutil.rmtree(self.shared.pop(member))


@dataclass
class Sliced:
    """A source whose `games`, those of stage `stage`, workers play, `size` in a slice. What is asked for at one moment
    is cut together, be it a whole step or episode by episode."""

    games: Games
    troupe: Troupe
    stage: int
    size: int
    _asked: dict[str, Batch] = field(default_factory=dict)  # at this moment
    _played: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(
        self, numbers: Sequence[int], branching: Branching, memory: Memory, told: Told = None
    ) -> list[Episode]:
        """The episodes of these numbers, in their order, by the learners as they stand now."""
        cast = self.troupe.now()
        order = {"stage": self.stage, "branching": asdict(branching), "measured": dict(memory.get(MEASURED, {}))}
        key = repr((cast.members, order))
        if key not in self._asked:
            self._asked[key] = Batch(self.troupe, cast, order, self.size)
            asyncio.get_running_loop().call_soon(self._begin, key)
        return list(await asyncio.gather(*(self._asked[key].ask(number, told) for number in numbers)))

    def observe(self, episodes: Sequence[Episode], memory: Memory) -> Metrics:
        return self.games.observe(episodes, memory)

    def _begin(self, key: str) -> None:
        task = asyncio.get_running_loop().create_task(self._asked.pop(key).play())
        self._played.add(task)
        task.add_done_callback(self._played.discard)


class Batch:
    """Episodes asked for at one moment; each is told of, and given, as its slice is done."""

    def __init__(self, troupe: Troupe, cast: Cast, order: Mapping[str, Any], size: int) -> None:
        self.troupe, self.cast, self.order, self.size = troupe, cast, order, size
        self._asked: dict[int, tuple[asyncio.Future[Episode], Told]] = {}
        troupe.hold(cast)

    def ask(self, number: int, told: Told) -> asyncio.Future[Episode]:
        """The episode of that number, to be awaited."""
        future: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._asked[number] = (future, told)
        return future

    async def play(self) -> None:
        """Has all slices played; what ends one is raised to whoever asked for its episodes."""
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
            if not future.done():  # cancelled: nobody waits for it
                future.set_result(episode)


@dataclass
class SlicedExam(Exam):
    """An exam whose episodes workers play, `size` in a slice."""

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
    """`numbers` in their order, `size` at a time."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def size_of(episodes: int, slices: int) -> int:
    """How many of so many episodes make one of so many slices."""
    return math.ceil(episodes / slices)


def _taken(folder: Path) -> list[Episode]:
    episodes: list[Episode] = pickle.loads((folder / EPISODES).read_bytes())
    shutil.rmtree(folder)
    return episodes
