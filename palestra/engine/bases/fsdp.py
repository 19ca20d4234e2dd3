"""Sharding of a base model over the ranks: FSDP2 (`fully_shard`), layer by layer.

A decoder layer's weights are gathered when a pass reaches it and dropped after it. Gradients are reduce-scattered after
every micro-batch: keeping them unsharded until the last one would need the memory that sharding saves. Every pass is
thus a collective operation, and all ranks must make the same number of passes.

Sampling steps of different ranks are not synchronised. For a rollout or an evaluation the weights are gathered once,
and every rank then samples independently from the full model.

Code that reads weights (routes, fused norms, the tied head) reads them from its module during a pass of that module,
when they are gathered. `fully_shard` calls a module's `forward` between its hooks, so the engine's replacements are
called as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from palestra.engine.bases.model import Engine
from palestra.engine.forward.decoder import decoder_of
from palestra.parallel.process_group import ProcessGroup


class FSDPParams:
    """Gathers and reshards the weights of an FSDP model."""

    def __init__(self, root: Any, modules: list[Any]) -> None:
        self.root = root
        self.modules = modules

    @contextlib.contextmanager
    def gather_weights(self) -> Iterator[None]:
        """Context in which every rank has all weights and passes are not collective."""
        self.root.set_reshard_after_forward(False)
        for module in self.modules:
            module.unshard()
        try:
            yield
        finally:
            self.reshard()
            for module in self.modules:
                module.set_reshard_after_forward(module is not self.root, recurse=False)

    def in_pass(self, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, called in place of the model's own forward: the weights outside the layers, such as the
        head's, are gathered for the call, and again for the backward pass of the tensors that it returns."""
        self.root.forward = lambda: tree_map_only(Tensor, _without_view, compute())
        try:
            return self.root()
        finally:
            del self.root.forward

    def reshard(self) -> None:
        """Keeps only this rank's shard. A pass without gradients leaves the root's weights gathered, and an optimizer
        step would not update them."""
        for module in self.modules:
            module.reshard()


def shard_engine(
    engine: Engine, group: ProcessGroup, device: str, *, train: bool, autocast_dtype: torch.dtype | None = None
) -> None:
    """Shards the engine's model over `group` on `device`; `train` enables gradients of the weights. With
    `autocast_dtype`, weights are gathered and passes computed in that dtype; the shards keep their dtype."""
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (group.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=autocast_dtype, reduce_dtype=torch.float32 if autocast_dtype else None)
    model = engine.model.requires_grad_(train)
    layers = list(getattr(decoder_of(model), "layers", ()))
    for module in [*layers, model]:  # the root last: it takes the remaining parameters
        fully_shard(module, mesh=mesh, mp_policy=policy)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # a token's weight is its share of the whole batch: sums, not means
        module.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
    engine.sharded_params = FSDPParams(model, modules)
    engine.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    engine.dtype = autocast_dtype or engine.dtype
    with engine.sharded_params.gather_weights():
        pass  # gather once, so that the shards reach their final memory locations


def _without_view(tensor: Tensor) -> Tensor:
    """Returns a tensor that is not a view of another: an operation in place on a view would lose the hook that gathers
    the weights."""
    return tensor.clone() if tensor._is_view() else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is sharded over the ranks."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory; the whole tensor if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
        return shard.detach()


def full_tensor(shard: Tensor, like: Tensor) -> Tensor:
    """Returns the full tensor of which each rank holds `shard`, laid out like `like`. Collective: all ranks must call
    it."""
    if not isinstance(like, DTensor) or shard.shape != local_shard(like).shape:
        return shard
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def local_rows(like: Tensor) -> slice:
    """Returns the rows of the full tensor that this rank holds of `like`."""
    if not isinstance(like, DTensor):
        return slice(None)
    each = -(-like.shape[0] // like.device_mesh.size())
    first = min(like.shape[0], like.device_mesh.get_local_rank() * each)
    return slice(first, min(like.shape[0], first + each))


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Returns transformers' class of a model: sharding replaces it by a subclass."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
