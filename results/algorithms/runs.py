"""One run of the comparison: its training, its score and its line in the ledger."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import palestra
from palestra.core.config import Tree
from palestra.core.config.tree import to_yaml
from palestra.core.types import Episode, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.evaluation.evaluate import evaluate
from palestra.runs import list_checkpoints, read_lines
from palestra.text.rollouts.metrics import member_name
from results.algorithms.methods import TASKS, UNTRAINED, Task, find_method, settings_of, shorten, slug, tuned_rates

TUNING = (100, 101)  # seeds of runs that choose a learning rate
Line = dict[str, Any]


class Job(NamedTuple):
    """A run: the names of its task and method, its learning rate and its seed."""

    task: str
    method: str
    rate: float
    seed: int

    def __str__(self) -> str:
        """The name of the run's row in the ledger. The same seed may have several rates."""
        return f"{self.row}/lr {self.rate:g}"

    @property
    def row(self) -> str:
        return f"{self.task}/{self.method}/{self.seed}"


@dataclass(frozen=True)
class Place:
    """The folder of runs, the device of tasks that are `on_device`; `quick`: runs are smoke tests; `unsafe`: programs
    that models write run without a sandbox."""

    root: Path
    device: str = "cpu"
    quick: bool = False
    unsafe: bool = False

    def folder(self, job: Job) -> Path:
        return self.root / settings_of(*_parts(job), job.rate, job.seed)["name"]


def _parts(job: Job) -> tuple[Task, Any]:
    task = next(task for task in TASKS if task.name == job.task)
    return task, find_method(task, job.method)


def by_job(lines: Iterable[Line]) -> dict[Job, Line]:
    """Returns the lines of a ledger, by run."""
    return {Job(line["task"], line["method"], line["rate"], line["seed"]): line for line in lines}


def measure(job: Job, place: Place) -> Line:
    """Trains and scores a run in this process; returns its line. The run's output goes to a log beside its folder. An
    interrupted run is resumed."""
    task, method = _parts(job)
    place.root.mkdir(parents=True, exist_ok=True)
    with place.folder(job).with_suffix(".log").open("a") as log, contextlib.redirect_stdout(log):
        line = score_untrained(task, place) if method is UNTRAINED else train_and_score(task, job, place)
    release_models()
    return line | {"device": place.device if task.on_device else "cpu"}


def release_models() -> None:
    """Frees the models of the run that ended, before others are loaded."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def config_of(job: Job, place: Place) -> Tree:
    """Returns the run's full config."""
    task, method = _parts(job)
    tree = placed(task, settings_of(task, method, job.rate, job.seed), place)
    if method.teacher:
        weights = list_checkpoints(place.folder(needed_run(job)))[-1].path
        for name in task.learners:
            tree["policies"][f"teacher_of_{name}"]["path"] = str(weights / name)
    if method.data:
        tree["data"] = str(place.folder(needed_run(job)))
    if method.judge:
        tree["reward_model"] = {"path": str(place.folder(needed_run(job)))}
    return shorten(tree) if place.quick else tree


def placed(task: Task, tree: Tree, place: Place) -> Tree:
    """Sets what depends on the machine in a config, and returns it. Tasks that are not `on_device` run on the CPU even
    where there is a GPU."""
    tree["device"] = place.device if task.on_device else "cpu"
    if task.runs_programs and place.unsafe:
        tree["env"]["unsafe"] = True
    return tree


def needed_run(job: Job) -> Job:
    """Returns the run that `job` needs: its teacher, its reward model or its data."""
    task, method = _parts(job)
    assert method.needs is not None
    return Job(job.task, method.needs, tuned_rates()[task.name][method.needs], TUNING[0])


def needed_runs(job: Job) -> list[Job]:
    """Returns the runs that must come before `job`, in order."""
    if not _parts(job)[1].needs:
        return []
    needed = needed_run(job)
    return [*needed_runs(needed), needed]


def has_weights(job: Job, place: Place) -> bool:
    """True if the run's weights are here; its folder may have been removed."""
    folder = place.folder(job)
    return folder.exists() and bool(list_checkpoints(folder))


def train_and_score(task: Task, job: Job, place: Place) -> Line:
    path = place.folder(job)
    if path.exists():
        palestra.train(resume=path)
    else:
        palestra.train(config_of(job, place), root=place.root)
    release_models()
    points = curve(task, path)
    line: Line = job._asdict() | {"run": path.name, "dev": points[-1][1], "answers": points[-1][0], "curve": points}
    line |= {"cpu": seconds(path, "_cpu_s"), "clock": seconds(path, "_s")}
    line["to_bar"] = next((count for count, score in points if score >= task.bar), None)
    return line if job.seed in TUNING else line | score(task, path, place)


def curve(task: Task, run: Path) -> list[tuple[float, float]]:
    """Returns a pair for each evaluation on dev: the answers sampled in training before it, and the score."""
    answers = np.cumsum(list(sampled(run)))
    points: dict[int, list[float]] = {}
    for line in read_lines(run / "evals.jsonl"):
        if line["name"] in task.sides:
            points.setdefault(line["step"], []).append(task.score(line["name"], line))
    return [(float(answers[step]) if step >= 0 else 0.0, float(np.mean(own))) for step, own in sorted(points.items())]


def sampled(run: Path) -> Iterator[float]:
    """Yields the answers sampled in each step, those of replaced instances included; these are assumed to have as many
    answers as the others."""
    replaced = {line["step"]: line.get("redraws", 0.0) for line in read_lines(run / "metrics.jsonl") if is_team(line)}
    episodes = palestra.load_run(run).config["episodes"]
    for line in read_lines(run / "timings.jsonl"):
        if is_team(line):
            yield line["answers"] * (1 + replaced.get(line["step"], 0.0) / episodes)


def is_team(line: Line) -> bool:
    return bool(line["policy"] == "team")


def seconds(run: Path, ending: str) -> float:
    """Returns the seconds of rollouts and training, without evaluations. `ending` is `_cpu_s` for CPU seconds of this
    process, `_s` for wall seconds."""
    phases = [f"{phase}{ending}" for phase in ("rollout", "train")]
    lines = [line for line in read_lines(run / "timings.jsonl") if is_team(line)]
    return float(sum(line.get(phase, 0.0) for line in lines for phase in phases))


def score(task: Task, run: Path, place: Place) -> dict[str, float]:
    """Returns the score on split test, and the learners' KL divergence from the base and entropy there, in nats per
    token.

    Both are estimated from sampled answers, also where the score is of greedy ones."""
    episodes, scores, answers = (10 if place.quick else 300), [], []
    for side, (seats, _) in task.sides.items():
        scored = play(task, run, seats, episodes)
        scores.append(task.score(side, scored.metrics))
        if task.greedy:
            scored = evaluate(run, {}, seats, episodes=min(100, episodes), sampling={"temperature": 1.0})
        answers += samples(scored.episodes, task.learners)
    device = place.device if task.on_device else "cpu"
    base = AdapterWeights(Engine.load(task.base, device=device, dtype="float32"), None).logprobs(answers)
    own = np.concatenate([sample.logprobs for sample in answers])
    kl, entropy = float((own - np.concatenate(base)).mean()), -float(own.mean())
    return {"score": float(np.mean(scores)), "kl": kl, "entropy": entropy}


def play(task: Task, what: Path, seats: dict[str, str], episodes: int) -> Any:
    sampling = {"temperature": 0.0} if task.greedy else {}
    return evaluate(what, {}, seats, episodes=episodes, sampling=sampling)


def samples(episodes: Sequence[Episode], learners: Sequence[str]) -> list[Sample]:
    """Returns the learners' answers as samples with advantages of zero."""
    said = [answer for episode in episodes for node in episode.nodes for answer in node.answers.values()]
    return [
        Sample(a.prompt_ids, a.token_ids, a.logprobs, np.zeros(len(a.token_ids)))
        for a in said
        if member_name(a.policy) in learners and len(a.token_ids)
    ]


def score_untrained(task: Task, place: Place) -> Line:
    """Returns the line of the untrained base's score on split test: 300 instances if answers are greedy, else 1,000."""
    episodes = 10 if place.quick else 300 if task.greedy else 1000
    job = Job(task.name, UNTRAINED.name, 0.0, 0)
    tree = placed(task, settings_of(task, UNTRAINED, 0.0, 0), place) | {"algorithm": {"type": "grpo"}}
    config = place.root / f"{task.name}-{slug(UNTRAINED)}.yaml"
    config.write_text(to_yaml(tree))
    everywhere = dict.fromkeys(tree.get("seats") or task.learners, "base")
    scores = [task.score(side, play(task, config, everywhere, episodes).metrics) for side in task.sides]
    return job._asdict() | {"score": float(np.mean(scores)), "episodes": episodes}
