"""The loop that does not wait: episodes are played ahead while training goes on, on weights of bounded age.

With `staleness: n` an episode may begin once its own step is at most n steps ahead of what is trained: number i, of E
episodes a step, once floor(i / E) <= trained + n (admission control, Fu et al., 2025, arXiv:2505.24298, eq. 3). It
plays to its end with the weights of that moment, so that the weights it trains are at most n steps younger. Nothing is
ever too old, and nothing is dropped.

Step s trains exactly the episodes that belong to it, as in the loop that waits (train.py): what a step trains on never
hangs on which episode was faster. One that takes long holds up training, and sampling only at the bound.

Every episode is on the disk (rollouts/buffer.py) before it counts as finished. A run that resumes takes the finished
ones as they are, those too that steps beyond its checkpoint had trained on, and plays the others anew. Steps that are
trained again are thus the same, bit for bit.

All is one process and one event loop. Learners let it go on between their micro-batches; weights that are played move
only between steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from palestra.rollouts.buffer import Buffer, Finished
from palestra.rollouts.failures import RunFailed
from palestra.rollouts.figures import member
from palestra.runs import KEPT, Run, checkpoints
from palestra.train import Clock, Setup, Stage, Watcher, enter, examine, keep, now, study
from palestra.train import train as train_in_turn
from palestra.types import Metrics

BUFFER = "buffer"  # in a run's folder


async def train(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Credit, learn and keep from `run.next_step` on, while episodes are played ahead. True when all steps are done,
    False when `stop` said so: the run then has a checkpoint of its last step, and every episode that had begun is
    finished and kept."""
    watcher = watcher or Watcher()
    if run.next_step == 0:
        await examine(setup, run, -1, watcher)
    first = run.next_step
    ahead = Ahead(setup, Buffer(run.path / BUFFER, _first_number(setup, first)), watcher)
    try:
        for step in range(first, setup.steps):
            moment = enter(setup, step, resumed=step == first)
            await ahead.admit(step)
            clock, start = Clock(), now()
            finished = await ahead.take(moment.numbers)
            clock.since("wait", start)
            episodes = [each.episode for each in finished]
            old = {name: ages(finished, name, step) for name in setup.names}
            with ahead.forgetting_failures(moment.first):
                watcher.step(step, await study(setup, run, step, episodes, clock, old))
            await examine(setup, run, step, watcher)
            run.sync()
            goes_on = keep(setup, run, step, stop)
            if run.next_step == step + 1:
                ahead.buffer.drop(_first_number(setup, _oldest_resume(run.path)))
            if not goes_on:
                await ahead.drain()
                return False
    finally:
        await ahead.abandon()
    ahead.buffer.close()
    return True


class Ahead:
    """Plays the episodes that may begin, keeps those that end in `buffer`, and hands them over by number."""

    def __init__(self, setup: Setup, buffer: Buffer, watcher: Watcher) -> None:
        self.setup, self.buffer, self.watcher = setup, buffer, watcher
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def admit(self, step: int) -> None:
        """Begins the episodes that may begin once `step` steps are trained, none of a later stage; on return all have
        begun, with the weights of now."""
        moment = self.setup.at(step)
        steps = min(self.setup.staleness + 1, moment.stage.steps - moment.done)
        for number in range(moment.first, moment.first + steps * moment.stage.episodes):
            if number not in self.tasks and number not in self.buffer:
                self.tasks[number] = asyncio.create_task(self._play(number, step, moment.stage))
        await asyncio.sleep(0)

    async def take(self, numbers: Sequence[int]) -> list[Finished]:
        """The episodes of these numbers, in their order, once all have ended."""
        for number in numbers:
            if number in self.tasks:
                await self.tasks[number]
                del self.tasks[number]
        return await asyncio.to_thread(lambda: [self.buffer.get(number) for number in numbers])

    async def drain(self) -> None:
        """Plays what has begun to its end."""
        await asyncio.gather(*self.tasks.values())

    async def abandon(self) -> None:
        """Ends what has begun and is not finished."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    @contextmanager
    def forgetting_failures(self, first: int) -> Iterator[None]:
        """Within, a RunFailed takes the failed episodes from number `first` on out of the buffer: a run that resumes
        plays them anew."""
        try:
            yield
        except RunFailed:
            self.buffer.drop_failed(first)
            raise

    async def _play(self, number: int, began: int, stage: Stage) -> None:
        branching, told = stage.algorithm.branching, self.watcher.played
        (episode,) = await stage.source.play([number], branching, self.setup.memory, told)
        await self.buffer.put(number, began, episode)


def ages(finished: Sequence[Finished], policy: str, step: int) -> Metrics:
    """How many steps the weights of `policy` that played are behind those that `step` trains: mean and most over the
    episodes that it played in and that did not fail."""
    own = [
        step - began
        for episode, began in finished
        if episode.error is None and policy in map(member, episode.seats.values())
    ]
    return {"staleness": sum(own) / len(own) if own else 0.0, "staleness_max": float(max(own, default=0))}


def run_training(
    setup: Setup, run: Run, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """`train`, or where the setup allows no staleness the loop that waits, for callers without an event loop."""
    with setup.place:
        return asyncio.run((train if setup.staleness else train_in_turn)(setup, run, watcher, stop))


def _first_number(setup: Setup, step: int) -> int:
    """The number of the first episode of `step`; behind the last step, the one after all."""
    return setup.at(step).first if step < setup.steps else setup.at(step - 1).numbers.stop


def _oldest_resume(path: Path) -> int:
    """The least step that the run may go on with: after the older of its newest checkpoints, should one be damaged."""
    newest = checkpoints(path)[-KEPT:]
    return newest[0].step + 1 if len(newest) == KEPT else 0
