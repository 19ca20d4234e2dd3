"""Configs of optimizers, `optimizer: {type: adamw, betas: [0.9, 0.99]}`, in both kinds of run. Learning rates and the
clipping of gradients are settings of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from palestra.core.config import StrictModel, load_object
from palestra.core.config.own_types import OwnObject, OwnTypes

Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class OptimizerConfig(StrictModel):
    """Base of the configs of optimizers."""

    type: str

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"type"})


class Adam(OptimizerConfig):
    """Adam (Kingma & Ba, 2015)."""

    type: Literal["adam"] = "adam"
    betas: Betas = (0.9, 0.999)
    """Decay rates of the first and the second moment."""
    eps: float = Field(1e-5, gt=0)
    """Constant added to the denominator."""


class AdamW(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 2019)."""

    type: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Constant added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""


class AdamW8bit(AdamW):
    """AdamW whose moments have 8 bits and take a quarter of the memory; needs bitsandbytes."""

    type: Literal["adamw_8bit"] = "adamw_8bit"  # type: ignore[assignment]


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the matrices of the adapter or of the layers, at AdamW's learning rate, and AdamW
    for all other weights. `betas` and `eps` are AdamW's."""

    type: Literal["muon"] = "muon"  # type: ignore[assignment]


class SGD(OptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)
    """Share of the last update that each update keeps."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, as a part of the gradient."""


class OwnOptimizer(OwnObject, OptimizerConfig):
    """An optimizer of one's own: a torch.optim.Optimizer that is made with the parameters, `lr` and the options."""

    model_config = ConfigDict(extra="allow")
    type: str
    """The class, as "module:Class"."""

    @model_validator(mode="after")
    def _check_class(self) -> Self:
        base = load_object("torch.optim:Optimizer", "optimizer")  # not imported above: configs load without torch
        self.check_class(base, "optimizer", leave_out=("params", "lr"))
        return self


EARLIER_KEYS = {"adam_betas": "betas", "adam_eps": "eps", "weight_decay": "weight_decay"}


class OptimizedPolicy(StrictModel):
    """Base of the configs of trained policies. Runs that began before `optimizer` was a config stored its options
    beside it, all of them, and are read."""

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_run(cls, keys: Any) -> Any:
        is_stored = isinstance(keys, Mapping) and {"adam_eps", "max_grad_norm"} <= keys.keys()
        if not is_stored or not isinstance(keys.get("optimizer", ""), str):
            return keys
        options = {new: keys[old] for old, new in EARLIER_KEYS.items() if old in keys}
        others = {key: value for key, value in keys.items() if key not in EARLIER_KEYS}
        return others | {"optimizer": {"type": keys.get("optimizer", "adam"), **options}}


OWN_OPTIMIZER = OwnTypes("optimizer", OptimizerConfig, config=OwnOptimizer)
