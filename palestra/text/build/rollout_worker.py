"""Rollout worker: plays slices of a step's episodes (`text/training/episode_tasks.py`) in its own process, with the
run's bases, samplers and envs.

An episode is played entirely in the process that holds its sampler. The worker builds the same parts as a run in one
process; it does not train, but loads the learners' published weights.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from palestra.core.types import Episode
from palestra.parallel.config import RolloutBackendConfig
from palestra.parallel.tasks import Task
from palestra.parallel.worker_stats import worker_stats
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.learners.lm import LanguageLearner
from palestra.text.training.episode_tasks import EPISODES_FILE, EpisodesResult, EpisodesTask, EvalTask, RolloutTask
from palestra.text.training.trainer import play_instances


class RolloutWorker:
    """Plays slices of a run's stages and evaluations. Stages that read data play nothing and are left out."""

    def __init__(self, config: TextConfig) -> None:
        self.stages, played = rollout_config(config)
        self.setup = build(played)
        self.evals = {evaluation.name: evaluation for evaluation in self.setup.evals}
        self.members = dict.fromkeys(self.setup.learners, "")

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> EpisodesResult:
        """Plays a slice and writes its episodes to `out`."""
        assert isinstance(task, EpisodesTask) and out is not None
        for member, folder in members.items():
            name, _, version = member.rpartition("@")
            learner = self.setup.learners[name]
            assert isinstance(learner, LanguageLearner)
            learner.set_config(type(learner.config).model_validate(task.settings[name]))
            if self.members[name] != member:
                learner.load_exported(folder, int(version))
                self.members[name] = member
        start = time.process_time()
        episodes = asyncio.run(self._play(task))
        (out / EPISODES_FILE).write_bytes(_pickle_episodes(episodes))
        return EpisodesResult(
            episodes=len(episodes), cpu_s=time.process_time() - start, worker_stats=tuple(worker_stats.take_report(0.0))
        )

    async def _play(self, task: EpisodesTask) -> list[Episode]:
        if isinstance(task, EvalTask):
            evaluation = self.evals[task.evaluation]
            policies = evaluation.seat_policies()
            samples = evaluation.samples
            return await play_instances(evaluation.runner, policies, task.numbers, task.seed, samples=samples)
        assert isinstance(task, RolloutTask)
        source = self.setup.stages[self.stages[task.stage]].source
        return await source.play(task.numbers, task.branching, dict(task.source_state))


def rollout_config(config: TextConfig) -> tuple[dict[int, int], TextConfig]:
    """Returns the run's config without data and with an inline backend, and the new number of each stage that plays."""
    alone = {"backend": RolloutBackendConfig(type="inline"), "data": []}
    plays = [number for number, part in enumerate(config.stage_configs()) if not part.data]
    stages = [config.stages[number].model_copy(update={"data": []}) for number in plays if config.stages]
    return {number: place for place, number in enumerate(plays)}, config.model_copy(update={**alone, "stages": stages})


def _pickle_episodes(episodes: Sequence[Episode]) -> bytes:
    try:
        return pickle.dumps(episodes)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"an episode cannot be sent to another process ({error}): observations and info may hold text, numbers, "
            "arrays, lists and mappings; convert other values in the env"
        ) from error
