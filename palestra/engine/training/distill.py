"""On-policy distillation of a reference into a student with another prompt: reverse KL over the whole vocabulary.

The student samples an answer and learns, at each of its tokens, the reference's next-token distribution (Gu et al.,
2024, MiniLLM; Agarwal et al., 2024, on-policy distillation). The reference may have more context than the student: a
worked example, or the other agent's observation.

Shapes: `T` tokens of an answer, `A` answer tokens of several examples, `V` vocabulary; `M` scored targets of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.types import Datum
from palestra.engine.bases.model import Engine
from palestra.engine.forward.logits import widen
from palestra.engine.forward.tree_attention import build_forest
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.lora.routes import AdapterStack, MultiAdapterRoute
from palestra.engine.training.multi_adapter import JobLossInputs


@dataclass(frozen=True)
class DistillExample:
    """An `answer` [T] (int) with token `weights` [T] (float), after the `student_prompt` prompt and after the
    `reference_prompt` prompt (int token ids). Neither prompt nor answer may be empty."""

    student_prompt: np.ndarray
    reference_prompt: np.ndarray
    answer: np.ndarray
    weights: np.ndarray


def reverse_kl(student_AV: Tensor, reference_AV: Tensor, temperature: float) -> Tensor:
    """Returns KL(student || reference) [A] in nats, of the distributions given by two sets of logits at
    `temperature`."""
    student_logp_AV = torch.log_softmax(student_AV / temperature, -1)
    reference_logp_AV = torch.log_softmax(reference_AV / temperature, -1)
    return (student_logp_AV.exp() * (student_logp_AV - reference_logp_AV)).sum(-1)


class ReverseKL:
    """The loss of a job on `data`: the weighted sum of the reverse KL of each answer token. Gradients flow to the
    student only. `example_losses` (float64) holds the loss of each example; it is overwritten rather than accumulated,
    since a job processes its data in parts and may repeat a part."""

    def __init__(
        self, engine: Engine, reference: Snapshot | None, examples: Sequence[DistillExample], *, temperature: float
    ) -> None:
        self.engine = engine
        self.reference = reference
        self.examples = examples
        self.temperature = temperature
        self.example_losses = torch.zeros(len(examples), dtype=torch.float64)

    @property
    def data(self) -> list[Datum]:
        """Training sequences of the student: prompt and answer, with the example's index at the answer tokens and -1
        before."""
        return [_datum(number, example) for number, example in enumerate(self.examples)]

    def __call__(self, predicted: JobLossInputs) -> tuple[Tensor, TensorMetrics]:
        asked_A = (predicted.inputs["lesson"] >= 0).nonzero()[:, 0]
        lesson_A = predicted.inputs["lesson"][asked_A].long()
        numbers = lesson_A.unique_consecutive()
        reference = _Reference(self.engine, self.reference, [self.examples[i] for i in numbers.tolist()])

        def read(student_CV: Tensor, rows: slice) -> Tensor:
            return reverse_kl(student_CV, reference.logits(rows), self.temperature)

        kl_A = predicted.map_logits(read, asked_A)
        loss_A = kl_A * predicted.inputs["weights"][asked_A]
        sums = torch.zeros_like(self.example_losses).index_add_(0, lesson_A.cpu(), loss_A.detach().double().cpu())
        seen = lesson_A.unique().cpu()  # assigned, not accumulated: a failed pass is repeated
        self.example_losses[seen] = sums[seen]
        return loss_A.sum(), {}


def _datum(number: int, example: DistillExample) -> Datum:
    tokens = np.concatenate([example.student_prompt, example.answer]).astype(np.int64)
    before = np.zeros(len(example.student_prompt) - 1, np.float32)
    weights = np.concatenate([before, example.weights]).astype(np.float32)
    numbers = np.concatenate([before - 1, np.full(len(example.answer), number, np.float32)])
    return Datum(tokens[:-1], tokens[1:], {"weights": weights, "lesson": numbers})


class _Reference:
    """The last hidden states of the reference at the answer tokens of `lessons`, example by example."""

    @torch.no_grad()
    def __init__(self, engine: Engine, adapter: Snapshot | None, lessons: Sequence[DistillExample]) -> None:
        self.engine = engine
        self.stack = AdapterStack([adapter], engine.linear_layers) if adapter else None
        forest = build_forest([np.concatenate([x.reference_prompt, x.answer[:-1]]).astype(np.int64) for x in lessons])
        paths = zip(lessons, forest.paths, strict=True)
        read = np.concatenate([path[len(x.reference_prompt) - 1 :] for x, path in paths])
        keep, row_A = np.unique(read, return_inverse=True)
        hidden_RH = engine.forest_states(forest, self._route(len(forest.ids_S)), keep)
        self.hidden_AH = hidden_RH.index_select(0, engine.tensor(row_A))

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor:
        """Returns the logits [C, V] float32 at some of the answer tokens."""
        hidden_CH = self.hidden_AH[rows]
        return widen(self.engine.head_logits(hidden_CH, self._route(len(hidden_CH))))

    def _route(self, rows: int) -> MultiAdapterRoute | None:
        return MultiAdapterRoute(self.stack, [rows]) if self.stack else None
