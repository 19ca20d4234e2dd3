"""Optimizers of trained weights: AdamW, AdamW with 8-bit moments, Muon, SGD, or one of a user's own.

All have parameter groups and a state by parameter number, in the order in which the parameters are given, so that
checkpoints do not depend on how an optimizer divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.optimizers import OWN_OPTIMIZER, SGD, AdamW, AdamW8bit, Muon, OptimizerConfig, OwnOptimizer

TextOptimizer = Annotated[AdamW | AdamW8bit | Muon | SGD, Field(discriminator="type"), OWN_OPTIMIZER]
MIN_8BIT_SIZE = 4096  # bitsandbytes keeps moments of smaller tensors in float32
BLOCK_8BIT = 256  # values with one scale


class MuonAndAdamW:
    """Muon (Jordan et al., 2024) for matrices and AdamW for all other parameters, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al., 2025, section 2.2), so that both use one learning
    rate and the same defaults.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], matrices: Sequence[Tensor]) -> None:
        self._order = list(chain.from_iterable(group["params"] for group in groups))
        ids = {id(p) for p in matrices}
        self._parts: list[torch.optim.Optimizer] = []
        for group in groups:
            rest = [p for p in group["params"] if id(p) not in ids]
            if mine := [p for p in group["params"] if id(p) in ids]:
                muon = {**group, "params": mine}
                self._parts.append(torch.optim.Muon([muon], lr=1e-3, adjust_lr_fn="match_rms_adamw"))
            if rest:
                self._parts.append(torch.optim.AdamW([{**group, "params": rest}], lr=1e-3))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self._parts))

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {p: slots for part in self._parts for p, slots in part.state.items()}

    def step(self) -> None:
        """Changes all parameters that have a gradient."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        known = self.state
        state = {number: known[p] for number, p in enumerate(self._order) if p in known}
        return {"state": state, "param_groups": self.param_groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        number = {id(p): n for n, p in enumerate(self._order)}
        for part in self._parts:
            own = part.state_dict()
            mine = [number[id(p)] for p in chain.from_iterable(group["params"] for group in part.param_groups)]
            state = {i: saved["state"][n] for i, n in enumerate(mine) if n in saved["state"]}
            part.load_state_dict({"state": state, "param_groups": own["param_groups"]})


def build_optimizer(
    config: OptimizerConfig, policy: Sequence[Tensor], critic: Sequence[Tensor], matrices: Sequence[Tensor]
) -> Any:
    """Returns an optimizer of a policy's and a critic's parameters; groups of the critic have `critic` true. Muon takes
    the `matrices` among them. Raises ValueError if the package for 8 bits is missing."""
    groups = [{"params": list(part), "critic": part is critic} for part in (policy, critic) if part]
    if isinstance(config, OwnOptimizer):
        return config.build(groups, lr=1e-3)
    if isinstance(config, SGD):
        return torch.optim.SGD(groups, lr=1e-3, **config.options)
    if isinstance(config, Muon):
        return MuonAndAdamW(groups, matrices)
    if not isinstance(config, AdamW8bit):
        return torch.optim.AdamW(groups, lr=1e-3)
    try:
        from bitsandbytes.optim import AdamW8bit as AdamWOf8Bits
    except ImportError as error:
        raise ValueError(
            f"optimizer adamw_8bit needs a package that is missing ({error}): pip install 'palestra[bitsandbytes]', "
            "or set optimizer: {type: adamw}"
        ) from error
    return AdamWOf8Bits(groups, lr=1e-3, min_8bit_size=MIN_8BIT_SIZE)


def set_options(group: dict[str, Any], lr: float, config: OptimizerConfig) -> None:
    """Sets the learning rate of a parameter group, and the options of AdamW, which may change from step to step. Muon
    has no betas, and keeps its own momentum and epsilon."""
    group["lr"] = lr
    if isinstance(config, AdamW):
        group["weight_decay"] = config.weight_decay
        if "betas" in group:
            group.update(betas=config.betas, eps=config.eps)


def state_bytes(config: OptimizerConfig, num_weights: int) -> int:
    """Returns the bytes of the state of `num_weights` weights: two moments in float32 (also assumed of a user's own
    optimizer) or 8 bits, or the one of Muon and of momentum."""
    if isinstance(config, AdamW8bit):
        return 2 * num_weights + 8 * num_weights // BLOCK_8BIT
    if isinstance(config, SGD):
        return 4 * num_weights * bool(config.momentum)
    if isinstance(config, Muon):
        return 4 * num_weights
    return 8 * num_weights
