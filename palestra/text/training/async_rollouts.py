"""Asynchronous training of language agents: episodes are played during training, with weights of bounded staleness.

With `staleness: n` an episode may start if its own step is at most n steps ahead of training: episode i, with E
episodes per step, starts once floor(i / E) <= trained + n (admission control, Fu et al., 2025, arXiv:2505.24298, eq.
3). It is played to its end with the weights it started with, so these are at most n steps older than the weights that
train on it; with in-flight updates, running answers continue with the newest weights. No episode is too old, and none
is dropped.

Step s trains on exactly the episodes that belong to it, as in synchronous training (text.py): they do not depend on
which episode finished first. A slow episode delays training; it delays sampling only once the staleness bound is
reached.

Every episode is written to disk (text/training/async_rollouts.py) before it counts as finished. A resumed run reuses
the finished ones, including those that steps after its checkpoint had trained on, and plays the others again. Repeated
steps are therefore bit-identical.

Everything runs in one process and one event loop. Learners yield to it between micro-batches; the weights that play
change only between steps. With in-flight updates they change then for running answers too
(text/policies/in_flight.py): an answer may have tokens of several versions, which are recorded for each token.
"""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow.parquet as pq

from palestra.core.failures import RunFailed
from palestra.core.files import DamagedFile, atomic_write
from palestra.core.types import Answer, Episode, Metrics
from palestra.runs import NUM_KEPT, list_checkpoints
from palestra.runs.episodes import load_episodes, to_table
from palestra.runs.loop import Callback, PhaseTimer, read_clocks, step_span
from palestra.runs.null_run import AnyRun
from palestra.text.rollouts.metrics import answers_of, member_name
from palestra.text.training.trainer import CollectedEpisodes, Stage, TextTrainer, TextUpdate

EPISODE_FILE = re.compile(r"episode-(\d+)@(\d+)\.parquet")
FIRST_NUMBER_FILE = "first"


class StoredEpisode(NamedTuple):
    """An episode, and the number of training steps taken when it began."""

    episode: Episode
    start_step: int


class EpisodeBuffer:
    """The finished episodes in `folder` by number, one file each: `episode-000123@12.parquet` is episode 123, started
    after 12 training steps, and `first` holds the smallest number that has not been dropped. Training always reads the
    files, so a resumed run trains on exactly the same bytes.

    The caller needs those from `first` on. If some of these are already dropped, the run was reset by hand to an
    earlier checkpoint: the remaining files are of later steps and are dropped too."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        names = [match for file in folder.iterdir() if (match := EPISODE_FILE.fullmatch(file.name))]
        self._began = {int(match[1]): int(match[2]) for match in names}
        mark = folder / FIRST_NUMBER_FILE
        if mark.exists() and _number(mark) > first:
            self.drop(max(self._began, default=-1) + 1)
            mark.unlink()

    def __contains__(self, number: int) -> bool:
        return number in self._began

    async def put(self, number: int, began: int, episode: Episode) -> None:
        """Writes an episode that began after `began` training steps, on a thread; returns once it is on disk."""
        await asyncio.to_thread(self._write, number, began, episode)
        self._began[number] = began

    def get(self, number: int) -> StoredEpisode:
        """Returns the episode of that number. Raises KeyError if it is not stored, and `DamagedFile` if its file cannot
        be read."""
        began = self._began[number]
        path = self._path(number, began)
        try:
            return StoredEpisode(load_episodes(path)[0], began)
        except (ValueError, IndexError) as error:
            raise DamagedFile(
                f"{path} is damaged ({error}): remove it, and resume the run, which plays that episode again"
            ) from error

    def drop(self, before: int) -> None:
        """Removes the episodes with numbers less than `before`."""
        atomic_write(self.folder / FIRST_NUMBER_FILE, str(before).encode())
        for number in [number for number in self._began if number < before]:
            self._path(number, self._began.pop(number)).unlink()

    def drop_failed(self, first: int) -> None:
        """Removes the episodes with numbers of at least `first` that failed, in all branches or in some."""
        for number in [number for number in self._began if number >= first]:
            if self.get(number).episode.failed_share:
                self._path(number, self._began.pop(number)).unlink()

    def close(self) -> None:
        """Removes the folder and its contents."""
        self._began.clear()
        shutil.rmtree(self.folder)

    def _write(self, number: int, began: int, episode: Episode) -> None:
        data = io.BytesIO()
        pq.write_table(to_table(began, [episode], first=number), data, write_page_checksum=True)
        atomic_write(self._path(number, began), data.getvalue())

    def _path(self, number: int, began: int) -> Path:
        return self.folder / f"episode-{number:06d}@{began}.parquet"


def _number(mark: Path) -> int:
    text = mark.read_text(errors="replace")
    if not text.isdecimal():
        raise DamagedFile(
            f"{mark} holds {text[:20]!r}, not a number: remove {mark.parent}; its episodes are then played again"
        )
    return int(text)


BUFFER_FOLDER = "buffer"  # folder of finished episodes in a run's folder
VERSIONS_KEY = "versions"  # key in `algorithm_state`: by policy, its version after each number of trained steps


class Updatable(Protocol):
    """A policy that plays with the weights at its last update."""

    def update(self) -> None:
        """Switches to the current weights, also for running answers."""
        ...


@dataclass
class AsyncTextTrainer(TextTrainer):
    """A `TextTrainer` whose episodes are played during training, up to `staleness` steps ahead. `in_flight` are the
    policies, by name, whose running answers take the new weights after each step."""

    staleness: int = 1
    in_flight: Mapping[str, Updatable] = field(default_factory=dict)

    rollouts: AsyncRollouts = field(init=False, repr=False)  # set while the trainer is open

    @contextmanager
    def open(self, run: AnyRun, callback: Callback) -> Iterator[None]:
        """As for `TextTrainer`, with the buffer of finished episodes. A run that is stopped finishes and stores every
        episode that has started; an error cancels them."""
        with super().open(run, callback):
            buffer = EpisodeBuffer(run.path / BUFFER_FOLDER, self._first_number(run.next_step))
            self.rollouts = AsyncRollouts(self, buffer)
            try:
                yield
                self.run_async(self.rollouts.drain())
            finally:
                self.run_async(self.rollouts.cancel())
            if run.next_step == self.steps:
                buffer.close()
            else:
                self._drop_trained()

    def collect(self, step: int) -> CollectedEpisodes:
        """Starts the episodes that may start, then waits for the episodes of `step`."""
        if self.run.next_step == step:
            self._drop_trained()
        position = self.enter_step(step)
        self._update_in_flight()
        self._note_versions(step)
        self.run_async(self.rollouts.start_episodes(step))
        timer = PhaseTimer()
        start = read_clocks()
        finished = self.run_async(self.rollouts.collect(position.episode_numbers))
        timer.add_since("wait", start)
        episodes = [each.episode for each in finished]
        stale = {name: staleness_metrics(finished, name, step) for name in self.policy_names}
        for name in self.in_flight:
            stale[name] |= token_staleness_metrics(episodes, name, self._versions(name))
        return CollectedEpisodes(position, episodes, timer, stale)

    def update(self, step: int, collected: CollectedEpisodes) -> TextUpdate:
        """As for `TextTrainer`. Failed episodes of a run that ends are dropped, so that a resume plays them again."""
        try:
            update = super().update(step, collected)
        except RunFailed:
            self.rollouts.buffer.drop_failed(collected.position.first_episode)
            raise
        self._update_in_flight()
        return update

    def _update_in_flight(self) -> None:
        for policy in self.in_flight.values():
            policy.update()

    def _note_versions(self, step: int) -> None:
        """Records the policies' versions after `step` training steps, and removes versions that no episode of this or a
        later step can have."""
        for name in self.in_flight:
            known = self.algorithm_state.setdefault(VERSIONS_KEY, {}).setdefault(name, {})
            known[str(step)] = self.learners[name].version
            for old in [key for key in known if not step - self.staleness <= int(key) <= step]:
                del known[old]

    def _versions(self, name: str) -> list[int]:
        """Returns the recorded versions of policy `name`, the newest last."""
        known = self.algorithm_state[VERSIONS_KEY][name]
        return [known[key] for key in sorted(known, key=int)]

    def _drop_trained(self) -> None:
        """Drops the stored episodes that no checkpoint needs."""
        self.rollouts.buffer.drop(self._first_number(oldest_resume(self.run.path)))

    def _first_number(self, step: int) -> int:
        """Number of the first episode of `step`; after the last step, the number of episodes in the run."""
        if step < self.steps:
            return self.position_of(step).first_episode
        return self.position_of(step - 1).episode_numbers.stop


class AsyncRollouts:
    """Plays the episodes that may begin, stores finished ones in `buffer`, and returns them by number."""

    def __init__(self, trainer: AsyncTextTrainer, buffer: EpisodeBuffer) -> None:
        self.trainer = trainer
        self.buffer = buffer
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def start_episodes(self, step: int) -> None:
        """Starts the episodes that may begin once `step` steps are trained, within the current stage. On return all
        of them have started, with the current weights."""
        position = self.trainer.position_of(step)
        steps = min(self.trainer.staleness + 1, position.stage.steps - position.stage_step)
        for ahead in range(steps):
            first = position.first_episode + ahead * position.stage.episodes
            with step_span(step + ahead):  # the trace of the step that will train on them
                for number in range(first, first + position.stage.episodes):
                    if number not in self.tasks and number not in self.buffer:
                        self.tasks[number] = asyncio.create_task(self._play(number, step, position.stage))
        await asyncio.sleep(0)

    async def collect(self, numbers: Sequence[int]) -> list[StoredEpisode]:
        """Waits for the episodes with these numbers and returns them in this order."""
        for done, number in enumerate(numbers):
            self.trainer.callback.on_progress("playing", done, len(numbers))
            if number in self.tasks:
                await self.tasks[number]
                del self.tasks[number]
        return await asyncio.to_thread(lambda: [self.buffer.get(number) for number in numbers])

    async def drain(self) -> None:
        """Waits for all episodes that have started."""
        await asyncio.gather(*self.tasks.values())

    async def cancel(self) -> None:
        """Cancels all episodes that have started and are not finished."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _play(self, number: int, began: int, stage: Stage) -> None:
        trainer = self.trainer
        on_episode = trainer.callback.on_episode
        state = trainer.algorithm_state
        (episode,) = await stage.source.play([number], stage.algorithm.branching, state, on_episode)
        await self.buffer.put(number, began, episode)


def staleness_metrics(finished: Sequence[StoredEpisode], policy: str, step: int) -> Metrics:
    """Returns the mean and maximum age, in steps, of the weights of `policy` that played the episodes of `step`. Counts
    the episodes that `policy` played in and that did not fail."""
    own = [
        step - began
        for episode, began in finished
        if episode.error is None and policy in map(member_name, episode.seats.values())
    ]
    return {"staleness": sum(own) / len(own) if own else 0.0, "staleness_max": float(max(own, default=0))}


def oldest_resume(path: Path) -> int:
    """Returns the earliest step that the run may resume from: the step after the older of its two newest checkpoints,
    since the newest may be damaged; 0 if it has fewer checkpoints."""
    newest = list_checkpoints(path)[-NUM_KEPT:]
    return newest[0].step + 1 if len(newest) == NUM_KEPT else 0


def answer_versions(answer: Answer) -> np.ndarray:
    """Returns the version of the policy that sampled each token of an answer [T] int32; -1 if its name has none."""
    if len(answer.versions):
        return answer.versions
    _, _, version = answer.policy.partition("@")
    return np.full(len(answer.token_ids), int(version) if version.isdecimal() else -1, np.int32)


def token_staleness_metrics(episodes: Sequence[Episode], policy: str, step_versions: Sequence[int]) -> Metrics:
    """Returns how many training steps the weights that sampled each token of `policy` are behind the newest ones (mean
    and maximum over tokens), and the share of answers with tokens of more than one version.

    `step_versions` are the policy's versions after consecutive training steps, the newest last. Answers of failed
    episodes do not count.
    """
    valid = [episode for episode in episodes if episode.error is None]
    answers = [answer for answer in answers_of(valid, policy) if len(answer.token_ids)]
    versions = [answer_versions(answer) for answer in answers]
    behind = len(step_versions) - np.searchsorted(step_versions, np.concatenate([*versions, []]), side="right")
    mixed = [len(np.unique(own)) > 1 for own in versions]
    return {
        "token_staleness": float(behind.mean()) if len(behind) else 0.0,
        "token_staleness_max": float(behind.max(initial=0)),
        "mixed_version_fraction": float(np.mean(mixed)) if mixed else 0.0,
    }
