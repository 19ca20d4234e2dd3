"""Episodes as tasks: a step's episodes are divided into slices, which workers play.
`text/build/rollout_worker.py` is the worker's side.

A slice is one task. It lists its episodes by number, which determines everything drawn in them, and the members that
play: each learner's current weights, published under its version (`planner@12`) when a slice first needs them, and
removed when the learner has newer weights and the last slice that uses them is done. A run of any length therefore
stores only a few.
"""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.core.event_loop import settle
from palestra.core.tracing import TraceContext, continue_trace, trace_context
from palestra.core.types import AlgorithmState, Episode, Metrics
from palestra.parallel.async_backend import AsyncBackend
from palestra.parallel.tasks import Result, Task
from palestra.parallel.worker_stats import worker_stats
from palestra.text.learners.lm import LanguageLearner
from palestra.text.rollouts.sources import STATE_KEYS, EnvSource, EpisodeCallback
from palestra.text.rollouts.tree_rollout import Branching
from palestra.text.training.trainer import TextEval

EPISODES_FILE = "episodes.pickle"  # a slice's output; pickle keeps answers that siblings share as one object


@dataclass(frozen=True, kw_only=True)
class EpisodesResult(Result):
    """Result of a slice, whose episodes are in its output folder: their number, CPU time of the worker's process in
    seconds, and the counters of further workers that it used (`parallel/worker_stats.py`)."""

    episodes: int
    cpu_s: float
    worker_stats: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class EpisodesTask(Task):
    """Plays the episodes with these numbers. `settings` are the configs of the learners, by name."""

    kind = "play"
    result_type = EpisodesResult
    is_output_member = False

    numbers: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutTask(EpisodesTask):
    """Plays episodes of stage number `stage`. `source_state` is the state by which its source draws instances."""

    stage: int
    branching: Branching
    source_state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalTask(EpisodesTask):
    """Plays episodes of the evaluation called `evaluation`."""

    evaluation: str
    seed: int


@dataclass(frozen=True)
class PolicyVersions:
    """The versions of the learners that are published at one time: `members` (`name@version`), and each learner's
    config, by name."""

    members: tuple[str, ...]
    settings: Mapping[str, Any]


class EpisodeDispatcher:
    """Publishes learners as members and submits slices of episodes to the backend."""

    def __init__(self, learners: Mapping[str, LanguageLearner], backend: AsyncBackend) -> None:
        self.learners = learners
        self.backend = backend
        self.num_slices = 0  # slices so far
        self.wall_s = self.cpu_s = 0.0  # seconds, summed over workers: wall-clock and CPU time
        self.published: dict[str, Path] = {}
        self._needed: Counter[str] = Counter()  # number of `acquire`s of each member
        self._scratch = Path(tempfile.mkdtemp(prefix="palestra-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def publish_current(self) -> PolicyVersions:
        """Returns the learners' current versions; publishes those that are not published yet."""
        names = self._names()
        for name, member in names.items():
            if member not in self.published:
                folder = self._scratch / member
                self.learners[name].export(folder)
                self.backend.add_member(member, folder)
                self.published[member] = folder
        self._let_go()
        settings = {name: learner.config.model_dump(mode="json") for name, learner in self.learners.items()}
        return PolicyVersions(tuple(names.values()), settings)

    def acquire(self, versions: PolicyVersions) -> None:
        """Keeps the members' files until `release` is called, even if the learners move on."""
        self._needed.update(versions.members)

    def release(self, versions: PolicyVersions) -> None:
        """Undoes one `acquire`."""
        self._needed -= Counter(versions.members)

    async def play(self, versions: PolicyVersions, task: EpisodesTask) -> list[Episode]:
        """Runs one slice and returns its episodes; `task` is given its name, members and settings here. `versions` must
        be held."""
        self.num_slices += 1
        name = f"slice-{self.num_slices}"
        settings = versions.settings
        members = versions.members
        done = await self.backend.run_task(
            replace(task, name=name, settings=settings, members=members, output_member=name)
        )
        assert isinstance(done.result, EpisodesResult) and done.folder is not None
        worker_stats.merge(done.result.worker_stats)
        self.wall_s = self.wall_s + done.seconds
        self.cpu_s = self.cpu_s + done.result.cpu_s
        return await asyncio.to_thread(_take_episodes, done.folder)

    def _names(self) -> dict[str, str]:
        return {name: f"{name}@{learner.version}" for name, learner in self.learners.items()}

    def _let_go(self) -> None:
        """Removes members that are neither a learner's current version nor held."""
        now = set(self._names().values())
        for member in [member for member in self.published if member not in now and member not in self._needed]:
            self.backend.remove_member(member)
            shutil.rmtree(self.published.pop(member))


@dataclass
class DistributedSource:
    """Source that has workers play the episodes of `games`, which belong to stage number `stage`, `slice_size` per
    slice.

    Requests made in the same iteration of the event loop are divided together, whether for a whole step or for one
    episode each.
    """

    games: EnvSource
    dispatcher: EpisodeDispatcher
    stage: int
    slice_size: int
    _asked: dict[str, PendingEpisodes] = field(default_factory=dict)  # in this iteration of the event loop
    _played: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes with these numbers, in order, played by the learners' current weights."""
        versions = self.dispatcher.publish_current()
        source_state = copy.deepcopy({key: state[key] for key in STATE_KEYS if key in state})
        task = RolloutTask("", stage=self.stage, branching=branching, source_state=source_state)
        key = repr((versions.members, task))
        if key not in self._asked:
            self._asked[key] = PendingEpisodes(self.dispatcher, versions, task, self.slice_size)
            asyncio.get_running_loop().call_soon(self._begin, key)
        return list(await asyncio.gather(*(self._asked[key].add(number, on_episode) for number in numbers)))

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        """Passes the episodes on to the wrapped source."""
        return self.games.observe(episodes, state)

    def _begin(self, key: str) -> None:
        task = asyncio.get_running_loop().create_task(self._asked.pop(key).play())
        self._played.add(task)
        task.add_done_callback(self._played.discard)


class PendingEpisodes:
    """Episodes requested together. Each is reported to its callback, and its future is set, when its slice is done."""

    def __init__(self, dispatcher: EpisodeDispatcher, versions: PolicyVersions, task: EpisodesTask, size: int) -> None:
        self.dispatcher = dispatcher
        self.versions = versions
        self.task = task
        self.size = size
        self._asked: dict[int, tuple[asyncio.Future[Episode], EpisodeCallback]] = {}
        self._traces: dict[int, TraceContext | None] = {}
        dispatcher.acquire(versions)

    def add(self, number: int, on_episode: EpisodeCallback) -> asyncio.Future[Episode]:
        """Adds an episode by number and returns its future."""
        future: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._asked[number], self._traces[number] = (future, on_episode), trace_context()
        return future

    async def play(self) -> None:
        """Plays all slices. An error is raised to the coroutines that wait for that slice's episodes."""
        try:
            await asyncio.gather(*(self._slice(numbers) for numbers in split_into_slices(list(self._asked), self.size)))
        finally:
            self.dispatcher.release(self.versions)

    async def _slice(self, numbers: Sequence[int]) -> None:
        waiting = [self._asked[number] for number in numbers]
        try:
            with continue_trace(self._traces[numbers[0]]):  # of the first episode's step
                episodes = await self.dispatcher.play(self.versions, replace(self.task, numbers=tuple(numbers)))
        except Exception as error:
            for future, _ in waiting:
                settle(future, error)
            return
        for (future, on_episode), episode in zip(waiting, episodes, strict=True):
            if on_episode:
                on_episode(episode)
            settle(future, episode)


@dataclass(kw_only=True)
class DistributedEval(TextEval):
    """Evaluation whose episodes workers play, `slice_size` per slice."""

    dispatcher: EpisodeDispatcher
    slice_size: int

    async def play(self, seed: int, on_episode: EpisodeCallback = None) -> list[Episode]:
        """As for `TextEval`; `on_episode` is called with the episodes of a slice when it ends."""
        versions = self.dispatcher.publish_current()
        task = EvalTask("", evaluation=self.name, seed=seed)
        pending = PendingEpisodes(self.dispatcher, versions, task, self.slice_size)
        episodes = [pending.add(number, on_episode) for number in self.numbers]
        await asyncio.gather(pending.play(), *episodes)
        return [episode.result() for episode in episodes]


def split_into_slices(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Splits `numbers` into consecutive parts of `size`; the last may be shorter."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def episodes_per_slice(episodes: int, slices: int) -> int:
    """Returns the number of episodes per slice, rounded up."""
    return math.ceil(episodes / slices)


def _take_episodes(folder: Path) -> list[Episode]:
    episodes: list[Episode] = pickle.loads((folder / EPISODES_FILE).read_bytes())
    shutil.rmtree(folder)
    return episodes
