"""Gradients for one adapter, or for a whole model, from samples that share as much computation as they have in common.

Samples become a forest (attention.py): a prompt once with its K answers, a conversation once with its later turns.
Large batches are cut into micro-batches of at most `pack_tokens`; their gradients add up, since every token carries its
share of the batch's mean. The same tokens, unpacked, give the same gradients to float tolerance.

Shapes: `S` tokens of a forest, `M` trained tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Strict
from palestra.engine.attention import Forest, TreeLayout, plant
from palestra.engine.lora import Adapter, Single
from palestra.engine.models import Engine
from palestra.losses.policy import Figures, Scored
from palestra.types import Metrics, Sample

Loss = Callable[..., tuple[Tensor, Figures]]


class AdamConfig(Strict):
    """AdamW (Loshchilov & Hutter, 2019) with clipping of the gradient's norm (null: none)."""

    lr: float = Field(1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = Field(1.0, gt=0)


@dataclass(frozen=True)
class Pack:
    """Samples of one micro-batch with each sample's share of the mean per token."""

    samples: list[Sample]
    shares: list[float]


class Trainer:
    """Trains one adapter of an engine (`adapter` given) or all weights of its model (`adapter` None)."""

    def __init__(self, engine: Engine, adapter: Adapter | None, *, pack_tokens: int = 16384, autocast: bool = False):
        self.engine, self.adapter, self.pack_tokens, self.autocast = engine, adapter, pack_tokens, autocast
        if adapter is None:
            engine.model.requires_grad_(True)
        self.parameters = adapter.parameters() if adapter else list(engine.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.steps = 0

    def forward_backward(self, samples: Sequence[Sample], loss: Loss, *, kl: float = 0.0, **options: float) -> Metrics:
        """Adds the gradient of `loss` over `samples` to the parameters; returns the loss and its figures as floats."""
        if kl and self.adapter is None:
            raise ValueError("a KL penalty needs a reference, and a full model in training has none: train an adapter")
        total: dict[str, float] = {}
        for pack in packs(samples, self.pack_tokens):
            scored = self._score(pack, reference=kl > 0, bonus=bool(options.get("entropy")))
            value, figures = loss(scored, kl=kl, **options) if kl else loss(scored, **options)
            value.backward()
            for name, figure in {"loss": value.detach(), **figures}.items():
                total[name] = total.get(name, 0.0) + float(figure)
        return total

    def optim_step(self, adam: AdamConfig, *, lr: float | None = None) -> Metrics:
        """One optimizer step on the gradients gathered so far; returns the gradient's norm before clipping."""
        for group in self.optimizer.param_groups:
            group.update(
                lr=adam.lr if lr is None else lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, adam.grad_clip or torch.inf)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise ValueError(f"the gradient's norm is {float(norm)}. Lower the learning rate, or look for bad rewards.")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm": float(norm)}

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities [T] of each sample's answer tokens under the current weights."""
        scores = []
        for pack in packs(samples, self.pack_tokens):
            flat = self._score(pack).logp_M.float().cpu().numpy()
            scores += np.split(flat, np.cumsum([len(s.token_ids) for s in pack.samples])[:-1])
        return scores

    def _score(self, pack: Pack, *, reference: bool = False, bonus: bool = False) -> Scored:
        """What the loss reads of `pack`: with `reference` under the base too, with `bonus` entropy with gradients."""
        samples, device = pack.samples, self.engine.device
        forest, rows_M, targets_M = lay_out(samples)
        layout = TreeLayout(forest, device)
        temperature_M = _spread([s.temperature or 1.0 for s in samples], samples)
        inputs = (forest, layout, rows_M, targets_M, temperature_M)
        ref_logp_M = None
        if reference:
            with torch.no_grad():
                ref_logp_M = self._logp(*inputs, adapter=None)[0]
        logp_M, entropy_M = self._logp(*inputs, adapter=self.adapter, bonus=bonus)
        flat = {
            "old": np.concatenate([s.logprobs for s in samples]),
            "advantage": np.concatenate([s.advantages for s in samples]),
            "weight": _spread(pack.shares, samples),
        }
        old, advantage, weight = (torch.as_tensor(v, dtype=torch.float32, device=device) for v in flat.values())
        sequence = self.engine.tensor(np.repeat(np.arange(len(samples)), [len(s.token_ids) for s in samples]))
        return Scored(logp_M, entropy_M, old, ref_logp_M, advantage, weight, sequence)

    def _logp(
        self,
        forest: Forest,
        layout: TreeLayout,
        rows_M: np.ndarray,
        targets_M: np.ndarray,
        temperature_M: np.ndarray,
        *,
        adapter: Adapter | None,
        bonus: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [M] of the target tokens. Each distinct row of logits is computed once."""
        keep, of_token_M = np.unique(rows_M, return_inverse=True)
        tensor, route = self.engine.tensor, Single(adapter) if adapter else None
        with torch.autocast(self.engine.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.engine.logits(
                tensor(forest.ids_S), tensor(forest.positions_S), layout, route, tensor(keep)
            ).float()
        logits_MV = logits.index_select(0, tensor(of_token_M))
        if (temperature_M != 1).any():
            logits_MV = logits_MV / tensor(temperature_M, torch.float32)[:, None]
        logp_MV = torch.log_softmax(logits_MV, -1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bonus):
            entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
        return logp_MV.gather(1, tensor(targets_M)[:, None])[:, 0], entropy_M


def lay_out(samples: Sequence[Sample]) -> tuple[Forest, np.ndarray, np.ndarray]:
    """The forest of `samples`, and for each of the `M` answer tokens the flat row that predicts it and the token."""
    sequences = [np.concatenate([s.prompt_ids, s.token_ids[:-1]]).astype(np.int64) for s in samples]
    forest = plant(sequences)
    rows = [path[len(s.prompt_ids) - 1 :] for s, path in zip(samples, forest.paths, strict=True)]
    return forest, np.concatenate(rows), np.concatenate([s.token_ids for s in samples]).astype(np.int64)


def packs(samples: Sequence[Sample], tokens: int) -> list[Pack]:
    """`samples` in micro-batches of at most `tokens` before sharing (one sample alone may exceed it), in their order,
    with weights that make the whole a mean over answer tokens (Yu et al., 2025, eq. 12)."""
    share = 1.0 / max(1, sum(len(s.token_ids) for s in samples))
    result: list[Pack] = []
    part: list[Sample] = []
    size = 0
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.token_ids)
        if part and size + length > tokens:
            result.append(Pack(part, [share] * len(part)))
            part, size = [], 0
        part.append(sample)
        size += length
    return [*result, Pack(part, [share] * len(part))] if part else result


def _spread(values: Sequence[float], samples: Sequence[Sample]) -> np.ndarray:
    return np.repeat(np.asarray(values, np.float32), [len(s.token_ids) for s in samples])
