"""A base model of which every rank keeps a part: FSDP2 (`fully_shard`), layer by layer.

A decoder layer's weights are gathered when a pass comes to it and dropped when it has gone on; gradients are summed as
they are scattered to who keeps those rows, after every micro-batch: whole until the last one, they would need what
sharding saved. Every pass is thus a meeting of all ranks, and all must make as many.

Sampling steps of different ranks are not in step. For a rollout or an exam the weights are gathered once, and every
rank then samples by itself from the whole model.

Whatever reads weights (routes, fused norms, the tied head) reads them from its module while a pass is in it, when they
are whole. `fully_shard` calls a module's `forward` between its hooks, so the engine's own ones are called as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from palestra.engine.models import Engine
from palestra.engine.ranks import Ranks


class Shards:
    """What makes a model's weights whole and parted again."""

    def __init__(self, root: Any, modules: list[Any]) -> None:
        self.root, self.modules = root, modules

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within, every rank has all weights, and passes are its own business."""
        self.root.set_reshard_after_forward(False)
        for module in self.modules:
            module.unshard()
        try:
            yield
        finally:
            self.part()
            for module in self.modules:
                module.set_reshard_after_forward(module is not self.root, recurse=False)

    def part(self) -> None:
        """Every rank has its own part only. The root's weights stay whole behind a pass without gradients, and a step
        of the optimizer would leave them behind."""
        for module in self.modules:
            module.reshard()


def shard(engine: Engine, ranks: Ranks, device: str, *, train: bool, mixed: torch.dtype | None = None) -> None:
    """Leaves this rank its part of the engine's model, on `device`; `train` says whether the weights are to get
    gradients. With `mixed` they are gathered and passes are computed in that type; what is kept is as it was."""
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32 if mixed else None)
    model = engine.model.requires_grad_(train)
    layers = list(getattr(model.get_decoder(), "layers", ()))
    for module in [*layers, model]:  # the root last: it takes what is left
        fully_shard(module, mesh=mesh, mp_policy=policy)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # a token's weight is its share of the whole batch: sums, not means
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no products in a sum
    engine.shards = Shards(model, modules)
    engine.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    engine.dtype = mixed or engine.dtype
    with engine.shards.whole():
        pass  # once, so that what each rank keeps lies where it will stay


def is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def own(tensor: Tensor) -> Tensor:
    """What this rank keeps of a tensor, in the same memory; all of it, where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part.detach()


def full(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each rank has such a `part` as it has of `like`. All ranks must ask."""
    if not isinstance(like, DTensor) or part.shape != own(like).shape:
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def rows(like: Tensor) -> slice:
    """Which rows of the whole tensor this rank keeps of `like`."""
    if not isinstance(like, DTensor):
        return slice(None)
    each = -(-like.shape[0] // like.device_mesh.size())
    first = min(like.shape[0], like.device_mesh.get_local_rank() * each)
    return slice(first, min(like.shape[0], first + each))
