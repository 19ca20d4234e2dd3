"""In-flight weight updates: answers that get new weights while they are sampled, in whole runs on a real engine."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.tolerances import LOGPROB_ATOL
from text.training.test_async_rollouts import played, recorded

from palestra.core.config import dump, validate
from palestra.core.types import Answer, Episode, Node, Sample
from palestra.engine.sampling.scoring import answer_logprobs
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.rollouts.metrics import answers_of
from palestra.text.training.async_rollouts import answer_versions, token_staleness_metrics


def config(base, update: str, **changes) -> TextConfig:
    """Answers of 48 tokens, so that many run while a step is trained."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "micro_batch_tokens": 200}
    speech |= {"sampling": {"max_tokens": 48, "stop_at_eos": False}}
    whole = {
        "name": "in-flight",
        "steps": 6,
        "episodes": 4,
        "staleness": 2,
        "in_flight_updates": update,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 3},
        "checkpoint_every": 100,
        "device": "cpu",
    }
    return validate(TextConfig, whole | changes)


class Snapshots(Callback):
    """The snapshot of each version that a policy had between two steps."""

    def __init__(self, trainer) -> None:
        self.trainer, self.found = trainer, {}
        self.take()

    def take(self) -> None:
        for name, learner in self.trainer.learners.items():
            self.found[name, learner.version] = learner.policy().adapter

    def on_step(self, step, metrics):
        self.take()


def run_with_snapshots(settings, folder):
    trainer = build(settings)
    snapshots = Snapshots(trainer)
    with Run.create(folder, dump(settings), settings.name) as run:
        assert run_training(trainer, run, snapshots)
        return run.path, trainer, snapshots.found


def test_each_token_has_the_log_probability_of_its_version(base, tmp_path):
    path, trainer, snapshots = run_with_snapshots(config(base, "recompute_kv"), tmp_path)
    steps = recorded(path)
    mixed = 0
    for name, learner in trainer.learners.items():
        answers = answers_of([episode for episodes in steps for episode in episodes], name)
        samples = [Sample(a.prompt_ids, a.token_ids, a.logprobs, a.logprobs) for a in answers]
        scores = {
            version: answer_logprobs(learner.sampler.engine, snapshot, samples)
            for (own, version), snapshot in snapshots.items()
            if own == name
        }
        for i, answer in enumerate(answers):
            versions = answer_versions(answer)
            assert (np.diff(versions) >= 0).all()
            mixed += versions[0] != versions[-1]
            expected = [scores[version][i][t] for t, version in enumerate(versions)]
            np.testing.assert_allclose(answer.logprobs, expected, atol=LOGPROB_ATOL, rtol=0)
    assert mixed
    for step, episodes in enumerate(steps):
        line = next(
            line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "walker" and line["step"] == step
        )
        assert line["token_staleness"] <= line["token_staleness_max"] <= 2 and line["staleness_max"] <= 2
        shares = [len(set(answer_versions(a).tolist())) > 1 for a in answers_of(episodes, "walker")]
        assert line["mixed_version_fraction"] == pytest.approx(np.mean(shares))


def test_kept_keys_and_values_are_of_older_versions(base, tmp_path):
    """The recorded log-probabilities are still the sampler's, but belong to no single version."""
    path, trainer, snapshots = run_with_snapshots(config(base, "keep_kv"), tmp_path)
    gaps = []
    for answer in answers_of([episode for episodes in recorded(path) for episode in episodes], "walker"):
        versions = answer_versions(answer)
        sample = Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, answer.logprobs)
        of_first = answer_logprobs(
            trainer.learners["walker"].sampler.engine, snapshots["walker", int(versions[0])], [sample]
        )
        gap = np.abs(of_first[0] - answer.logprobs)
        assert gap[versions == versions[0]].max() < LOGPROB_ATOL
        gaps += gap[versions != versions[0]].tolist()
    assert max(gaps) > 10 * LOGPROB_ATOL


def test_token_staleness_by_hand():
    """Versions 0, 2 and 3 after 3, 4 and 5 trained steps; step 5 trains. Tokens of version 2 and 3 are 1 and 0 steps
    old, those of version 0 are 2."""
    tokens = np.zeros(4, np.int32)

    def episode(policy, versions, error=None):
        answer = Answer("", policy, tokens, tokens, tokens.astype(np.float32), versions=np.array(versions, np.int32))
        return Episode("e", 0, {"a": policy}, [Node(0, None, 0, {"a": ""}, {"a": answer})], error=error)

    episodes = [episode("a@0", [0, 2, 2, 3]), episode("a@2", []), episode("a@0", [], "lost"), episode("b@9", [])]
    assert token_staleness_metrics(episodes, "a", [0, 2, 3]) == {
        "token_staleness": (2 + 1 + 1 + 0 + 4 * 1) / 8,
        "token_staleness_max": 2.0,
        "mixed_version_fraction": 0.5,
    }


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep_kv", "recompute_kv"])
def test_two_agents_learn_with_in_flight_updates(base, tmp_path, update):
    """Answers of eight tokens, of which only the first counts, with versions up to four steps old."""
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 8, "stop_at_eos": False}}
    evals = {"test": {"episodes": 200, "env": {"split": "test"}}}
    settings = config(
        base,
        update,
        staleness=4,
        steps=40,
        episodes=32,
        env={"type": "helpers.toys:Whisper"},
        policies={"guide": speech, "walker": speech},
        algorithm={"type": "grpo", "group_size": 8},
        evals=evals,
    )
    path = played(settings, tmp_path)
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.5 and after > 0.85


def test_in_flight_updates_need_answers_that_run_during_training(base):
    with pytest.raises(ValueError, match="with staleness: 0 none are"):
        config(base, "keep_kv", staleness=0)
