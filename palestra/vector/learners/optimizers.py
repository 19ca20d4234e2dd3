"""Optimizers of stacks of small networks, which clip each member's gradient by itself.

Shapes: `P` members, `D` weights of a member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.optimizers import OWN_OPTIMIZER, SGD, Adam, AdamW, OptimizerConfig, OwnOptimizer
from palestra.envs.vector_base import Arrays
from palestra.parallel.process_group import ProcessGroup

NetOptimizer = Annotated[Adam | AdamW | SGD, Field(discriminator="type"), OWN_OPTIMIZER]


class StepConfig(Protocol):
    """The settings of a policy that its optimizer reads."""

    @property
    def lr(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...


class NonFiniteGradient(FloatingPointError):
    """A gradient is not finite. `policy` is the name of the affected policy."""

    def __init__(self, policy: str) -> None:
        super().__init__(f"the loss of policy {policy} is not a finite number")
        self.policy = policy


class StackedOptimizer:
    """The optimizer of a stack of networks; each member's gradient is clipped separately.

    All parameters are stored in one float32 array [P, D], of which the module's parameters are views, so a step takes
    few operations for any number of layers: their number determines the cost for small networks. It works on the
    module's device. On a GPU a step does not wait for its norms: see `check_finite`.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], config: StepConfig, process_group: ProcessGroup
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names = names
        self.config = config
        self.process_group = process_group
        self.flat = torch.cat([p.detach().flatten(1) for p in self.parameters], 1)
        for p, own in zip(self.parameters, self.flat.split([p[0].numel() for p in self.parameters], 1), strict=True):
            p.data = own.view(p.shape)
        self.failed = torch.zeros(len(names), dtype=torch.bool, device=self.flat.device)  # not used on a CPU
        optimizer = config.optimizer
        self.rule: FusedAdam | MemberOptimizers
        if isinstance(optimizer, Adam | AdamW):
            self.rule = FusedAdam(self.flat, optimizer)
        else:
            self.rule = MemberOptimizers(self.flat, [p.shape[1:] for p in self.parameters], optimizer)

    def step(self, loss: Tensor, progress: float) -> Tensor:
        """Takes one step on the sum of the members' losses; returns the norms of their gradients [P] float32.

        If a gradient is not finite, the step changes nothing and raises `NonFiniteGradient`; on a GPU it changes
        nothing and `check_finite` raises later.
        """
        parts = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        gradient = torch.cat([part.flatten(1) for part in parts], 1)
        if self.process_group.world_size > 1:
            gradient = self.process_group.all_reduce(gradient) / self.process_group.world_size
        norms = torch.linalg.vector_norm(gradient, dim=1)
        gradient *= (self._scales(norms) if norms.is_cpu else self._scales_on_device(norms))[:, None]
        lr = self.config.lr * (1 - progress if self.config.lr_schedule == "linear" else 1.0)
        self.rule.step(gradient, lr, None if self.failed.is_cpu else self.failed.any().float())
        return norms

    def _scales(self, norms: Tensor) -> Tensor:
        """Returns the factors [P] that clip gradients of norms [P]."""
        scales = []
        for name, norm in zip(self.names, norms.tolist(), strict=True):
            if not math.isfinite(norm):
                raise NonFiniteGradient(name)
            scales.append(min(self.config.max_grad_norm / (norm + 1e-6), 1.0))
        return torch.tensor(scales)

    def _scales_on_device(self, norms: Tensor) -> Tensor:
        """Returns the factors [P] that clip gradients of norms [P], without waiting for the device;
        records in `failed` which norms are not finite."""
        self.failed |= ~torch.isfinite(norms)
        return (self.config.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)

    def check_finite(self) -> None:
        """Raises `NonFiniteGradient` if a gradient of an earlier step was not finite. Does nothing
        on a CPU, where the step itself raises."""
        if self.failed.is_cpu:
            return
        for name, failed in zip(self.names, self.failed.tolist(), strict=True):
            if failed:
                raise NonFiniteGradient(name)


class FusedAdam:
    """Adam, or AdamW, of all members at once."""

    def __init__(self, flat: Tensor, config: Adam | AdamW) -> None:
        self.flat = flat
        self.config = config
        self.step_count = flat.new_zeros(())
        self.exp_avg = torch.zeros_like(flat)
        self.exp_avg_sq = torch.zeros_like(flat)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float, failed: Tensor | None) -> None:
        """Takes one step of `torch.optim.Adam`, by the operation that it calls internally. The class imports torch's
        compiler, which takes two seconds in every process, and its functional form takes five times as long."""
        self.step_count += 1
        config = self.config
        operation = torch._fused_adam_ if isinstance(config, Adam) else torch._fused_adamw_
        operation(
            [self.flat],
            [gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.step_count],
            amsgrad=False,
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=config.weight_decay if isinstance(config, AdamW) else 0.0,
            eps=config.eps,
            maximize=False,
            found_inf=failed,  # 1: the operation changes nothing
        )

    def arrays(self) -> Arrays:
        """Returns Adam's moments and step counts."""
        return {f"0.{key}": value.cpu().numpy() for key, value in self._state.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        for key, value in self._state.items():
            value.copy_(torch.from_numpy(np.array(arrays[f"0.{key}"])).view_as(value))

    @property
    def _state(self) -> dict[str, Tensor]:
        return {"step": self.step_count, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class MemberOptimizers:
    """An optimizer of torch's, or a user's own, for each member: it sees the parameters of one network, in `shapes`."""

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size], config: OptimizerConfig) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.sizes = sizes
        self.members = []
        for row in flat.detach():
            parts = zip(row.split(sizes), shapes, strict=True)
            self.members.append([nn.Parameter(part.view(shape)) for part, shape in parts])
        self.optimizers: list[Any] = [_build_optimizer(config, parameters) for parameters in self.members]

    def step(self, gradient: Tensor, lr: float, failed: Tensor | None) -> None:
        """Takes one step of each member's optimizer. On a GPU it waits for `failed`."""
        if failed is not None and failed.item():
            return
        for optimizer, parameters, row in zip(self.optimizers, self.members, gradient, strict=True):
            for parameter, part in zip(parameters, row.split(self.sizes), strict=True):
                parameter.grad = part.view(parameter.shape)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def arrays(self) -> Arrays:
        """Returns the state of each parameter, by member, number and name; of numbers the name ends in "#"."""
        found: Arrays = {}
        for p, optimizer in enumerate(self.optimizers):
            for number, slots in optimizer.state_dict()["state"].items():
                for name, value in slots.items():
                    if isinstance(value, Tensor):
                        found[f"{p}.{number}.{name}"] = value.cpu().numpy()
                    elif value is not None:
                        found[f"{p}.{number}.{name}#"] = np.asarray(value)
        return found

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        for p, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Any]] = {}
            for key, array in arrays.items():
                member, number, name = key.split(".", 2)
                if int(member) == p:
                    value = array.item() if name.endswith("#") else torch.from_numpy(np.array(array))
                    state.setdefault(int(number), {})[name.removesuffix("#")] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _build_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> Any:
    if isinstance(config, OwnOptimizer):
        return config.build(parameters, lr=1e-3)  # every step sets the rate
    return torch.optim.SGD(parameters, lr=1e-3, **config.options)
