"""Asynchronous training loop: episodes are played during training, with weights of bounded staleness.

With `staleness: n` an episode may begin if its own step is at most n steps ahead of training: episode i, with E
episodes per step, begins once floor(i / E) <= trained + n (admission control, Fu et al., 2025, arXiv:2505.24298, eq.
3). It is played to its end with the weights it began with, so the weights that it trains are at most n steps newer. No
episode is ever too old, and none is dropped.

Step s trains exactly the episodes that belong to it, as in the synchronous loop (train.py): what a step trains on does
not depend on which episode finished first. A slow episode delays training, and delays sampling only at the bound.

Every episode is written to disk (rollouts/buffer.py) before it counts as finished. A resumed run reuses the finished
ones, including those that steps after its checkpoint had trained on, and plays the others again. Repeated steps are
therefore bit-identical.

Everything runs in one process and one event loop. Learners yield to it between micro-batches; the weights that play
change only between steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from palestra.rollouts.episode_buffer import EpisodeBuffer, StoredEpisode
from palestra.rollouts.failures import RunFailed
from palestra.rollouts.metrics import member_name
from palestra.runs import NUM_KEPT, Run, list_checkpoints
from palestra.training.loop import (
    Callback,
    PhaseTimer,
    Setup,
    Stage,
    checkpoint_if_due,
    enter_step,
    read_clocks,
    run_evals,
    train_step,
)
from palestra.training.loop import train as train_in_turn
from palestra.types import Metrics

BUFFER_FOLDER = "buffer"  # folder of finished episodes in a run's folder


async def train(
    setup: Setup, run: Run, callback: Callback | None = None, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs the loop from `run.next_step` on, while episodes are played ahead.

    Returns True if all steps are done, False if `should_stop` returned True: the run then has a checkpoint of its last
    step, and every episode that had begun is finished and stored. Raises RunFailed if too many episodes of a step or an
    evaluation failed.
    """
    callback = callback or Callback()
    if run.next_step == 0:
        await run_evals(setup, run, -1, callback)
    first = run.next_step
    ahead = AsyncRollouts(setup, EpisodeBuffer(run.path / BUFFER_FOLDER, _first_number(setup, first)), callback)
    try:
        for step in range(first, setup.steps):
            moment = enter_step(setup, step, resumed=step == first)
            await ahead.start_episodes(step)
            clock, start = PhaseTimer(), read_clocks()
            finished = await ahead.collect(moment.episode_numbers)
            clock.add_since("wait", start)
            episodes = [each.episode for each in finished]
            old = {name: staleness_metrics(finished, name, step) for name in setup.policy_names}
            with ahead.dropping_failures(moment.first_episode):
                callback.on_step(step, await train_step(setup, run, step, episodes, clock, old))
            await run_evals(setup, run, step, callback)
            run.sync()
            goes_on = checkpoint_if_due(setup, run, step, should_stop)
            if run.next_step == step + 1:
                ahead.buffer.drop(_first_number(setup, _oldest_resume(run.path)))
            if not goes_on:
                await ahead.drain()
                return False
    finally:
        await ahead.cancel()
    ahead.buffer.close()
    return True


class AsyncRollouts:
    """Plays the episodes that may begin, stores finished ones in `buffer`, and returns them by number."""

    def __init__(self, setup: Setup, buffer: EpisodeBuffer, callback: Callback) -> None:
        self.setup, self.buffer, self.callback = setup, buffer, callback
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def start_episodes(self, step: int) -> None:
        """Starts the episodes that may begin once `step` steps are trained, within the current stage. On return all
        of them have started, with the current weights."""
        moment = self.setup.position_of(step)
        steps = min(self.setup.staleness + 1, moment.stage.steps - moment.stage_step)
        for number in range(moment.first_episode, moment.first_episode + steps * moment.stage.episodes):
            if number not in self.tasks and number not in self.buffer:
                self.tasks[number] = asyncio.create_task(self._play(number, step, moment.stage))
        await asyncio.sleep(0)

    async def collect(self, numbers: Sequence[int]) -> list[StoredEpisode]:
        """Waits for the episodes with these numbers and returns them in this order."""
        for number in numbers:
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

    @contextmanager
    def dropping_failures(self, first: int) -> Iterator[None]:
        """Context in which a RunFailed removes failed episodes, from number `first` on, from the buffer, so
        that a resumed run plays them again."""
        try:
            yield
        except RunFailed:
            self.buffer.drop_failed(first)
            raise

    async def _play(self, number: int, began: int, stage: Stage) -> None:
        branching, told = stage.algorithm.branching, self.callback.on_episode
        (episode,) = await stage.source.play([number], branching, self.setup.algorithm_state, told)
        await self.buffer.put(number, began, episode)


def staleness_metrics(finished: Sequence[StoredEpisode], policy: str, step: int) -> Metrics:
    """Returns the mean and maximum number of steps by which the weights of `policy` that played are older than those
    that `step` trains. Counts the episodes that `policy` played in and that did not fail."""
    own = [
        step - began
        for episode, began in finished
        if episode.error is None and policy in map(member_name, episode.seats.values())
    ]
    return {"staleness": sum(own) / len(own) if own else 0.0, "staleness_max": float(max(own, default=0))}


def run_training(
    setup: Setup, run: Run, callback: Callback | None = None, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Runs `train` or, if the setup has no staleness, the synchronous loop, for callers without an event loop."""
    with setup.worker_context:
        return asyncio.run((train if setup.staleness else train_in_turn)(setup, run, callback, should_stop))


def _first_number(setup: Setup, step: int) -> int:
    """Number of the first episode of `step`; after the last step, the number of episodes in the run."""
    return (
        setup.position_of(step).first_episode
        if step < setup.steps
        else setup.position_of(step - 1).episode_numbers.stop
    )


def _oldest_resume(path: Path) -> int:
    """The earliest step that the run may resume from: the older of its newest checkpoints, in case the newest is
    damaged."""
    newest = list_checkpoints(path)[-NUM_KEPT:]
    return newest[0].step + 1 if len(newest) == NUM_KEPT else 0
