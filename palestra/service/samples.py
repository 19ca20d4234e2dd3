"""Scheduling of sampling requests: sampling, scoring of prompts where requested, and answering."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import sqlalchemy as sql

from palestra.engine.fair_queue import FairQueue
from palestra.engine.sampler import Request, Sampled
from palestra.engine.scoring import Question, Scores, score
from palestra.service import codec
from palestra.service.answers import judged, spoken
from palestra.service.jobs import SampleJob
from palestra.service.outbox import Outbox
from palestra.service.store import Done
from palestra.service.tenants import Base, Tenants

SCORED = 16384  # prompt tokens scored in one step, at most


@dataclass
class Sample:
    """A pending sampling request and its completions so far."""

    row: sql.Row
    job: SampleJob
    sampled: list[Sampled] = field(default_factory=list)


class Samples:
    """Runs the sampling requests of all base models.

    `begin` accepts requests. `advance` samples a token for every row and scores the prompts of completed samples;
    prompts are scored last, so that scores do not wait in memory for samples.
    """

    def __init__(self, tenants: Tenants, outbox: Outbox) -> None:
        self.tenants, self.outbox = tenants, outbox
        self._questions: FairQueue[Sample] = FairQueue()

    @property
    def busy(self) -> bool:
        """True while any request is being sampled or scored."""
        return bool(self._questions) or any(base.sampler.busy for base in self.tenants.bases.values())

    def advance(self) -> bool:
        """Runs one step of sampling and scoring. Returns False if there was nothing to do."""
        moved = any([base.sampler.advance() for base in self.tenants.bases.values()])
        return self._score() or moved

    def rest(self) -> None:
        """Releases memory that is not in use."""
        for base in self.tenants.bases.values():
            base.sampler.rest()

    def begin(self, row: sql.Row) -> None:
        """Submits a queued request to the sampler. Raises ValueError if its base or weights are not available."""
        job = SampleJob.model_validate_json(row.body)
        base, ids = self.tenants.base(job.base), np.array(job.tokens, np.int32)
        adapter = self.tenants.snapshot(base, job.folder)
        request = Request(
            ids, job.num_samples, job.sampling, adapter, job.seed, top_logprobs=job.topk_sample, client=row.owner
        )
        base.sampler.submit(request, partial(self._sampled, Sample(row, job)))

    def _score(self) -> bool:
        """Scores prompts of at most `SCORED` tokens in total, scheduled fairly among API keys. Returns False if no
        prompt was waiting."""
        samples: list[Sample] = []
        tokens = 0
        while clients := self._questions.clients():
            size = len(self._questions.first(clients[0]).job.tokens)
            if samples and tokens + size > SCORED:
                break
            samples.append(self._questions.pop(clients[0]))
            self._questions.shares.charge(clients[0], size)
            tokens += size
        for base in self.tenants.bases.values():
            mine = [s for s in samples if s.job.base == base.name]
            if not mine:
                continue
            try:
                self._answer_scores(base, mine)
            except Exception:  # one of them is invalid, or together they need too much memory: retry singly
                for sample in mine:
                    self.outbox.guarded(sample.row, partial(self._answer_scores, base, [sample]))
        return bool(samples)

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
            self._answer_sample(sample, scores)

    def _sampled(self, sample: Sample, sampled: list[Sampled] | Exception) -> None:
        if isinstance(sampled, Exception):
            self.outbox.fail(sample.row, sampled)
            return
        sample.sampled = sampled
        if sample.job.asks_prompt:
            self._questions.push(sample.row.owner, sample)
        else:
            self.outbox.guarded(sample.row, partial(self._answer_sample, sample))

    def _answer_sample(self, sample: Sample, scores: Scores | None = None) -> None:
        sequences = [spoken(sampled) for sampled in sample.sampled]
        result = codec.sample_result(sequences, judged(scores, sample.job))
        self.outbox.answers.append(Done(sample.row.id, result, "sample"))
