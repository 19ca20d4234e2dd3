"""Training passes of several adapters at once: each equals its own pass, and failures stay with their job."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from helpers.small_models import random_adapter
from helpers.tolerances import LOGPROB_ATOL
from transformers import AutoModelForCausalLM

from palestra.core.losses import clipped_policy_loss, cross_entropy_loss
from palestra.core.types import Datum, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora import routes
from palestra.engine.lora.adapters import weighted_sum
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import ScoreRequest, score_prompts
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.multi_adapter import Job, JobLossFunction, JobLossInputs, JobResult, train_jobs
from palestra.engine.training.peft_format import load_adapter, save_adapter
from palestra.service.worker.losses import build_loss
from palestra.testing import tiny_lm

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES = [
    LoraConfig(rank=4),
    LoraConfig(rank=7, alpha=3, target_modules=["q_proj", "down_proj"]),
    LoraConfig(rank=2, target_modules=[*LINEAR, "lm_head"]),
    LoraConfig(rank=3, target_modules=["lm_head"]),
]
NLL = build_loss("cross_entropy", {})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_lm(2)


def trainer(engine: Engine, config: LoraConfig, seed: int) -> AdapterWeights:
    return AdapterWeights(engine, random_adapter(engine, config, seed))


def trainers(engine: Engine) -> list[AdapterWeights]:
    return [trainer(engine, config, seed) for seed, config in enumerate(SHAPES)]


def datums(seed: int, count: int = 4) -> list[Datum]:
    """Sequences of several lengths, two with a common beginning."""
    rng = np.random.default_rng(seed)
    data = []
    start = rng.integers(5, 250, 6)
    for number in range(count):
        ids = np.concatenate([start[: 6 * (number < 2)], rng.integers(5, 250, int(rng.integers(3, 14)))]).astype(
            np.int64
        )
        spread = {"logprobs": (-5.6, 0.3), "advantages": (0, 1), "weights": (1, 0.3)}
        inputs = {k: rng.normal(*given, len(ids) - 1).astype(np.float32) for k, given in spread.items()}
        data.append(Datum(ids[:-1], ids[1:], inputs))
    return data


def run(engine: Engine, jobs: Sequence[Job], pack_tokens: int = 10_000) -> list[JobResult | Exception]:
    passes = train_jobs(engine, jobs, pack_tokens)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            outcomes: list[JobResult | Exception] = end.value
            return outcomes


def expect_success(outcome: JobResult | Exception) -> JobResult:
    assert isinstance(outcome, JobResult), outcome
    return outcome


def grads(trainer: AdapterWeights) -> list[torch.Tensor]:
    found = [w.grad for w in trainer.parameters if w.grad is not None]
    assert len(found) == len(trainer.parameters)
    return found


def assert_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
    assert any(grad.abs().max() > 1e-3 for grad in theirs)  # otherwise the test would prove nothing
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize(("pack_tokens", "grouped_rows"), [(10_000, 512), (40, 512), (1, 512), (10_000, 0)])
def test_joint_training_of_adapters_equals_separate_training(
    engine: Engine, pack_tokens: int, grouped_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products of all adapters together, and with 0 rows grouped by those of each alone."""
    monkeypatch.setattr(routes, "MAX_GROUPED_ROWS", grouped_rows)
    loss = build_loss("ppo", {})
    together, alone = trainers(engine), trainers(engine)
    outcomes = run(engine, [Job(t, datums(i), loss) for i, t in enumerate(together)], pack_tokens)
    for i, (t, outcome) in enumerate(zip(alone, outcomes, strict=True)):
        (wanted,) = run(engine, [Job(t, datums(i), loss)])
        assert_close(grads(together[i]), grads(t))
        for ours, theirs, datum in zip(
            expect_success(outcome).logprobs, expect_success(wanted).logprobs, datums(i), strict=True
        ):
            assert ours.shape == datum.targets.shape
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        for name, figure in expect_success(wanted).metrics.items():
            assert expect_success(outcome).metrics[name] == pytest.approx(figure, abs=1e-4)


@pytest.mark.parametrize("ours", [clipped_policy_loss, cross_entropy_loss])
def test_gradient_equals_the_trainers(engine: Engine, ours: Any) -> None:
    """The trainer takes means over tokens, the service's losses sums: the advantages contain the factor."""
    one, other = (trainer(engine, SHAPES[0], 1) for _ in range(2))
    rng = np.random.default_rng(3)
    samples, data = [], []
    total = 4 * 5
    for _ in range(4):
        prompt, answer = rng.integers(5, 250, 7), rng.integers(5, 250, 5)
        old, advantage = rng.normal(-5, 0.2, 5).astype(np.float32), rng.normal(0, 1, 5).astype(np.float32)
        samples.append(Sample(prompt, answer, old, advantage))
        ids = np.concatenate([prompt, answer]).astype(np.int64)
        spread = {"logprobs": old, "advantages": advantage / total, "weights": np.ones(5)}
        if ours is cross_entropy_loss:
            spread = {"weights": advantage / total}
        inputs = {k: np.concatenate([np.zeros(6), v]).astype(np.float32) for k, v in spread.items()}
        data.append(Datum(ids[:-1], ids[1:], inputs))
    wanted = one.forward_backward(samples, ours)
    name = "ppo" if ours is clipped_policy_loss else "cross_entropy"
    (outcome,) = run(engine, [Job(other, data, build_loss(name, {}))])
    assert_close(grads(other), grads(one), 1e-6)
    assert expect_success(outcome).metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-5)


def test_gradients_accumulate_over_calls_and_jobs(engine: Engine) -> None:
    parts, whole = (trainer(engine, SHAPES[0], 1) for _ in range(2))
    data = datums(0, 6)
    run(engine, [Job(parts, data[:2], NLL), Job(parts, data[2:4], NLL)])
    run(engine, [Job(parts, data[4:], NLL)])
    run(engine, [Job(whole, data, NLL)])
    assert_close(grads(parts), grads(whole))


def test_forward_only_pass_leaves_no_gradients(engine: Engine) -> None:
    looks, learns, alone = (trainer(engine, SHAPES[2], 1) for _ in range(3))
    outcomes = run(engine, [Job(looks, datums(0), NLL, backward=False), Job(learns, datums(1), NLL)])
    (learnt,) = run(engine, [Job(alone, datums(0), NLL)])
    assert all(w.grad is None for w in looks.parameters)
    assert all(w.grad is not None for w in learns.parameters)
    assert expect_success(outcomes[0]).metrics == pytest.approx(expect_success(learnt).metrics, abs=1e-4)
    (quiet,) = run(engine, [Job(looks, datums(0), NLL, backward=False)])
    assert expect_success(quiet).metrics == pytest.approx(expect_success(learnt).metrics, abs=1e-4)


def test_two_dimensional_targets_equal_separate_sequences(engine: Engine) -> None:
    """K targets at one position equal K sequences with one target each."""
    matrix, rows = trainer(engine, SHAPES[0], 1), trainer(engine, SHAPES[0], 1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 250, 8)
    targets, weights = rng.integers(0, 250, (8, 3)), rng.random((8, 3)).astype(np.float32)
    (ours,) = run(engine, [Job(matrix, [Datum(tokens, targets, {"weights": weights})], NLL)])
    columns = [Datum(tokens, targets[:, k], {"weights": weights[:, k]}) for k in range(3)]
    (theirs,) = run(engine, [Job(rows, columns, NLL)])
    assert_close(grads(matrix), grads(rows))
    np.testing.assert_allclose(
        expect_success(ours).logprobs[0], np.stack(expect_success(theirs).logprobs, 1), atol=LOGPROB_ATOL
    )


def half_weighted(datum: Datum) -> Datum:
    """The data of a prompt and its answer: the first half of the tokens has weight 0."""
    weights = datum.inputs["weights"] * (np.arange(len(datum.tokens)) >= len(datum.tokens) // 2)
    return Datum(datum.tokens, datum.targets, {**datum.inputs, "weights": weights})


@pytest.mark.parametrize("pack_tokens", [10_000, 30])
def test_zero_weight_tokens_may_be_skipped(engine: Engine, pack_tokens: int) -> None:
    """Gradients are the same, log-probabilities are the same where the weight is not 0, and other jobs get all of their
    log-probabilities."""
    sparse, _, other = trainers(engine)[:3]
    whole = trainer(engine, SHAPES[0], 0)
    data = [half_weighted(datum) for datum in datums(1)]
    silent = Datum(data[0].tokens, data[0].targets, {k: 0 * v for k, v in data[0].inputs.items()})
    jobs = [Job(sparse, [*data, silent], NLL, weighted_only=True), Job(other, datums(2), NLL)]
    ours, its = run(engine, jobs, pack_tokens)
    theirs, alone = run(engine, [Job(whole, [*data, silent], NLL), Job(trainers(engine)[2], datums(2), NLL)])
    assert_close(grads(sparse), grads(whole))
    for datum, logps, full in zip(data, expect_success(ours).logprobs, expect_success(theirs).logprobs, strict=False):
        heard = datum.inputs["weights"] != 0
        np.testing.assert_allclose(logps, np.where(heard, full, 0), atol=LOGPROB_ATOL)
    for logps, full in zip(expect_success(its).logprobs, expect_success(alone).logprobs, strict=True):
        np.testing.assert_allclose(logps, full, atol=LOGPROB_ATOL)


# -- failures --------------------------------------------------------------------------------------------------------


def refuses(predicted: JobLossInputs) -> Any:
    raise ValueError("not this")


def breaks(predicted: JobLossInputs) -> Any:
    raise RuntimeError("out of memory, say")


def not_a_number(predicted: JobLossInputs) -> Any:
    return predicted.logp_M.sum() * torch.nan, {}


def fails_backward(predicted: JobLossInputs) -> Any:
    loss = predicted.logp_M.sum()
    loss.register_hook(breaks)
    return loss, {}


@pytest.mark.parametrize("loss", [refuses, breaks, not_a_number, fails_backward])
@pytest.mark.parametrize("place", [0, 1])
def test_failed_job_leaves_gradients_unchanged(engine: Engine, loss: JobLossFunction, place: int) -> None:
    bad, fine, alone = (trainer(engine, SHAPES[0], seed) for seed in (1, 2, 2))
    run(engine, [Job(bad, datums(5), NLL)])
    before = [grad.clone() for grad in grads(bad)]
    jobs = [Job(fine, datums(0), NLL)]
    jobs.insert(place, Job(bad, datums(1), loss))
    outcomes = run(engine, jobs)
    assert isinstance(outcomes[place], (ValueError, RuntimeError))
    (wanted,) = run(engine, [Job(alone, datums(0), NLL)])
    assert_close(grads(fine), grads(alone))
    assert all(map(torch.equal, grads(bad), before))
    assert expect_success(outcomes[1 - place]).metrics == pytest.approx(expect_success(wanted).metrics, abs=1e-4)
    assert len(expect_success(outcomes[1 - place]).logprobs) == 4


def test_job_that_fails_midway_leaves_no_partial_gradient(engine: Engine) -> None:
    bad = trainer(engine, SHAPES[0], 1)
    calls = []

    def second(predicted: JobLossInputs) -> Any:
        calls.append(1)
        return NLL(predicted) if len(calls) == 1 else refuses(predicted)

    (outcome,) = run(engine, [Job(bad, datums(0), second)], pack_tokens=12)
    assert isinstance(outcome, ValueError) and len(calls) == 2
    assert all(w.grad is None for w in bad.parameters)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_one_adapter_does_not_spread(engine: Engine, place: int) -> None:
    """Padding is masked, but NaN times 0 is NaN, so each job needs its own padding."""
    wild, tame, alone = (trainer(engine, SHAPES[0], seed) for seed in (1, 2, 2))
    with torch.no_grad():
        for weight in wild.parameters:
            weight.fill_(torch.nan)
    jobs = [Job(tame, datums(0), NLL)]
    jobs.insert(place, Job(wild, datums(0), NLL))
    outcomes = run(engine, jobs)
    assert "the loss is nan" in str(outcomes[place])
    run(engine, [Job(alone, datums(0), NLL)])
    assert_close(grads(tame), grads(alone))
    assert all(w.grad is None for w in wild.parameters)


# -- losses ------------------------------------------------------------------------------------------------------------

# Two sequences, of two tokens and of one. Ratios exp(logp - old): 1/2, 2 and 5/4.
LOGP = np.log(np.array([0.25, 0.5, 0.5], np.float32))
OLD = np.log(np.array([0.5, 0.25, 0.4], np.float32))
ADVANTAGE, WEIGHT = [2.0, 1.0, -1.0], [1.0, 0.5, 2.0]
SEQUENCE = [0, 0, 1]


def loss_by_hand(
    name: str, options: dict[str, float], **inputs: list[float]
) -> tuple[float, list[float], dict[str, float]]:
    """A loss's value, its gradient with respect to the log-probabilities, and its metrics."""
    logp = torch.tensor(LOGP, requires_grad=True)
    given = {"weights": WEIGHT, **inputs}
    if name != "cross_entropy":  # `check.py` allows only the inputs of the loss
        given |= {"logprobs": OLD.tolist(), "advantages": ADVANTAGE}
    tensors = {key: torch.tensor(values) for key, values in given.items()}
    predicted = JobLossInputs(
        logp, tensors, torch.tensor(SEQUENCE), lambda read, index_A=None: read(torch.zeros(3, 4), slice(0, 3))
    )
    loss, figures = build_loss(name, options)(predicted)
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.tolist(), {key: value.item() for key, value in figures.items()}


@pytest.mark.parametrize(
    ("name", "options", "inputs", "value", "gradient"),
    [
        # -w logp
        ("cross_entropy", {}, {}, math.log(4) + 0.5 * math.log(2) + 2 * math.log(2), [-1, -0.5, -2]),
        # -w ratio A, whose gradient is itself
        ("importance_sampling", {}, {}, -1 * 0.5 * 2 - 0.5 * 2 * 1 + 2 * 1.25 * 1, [-1, -1, 2.5]),
        # -w min(ratio A, clip(ratio, .8, 1.2) A): min(1, 1.6), min(2, 1.2), min(-1.25, -1.2)
        ("ppo", {}, {}, -1 - 0.5 * 1.2 + 2 * 1.25, [-1, 0, 2.5]),
        ("ppo", {"clip_low_threshold": 0.4, "clip_high_threshold": 3.0}, {}, 0.5, [-1, -1, 2.5]),
        ("ppo", {}, {"clip_low_threshold": [0.4] * 3, "clip_high_threshold": [1.2, 3.0, 1.2]}, 0.5, [-1, -1, 2.5]),
        # entropy of four equal logits is log 4: 0.1 * (1 + 0.5 + 2) * log 4 less
        ("ppo", {"entropy": 0.1}, {}, 0.9 - 0.35 * math.log(4), [-1, 0, 2.5]),
        # -w clip(ratio, 0, 4) logp A, no gradient through the ratio
        (
            "cispo",
            {"clip_high_threshold": 1.5},
            {},
            math.log(4) * 0.5 * 2 + 0.5 * 1.5 * math.log(2) - 2 * 1.25 * math.log(2),
            [-1, -0.75, 2.5],
        ),
        # w (beta / 2 (logp - old)^2 - logp A)
        (
            "dro",
            {"beta": 0.5},
            {},
            0.25 * (1.5 * math.log(2) ** 2 + 2 * math.log(1.25) ** 2) + (2 * 2 + 0.5 - 2) * math.log(2),
            [-2 - 0.5 * math.log(2), -0.5 + 0.25 * math.log(2), 2 + math.log(1.25)],
        ),
        # the sequences' ratios are sqrt(1/2 * 2) = 1 and 5/4
        ("gspo", {}, {}, -2 - 0.5 + 2 * 1.25, [-2, -0.5, 2.5]),
        # of the first sequence only the second token counts: ratio 2, clipped to 1.2 where that is less
        ("gspo", {}, {"sequence_ratio_mask": [0.0, 1.0, 1.0]}, -2 * 1.2 - 0.5 * 1.2 + 2.5, [0, 0, 2.5]),
    ],
)  # fmt: skip
def test_wire_loss_by_hand(
    name: str, options: dict[str, float], inputs: dict[str, list[float]], value: float, gradient: list[float]
) -> None:
    ours, grad, figures = loss_by_hand(name, options, **inputs)
    assert ours == pytest.approx(value, abs=1e-5)
    assert grad == pytest.approx(gradient, abs=1e-5)
    assert ("entropy" in figures) == ("entropy" in options)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: f"{config.rank} on {config.target_modules}")
def test_sampler_scores_and_trainer_logprobs_agree(engine: Engine, config: LoraConfig) -> None:
    learner = trainer(engine, config, 1)
    assert learner.adapter is not None
    snapshot = learner.adapter.snapshot("x")
    prompt = np.arange(5, 17, dtype=np.int32)
    answers = Sampler(engine).sample_all([Request(prompt, 3, SamplingConfig(max_tokens=8), snapshot, seed=4)])[0]
    whole = [np.concatenate([prompt, answer.token_ids]).astype(np.int64) for answer in answers]
    scores = score_prompts(engine, [ScoreRequest(ids, snapshot) for ids in whole])
    data = [Datum(ids[:-1], ids[1:], {"weights": np.ones(len(ids) - 1, np.float32)}) for ids in whole]
    (outcome,) = run(engine, [Job(learner, data, NLL)])
    bare = score_prompts(engine, [ScoreRequest(ids) for ids in whole])
    for answer, scored, trained, base in zip(answers, scores, expect_success(outcome).logprobs, bare, strict=True):
        np.testing.assert_allclose(trained, scored.logprobs, atol=1e-4)
        np.testing.assert_allclose(answer.logprobs, trained[len(prompt) - 1 :], atol=1e-4)
        assert np.abs(base.logprobs - scored.logprobs).max() > 0.01


@pytest.mark.filterwarnings("ignore:Model has `tie_word:UserWarning", "ignore:Setting `save_embedding:UserWarning")
def test_lm_head_adapter_equals_peft(base: Path, tmp_path: Path) -> None:
    engine = Engine.load(str(base), device="cpu")
    learner = trainer(engine, SHAPES[2], 1)
    assert learner.adapter is not None
    save_adapter(tmp_path / "a", learner.adapter, str(base))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a").eval()
    assert any(name.endswith("lm_head.lora_A.default") for name, _ in model.named_modules())
    ids = np.random.default_rng(0).integers(5, 250, 20)
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=torch.tensor(ids[None, :-1])).logits[0], -1)
    (outcome,) = run(engine, [Job(learner, [Datum(ids[:-1], ids[1:], {"weights": np.ones(19, np.float32)})], NLL)])
    wanted = theirs.gather(1, torch.tensor(ids[1:, None]))[:, 0].numpy()
    np.testing.assert_allclose(expect_success(outcome).logprobs[0], wanted, atol=1e-4)
    back = load_adapter(tmp_path / "a", engine)
    assert list(back.weights) == list(learner.adapter.weights)
    assert all(map(torch.equal, back.parameters(), learner.adapter.parameters()))


def test_weighted_sum_of_adapters_is_exact(engine: Engine) -> None:
    sources = [trainer(engine, config, i).adapter for i, config in enumerate(SHAPES)]
    adapters, coefficients = [a for a in sources if a], [0.5, -2.0, 1.0, 3.0]
    mixed = weighted_sum(adapters, coefficients, engine.linear_layers)
    for name in mixed.weights:
        wanted = sum(
            c * a.scale_of(name) * (a.weights[name][1] @ a.weights[name][0])
            for c, a in zip(coefficients, adapters, strict=True)
            if name in a.weights
        )
        assert isinstance(wanted, torch.Tensor)
        ours = mixed.scale_of(name) * (mixed.weights[name][1] @ mixed.weights[name][0])
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


def test_adapter_loads_weights_of_its_own_shape_only(engine: Engine) -> None:
    ours, theirs = (trainer(engine, SHAPES[0], seed).adapter for seed in (1, 2))
    assert ours and theirs
    leaves = ours.parameters()
    ours.copy_from(theirs)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert all(a is b and a.requires_grad for a, b in zip(ours.parameters(), leaves, strict=True))
    for other in (SHAPES[1], LoraConfig(rank=4, alpha=5)):
        adapter = trainer(engine, other, 3).adapter
        assert adapter
        with pytest.raises(ValueError, match="another rank, scale or other targets"):
            ours.copy_from(adapter)
