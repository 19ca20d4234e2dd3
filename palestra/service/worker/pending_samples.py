"""Scheduling of sampling requests: sampling, scoring of prompts where requested, and answering."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from palestra.engine.sampling.fair_queue import FairQueue
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.scoring import AlternativeDraws, ScoreRequest, ScoreResult, score_prompts
from palestra.service.storage.outbox import Outbox
from palestra.service.storage.store import StoredAnswer
from palestra.service.storage.tables import TableRow
from palestra.service.wire.jobs import SampleJob
from palestra.service.worker.encoding import encode_sample
from palestra.service.worker.live_models import LiveModels, LoadedBase

MAX_SCORED_TOKENS = 16384  # prompt tokens scored in one step, at most


@dataclass
class PendingSample:
    """A pending sampling request and its completions so far."""

    row: TableRow
    job: SampleJob
    completions: list[Completion] = field(default_factory=list)


class SampleScheduler:
    """Runs the sampling requests of all base models.

    `submit` accepts requests. `advance` samples a token for every row and scores the prompts of completed samples;
    prompts are scored last, so that scores do not wait in memory for samples.
    """

    def __init__(self, live_models: LiveModels, outbox: Outbox) -> None:
        self.live_models = live_models
        self.outbox = outbox
        self.questions: FairQueue[PendingSample] = FairQueue()  # samples whose prompts wait to be scored

    @property
    def busy(self) -> bool:
        """True while any request is being sampled or scored."""
        return bool(self.questions) or any(base.sampler.has_requests for base in self.live_models.bases.values())

    def advance(self) -> bool:
        """Runs one step of sampling and scoring. Returns False if there was nothing to do."""
        moved = any([base.sampler.step() for base in self.live_models.bases.values()])
        return self._score() or moved

    def release_memory(self) -> None:
        for base in self.live_models.bases.values():
            base.sampler.release_memory()

    def submit(self, row: TableRow) -> None:
        """Submits a queued request to the sampler. Raises ValueError if its base or weights are not available."""
        job = SampleJob.model_validate_json(row.body)
        base = self.live_models.base(job.base)
        ids = np.array(job.tokens, np.int32)
        adapter = self.live_models.snapshot(base, job.folder)
        request = Request(
            ids, job.num_samples, job.sampling, adapter, job.seed, top_logprobs=job.topk_sample, client=row.owner
        )
        base.sampler.submit(request, partial(self._on_sampled, PendingSample(row, job)))

    def _score(self) -> bool:
        """Scores prompts of at most `MAX_SCORED_TOKENS` tokens in total, scheduled fairly among API keys. Returns False
        if no prompt was waiting."""
        samples: list[PendingSample] = []
        tokens = 0
        while clients := self.questions.next_clients():
            size = len(self.questions.peek(clients[0]).job.tokens)
            if samples and tokens + size > MAX_SCORED_TOKENS:
                break
            samples.append(self.questions.pop(clients[0]))
            self.questions.work_counters.add_work(clients[0], size)
            tokens += size
        for base in self.live_models.bases.values():
            mine = [s for s in samples if s.job.base == base.name]
            if not mine:
                continue
            try:
                self._answer_scores(base, mine)
            except Exception:  # one of them is invalid, or together they need too much memory: retry singly
                for sample in mine:
                    self.outbox.run_guarded(sample.row, partial(self._answer_scores, base, [sample]))
        return bool(samples)

    def _answer_scores(self, base: LoadedBase, samples: list[PendingSample]) -> None:
        questions = [
            ScoreRequest(
                np.array(s.job.tokens, np.int32),
                self.live_models.snapshot(base, s.job.folder),
                s.job.topk_prompt,
                np.array(s.job.target_prompt) if s.job.target_prompt else None,
                AlternativeDraws(s.job.drawn_prompt, s.job.sampling.temperature, s.job.seed),
            )
            for s in samples
        ]
        for sample, scores in zip(samples, score_prompts(base.engine, questions), strict=True):
            self._answer_sample(sample, scores)

    def _on_sampled(self, sample: PendingSample, sampled: list[Completion] | Exception) -> None:
        if isinstance(sampled, Exception):
            self.outbox.fail(sample.row, sampled)
            return
        sample.completions = sampled
        if sample.job.asks_prompt:
            self.questions.push(sample.row.owner, sample)
        else:
            self.outbox.run_guarded(sample.row, partial(self._answer_sample, sample))

    def _answer_sample(self, sample: PendingSample, scores: ScoreResult | None = None) -> None:
        result = encode_sample(sample.completions, sample.job, scores)
        self.outbox.answers.append(StoredAnswer(sample.row.id, result, "sample"))
