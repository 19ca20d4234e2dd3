"""Reverse KL: worked by hand, against a plain computation, and as learning."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_models import random_adapter
from helpers.tolerances import GRADIENTS

from palestra.engine.bases.model import Engine
from palestra.engine.forward.tree_attention import TreeLayout, build_forest
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.routes import SingleAdapterRoute
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.distill import DistillExample, ReverseKL, reverse_kl
from palestra.engine.training.multi_adapter import Job, JobResult, train_jobs
from palestra.testing import tiny_lm

LESSONS = [
    DistillExample(np.array([5, 6, 7]), np.array([9, 8, 7, 6, 5]), np.array([11, 12, 13]), np.array([1.0, 0.5, 0.0])),
    DistillExample(np.array([5, 6]), np.array([4]), np.array([20]), np.array([2.0])),
]


@pytest.fixture
def engine() -> Engine:
    return tiny_lm(0, initializer_range=0.2)


def test_reverse_kl_of_two_tokens_by_hand() -> None:
    """Student (3/4, 1/4), reference (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2; its gradient is p (ln p/q - KL)."""
    student = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64, requires_grad=True)
    kl = reverse_kl(student, torch.zeros(1, 2, dtype=torch.float64), 1.0)
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.item() == pytest.approx(by_hand)
    kl.sum().backward()
    assert student.grad is not None
    slope = 0.75 * (math.log(1.5) - by_hand)
    assert student.grad[0].tolist() == pytest.approx([slope, -slope])


def test_reverse_kl_is_not_symmetric() -> None:
    """With student and reference swapped it is 1/2 ln 2/3 + 1/2 ln 2."""
    kl = reverse_kl(torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]]), 1.0)
    assert kl.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_temperature_divides_both_logits() -> None:
    """At temperature 2, logits (2 ln 3, 0) give (3/4, 1/4), and (2 ln 9, 0) give (9/10, 1/10)."""
    student, reference = torch.tensor([[2 * math.log(3), 0.0]]), torch.tensor([[2 * math.log(9), 0.0]])
    by_hand = 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)
    assert reverse_kl(student, reference, 2.0).item() == pytest.approx(by_hand, rel=1e-5)


def trainer(engine: Engine, seed: int, bent: float = 0.0) -> AdapterWeights:
    """A trainer of a new adapter, which equals the base unless `bent`."""
    return AdapterWeights(engine, random_adapter(engine, LoraConfig(rank=4), seed, bent))


def run(trainer: AdapterWeights, loss: ReverseKL, pack_tokens: int = 1000) -> JobResult:
    passes = train_jobs(trainer.engine, [Job(trainer, loss.data, loss)], pack_tokens)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            (outcome,) = end.value
            assert isinstance(outcome, JobResult), outcome
            return outcome


def logits(engine: Engine, adapter: Adapter | None, lesson: DistillExample, prompt: np.ndarray) -> torch.Tensor:
    """Logits at the answer's tokens, one sequence at a time, in the trainer's own layout."""
    forest = build_forest([np.concatenate([prompt, lesson.answer[:-1]])])
    keep = engine.tensor(np.arange(len(prompt) - 1, len(forest.ids_S)))
    layout, route = TreeLayout(forest, engine.device), SingleAdapterRoute(adapter) if adapter else None
    return engine.logits(engine.tensor(forest.ids_S), engine.tensor(forest.positions_S), layout, route, keep)


@pytest.mark.parametrize("pack_tokens", [1000, 3])
@pytest.mark.parametrize("of_base", [False, True])
def test_distillation_is_independent_of_packing(engine: Engine, pack_tokens: int, of_base: bool) -> None:
    student, teacher = trainer(engine, 1, bent=0.1), trainer(engine, 2, bent=0.1)
    assert student.adapter and teacher.adapter
    reference = None if of_base else teacher.adapter
    expected = []
    for lesson in LESSONS:
        theirs = logits(engine, reference, lesson, lesson.reference_prompt).detach()
        kl = reverse_kl(logits(engine, student.adapter, lesson, lesson.student_prompt), theirs, 1.5)
        expected.append((kl * torch.tensor(lesson.weights)).sum())
    torch.stack(expected).sum().backward()
    gradients = [p.grad for p in student.parameters]
    student.optimizer.zero_grad(set_to_none=True)
    loss = ReverseKL(engine, reference.snapshot() if reference else None, LESSONS, temperature=1.5)
    outcome = run(student, loss, pack_tokens)
    assert outcome.metrics["loss"] == pytest.approx(sum(e.item() for e in expected), rel=1e-4)
    assert loss.example_losses.tolist() == pytest.approx([e.item() for e in expected], rel=1e-4)
    for parameter, gradient in zip(student.parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **GRADIENTS)
    assert all(p.grad is None for p in teacher.parameters)


def test_student_matches_a_reference_with_a_longer_prompt(engine: Engine, check_score: Any) -> None:
    student, teacher = trainer(engine, 1), trainer(engine, 2, bent=0.1)
    assert teacher.adapter
    losses = []
    for _ in range(30):
        loss = ReverseKL(engine, teacher.adapter.snapshot(), LESSONS, temperature=1.0)
        losses.append(run(student, loss).metrics["loss"])
        student.optim_step(OptimConfig(lr=1e-2))
    check_score(losses[-1] / losses[0])
