"""Gradients for one adapter, or for a whole model, from samples that share as much computation as they have in common.

Samples become a forest (attention.py): a prompt once with its K answers, a conversation once with its later turns.
Large batches are cut into micro-batches of at most `pack_tokens`; their gradients add up, since every token carries its
share of the batch's mean. The same tokens, unpacked, give the same gradients to float tolerance.

Shapes: `S` tokens of a forest, `M` trained tokens, `V` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.config import Strict
from palestra.engine.attention import Forest, TreeLayout, plant
from palestra.engine.lora import Adapter, Single
from palestra.engine.loss_scale import LossScale
from palestra.engine.models import Engine
from palestra.engine.ranks import ALONE, Ranks
from palestra.engine.sharded import is_shard, own
from palestra.losses.policy import Figures, Scored
from palestra.types import Metrics, Sample

Precision = Literal["auto", "float32", "bf16", "fp16"]
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_REFERENCE = "a full model in training has no reference to hold to: train an adapter (type: lora)"
Loss = Callable[..., tuple[Tensor, Figures]]


class AdamConfig(Strict):
    """AdamW (Loshchilov & Hutter, 2019) with clipping of the gradient's norm (null: none)."""

    lr: float = Field(1e-3, ge=0, le=1_000_000)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = Field(1.0, gt=0)


@dataclass(frozen=True)
class Pack:
    """Samples of one micro-batch, and what each token of each counts in the mean."""

    samples: list[Sample]
    shares: list[float]


class Trainer:
    """Trains one adapter of an engine (`adapter` given) or all weights of its model (`adapter` None); with `critic` a
    linear head on the features of the last layer too, which says what each token's state is worth.

    `reference` is the adapter that penalties hold to (None: the bare base). `precision` is what products are computed
    in, the weights in training are kept as they are; with `checkpointing` a backward pass computes each decoder layer
    again. Each of several `ranks` is given all samples of a batch and passes its share of them; the gradients are
    summed before the optimizer's step, which is then that of one process.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter | None,
        *,
        pack_tokens: int = 16384,
        precision: Precision = "auto",
        checkpointing: bool = False,
        critic: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.engine, self.adapter, self.pack_tokens, self.ranks = engine, adapter, pack_tokens, ranks
        # a sharded model in training is gathered in that type: autocast would keep a second copy of what is gathered
        self.mixed = None if engine.shards and adapter is None else MIXED.get(precision)
        self.checkpointing = checkpointing
        self.scale = LossScale() if precision == "fp16" else None
        if adapter is None:
            engine.model.requires_grad_(True)
        self.critic = value_head(engine) if critic else None
        self.parameters = adapter.parameters() if adapter else list(engine.model.parameters())
        self.parameters += list(self.critic.parameters()) if self.critic else []
        self.reference: Adapter | None = None
        self.begin()

    def begin(self) -> None:
        """A fresh optimizer, for what this rank keeps of the parameters."""
        self.leaves = [own(parameter) for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.leaves, lr=1e-3)
        self.steps = 0

    def anchor(self) -> None:
        """From now on the reference is what the adapter is now."""
        if self.adapter is None:
            raise ValueError(NO_REFERENCE)
        self.reference = copy.deepcopy(self.adapter)

    def forward_backward(self, samples: Sequence[Sample], loss: Loss, **options: float) -> Metrics:
        """Adds the gradient of `loss` over `samples` to the parameters; returns the loss and its figures as floats."""
        return [{}, *self.passes(samples, loss, **options)][-1]

    def passes(self, samples: Sequence[Sample], loss: Loss, **options: float) -> Iterator[Metrics]:
        """`forward_backward` a micro-batch at a time: the figures so far after each, so that others may go between;
        the last are those of all ranks."""
        total: Metrics = {}
        parts = self._parts(samples)
        for pack in parts[self.ranks.rank]:
            value, figures = loss(self._score(pack, bonus=bool(options.get("entropy"))), **options)
            self._backward(value)
            for name, figure in {"loss": value.detach(), **figures}.items():
                total[name] = total.get(name, 0.0) + float(figure)
            if self.ranks.size == 1:
                yield total
        for pack in self._idle(parts):
            self._backward(_nothing(self._score(pack)))
        if self.ranks.size > 1 and samples:
            yield _added(self.ranks.gather(total))

    def _parts(self, samples: Sequence[Sample]) -> list[list[Pack]]:
        """The micro-batches of each rank."""
        share = share_of_one(samples)
        return [packs(hand, self.pack_tokens, share) for hand in hands(samples, self.ranks.size)]

    def _idle(self, parts: Sequence[Sequence[Pack]]) -> list[Pack]:
        """What this rank passes for nothing, so that it makes as many passes as those with the most: a pass of a
        sharded model is a meeting of all."""
        most = max(map(len, parts))
        if not self.engine.shards or not most:
            return []
        shortest = min((pack.samples[:1] for part in parts for pack in part), key=lambda s: len(s[0].prompt_ids))
        return [Pack(shortest, [0.0])] * (most - len(parts[self.ranks.rank]))

    def _backward(self, value: Tensor) -> None:
        (value * self.scale.value if self.scale else value).backward()

    def optim_step(self, adam: AdamConfig, *, lr: float | None = None) -> Metrics:
        """One optimizer step on the gradients gathered so far; returns the gradient's norm before clipping. In fp16
        also the loss's scale, and whether the step was left out since a gradient did not fit (its norm is then 0)."""
        for group in self.optimizer.param_groups:
            group.update(
                lr=adam.lr if lr is None else lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
            )
        norm = self._gather_gradients()
        fits = bool(torch.isfinite(norm))
        if fits:
            torch.nn.utils.clip_grads_with_norm_(self.leaves, adam.grad_clip or torch.inf, norm)
            self.optimizer.step()
            self.steps += 1
        for tensor in [*self.parameters, *self.leaves]:
            tensor.grad = None
        if not fits and not self.scale:
            raise ValueError(f"the gradient's norm is {float(norm)}. Lower the learning rate, or look for bad rewards.")
        figures = self.scale.note(fits) if self.scale else {}
        return {"grad_norm": float(norm) if fits else 0.0, **figures}

    def _gather_gradients(self) -> Tensor:
        """Gives each leaf the gradient of the whole batch; returns the norm of all, the same on every rank.

        Summed by hand, once a batch: an adapter is no module of the model, and ranks make different numbers of passes,
        while DistributedDataParallel wants a module whose every pass all ranks make together. Shards have met already.
        """
        if self.engine.shards:
            self.engine.shards.part()
        alike = [p for p in self.parameters if not is_shard(p)]
        if self.ranks.size > 1:
            for parameter in alike:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.ranks.sum([p.grad for p in alike if p.grad is not None])
        for leaf, parameter in zip(self.leaves, self.parameters, strict=True):
            if leaf is not parameter and parameter.grad is not None:
                leaf.grad = own(parameter.grad)
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        if self.scale:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        if len(alike) == len(self.parameters):
            return torch.nn.utils.get_total_norm(gradients)
        return self._norm_of_shards()

    def _norm_of_shards(self) -> Tensor:
        """The norm of all gradients where each rank has its rows of some."""
        pairs = list(zip(self.leaves, self.parameters, strict=True))
        parted = [leaf.grad for leaf, p in pairs if is_shard(p) and leaf.grad is not None]
        alike = [leaf.grad for leaf, p in pairs if not is_shard(p) and leaf.grad is not None]
        square = torch.nn.utils.get_total_norm(parted).square()
        self.ranks.sum([square])
        return (square + torch.nn.utils.get_total_norm(alike).square()).sqrt()

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Log-probabilities [T] of each sample's answer tokens under the current weights, or under the reference."""
        if reference and self.adapter is None:
            raise ValueError(NO_REFERENCE)
        adapter = self.reference if reference else self.adapter
        return self._each(samples, lambda rows: self._read(rows, adapter).logp_M)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """What the critic thinks [T] of the state in which each of a sample's answer tokens was drawn."""
        return self._each(samples, lambda rows: self._value(self._read(rows, self.adapter)))

    def _each(self, samples: Sequence[Sample], read: Callable[[Rows], Tensor]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        parts = self._parts(samples)
        for pack in parts[self.ranks.rank]:
            flat = read(Rows.lay(pack.samples, self.engine)).float().cpu().numpy()
            found += np.split(flat, np.cumsum([len(s.token_ids) for s in pack.samples])[:-1])
        for pack in self._idle(parts):
            read(Rows.lay(pack.samples, self.engine))
        return [each for part in self.ranks.gather(found) for each in part]

    def _read(self, rows: Rows, adapter: Adapter | None, *, bonus: bool = False) -> Reading:
        with self.engine.computing(self.mixed, recompute=self.checkpointing):
            return rows.of(self.engine, adapter, bonus=bonus)

    def _value(self, read: Reading) -> Tensor:
        if self.critic is None:
            raise ValueError("this policy has no critic: it was built for an algorithm without one")
        return self.critic(read.features_MH.float())[:, 0]

    def _score(self, pack: Pack, *, bonus: bool = False) -> Scored:
        """What the loss reads of `pack`; with `bonus` entropy with gradients."""
        read = self._read(Rows.lay(pack.samples, self.engine), self.adapter, bonus=bonus)
        return scored(pack, read.logp_M, read.entropy_M, self._value(read) if self.critic else None)


def _nothing(tokens: Scored) -> Tensor:
    """A loss of zero, whose gradients are zero."""
    return 0.0 * (tokens.logp_M.sum() + (0.0 if tokens.value_M is None else tokens.value_M.sum()))


def _added(parts: Sequence[Metrics]) -> Metrics:
    """The sums of all parts' figures."""
    total: Metrics = {}
    for part in parts:
        for name, figure in part.items():
            total[name] = total.get(name, 0.0) + figure
    return total


class Reading(NamedTuple):
    """What a model says of `M` answer tokens: their log-probabilities, the entropies, and the features [M, H] that the
    logits were made of."""

    logp_M: Tensor
    entropy_M: Tensor
    features_MH: Tensor


@dataclass(frozen=True)
class Rows:
    """Samples laid out for a pass: where their `M` answer tokens are predicted, and which they are."""

    forest: Forest
    layout: TreeLayout
    rows_M: np.ndarray
    targets_M: np.ndarray
    temperature_M: np.ndarray

    @classmethod
    def lay(cls, samples: Sequence[Sample], engine: Engine) -> Rows:
        forest, rows_M, targets_M = lay_out(samples)
        temperature_M = _spread([s.temperature or 1.0 for s in samples], samples)
        return cls(forest, TreeLayout(forest, engine.device), rows_M, targets_M, temperature_M)

    def of(self, engine: Engine, adapter: Adapter | None, *, bonus: bool = False) -> Reading:
        """What the model says with `adapter`. Each distinct row of logits is computed once; `bonus` wants entropies
        with gradients."""
        keep, of_token_M = np.unique(self.rows_M, return_inverse=True)
        tensor, route = engine.tensor, Single(adapter) if adapter else None
        logits, features = engine.logits_and_features(
            tensor(self.forest.ids_S), tensor(self.forest.positions_S), self.layout, route, tensor(keep)
        )
        index_M = tensor(of_token_M)
        logits_MV = logits.float().index_select(0, index_M)
        if (self.temperature_M != 1).any():
            logits_MV = logits_MV / tensor(self.temperature_M, torch.float32)[:, None]
        logp_MV = torch.log_softmax(logits_MV, -1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bonus):
            entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
        logp_M = logp_MV.gather(1, tensor(self.targets_M)[:, None])[:, 0]
        return Reading(logp_M, entropy_M, features.index_select(0, index_M))


def value_head(engine: Engine) -> nn.Linear:
    """A critic that thinks every state worth nothing."""
    head = nn.Linear(engine.model.get_output_embeddings().in_features, 1, device=engine.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def lay_out(samples: Sequence[Sample]) -> tuple[Forest, np.ndarray, np.ndarray]:
    """The forest of `samples`, and for each of the `M` answer tokens the flat row that predicts it and the token."""
    sequences = [np.concatenate([s.prompt_ids, s.token_ids[:-1]]).astype(np.int64) for s in samples]
    forest = plant(sequences)
    rows = [path[len(s.prompt_ids) - 1 :] for s, path in zip(samples, forest.paths, strict=True)]
    return forest, np.concatenate(rows), np.concatenate([s.token_ids for s in samples]).astype(np.int64)


def share_of_one(samples: Sequence[Sample]) -> float:
    """What a token of weight one counts in the mean over the answer tokens of `samples` (Yu et al., 2025, eq. 12), each
    counted by its sample's own weight."""
    return 1.0 / (sum(s.weight * len(s.token_ids) for s in samples) or 1.0)


def packs(samples: Sequence[Sample], tokens: int, share: float | None = None) -> list[Pack]:
    """`samples` in micro-batches of at most `tokens` before sharing (one group alone may exceed it), in their order.
    `share` is what a token counts (None: these samples are a whole batch)."""
    share = share_of_one(samples) if share is None else share
    result: list[Pack] = []
    part: list[Sample] = []
    size = 0
    for group in together(samples):
        length = _length(group)
        if part and size + length > tokens:
            result.append(Pack(part, [share * s.weight for s in part]))
            part, size = [], 0
        part += group
        size += length
    return [*result, Pack(part, [share * s.weight for s in part])] if part else result


def hands(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """`samples` in `count` runs of about as many tokens each, so that most with a prompt in common stay together; those
    of one group always do."""
    groups = together(samples)
    ends = np.cumsum([_length(group) for group in groups])
    result: list[list[Sample]] = [[] for _ in range(count)]
    for group, end in zip(groups, ends.tolist(), strict=True):
        middle = end - _length(group) / 2
        result[int(middle * count / ends[-1])] += group
    return result


def _length(group: Sequence[Sample]) -> int:
    return sum(len(s.prompt_ids) + len(s.token_ids) for s in group)


def scored(pack: Pack, logp_M: Tensor, entropy_M: Tensor, value_M: Tensor | None = None) -> Scored:
    """What a loss reads of a micro-batch, given what a model says of its answer tokens; where `logp_M` is."""
    samples, lengths = pack.samples, [len(s.token_ids) for s in pack.samples]

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=logp_M.device)

    def joined(field: str) -> Tensor:
        return tensor(np.concatenate([getattr(s, field) for s in samples]))

    def given(field: str) -> Tensor | None:
        return None if any(getattr(s, field) is None for s in samples) else joined(field)

    return Scored(
        logp_M,
        entropy_M,
        joined("logprobs"),
        given("reference"),
        joined("advantages"),
        tensor(_spread(pack.shares, samples)),
        tensor(np.repeat(np.arange(len(samples)), lengths), torch.long),
        tensor(np.repeat(_numbers(samples), lengths), torch.long),
        value_M,
        given("values"),
        given("returns"),
    )


def together(samples: Sequence[Sample]) -> list[list[Sample]]:
    """`samples` as they may be parted: neighbours of one group stay together, others are alone."""
    groups: list[list[Sample]] = []
    for sample in samples:
        if groups and sample.group >= 0 and sample.group == groups[-1][-1].group:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _numbers(samples: Sequence[Sample]) -> np.ndarray:
    """The number of each sample's group among these."""
    groups = together(samples)
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def _spread(values: Sequence[float], samples: Sequence[Sample]) -> np.ndarray:
    return np.repeat(np.asarray(values, np.float32), [len(s.token_ids) for s in samples])
