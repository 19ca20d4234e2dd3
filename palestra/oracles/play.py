"""Rollout worker: plays slices of a step's episodes (`backends/slices.py`) in its own process, with the run's bases,
samplers and envs.

An episode is played wholly in the process that holds its sampler. The worker builds the same parts as a run in one
process, and only loads the learners' published weights.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.backends.places import LoopConfig
from palestra.backends.slices import EPISODES
from palestra.learners.lm import LanguageLearner
from palestra.populations.tasks import Result, Task
from palestra.recipe import Config
from palestra.roll import roll
from palestra.rollouts.play import Branching
from palestra.rollouts.sources import MEASURED
from palestra.setup import build
from palestra.train import evaluate_on
from palestra.types import Episode


class PlayWorker:
    """Plays slices of a run's stages and evaluations. Stages that read data are left out, as they play nothing."""

    def __init__(self, config: Config) -> None:
        self.stages, played = playing(config)
        self.setup = build(played)
        self.exams = {exam.name: exam for exam in self.setup.exams}
        self.members = dict.fromkeys(self.setup.learners, "")

    def do(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        """Plays a slice and writes its episodes to `out`.

        `cpu_s` is the CPU time of this process in seconds; `roll` are the counters of further workers that it used.
        """
        assert out is not None
        for member, folder in members.items():
            self._take(member, folder, task.order["settings"])
        start = time.process_time()
        episodes = asyncio.run(self._played(task.order))
        (out / EPISODES).write_bytes(_pickled(episodes))
        return {"episodes": len(episodes), "cpu_s": time.process_time() - start, "roll": roll.lines(0.0)}

    def _take(self, member: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Loads a member's weights into its learner, unless loaded, and applies its settings."""
        name, _, version = member.rpartition("@")
        learner = self.setup.learners[name]
        assert isinstance(learner, LanguageLearner)
        learner.adopt(type(learner.config).model_validate(settings[name]))
        if self.members[name] != member:
            learner.take(folder, int(version))
            self.members[name] = member

    async def _played(self, order: Mapping[str, Any]) -> list[Episode]:
        numbers: Sequence[int] = order["numbers"]
        if "exam" in order:
            exam = self.exams[order["exam"]]
            return await evaluate_on(exam.arena, exam.seats(), numbers, order["seed"])
        source = self.setup.stages[self.stages[order["stage"]]].source
        return await source.play(numbers, Branching(**order["branching"]), {MEASURED: order["measured"]})


def playing(config: Config) -> tuple[dict[int, int], Config]:
    """Returns the run's config without data and with an inline backend, and the new number of each stage that plays."""
    alone = {"backend": LoopConfig(type="inline"), "data": []}
    plays = [number for number, part in enumerate(config.parts()) if not part.data]
    stages = [config.stages[number].model_copy(update={"data": []}) for number in plays if config.stages]
    return {number: place for place, number in enumerate(plays)}, config.model_copy(update={**alone, "stages": stages})


def _pickled(episodes: Sequence[Episode]) -> bytes:
    try:
        return pickle.dumps(episodes)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"an episode cannot be sent to another process ({error}): observations and info hold text, numbers, "
            "arrays, lists and mappings; convert it in the env"
        ) from error
