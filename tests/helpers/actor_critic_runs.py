"""Tests of actor-critic algorithms: episodes of known tokens and rewards, known values, and runs of two agents."""

import asyncio

import numpy as np

from palestra.core.config import dump, parse, validate
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig

SEATS = {"a": "p", "b": "q"}


class FixedValuesLearner:
    """A learner that returns fixed values and reference log-probabilities, one list per sample, in order."""

    name = "p"
    is_at_reference = False

    def __init__(self, values, logprobs=(), reference=()):
        self.said, self.now, self.reference, self.updates = values, logprobs, reference, 1

    def batches(self, samples):
        return [list(samples)] * self.updates

    async def values(self, samples):
        return [np.array(v, np.float32) for v in self.said]

    async def logprobs(self, samples, *, reference=False):
        return [np.array(v, np.float32) for v in (self.reference if reference else self.now)]


def answer(tokens, policy="p@0", logprobs=None):
    ids = np.arange(tokens, dtype=np.int32)
    logprobs = [-1.0] * tokens if logprobs is None else logprobs
    return Answer("x", policy, np.array([1, 2], np.int32), ids, np.array(logprobs, np.float32))


def play(*lines, seats=SEATS, error=None):
    """An episode of branches from the root; each branch lists (tokens by seat, local rewards, team reward) of its joint
    steps."""
    episode = Episode("hand", 0, seats, error=error)
    for line in lines:
        parent = None
        for depth, (spoken, local, team) in enumerate(line):
            answers = {s: t if isinstance(t, Answer) else answer(t, f"{seats[s]}@0") for s, t in spoken.items()}
            node = Node(len(episode.nodes), parent, depth, {}, answers, local, team, done=depth + 1 == len(line))
            episode.nodes.append(node)
            parent = node.id
    return episode


def credit_samples(algorithm, episodes, learner, policy="p", memory=None):
    scores = asyncio.run(algorithm.token_scores(episodes, learner))
    samples, figures = algorithm.build_samples(episodes, policy, **({"scores": scores} if scores else {}))
    samples, more = asyncio.run(algorithm.finalize_samples(samples, learner, {} if memory is None else memory))
    return samples, figures | more


def lists(samples, field):
    return [getattr(sample, field).tolist() for sample in samples]


def whisper(base, *, steps, algorithm=None, policy=None, env=None, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}, **(policy or {})}
    config = {
        "name": "whisper",
        "steps": steps,
        "env": {"type": "helpers.toys:Whisper", "turns": 2, **(env or {})},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "ppo", **(algorithm or {})},
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }
    return validate(TextConfig, config | tree)


def run_of(config, root):
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(build(config), run)
        return run.path


def play_first_step(setup):
    moment = setup.position_of(0)
    return asyncio.run(
        moment.stage.source.play(moment.episode_numbers, moment.stage.algorithm.branching, setup.algorithm_state)
    )


def logged_steps(path):
    return {line["step"] for line in read_lines(path / "metrics.jsonl")}


def resumed_checkpoint(config, root, step):
    """The last checkpoint of a run that was stopped after `step` steps and resumed, whose logs and files equal those of
    one that was not."""
    whole = run_of(config, root)
    with Run.create(root, dump(config), config.name) as run:
        assert not run_training(build(config), run, should_stop=lambda: len(logged_steps(run.path)) == step)
    with Run.open(run.path) as run:
        setup = build(validate(TextConfig, parse(run.config)))
        assert restore_checkpoint(setup, run) == step
        assert run_training(setup, run)
    for log in ("metrics.jsonl", "evals.jsonl"):
        assert (whole / log).read_bytes() == (run.path / log).read_bytes()
    one, other = list_checkpoints(whole)[-1].path, list_checkpoints(run.path)[-1].path
    for file in (file for file in one.rglob("*") if file.is_file()):
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file
    return one
