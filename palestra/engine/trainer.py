"""Gradients for one adapter or a whole model, from samples that share the computation of common prefixes.

Samples become a forest (attention.py): a prompt once with its K answers, a conversation once with its later turns.
Large batches are cut into micro-batches of at most `pack_tokens`; their gradients add up, since every token is weighted
by its share of the batch mean. The gradients equal those of unpacked samples up to floating-point tolerance.

Shapes: `S` tokens of a forest, `M` trained tokens, `H` width of the model, `V` vocabulary.
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
    """AdamW (Loshchilov & Hutter, 2019) with clipping of the gradient norm."""

    lr: float = Field(1e-3, ge=0, le=1_000_000)
    """Learning rate, at least 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's first and second moment."""
    eps: float = 1e-8
    """Constant added to Adam's denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient; null for no clipping."""


@dataclass(frozen=True)
class Pack:
    """The samples of one micro-batch, and the weight of each token of each sample in the batch mean."""

    samples: list[Sample]
    shares: list[float]


class Trainer:
    """Trains one adapter of an engine, or all weights of its model (`adapter` None). With `critic`, also trains a
    linear value head on the last layer's features.

    `reference` is the adapter of KL penalties (None: the bare base). `precision` is the dtype of the products; the
    trained weights keep their dtype. `checkpointing` recomputes each decoder layer in the backward pass. With several
    `ranks`, each rank gets all samples of a batch and processes its part; gradients are summed before the optimizer
    step, which then equals that of one process.
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
        # a sharded model in training is gathered in that dtype: autocast would keep a second copy
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
        """Creates a new optimizer for this rank's part of the parameters, and sets the step count to 0."""
        self.leaves = [own(parameter) for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.leaves, lr=1e-3)
        self.steps = 0

    def anchor(self) -> None:
        """Makes a copy of the current adapter the reference. Raises ValueError for a full model."""
        if self.adapter is None:
            raise ValueError(NO_REFERENCE)
        self.reference = copy.deepcopy(self.adapter)

    def forward_backward(self, samples: Sequence[Sample], loss: Loss, **options: float) -> Metrics:
        """Adds the gradient of `loss` over `samples` to the parameters; returns the loss and its metrics."""
        return [{}, *self.passes(samples, loss, **options)][-1]

    def passes(self, samples: Sequence[Sample], loss: Loss, **options: float) -> Iterator[Metrics]:
        """Runs `forward_backward` one micro-batch at a time; yields the metrics so far after each, so that other work
        can run in between. The last metrics are those of all ranks."""
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
        """Returns the micro-batches of each rank."""
        share = share_of_one(samples)
        return [packs(hand, self.pack_tokens, share) for hand in hands(samples, self.ranks.size)]

    def _idle(self, parts: Sequence[Sequence[Pack]]) -> list[Pack]:
        """Returns dummy micro-batches of weight 0, so that this rank makes as many passes as the rank with the most:
        passes of a sharded model are collective."""
        most = max(map(len, parts))
        if not self.engine.shards or not most:
            return []
        shortest = min((pack.samples[:1] for part in parts for pack in part), key=lambda s: len(s[0].prompt_ids))
        return [Pack(shortest, [0.0])] * (most - len(parts[self.ranks.rank]))

    def _backward(self, value: Tensor) -> None:
        (value * self.scale.value if self.scale else value).backward()

    def optim_step(self, adam: AdamConfig, *, lr: float | None = None) -> Metrics:
        """Makes one optimizer step on the accumulated gradients; returns the gradient norm before clipping.

        In fp16 also returns the loss scale, and whether the step was skipped because a gradient overflowed (its norm is
        then 0). Raises ValueError if the norm is not finite and there is no loss scale.
        """
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
        """Sums the gradients over the ranks; returns the total norm, which is equal on all ranks.

        Not done by DistributedDataParallel: that needs a module whose passes all ranks make together, while an adapter
        is no module of the model and ranks make different numbers of passes. Sharded gradients are already reduced.
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
        """Returns the norm of all gradients if each rank has only its rows of some."""
        pairs = list(zip(self.leaves, self.parameters, strict=True))
        parted = [leaf.grad for leaf, p in pairs if is_shard(p) and leaf.grad is not None]
        alike = [leaf.grad for leaf, p in pairs if not is_shard(p) and leaf.grad is not None]
        square = torch.nn.utils.get_total_norm(parted).square()
        self.ranks.sum([square])
        return (square + torch.nn.utils.get_total_norm(alike).square()).sqrt()

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Returns log-probabilities [T] float32 of each sample's answer tokens under the current weights, or under the
        reference. Raises ValueError for the reference of a full model."""
        if reference and self.adapter is None:
            raise ValueError(NO_REFERENCE)
        adapter = self.reference if reference else self.adapter
        return self._each(samples, lambda rows: self._read(rows, adapter).logp_M)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the critic's values [T] float32 of the states before each of a sample's answer tokens. Raises
        ValueError without a critic."""
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
        """Returns the loss inputs of `pack`; with `bonus`, the entropy has gradients."""
        read = self._read(Rows.lay(pack.samples, self.engine), self.adapter, bonus=bonus)
        return scored(pack, read.logp_M, read.entropy_M, self._value(read) if self.critic else None)


def _nothing(tokens: Scored) -> Tensor:
    """Returns a loss of zero with zero gradients."""
    return 0.0 * (tokens.logp_M.sum() + (0.0 if tokens.value_M is None else tokens.value_M.sum()))


def _added(parts: Sequence[Metrics]) -> Metrics:
    """Returns the sum of each metric over all parts."""
    total: Metrics = {}
    for part in parts:
        for name, figure in part.items():
            total[name] = total.get(name, 0.0) + figure
    return total


class Reading(NamedTuple):
    """Model outputs for `M` answer tokens: log-probabilities [M] and entropies [M], float32, and the features [M, H]
    from which the logits were computed."""

    logp_M: Tensor
    entropy_M: Tensor
    features_MH: Tensor


@dataclass(frozen=True)
class Rows:
    """Samples packed for a pass: the flat rows that predict the `M` answer tokens (int64), the tokens (int64), and the
    temperatures (float32)."""

    forest: Forest
    layout: TreeLayout
    rows_M: np.ndarray
    targets_M: np.ndarray
    temperature_M: np.ndarray

    @classmethod
    def lay(cls, samples: Sequence[Sample], engine: Engine) -> Rows:
        """Packs `samples`."""
        forest, rows_M, targets_M = lay_out(samples)
        temperature_M = _spread([s.temperature or 1.0 for s in samples], samples)
        return cls(forest, TreeLayout(forest, engine.device), rows_M, targets_M, temperature_M)

    def of(self, engine: Engine, adapter: Adapter | None, *, bonus: bool = False) -> Reading:
        """Computes the outputs of the model with `adapter`. Each distinct row of logits is computed once; with `bonus`,
        entropies have gradients."""
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
    """Returns a linear value head [H → 1], float32, initialised to zero."""
    head = nn.Linear(engine.model.get_output_embeddings().in_features, 1, device=engine.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def lay_out(samples: Sequence[Sample]) -> tuple[Forest, np.ndarray, np.ndarray]:
    """Returns the forest of `samples`, the flat row that predicts each of the `M` answer tokens, and the tokens, both
    int64 [M]."""
    sequences = [np.concatenate([s.prompt_ids, s.token_ids[:-1]]).astype(np.int64) for s in samples]
    forest = plant(sequences)
    rows = [path[len(s.prompt_ids) - 1 :] for s, path in zip(samples, forest.paths, strict=True)]
    return forest, np.concatenate(rows), np.concatenate([s.token_ids for s in samples]).astype(np.int64)


def share_of_one(samples: Sequence[Sample]) -> float:
    """Returns the weight of a token in the mean over all answer tokens of `samples` (Yu et al., 2025, eq. 12), for a
    sample weight of 1."""
    return 1.0 / (sum(s.weight * len(s.token_ids) for s in samples) or 1.0)


def packs(samples: Sequence[Sample], tokens: int, share: float | None = None) -> list[Pack]:
    """Splits `samples`, in order, into micro-batches of at most `tokens` tokens counted before sharing (a single group
    may exceed it). `share` is the weight of a token (None: these samples are a whole batch)."""
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
    """Splits `samples` into `count` consecutive runs of similar numbers of tokens. Samples of one group stay together;
    most samples with a common prompt do."""
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
    """Builds the loss inputs of a micro-batch from the model's outputs at its answer tokens, on the device of `logp_M`.
    `entropy_M` and `value_M` are [M] too."""
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
    """Splits `samples` into units that must not be separated: neighbours of one group, or a single sample without a
    group."""
    groups: list[list[Sample]] = []
    for sample in samples:
        if groups and sample.group >= 0 and sample.group == groups[-1][-1].group:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _numbers(samples: Sequence[Sample]) -> np.ndarray:
    """Returns the index of each sample's group."""
    groups = together(samples)
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def _spread(values: Sequence[float], samples: Sequence[Sample]) -> np.ndarray:
    return np.repeat(np.asarray(values, np.float32), [len(s.token_ids) for s in samples])
