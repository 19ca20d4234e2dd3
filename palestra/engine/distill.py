"""Distillation of a reference into a student that reads another prompt: reverse KL over the whole vocabulary.

The student answers in its own words and learns, at each of them, how the reference would have gone on (Gu et al., 2024,
MiniLLM; Agarwal et al., 2024, on-policy distillation). The reference may be told more than the student: a worked
example, the other agent's view.

Shapes: `T` tokens of an answer, `A` answer tokens of several lessons, `V` vocabulary; `M` scored targets of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.engine.attention import TreeLayout, plant
from palestra.engine.joint import Predicted
from palestra.engine.lora import Snapshot, Stack, Stacked
from palestra.engine.models import Engine
from palestra.losses.policy import Figures
from palestra.types import Datum


@dataclass(frozen=True)
class Lesson:
    """An `answer` [T] with its tokens' `weights` [T], after what the student read and after what the reference reads.
    Neither prompt is empty, nor is the answer."""

    student: np.ndarray
    reference: np.ndarray
    answer: np.ndarray
    weights: np.ndarray


def reverse_kl(student_AV: Tensor, reference_AV: Tensor, temperature: float) -> Tensor:
    """KL(student || reference) [A], in nats, of the distributions that two sets of logits mean at `temperature`."""
    student_logp_AV = torch.log_softmax(student_AV / temperature, -1)
    reference_logp_AV = torch.log_softmax(reference_AV / temperature, -1)
    return (student_logp_AV.exp() * (student_logp_AV - reference_logp_AV)).sum(-1)


class ReverseKL:
    """The loss of a job on `data`: each answer token's reverse KL times its weight, summed. Gradients reach the student
    alone. `sums` holds what each lesson came to: a job sees its data a part at a time, and may see a part again."""

    def __init__(
        self, engine: Engine, reference: Snapshot | None, lessons: Sequence[Lesson], *, temperature: float
    ) -> None:
        self.engine, self.reference, self.lessons, self.temperature = engine, reference, lessons, temperature
        self.sums = torch.zeros(len(lessons), dtype=torch.float64)

    @property
    def data(self) -> list[Datum]:
        """What the student is shown: prompt and answer, with the number of the lesson at the answer's tokens and -1
        before."""
        return [_datum(number, lesson) for number, lesson in enumerate(self.lessons)]

    def __call__(self, predicted: Predicted) -> tuple[Tensor, Figures]:
        asked_A = (predicted.inputs["lesson"] >= 0).nonzero()[:, 0]
        lesson_A = predicted.inputs["lesson"][asked_A].long()
        numbers = lesson_A.unique_consecutive()
        reference_AV = _reference_logits(self.engine, self.reference, [self.lessons[i] for i in numbers.tolist()])
        kl_A = reverse_kl(predicted.logits_MV().index_select(0, asked_A), reference_AV, self.temperature)
        loss_A = kl_A * predicted.inputs["weights"][asked_A]
        sums = torch.zeros_like(self.sums).index_add_(0, lesson_A.cpu(), loss_A.detach().double().cpu())
        seen = lesson_A.unique().cpu()  # set, not added to: a pass that fails is done again
        self.sums[seen] = sums[seen]
        return loss_A.sum(), {}


def _datum(number: int, lesson: Lesson) -> Datum:
    tokens = np.concatenate([lesson.student, lesson.answer]).astype(np.int64)
    before = np.zeros(len(lesson.student) - 1, np.float32)
    weights = np.concatenate([before, lesson.weights]).astype(np.float32)
    numbers = np.concatenate([before - 1, np.full(len(lesson.answer), number, np.float32)])
    return Datum(tokens[:-1], tokens[1:], {"weights": weights, "lesson": numbers})


@torch.no_grad()
def _reference_logits(engine: Engine, reference: Snapshot | None, lessons: Sequence[Lesson]) -> Tensor:
    """Logits [A, V] at the answers' tokens, lesson by lesson, after the reference's prompts."""
    forest = plant([np.concatenate([x.reference, x.answer[:-1]]).astype(np.int64) for x in lessons])
    rows_A = np.concatenate([path[len(x.reference) - 1 :] for x, path in zip(lessons, forest.paths, strict=True)])
    keep, row_A = np.unique(rows_A, return_inverse=True)
    route = Stacked(Stack([reference], engine.linears), [len(forest.ids_S)]) if reference else None
    ids_S, positions_S = engine.tensor(forest.ids_S), engine.tensor(forest.positions_S)
    layout = TreeLayout(forest, engine.device)
    logits = engine.logits(ids_S, positions_S, layout, route, engine.tensor(keep)).float()
    return logits.index_select(0, engine.tensor(row_A))
