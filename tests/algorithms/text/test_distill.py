"""On-policy distillation: advantages by hand, the teacher's scores, and a student that comes to play as its teacher."""

import asyncio

import numpy as np
import pytest
from tolerances import LOGPROB_ATOL

from palestra.algorithms.text.distill import Distill
from palestra.builders.text import build
from palestra.builders.text_config import TextConfig
from palestra.config import dump, validate
from palestra.engine.lora import Adapter, LoraConfig
from palestra.engine.scoring import answer_logprobs
from palestra.engine.trainer import Trainer
from palestra.losses.policy import importance_sampling_loss
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.testing import tiny_lm
from palestra.training.loop import run_training
from palestra.types import Answer, Episode, Node, Sample


class Taught:
    """A learner whose teacher gives every token the log-probability -0.1 times its id."""

    async def teacher_logprobs(self, samples):
        return [-0.1 * sample.token_ids.astype(np.float32) for sample in samples]


def test_the_advantage_is_the_teachers_log_ratio_by_hand():
    said = Answer("", "p@0", np.array([1]), np.array([5, 20]), np.array([-1.0, -1.0], np.float32))
    other = Answer("", "q@0", np.array([1]), np.array([5]), np.array([-1.0], np.float32))
    nodes = [Node(0, None, 0, {}, {"a": said, "b": other}), Node(1, None, 0, {}, {"a": said}, {"a": 9.0}, done=True)]
    samples, metrics = Distill().build_samples([Episode("hand", 0, {"a": "p", "b": "q"}, nodes)], "p")
    assert len(samples) == 1 and metrics == {}
    (sample,), metrics = asyncio.run(Distill().finalize_samples(samples, Taught(), {}))
    assert sample.advantages == pytest.approx([0.5, -1.0]) and metrics["teacher_kl"] == pytest.approx(0.25)
    assert nodes[0].advantages["a"] == pytest.approx(-0.25)
    assert Distill().loss is importance_sampling_loss
    assert asyncio.run(Distill().finalize_samples([], Taught(), {})) == ([], {})


def test_a_teachers_scores_are_those_of_a_training_pass():
    engine, rng = tiny_lm(0, initializer_range=0.2), np.random.default_rng(0)
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0)
    for _, b in adapter.weights.values():
        b.data.normal_(0, 0.1)
    blank = np.zeros(3, np.float32)
    samples = [Sample(rng.integers(5, 250, n), rng.integers(5, 250, 3), blank, blank) for n in (4, 7)]
    found = answer_logprobs(engine, adapter.snapshot("t", engine.dtype), samples)
    for ours, theirs in zip(found, Trainer(engine, adapter).logprobs(samples), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=LOGPROB_ATOL)  # rounding of float32


def tree(base, algorithm, policies, steps):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    seats = {name: speech | policies.get(name, {}) for name in ("guide", "walker")}
    return {
        "steps": steps,
        "env": {"type": "toys:Whisper"},
        "policies": seats | {name: own for name, own in policies.items() if name not in seats},
        "algorithm": algorithm,
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }


def run_of(root, tree):
    config = validate(TextConfig, tree)
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(build(config), run)
        return run.path


def test_a_student_comes_to_play_as_its_teacher(base, tmp_path):
    """Held out; one in four by chance. The student never sees a reward."""
    taught = run_of(tmp_path / "teacher", tree(base, {"type": "dpo"}, {}, 20))
    goal = read_lines(taught / "evals.jsonl")[-1]["success"]
    folder = list_checkpoints(taught)[-1].path
    policies = {
        name: {"type": "frozen", "base": str(base), "path": str(folder / seat)}
        for name, seat in (("old_guide", "guide"), ("old_walker", "walker"))
    }
    policies |= {"guide": {"teacher": "old_guide"}, "walker": {"teacher": "old_walker"}}
    path = run_of(tmp_path / "student", tree(base, {"type": "distill", "group_size": 8}, policies, 20))
    before, after = [line["success"] for line in read_lines(path / "evals.jsonl")]
    distances = [line["teacher_kl"] for line in read_lines(path / "metrics.jsonl") if line["policy"] == "walker"]
    assert goal > 0.8 and before < 0.4 and after > 0.7
    assert distances[0] > 4 * abs(distances[-1])


def test_a_student_without_a_teacher_that_can_score_says_so(base):
    for policies, message in (
        ({}, "policies.guide is to be distilled and has no teacher"),
        ({"old": {"type": "random"}, "guide": {"teacher": "old"}}, "old cannot score tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            build(validate(TextConfig, tree(base, {"type": "distill"}, policies, 1)))
