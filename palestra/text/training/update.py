"""Updates of learners on the episodes of a step: credit, passes with gradients, optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palestra.core.sample_weights import WeightedMeans, batch_denominator, trained_weight
from palestra.core.tracing import span
from palestra.core.types import AlgorithmState, Episode, Metrics, Sample
from palestra.runs.loop import PhaseTimer, read_clocks
from palestra.text.learners.base import Learner

if TYPE_CHECKING:  # they load torch
    from palestra.engine.training.train_pass import TrainPass
    from palestra.text.algorithms.base import TextAlgorithm


@dataclass
class LearnerUpdate:
    """The update of one learner: its batches, of which each takes one optimizer step, and what was measured.

    `progress` is the elapsed share of the stage, for learning-rate schedules; `state` is what the algorithm keeps for
    the policy between steps.
    """

    algorithm: TextAlgorithm
    learner: Learner
    progress: float
    state: AlgorithmState = field(default_factory=dict)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    batches: list[list[Sample]] = field(default_factory=list)
    credit: Metrics = field(default_factory=dict)
    means: WeightedMeans = field(default_factory=WeightedMeans)

    async def prepare(self, episodes: Sequence[Episode]) -> None:
        """Builds the learner's own samples, with credit, and splits them into batches."""
        start = read_clocks()
        algorithm, learner = self.algorithm, self.learner
        scores = await algorithm.token_scores(episodes, learner)
        given: dict[str, Any] = {"scores": scores} if scores else {}  # an algorithm without scores need not take them
        samples, credit = algorithm.build_samples(episodes, learner.name, self.state, **given)
        samples, more = await algorithm.finalize_samples(samples, learner, self.state)
        self.batches = learner.batches(samples)
        self.credit = {"samples": float(len(samples)), "updates": float(len(self.batches)), **credit, **more}
        self.timer.add_since("train", start)

    def passes(self, number: int) -> list[TrainPass] | None:
        """Returns the passes of a batch; None if the learner makes them itself."""
        return self.learner.passes(self.batches[number], self.algorithm.loss, **self.algorithm.loss_options)

    async def step(self, number: int, passes: Sequence[TrainPass] | None) -> None:
        """Takes the optimizer step of a batch after its passes; makes them first if they are None."""
        start = read_clocks()
        batch, algorithm, learner = self.batches[number], self.algorithm, self.learner
        if passes is None:
            metrics = await learner.forward_backward(batch, algorithm.loss, **algorithm.loss_options)
        else:
            metrics = learner.metrics_of(passes)
        loss = {name: metrics.pop(name) for name in ("loss",) if name in metrics}
        self.means.add(loss, batch_denominator(batch))
        self.means.add(metrics, trained_weight(batch))
        self.means.add(await learner.optim_step(self.progress))
        self.timer.add_since("train", start)

    def metrics(self) -> Metrics:
        """Returns the metrics: those of the loss are means over the tokens of all batches, by their weights, those of
        the optimizer means over its steps."""
        return {**self.credit, **self.means.means()}


async def update_learner(
    algorithm: TextAlgorithm,
    learner: Learner,
    episodes: Sequence[Episode],
    progress: float,
    state: AlgorithmState | None = None,
) -> Metrics:
    """Updates one learner on its own samples (see `LearnerUpdate`). Returns metrics."""
    update = LearnerUpdate(algorithm, learner, progress, {} if state is None else state)
    (metrics,) = await run_updates([update], episodes)
    return metrics


async def run_updates(updates: Sequence[LearnerUpdate], episodes: Sequence[Episode]) -> list[Metrics]:
    """Updates learners on their own samples; returns the metrics of each. The first batches of all come first, so that
    small passes of several adapters on one base are made together."""
    with span("train", policy=", ".join(update.learner.name for update in updates)):
        for update in updates:
            await update.prepare(episodes)
        for number in range(max((len(update.batches) for update in updates), default=0)):
            due = [update for update in updates if number < len(update.batches)]
            queues = [update.passes(number) for update in due]
            if any(queues):
                await _make_passes(due, [queue or [] for queue in queues])
            for update, passes in zip(due, queues, strict=True):
                await update.step(number, passes)
    return [update.metrics() for update in updates]


async def _make_passes(updates: Sequence[LearnerUpdate], queues: Sequence[Sequence[TrainPass]]) -> None:
    """Makes the passes of each update. Of the time of joint passes, each update gets its share of the tokens."""
    from palestra.engine.training.train_pass import join_passes

    owners = {id(each): update for update, queue in zip(updates, queues, strict=True) for each in queue}
    for together in join_passes(queues):
        start = read_clocks()
        await owners[id(together[0])].learner.make_passes(together)
        total = sum(each.num_tokens for each in together)
        for each in together:
            owners[id(each)].timer.add_since("train", start, each.num_tokens / total)
