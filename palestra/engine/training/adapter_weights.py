"""Gradients for one adapter or a whole model, from samples that share the computation of common prefixes.

Samples become a forest (tree_attention.py): a prompt once with its K answers, a conversation once with its later turns.
Large batches are cut into micro-batches of at most `micro_batch_tokens`; their gradients add up, since every token is
weighted by its share of the batch mean. The gradients equal those of unpacked samples up to floating-point tolerance.

Shapes: `S` tokens of a forest, `M` trained tokens, `H` width of the model, `V` vocabulary.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from palestra.core.losses import LossFunction, LossInputs, has_dropout
from palestra.core.optimizers import AdamW, OptimizedPolicy, OptimizerConfig
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, Sample
from palestra.engine.bases.fsdp import is_sharded, local_shard
from palestra.engine.bases.model import Engine, replaced_data
from palestra.engine.lora.adapters import Adapter, Snapshot
from palestra.engine.lora.variants import Dropout
from palestra.engine.training.checkpoints import load_training_state, load_weights, save_training_state, save_weights
from palestra.engine.training.micro_batch import (
    MicroBatch,
    PackedBatch,
    TokenOutputs,
    build_loss_inputs,
    micro_batches,
    split_over_ranks,
    token_weight,
    trained_share,
    with_gradient,
)
from palestra.engine.training.optimizers import TextOptimizer, build_optimizer, set_options
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.parallel.torch_group import sum_in_place

GROWTH_INTERVAL = 2000  # steps


class LossScale:
    """Dynamic loss scale for float16 gradients (Micikevicius et al., 2018, section 3.2): halved when one overflows,
    doubled after `GROWTH_INTERVAL` consecutive steps without overflow.

    Replaces torch's GradScaler, which checks the gradients of one process: here the norm of the whole gradient, which
    is equal on all ranks, decides.
    """

    value = 2.0**16
    good_steps = 0

    def update(self, finite: bool) -> Metrics:
        """Updates the scale after a step and returns its metrics; `finite` is true if all gradients were finite. Raises
        ValueError if the scale falls below 2**-14, because gradients are never finite."""
        metrics = {"loss_scale": self.value, "skipped": float(not finite)}
        self.good_steps += 1
        if not finite:
            self.value /= 2
            self.good_steps = 0
        elif self.good_steps == GROWTH_INTERVAL:
            self.value = 2 * self.value
            self.good_steps = 0
        if self.value < 2.0**-14:
            raise ValueError("the gradient is not finite in float16, however small the loss: use precision: bfloat16")
        return metrics


Precision = Literal["auto", "float32", "bfloat16", "float16"]
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ReferenceKind = Literal["none", "copy", "disk"]
NO_REFERENCE_MESSAGE = "this full model has no reference for KL: set reference: copy or disk, or train an adapter"
DEFAULT_OPTIMIZER = AdamW()


class OptimConfig(OptimizedPolicy):
    """The optimizer, learning rates, and clipping of the gradient norm."""

    lr: float = Field(1e-3, ge=0, le=1_000_000)
    """Learning rate, at least 0."""
    optimizer: TextOptimizer = AdamW()
    """The optimizer and its options: {type: adamw}, adamw_8bit, muon or sgd, or "module:Class" for a
    torch.optim.Optimizer of one's own."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient; null for no clipping."""
    critic_lr: float | None = Field(None, ge=0, le=1_000_000)
    """Learning rate of a critic's value head, on the same schedule; null uses `lr`."""
    critic_max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient of a critic's value head, which is clipped apart from the policy's; null for no
    clipping."""

    @property
    def rate_of_critic(self) -> float:
        return self.lr if self.critic_lr is None else self.critic_lr


class AdapterWeights:
    """Trains one adapter of an engine, or all weights of its model (`adapter` None). With `critic`, also trains a
    linear value head on the last layer's features.

    `reference` is the adapter of KL penalties (None: the bare base); a full model has one after `add_full_reference`.
    `precision` is the dtype of the products; the trained weights keep their dtype. `checkpointing` recomputes each
    decoder layer in the backward pass. With several ranks in `group`, each rank gets all samples of a batch and
    processes its part; gradients are summed before the optimizer step, which then equals that of one process.

    A full model has no snapshots: its policy samples from the weights in training, which change only between rollouts.
    """

    is_local = True  # trained in this process

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter | None,
        *,
        pack_tokens: int = 16384,
        precision: Precision = "auto",
        checkpointing: bool = False,
        critic: bool = False,
        group: ProcessGroup = SINGLE_PROCESS,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.pack_tokens = pack_tokens
        self.group = group
        self.optimizer_config = optimizer
        self.optimizer_name = optimizer.type
        # a sharded model in training is gathered in that dtype: autocast would keep a second copy
        self.autocast_dtype = None if engine.sharded_params and adapter is None else AUTOCAST_DTYPES.get(precision)
        self.checkpointing = checkpointing
        self.loss_scale = LossScale() if precision == "float16" else None
        if adapter is None:
            engine.model.requires_grad_(True)
        self.critic = value_head(engine) if critic else None
        self.parameters = adapter.parameters() if adapter else list(engine.model.parameters())
        self._num_policy_parameters = len(self.parameters)
        if self.critic:
            self.parameters += list(self.critic.parameters())
        self.reference: Adapter | None = None
        self.full_reference: ReferenceWeights | None = None
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Creates a new optimizer for this rank's part of the parameters, and sets the step count to 0."""
        self.local_parameters = [local_shard(parameter) for parameter in self.parameters]
        self.policy_parameters = self.local_parameters[: self._num_policy_parameters]
        self.critic_parameters = self.local_parameters[self._num_policy_parameters :]
        self.optimizer: Any = build_optimizer(
            self.optimizer_config, self.policy_parameters, self.critic_parameters, self._matrices()
        )
        self.steps = self._passes = 0

    def _matrices(self) -> list[Tensor]:
        """Returns the parameters that Muon trains: an adapter's A and B, or a full model's matrices without embeddings
        and head. Raises ValueError for optimizers that need whole matrices where this process has some rows only."""
        if self.adapter:
            return list(chain.from_iterable(self.adapter.weights.values()))
        if self.optimizer_name != "adamw" and self.engine.sharded_params:
            raise ValueError(
                f"optimizer: {self.optimizer_name} needs whole matrices, of which parallel: fsdp leaves each process "
                "some rows: set parallel: ddp, or optimizer: {type: adamw}"
            )
        model = self.engine.model
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        apart = {id(w) for module in ends for w in module.parameters()}
        return [p for p in self.policy_parameters if p.dim() == 2 and id(p) not in apart]

    def add_full_reference(self, *, on_disk: bool) -> None:
        """Copies the weights of a full model, in memory or on disk, as the reference of KL penalties."""
        self.full_reference = ReferenceWeights(list(self.engine.model.parameters()), on_disk=on_disk)

    def set_reference(self) -> None:
        """Replaces the reference by a copy of the current adapter, or of the weights of a full model that has a
        reference."""
        if self.adapter:
            self.reference = copy.deepcopy(self.adapter)
        elif self.full_reference:
            self.full_reference.replace()

    def start_stage(self) -> None:
        """Starts a new training stage: a new optimizer, and the current weights become the reference."""
        self.reset_optimizer()
        self.set_reference()

    def snapshot(self, name: str) -> Snapshot | None:
        """Returns a copy of the adapter for sampling; None for a full model."""
        if self.adapter is None:
            return None
        return self.adapter.snapshot(name, self.engine.dtype)

    def save(self, folder: Path) -> None:
        """Writes weights and training state. All ranks must call it; rank 0 writes."""
        save_training_state(folder, self)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises ValueError if it does not fit."""
        load_training_state(folder, self)

    def export(self, folder: Path) -> None:
        """Writes the adapter or the model for sampling in other processes."""
        save_weights(folder, self)

    def load_exported(self, folder: Path) -> None:
        """Loads weights that another process exported, for sampling."""
        load_weights(folder, self)

    def forward_backward(self, samples: Sequence[Sample], loss: LossFunction, **options: float) -> Metrics:
        """Adds the gradient of `loss` over `samples` to the parameters; returns the loss and its metrics."""
        return [{}, *self.iter_forward_backward(samples, loss, **options)][-1]

    def iter_forward_backward(
        self, samples: Sequence[Sample], loss: LossFunction, **options: float
    ) -> Iterator[Metrics]:
        """Runs `forward_backward` one micro-batch at a time; yields the metrics so far after each, so that other work
        can run in between. The last metrics cover all ranks."""
        total: Metrics = {}
        share = token_weight(samples)
        trained = trained_share(samples)
        samples = with_gradient(samples)
        parts = self._micro_batches_by_rank(samples, share)
        for pack in parts[self.group.rank]:
            dropout = self._next_dropout() if has_dropout(loss) else None
            tokens = self._loss_inputs(pack, bonus=bool(options.get("entropy")), dropout=dropout)
            value, metrics = loss(tokens, **options)
            self._backward(value)
            for name, figure in {"loss": value.detach(), **{n: m / trained for n, m in metrics.items()}}.items():
                total[name] = total.get(name, 0.0) + float(figure)
            if self.group.world_size == 1:
                yield total
        for pack in self._dummy_micro_batches(parts):
            self._backward(_zero_loss(self._loss_inputs(pack)))
        if self.group.world_size > 1 and samples:
            yield _sum_metrics(self.group.all_gather(total))

    def _micro_batches_by_rank(self, samples: Sequence[Sample], share: float | None = None) -> list[list[MicroBatch]]:
        """Returns the micro-batches of each rank. `share` is the weight of a token (None: `samples` are all that
        count)."""
        if share is None:
            share = token_weight(samples)
        parts = split_over_ranks(samples, self.group.world_size)
        return [micro_batches(part, self.pack_tokens, share) for part in parts]

    def _dummy_micro_batches(self, parts: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
        """Returns dummy micro-batches of weight 0, so that this rank makes as many passes as the rank with the most:
        passes of a sharded model are collective."""
        most = max(map(len, parts))
        if not self.engine.sharded_params or not most:
            return []
        firsts = [pack.samples[0] for pack in chain.from_iterable(parts)]
        shortest = min(firsts, key=lambda sample: len(sample.prompt_ids))
        return [MicroBatch([shortest], [0.0])] * (most - len(parts[self.group.rank]))

    def _backward(self, value: Tensor) -> None:
        if self.loss_scale:
            value = value * self.loss_scale.value
        value.backward()
        self.engine.release_freed_memory()

    def optim_step(self, step: OptimConfig) -> Metrics:
        """Makes one optimizer step on the accumulated gradients; returns the gradient norm before clipping, and
        separately the norm of a critic's head (`critic_grad_norm`).

        In float16 also returns the loss scale, and whether the step was skipped because a gradient overflowed (its norm
        is then 0). Raises ValueError if the norm is not finite and there is no loss scale.
        """
        for group in self.optimizer.param_groups:
            own = step.rate_of_critic if group["critic"] else step.lr
            set_options(group, own, step.optimizer)
        norm = self._gather_gradients()
        critic_norm = torch.nn.utils.get_total_norm([p.grad for p in self.critic_parameters if p.grad is not None])
        fits = bool(torch.isfinite(norm) and torch.isfinite(critic_norm))
        if fits:
            clip = torch.nn.utils.clip_grads_with_norm_
            clip(self.policy_parameters, step.max_grad_norm or torch.inf, norm)
            clip(self.critic_parameters, step.critic_max_grad_norm or torch.inf, critic_norm)
            self.optimizer.step()
            self.steps += 1
        self._passes = 0
        for tensor in [*self.parameters, *self.local_parameters]:
            tensor.grad = None
        if not fits and not self.loss_scale:
            raise ValueError(f"the gradient's norm is {float(norm)}. Lower the learning rate, or look for bad rewards.")
        if not fits:
            norm = critic_norm = torch.zeros(())
        metrics = {"grad_norm": float(norm)}
        if self.loss_scale:
            metrics |= self.loss_scale.update(fits)
        if self.critic:
            metrics["critic_grad_norm"] = float(critic_norm)
        return metrics

    def _gather_gradients(self) -> Tensor:
        """Sums the gradients over the ranks; returns the norm of the policy's, which is equal on all ranks.

        Not done by DistributedDataParallel: that needs a module whose passes all ranks make together, while an adapter
        is not a module of the model and ranks make different numbers of passes. Sharded gradients are already reduced.
        """
        if self.engine.sharded_params:
            self.engine.sharded_params.reshard()
        alike = [p for p in self.parameters if not is_sharded(p)]
        if self.group.world_size > 1:
            for parameter in alike:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            sum_in_place(self.group, [p.grad for p in alike if p.grad is not None])
        for leaf, parameter in zip(self.local_parameters, self.parameters, strict=True):
            if leaf is not parameter and parameter.grad is not None:
                leaf.grad = local_shard(parameter.grad)
        gradients = [leaf.grad for leaf in self.local_parameters if leaf.grad is not None]
        if self.loss_scale:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        if len(alike) == len(self.parameters):
            return torch.nn.utils.get_total_norm([p.grad for p in self.policy_parameters if p.grad is not None])
        return self._norm_of_shards()

    def _norm_of_shards(self) -> Tensor:
        """Returns the norm of the policy's gradients if each rank has only its rows of some."""
        pairs = list(zip(self.policy_parameters, self.parameters, strict=False))
        parted = [leaf.grad for leaf, p in pairs if is_sharded(p) and leaf.grad is not None]
        alike = [leaf.grad for leaf, p in pairs if not is_sharded(p) and leaf.grad is not None]
        square = torch.nn.utils.get_total_norm(parted).square()
        sum_in_place(self.group, [square])
        return (square + torch.nn.utils.get_total_norm(alike).square()).sqrt()

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Returns log-probabilities [T] float32 of each sample's answer tokens under the current weights, or under the
        reference. Raises ValueError for the reference of a full model that has none."""
        if reference and self.adapter is None:
            if self.full_reference is None:
                raise ValueError(NO_REFERENCE_MESSAGE)
            with self.full_reference.in_place():
                return self._each(samples, lambda rows: self._read(rows, None).logp_M)
        adapter = self.reference if reference else self.adapter
        return self._each(samples, lambda rows: self._read(rows, adapter).logp_M)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the critic's values [T] float32 of the states before each of a sample's answer tokens. Raises
        ValueError without a critic."""
        return self._each(samples, lambda rows: self._value(self._read(rows, self.adapter)))

    def read_parts(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Returns the samples in the parts that `logprobs` and `values` read at a time; one part with several ranks,
        which divide it."""
        if self.group.world_size > 1:
            return [list(samples)]
        return [pack.samples for pack in micro_batches(samples, self.pack_tokens)]

    def _each(self, samples: Sequence[Sample], read: Callable[[PackedBatch], Tensor]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        parts = self._micro_batches_by_rank(samples)
        for pack in parts[self.group.rank]:
            flat = read(PackedBatch.pack(pack.samples, self.engine)).float().cpu().numpy()
            found += np.split(flat, np.cumsum([len(s.token_ids) for s in pack.samples])[:-1])
        for pack in self._dummy_micro_batches(parts):
            read(PackedBatch.pack(pack.samples, self.engine))
        return list(chain.from_iterable(self.group.all_gather(found)))

    def _read(
        self, rows: PackedBatch, adapter: Adapter | None, *, bonus: bool = False, dropout: Dropout | None = None
    ) -> TokenOutputs:
        with self.engine.precision_context(self.autocast_dtype, recompute=self.checkpointing):
            return rows.run_model(self.engine, adapter, entropy_grad=bonus, dropout=dropout)

    def _next_dropout(self) -> Dropout | None:
        """Returns the dropout of the next pass with gradients, by the numbers of the step, the rank and the pass."""
        if self.adapter is None or not self.adapter.config.lora_dropout:
            return None
        seed = derive_seed(self.adapter.seed, "dropout", self.steps, self.group.rank, self._passes)
        self._passes += 1
        return Dropout(self.adapter.config.lora_dropout, seed)

    def _value(self, read: TokenOutputs) -> Tensor:
        if self.critic is None:
            raise ValueError("this policy has no critic: it was built for an algorithm without one")
        return self.critic(read.features_MH.float())[:, 0]

    def _loss_inputs(self, pack: MicroBatch, *, bonus: bool = False, dropout: Dropout | None = None) -> LossInputs:
        """Returns the loss inputs of `pack`; with `bonus`, the entropy has gradients."""
        rows = PackedBatch.pack(pack.samples, self.engine)
        read = self._read(rows, self.adapter, bonus=bonus, dropout=dropout)
        return build_loss_inputs(pack, read.logp_M, read.entropy_M, self._value(read) if self.critic else None)


def _zero_loss(tokens: LossInputs) -> Tensor:
    """Returns a loss of zero with zero gradients."""
    outputs = [tokens.logp_M]
    if tokens.value_M is not None:
        outputs.append(tokens.value_M)
    return 0.0 * torch.cat(outputs).sum()


def _sum_metrics(parts: Sequence[Metrics]) -> Metrics:
    total: Metrics = {}
    for part in parts:
        for name, figure in part.items():
            total[name] = total.get(name, 0.0) + figure
    return total


def value_head(engine: Engine) -> nn.Linear:
    """Returns a linear value head [H → 1], float32, initialised to zero."""
    head = nn.Linear(engine.model.get_output_embeddings().in_features, 1, device=engine.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


REFERENCE_FILE = "weights.safetensors"


class ReferenceWeights:
    """A copy of `parameters` as they are now, in their own dtype: in the memory of their device, or with `on_disk` in a
    temporary folder, read whole for every pass. For a pass of the reference the model's parameters point to the frozen
    tensors, without copying. `is_base` is True until the base's weights are replaced."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, on_disk: bool) -> None:
        self.parameters = list(parameters)
        self.is_base = True
        self._folder: Path | None = None
        if on_disk:
            self._folder = Path(tempfile.mkdtemp(prefix="palestra-reference-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._tensors: list[Tensor] = []
        self._store([parameter.detach() for parameter in self.parameters])

    def replace(self) -> None:
        """Replaces the reference by a copy of the current parameters."""
        self._store([parameter.detach() for parameter in self.parameters])
        self.is_base = False

    def in_place(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the frozen weights."""
        return replaced_data(self.parameters, self._load())

    def save(self, path: Path) -> None:
        """Writes the frozen weights to `path`."""
        tensors = {str(i): tensor.cpu().contiguous() for i, tensor in enumerate(self._load())}
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        """Reads the weights that `save` wrote. Raises ValueError if they are of another model."""
        stored = load_file(path)
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        if [tuple(stored[str(i)].shape) for i in range(len(stored))] != shapes:
            raise ValueError(f"the reference at {path} is of another model")
        self._store([stored[str(i)] for i in range(len(stored))])
        self.is_base = False

    def _store(self, tensors: Sequence[Tensor]) -> None:
        if self._folder:
            kept = {str(i): tensor.cpu().contiguous() for i, tensor in enumerate(tensors)}
            save_file(kept, self._folder / REFERENCE_FILE)
            return
        places = zip(tensors, self.parameters, strict=True)
        self._tensors = [torch.empty_like(p, requires_grad=False).copy_(tensor) for tensor, p in places]

    def _load(self) -> list[Tensor]:
        if not self._folder:
            return self._tensors
        stored = load_file(self._folder / REFERENCE_FILE)
        return [stored[str(i)].to(parameter.device) for i, parameter in enumerate(self.parameters)]
