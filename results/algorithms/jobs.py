"""The runs of the comparison: their order, and how several run at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Container, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context

from results.algorithms.methods import UNTRAINED, Method, Task, tuned_rates
from results.algorithms.runs import TUNING, Job, Line, Place, by_job, has_weights, measure, needed_runs
from results.ledger import Ledger


def chosen_rate(task: Task, method: Method, have: dict[Job, Line]) -> float | None:
    """Returns the learning rate of a method: the tuned one, the only one, or the one with the highest score on dev, a
    mean over the tuning seeds. Returns None while some tuning runs are missing."""
    if (rate := tuned_rates().get(task.name, {}).get(method.name)) is not None:
        return rate
    if len(task.rates) == 1:
        return task.rates[0]
    jobs = tuning_jobs(task, method)
    if not all(job in have for job in jobs):
        return None
    return max(task.rates, key=lambda rate: sum(have[job]["dev"] for job in jobs if job.rate == rate))


def tuning_jobs(task: Task, method: Method) -> list[Job]:
    """Returns the runs that choose the learning rate of a method."""
    return [Job(task.name, method.name, rate, seed) for rate in task.rates for seed in TUNING]


@dataclass
class Schedule:
    """The runs that were not measured here, in order. `take` waits until one can begin: a run whose learning rate is
    being tuned, or whose teacher or reward model is in training, cannot begin before these end. `rows` limits the runs
    of the comparison to those of these names; learning rates are chosen by published runs too."""

    tasks: Sequence[Task]
    methods: Sequence[Method]
    seeds: int
    place: Place
    tune: bool
    ledger: Ledger
    rows: Container[str] | None = None
    have: dict[Job, Line] = field(default_factory=dict)
    failed: dict[Job, str] = field(default_factory=dict)
    running: set[Job] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.have = by_job(self.ledger.here.values())
        self.published = by_job(self.ledger.published.values())
        self.changed = threading.Condition()

    def pairs(self) -> list[tuple[Task, Method]]:
        return [(task, method) for method in self.methods for task in self.tasks if task.name in method.tasks]

    def wanted(self) -> tuple[list[Job], bool]:
        """Returns the runs of the comparison whose learning rates are known, and True if others are being tuned: the
        scores of the untrained bases, the runs that choose rates, then one run of each method after another."""
        jobs = [Job(task.name, UNTRAINED.name, 0.0, 0) for task in self.tasks]
        for task, method in self.pairs():
            if self.tune and chosen_rate(task, method, self.published) is None:
                jobs += tuning_jobs(task, method)
        tuning = False
        for seed in range(self.seeds):
            for task, method in self.pairs():
                if (rate := self.rate(task, method)) is not None:
                    job = Job(task.name, method.name, rate, seed)
                    if self.rows is None or job.row in self.rows:
                        jobs.append(job)
                else:
                    tuning = tuning or not self._lost(task, method)
        return jobs, tuning

    def rate(self, task: Task, method: Method) -> float | None:
        return chosen_rate(task, method, self.published | self.have) if self.tune else task.rates[0]

    def open_jobs(self) -> tuple[list[Job], bool]:
        """Returns the runs that can begin now, and True if others may begin later."""
        done = self.have.keys() | self.failed.keys() | self.running
        jobs, waiting = self.wanted()
        ready: list[Job] = []
        needed: list[Job] = []
        for job in jobs:
            if job in done:
                continue
            missing = self._missing(job)
            if not missing:
                ready.append(job)
            elif not any(run in self.failed for run in missing):
                waiting = True
                needed += [run for run in missing[:1] if run not in self.running]
        bases = [job for job in ready if job.method == UNTRAINED.name]
        return list(dict.fromkeys([*bases, *needed, *ready])), waiting

    def _missing(self, job: Job) -> list[Job]:
        """Returns the runs that must end before `job`, in order. A run whose weights are here needs none before it."""
        missing: list[Job] = []
        for run in reversed(needed_runs(job)):
            if run in self.have and has_weights(run, self.place):
                break
            missing.insert(0, run)
        return missing

    def _lost(self, task: Task, method: Method) -> bool:
        """True if tuning failed: the method has no rate and never will."""
        return any(job in self.failed for job in tuning_jobs(task, method))

    def take(self) -> Job | None:
        """Returns the next run; None if there is none left."""
        with self.changed:
            while True:
                jobs, waiting = self.open_jobs()
                if jobs:
                    self.running.add(jobs[0])
                    return jobs[0]
                if not waiting:
                    return None
                self.changed.wait()

    def end(self, job: Job, line: Line | None, error: str = "") -> None:
        """Stores the line of a run in the ledger, or the reason why it failed."""
        with self.changed:
            self.running.discard(job)
            if line:
                self.ledger.add(str(job), line)
                self.have[job] = line
            else:
                self.failed[job] = error
            left = len(self.open_jobs()[0]) + len(self.running)
            told = f"{job}: FAILED: {error}" if error else self.ledger.compared(str(job))
            print(f"{time.strftime('%H:%M:%S')}  {told}  ({left} open)", flush=True)
            self.changed.notify_all()


def run_all(schedule: Schedule, processes: int) -> None:
    """Makes all runs, `processes` at once, each in a process with one torch thread. A run that fails, or a process that
    dies, does not end the others."""
    os.environ["OMP_NUM_THREADS"] = "1"
    threads = [threading.Thread(target=work, args=(schedule,), daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def work(schedule: Schedule) -> None:
    """Makes one run after the other in a process of its own."""
    pool = _process()
    while job := schedule.take():
        try:
            schedule.end(job, pool.submit(measure, job, schedule.place).result())
        except BrokenProcessPool:
            pool = _process()
            schedule.end(job, None, "its process died (out of memory?)")
        except Exception as error:  # a run may fail in any way, and is reported
            schedule.end(job, None, f"{type(error).__name__}: {error}"[:500])
    pool.shutdown()


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))
