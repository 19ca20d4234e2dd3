"""Samples on their way: begun, asked about their prompts, and answered when all of it is there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import sqlalchemy as sql

from palestra.engine.sampler import Request, Sampled
from palestra.engine.scoring import Question, Scores, score
from palestra.service import codec
from palestra.service.answers import judged, spoken
from palestra.service.jobs import SampleJob
from palestra.service.outbox import Outbox
from palestra.service.store import Done
from palestra.service.tenants import Base, Tenants


@dataclass
class Sample:
    """A request for samples on its way: its answers, and what was asked about its prompt."""

    row: sql.Row
    job: SampleJob
    sampled: list[Sampled] | None = None
    scores: Scores | None = None
    asked: bool = False


class Samples:
    """Samples of all bases. `begin` and `score` take requests; `advance` draws a token for every row."""

    def __init__(self, tenants: Tenants, outbox: Outbox) -> None:
        self.tenants, self.outbox = tenants, outbox
        self._questions: list[Sample] = []

    @property
    def busy(self) -> bool:
        return any(base.sampler.busy for base in self.tenants.bases.values())

    def advance(self) -> bool:
        """False where there was nothing to draw."""
        return any([base.sampler.advance() for base in self.tenants.bases.values()])

    def begin(self, row: sql.Row) -> None:
        job = SampleJob.model_validate_json(row.body)
        base, ids = self.tenants.base(job.base), np.array(job.tokens, np.int32)
        adapter = self.tenants.snapshot(base, job.folder)
        sample = Sample(row, job, asked=bool(job.prompt_logprobs or job.topk_prompt or job.target_prompt))
        request = Request(ids, job.num_samples, job.sampling, adapter, job.seed, top_logprobs=job.topk_sample)
        base.sampler.submit(request, partial(self._sampled, sample))
        if sample.asked:
            self._questions.append(sample)

    def score(self) -> None:
        """Answers what was asked about the prompts of the samples that began since the last time."""
        samples, self._questions = self._questions, []
        for base in self.tenants.bases.values():
            mine = [s for s in samples if s.job.base == base.name]
            try:
                self._answer_scores(base, mine)
            except Exception:  # one of them cannot be asked, or all are too much: each for itself
                for sample in mine:
                    self.outbox.guarded(sample.row, partial(self._answer_scores, base, [sample]))

    def _answer_scores(self, base: Base, samples: list[Sample]) -> None:
        questions = [
            Question(
                np.array(s.job.tokens, np.int32),
                self.tenants.snapshot(base, s.job.folder),
                s.job.topk_prompt,
                np.array(s.job.target_prompt) if s.job.target_prompt else None,
            )
            for s in samples
        ]
        for sample, scores in zip(samples, score(base.engine, questions), strict=True):
            sample.scores = scores
            self._answer_sample(sample)

    def _sampled(self, sample: Sample, sampled: list[Sampled] | Exception) -> None:
        if isinstance(sampled, Exception):
            self.outbox.fail(sample.row, sampled)
            return
        sample.sampled = sampled
        self.outbox.guarded(sample.row, partial(self._answer_sample, sample))

    def _answer_sample(self, sample: Sample) -> None:
        if sample.sampled is not None and (sample.scores is not None or not sample.asked):
            sequences = [spoken(sampled) for sampled in sample.sampled]
            result = codec.sample_result(sequences, judged(sample.scores, sample.job))
            self.outbox.answers.append(Done(sample.row.id, result, "sample"))
