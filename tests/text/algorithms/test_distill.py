"""On-policy distillation: advantages by hand, the teacher's scores, and a student that learns its teacher's
behaviour."""

import asyncio

import numpy as np
import pytest
import torch
from helpers.samplers import serving
from helpers.tolerances import LOGPROB_ATOL

from palestra.core.config import dump, validate
from palestra.core.losses import LossInputs
from palestra.core.types import Answer, Episode, Node, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.scoring import answer_logprobs
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.micro_batch import build_loss_inputs, micro_batches
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.runs.loop import run_training
from palestra.testing import tiny_lm
from palestra.text.algorithms.distill import Distill, distillation_loss
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.policies.endpoint import EndpointConfig, answer_logprobs_at


class KnownTeacherLearner:
    """A learner whose teacher returns -0.1 times its id as the log-probability of every token. An update has `updates`
    optimizer steps; the learner itself returns the log-probability `now` for every token."""

    def __init__(self, updates=1, now=-1.0):
        self.updates, self.now = updates, now

    def batches(self, samples):
        return [list(samples)] * self.updates

    async def logprobs(self, samples):
        return [np.full(len(sample.token_ids), self.now, np.float32) for sample in samples]

    async def teacher_logprobs(self, samples):
        return [-0.1 * sample.token_ids.astype(np.float32) for sample in samples]


def test_the_advantage_is_the_teachers_log_ratio_by_hand():
    said = Answer("", "p@0", np.array([1]), np.array([5, 20]), np.array([-1.0, -1.0], np.float32))
    other = Answer("", "q@0", np.array([1]), np.array([5]), np.array([-1.0], np.float32))
    nodes = [Node(0, None, 0, {}, {"a": said, "b": other}), Node(1, None, 0, {}, {"a": said}, {"a": 9.0}, done=True)]
    samples, metrics = Distill().build_samples([Episode("hand", 0, {"a": "p", "b": "q"}, nodes)], "p")
    assert len(samples) == 1 and metrics == {}
    (sample,), metrics = asyncio.run(Distill().finalize_samples(samples, KnownTeacherLearner(), {}))
    assert sample.advantages == pytest.approx([0.5, -1.0]) and metrics == {}
    assert sample.reference_logprobs == pytest.approx([-0.5, -2.0]) and sample.old_logprobs == "current"
    assert nodes[0].advantages["a"] == pytest.approx(-0.25)
    assert Distill().loss is distillation_loss and Distill().loss_options == {"importance_cap": 2.0}
    assert asyncio.run(Distill().finalize_samples([], KnownTeacherLearner(), {})) == ([], {})
    (several,), _ = asyncio.run(Distill().finalize_samples(samples, KnownTeacherLearner(updates=2, now=-0.7), {}))
    assert several.old_logprobs == pytest.approx([-0.7, -0.7])
    (plain,), _ = asyncio.run(Distill(old_logprobs="sampler").finalize_samples(samples, KnownTeacherLearner(), {}))
    assert plain.old_logprobs is None


def gradient_of(probabilities, sampler, teacher, *, before=None, **settings):
    """The gradient [2] of the loss with respect to the logits of two tokens, in expectation over the sampler's: each
    token counts by its probability there. `before`: the probabilities before the update. Also the metrics."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    drawn = [
        Sample(
            np.array([1]),
            np.array([token]),
            np.log(np.array([sampler[token]])),
            np.zeros(1),
            weight=sampler[token],
            reference_logprobs=np.log(np.array([teacher[token]])),
            old_logprobs="current" if before is None else np.log(np.array([before[token]])),
        )
        for token in range(2)
    ]
    (pack,) = micro_batches(drawn, 10**6)
    config = Distill(**settings)
    loss, metrics = config.loss(build_loss_inputs(pack, logp, -logp), **config.loss_options)
    loss.backward()
    return logits.grad.numpy(), metrics


def kl_gradient(probabilities, teacher):
    """The gradient of KL(student || teacher) with respect to the student's logits, p (log p - log q - KL), and the
    KL."""
    p, q = np.array(probabilities), np.array(teacher)
    gaps = np.log(p) - np.log(q)
    return p * (gaps - p @ gaps), p @ gaps


@pytest.mark.parametrize("before", [None, [0.7, 0.3]])
def test_a_student_that_agrees_with_its_teacher_has_no_gradient(before):
    """Also if an older version sampled, whose log-ratios to the teacher are not 0, and with any bound on the ratio."""
    found, metrics = gradient_of([0.5, 0.5], [0.9, 0.1], [0.5, 0.5], before=before)
    np.testing.assert_allclose(found, 0, atol=1e-7)
    assert float(metrics["teacher_kl"]) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("before", [None, [0.7, 0.3]])
@pytest.mark.parametrize("sampler", [[0.6, 0.4], [0.9, 0.1]])
def test_gradient_equals_that_of_the_kl_for_any_sampler(sampler, before):
    """With ratios below every bound, at the first optimizer step and at later ones."""
    student, teacher = [0.6, 0.4], [0.2, 0.8]
    expected, kl = kl_gradient(student, teacher)
    found, metrics = gradient_of(student, sampler, teacher, before=before, importance_cap=1e9)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert float(metrics["teacher_kl"]) == pytest.approx(kl, abs=1e-6)


def test_importance_ratios_of_distillation_are_bounded():
    """The second token is four times as likely as when it was sampled, and is weighted by the cap of 2: its share of
    the mean is 0.2 instead of its probability, 0.4."""
    found, metrics = gradient_of([0.6, 0.4], [0.9, 0.1], [0.2, 0.8])
    first, second = 0.6 * np.log(0.6 / 0.2), 0.2 * np.log(0.4 / 0.8)
    assert found[0] == pytest.approx(first * 0.4 - second * 0.6, abs=1e-6)
    assert float(metrics["importance_cap_fraction"]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="needs the teacher's log-probabilities"):
        distillation_loss(LossInputs(*[torch.zeros(1)] * 3, None, *[torch.zeros(1)] * 2))


def test_a_teachers_scores_are_those_of_a_training_pass():
    engine, rng = tiny_lm(0, initializer_range=0.2), np.random.default_rng(0)
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=0)
    for _, b in adapter.weights.values():
        b.data.normal_(0, 0.1)
    blank = np.zeros(3, np.float32)
    samples = [Sample(rng.integers(5, 250, n), rng.integers(5, 250, 3), blank, blank) for n in (4, 7)]
    found = answer_logprobs(engine, adapter.snapshot("t", engine.dtype), samples)
    for ours, theirs in zip(found, AdapterWeights(engine, adapter).logprobs(samples), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=LOGPROB_ATOL)  # rounding of float32


def tree(base, algorithm, policies, steps):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    seats = {name: speech | policies.get(name, {}) for name in ("guide", "walker")}
    return {
        "steps": steps,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": seats | {name: own for name, own in policies.items() if name not in seats},
        "algorithm": algorithm,
        "evals": {"test": {"episodes": 200, "env": {"split": "test"}}},
    }


def run_of(root, tree):
    config = validate(TextConfig, tree)
    with Run.create(root, dump(config), config.name) as run:
        assert run_training(build(config), run)
        return run.path


@pytest.mark.slow
def test_student_learns_its_teachers_behaviour(base, tmp_path):
    """On held-out instances; chance is 1/4. The student never sees a reward."""
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


def test_teacher_that_cannot_score_is_refused(base):
    for policies, message in (
        ({}, "policies.guide is distilled but has no teacher"),
        ({"old": {"type": "random"}, "guide": {"teacher": "old"}}, "old cannot score tokens"),
        ({"guide": {"teacher": "guide"}, "walker": {"teacher": "guide"}}, "set algorithm.teacher_seats"),
    ):
        with pytest.raises(ValueError, match=message):
            build(validate(TextConfig, tree(base, {"type": "distill"}, policies, 1)))


def test_the_teacher_reads_another_seats_prompt():
    """Seat "b" does not learn. The scores depend on the prompt that is read: -0.1 times its first token."""

    class PromptTokenTeacher(KnownTeacherLearner):
        async def teacher_logprobs(self, samples):
            return [np.full(len(s.token_ids), -0.1 * s.prompt_ids[0], np.float32) for s in samples]

    answers = {
        "a": Answer("", "p@0", np.array([1]), np.array([5, 6]), np.array([-1.0, -1.0], np.float32)),
        "b": Answer("", "p@0", np.array([30, 1]), np.array([7]), np.array([-1.0], np.float32)),
    }
    episode = Episode("hand", 0, {"a": "p", "b": "p"}, [Node(0, None, 0, {}, answers, done=True)])
    config = Distill(teacher_seats={"a": "b"})
    samples, _ = config.build_samples([episode], "p")
    (sample,), _ = asyncio.run(config.finalize_samples(samples, PromptTokenTeacher(), {}))
    assert sample.prompt_ids.tolist() == [1] and sample.advantages == pytest.approx([-2.0, -2.0])
    with pytest.raises(ValueError, match='what seat "c" reads in the same joint step, in which a, b act'):
        Distill(teacher_seats={"a": "c"}).build_samples([episode], "p")
    answers["b"].prompt_ids = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="whose policy has no tokens"):
        config.build_samples([episode], "p")


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["old", "learner"])
def test_seat_learns_to_answer_as_a_teacher_with_a_hint(base, tmp_path, teacher):
    """The teacher is a frozen policy, or the student itself."""
    speech = {"base": str(base), "sampling": {"max_tokens": 1}}
    settings = {
        "steps": 16,
        "env": {"type": "helpers.toys:Peek"},
        "policies": {
            "learner": {"type": "lora", "lr": 5e-3, "teacher": teacher} | speech,
            "old": {"type": "frozen"} | speech,
        },
        "seats": {"solver": "learner", "peeker": teacher},
        "algorithm": {"type": "distill", "group_size": 8, "teacher_seats": {"solver": "peeker"}},
    }
    lines = read_lines(run_of(tmp_path, settings) / "metrics.jsonl")
    distances = [line["teacher_kl"] for line in lines if "teacher_kl" in line]
    assert distances[0] > 0.02 and np.mean(distances[-3:]) < 0.3 * distances[0]


def test_a_teacher_behind_an_endpoint_scores_as_in_this_process(tmp_path):
    """The endpoint is `palestra serve-sampler`, over HTTP; the student's own base is the teacher, so there is nothing
    to learn."""
    engine, rng = Engine.load("tiny"), np.random.default_rng(0)
    blank = np.zeros(3, np.float32)
    samples = [Sample(rng.integers(5, 250, n), rng.integers(5, 250, 3), blank, blank) for n in (1, 7)]
    with serving("--base", "tiny") as (url, _):
        config = EndpointConfig(url=f"{url}/v1", model="tiny")
        found = asyncio.run(answer_logprobs_at(config, samples))
        for ours, theirs in zip(found, answer_logprobs(engine, None, samples), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=LOGPROB_ATOL)
        settings = tree("tiny", {"type": "distill", "group_size": 4}, {}, 1) | {"episodes": 2, "evals": {}}
        settings["policies"]["far"] = {"type": "endpoint", "url": f"{url}/v1", "model": "tiny"}
        for name in ("guide", "walker"):
            settings["policies"][name] = settings["policies"][name] | {"teacher": "far"}
        lines = read_lines(run_of(tmp_path, settings) / "metrics.jsonl")
        distances = [line["teacher_kl"] for line in lines if "teacher_kl" in line]
        assert len(distances) == 2 and np.allclose(distances, 0, atol=LOGPROB_ATOL)
        with pytest.raises(ValueError, match=r"a teacher gives no scores: nobody at .* HTTP 404"):
            asyncio.run(answer_logprobs_at(EndpointConfig(url=f"{url}/v1", model="nobody"), samples))
