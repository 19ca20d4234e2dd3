"""Computations of adapters other than plain LoRA: DoRA, dropout, adapted experts, and modules trained in full.

They are applied to each block of a flat row separately, on the layer's own output. The faster ways of lora_routes.py
(merged and stacked weights) need adapters that are `mergeable`.

Shapes: `E` experts, `r` rank; `A [E, r, in]` and `B [E, out, r]` of stacked experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from palestra.core.seeding import derive_seed
from palestra.engine.forward.decoder import decoder_of
from palestra.engine.forward.quantized import QuantizedLinear
from palestra.engine.lora.config import LoraConfig, names_of_targets


@dataclass
class Extras:
    """Weights of an adapter beyond its pairs on linear layers, float32: DoRA's `magnitudes` [out] by layer, weights of
    `modules` trained in full by parameter name, and pairs (A, B) of stacked `experts` by parameter name."""

    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.magnitudes or self.modules or self.experts)

    def parameters(self) -> list[Tensor]:
        """Returns all tensors, in a fixed order."""
        pairs = list(chain.from_iterable(self.experts.values()))
        return [*self.magnitudes.values(), *self.modules.values(), *pairs]

    def map(self, of: Callable[[Tensor], Tensor]) -> Extras:
        """Returns the same weights with `of` applied to each tensor."""
        return Extras(
            {name: of(w) for name, w in self.magnitudes.items()},
            {name: of(w) for name, w in self.modules.items()},
            {name: (of(a), of(b)) for name, (a, b) in self.experts.items()},
        )

    def fold_scale(self, dtype: torch.dtype, scale_of: Callable[[str], float]) -> Extras:
        """Returns a frozen copy, with weights of modules and experts in `dtype` and the scale folded into B."""
        copy = self.map(lambda w: w.detach().clone())
        pairs = {name: (a.to(dtype), b.to(dtype) * scale_of(name)) for name, (a, b) in copy.experts.items()}
        return Extras(copy.magnitudes, {name: w.to(dtype) for name, w in copy.modules.items()}, pairs)


@dataclass(frozen=True)
class Dropout:
    """Masks of one training pass, a pure function of `seed`: a recomputed layer and a resumed run use the same masks.
    All parts of a pass that have one shape, such as chunks of the head, have the same mask."""

    probability: float
    seed: int

    def apply(self, name: str, x: Tensor) -> Tensor:
        """Returns the input `x` of the layer `name` with values set to 0 at random, the others scaled up."""
        generator = torch.Generator(x.device).manual_seed(derive_seed(self.seed, name))
        keep_mask = torch.rand(x.shape, generator=generator, device=x.device) >= self.probability
        return x * (keep_mask.to(x.dtype) / (1 - self.probability))


class Owner(Protocol):
    """An adapter or a snapshot."""

    weights: dict[str, tuple[Tensor, Tensor]]
    extras: Extras

    def scale_of(self, name: str) -> float: ...
    def gain(self, name: str, layer: Any) -> Tensor: ...


# -- construction ------------------------------------------------------------------------------------------------------


def new_extras(
    config: LoraConfig, linears: Mapping[str, nn.Module], names: Iterable[str], model: PreTrainedModel | None, seed: int
) -> Extras:
    """Returns the weights beside the pairs on the linear layers `names`, with which the adapter equals its base: DoRA's
    magnitudes are the lengths of the base's rows, modules are copies, and B of experts is zero.

    Raises ValueError if `config` names a module or parameter that cannot be trained, or the base cannot have DoRA.
    """
    extras = Extras()
    if config.use_dora:
        for name in names:
            extras.magnitudes[name] = dense_weight(linears[name]).detach().float().norm(dim=1).requires_grad_()
    if (config.modules_to_save or config.target_parameters) and model is None:
        raise ValueError("modules_to_save and target_parameters need the whole model: pass model= to Adapter")
    if model is not None:
        for name in _saved_modules(config.modules_to_save, linears, model):
            for short, weight in model.get_submodule(name).named_parameters(recurse=False):
                if not weight.is_floating_point():
                    raise ValueError(f"modules_to_save: {name} is quantised: leave it out, or set quantize: null")
                extras.modules[f"{name}.{short}"] = weight.detach().float().clone().requires_grad_()
        generator = torch.Generator().manual_seed(derive_seed(seed, "experts"))
        for name in _stacked_targets(config.target_parameters, model):
            extras.experts[name] = _expert_pair(name, model, config.rank_of(name), generator)
    return extras


def _saved_modules(wanted: Sequence[str], linears: Mapping[str, nn.Module], model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules that `modules_to_save` selects, in model order. As in PEFT, an entry selects
    every module whose name ends with it, with or without a dot before it."""
    embedding = next((name for name, m in model.named_modules() if m is model.get_input_embeddings()), None)
    selected = []
    for target in wanted:
        names = [name for name, _ in model.named_modules() if name.endswith(target)]
        for name in names:
            if name != embedding and name not in linears:
                raise ValueError(
                    f"modules_to_save: {target} selects {name}, which is neither a linear layer nor the embeddings of "
                    f"tokens ({embedding}): name one of these, such as lm_head"
                )
        if not names:
            raise ValueError(f"modules_to_save: no module's name ends in {target!r}. Name lm_head or {embedding}.")
        selected += names
    return [name for name, _ in model.named_modules() if name in selected]


def stacked_parameters(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the modules of stacked experts by the names of their stacked weights: those with transformers' common
    interface (rows [S, H], chosen experts [S, k], their weights), since others may divide rows in other ways."""
    found: dict[str, nn.Module] = {}
    inside = {id(module) for module in decoder_of(model).modules()}
    for name, module in model.named_modules():
        if id(module) in inside and hasattr(module, "is_transposed"):
            parameters = module.named_parameters(recurse=False)
            found |= {f"{name}.{short}": module for short, weight in parameters if weight.dim() == 3}
    return found


def _stacked_targets(targets: Sequence[str], model: PreTrainedModel) -> list[str]:
    if not targets:
        return []
    names = list(stacked_parameters(model))
    for target in targets:
        if not names_of_targets(names, [target]):
            kinds = sorted({".".join(name.split(".")[-2:]) for name in names})
            remedy = f"Use some of {kinds}." if kinds else "This base has none that can: use target_modules."
            raise ValueError(f"target_parameters: {target!r} matches no stacked weights of experts. {remedy}")
    return names_of_targets(names, targets)


def _expert_pair(name: str, model: PreTrainedModel, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    module = stacked_parameters(model)[name]
    short = name.rpartition(".")[2]
    weight: Tensor = getattr(module, short)
    count, outputs, inputs = weight.mT.shape if module.is_transposed else weight.shape
    bound = inputs**-0.5  # as PEFT initialises A
    a = torch.empty(count, rank, inputs).uniform_(-bound, bound, generator=generator)
    b = torch.zeros(count, outputs, rank, device=weight.device)
    return a.to(weight.device).requires_grad_(), b.requires_grad_()


# -- linear layers -----------------------------------------------------------------------------------------------------


def dense_weight(layer: Any) -> Tensor:
    """Returns the weight [out, in] of a linear layer. Raises ValueError for layers with a forward of their own, such as
    quantised ones of other packages."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantize()
    if type(layer) not in (nn.Linear, Conv1D):
        raise ValueError(f"DoRA needs the weights of a {type(layer).__name__}: set use_dora: false, or another base")
    weight: Tensor = layer.weight
    if type(layer) is nn.Linear:
        return weight
    return weight.T


def dora_gain(magnitude: Tensor, layer: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns the factor [out] float32 of a layer's output with DoRA (Liu et al., 2024, eq. 5): the magnitude over the
    length of the rows of the sum of weights, which has no gradient (section 4.3)."""
    with torch.no_grad():
        norm = torch.addmm(dense_weight(layer).float(), b.float(), a.float(), alpha=scale).norm(dim=1)
    return magnitude / norm


def variant_output(
    owner: Owner, own: Callable[[Any, Tensor], Tensor], name: str, x: Tensor, layer: Any, dropout: Dropout | None = None
) -> Tensor:
    """Returns the output of the linear layer `name`, of which `own` computes the base's part, with an adapter of any
    kind. As in PEFT, dropout also reaches the base's part that DoRA rescales."""
    if replaced := replaced_parameters(owner, name, layer):
        return call_with(layer, lambda x: type(layer).forward(layer, x), replaced, (x,), {})
    y = own(layer, x)
    if (pair := owner.weights.get(name)) is None:
        return y
    a, b = (w.to(x.dtype) for w in pair)
    dropped = x
    if dropout is not None:
        dropped = dropout.apply(name, x)
    update = owner.scale_of(name) * F.linear(F.linear(dropped, a), b)
    if name not in owner.extras.magnitudes:
        return y + update
    gain = owner.gain(name, layer).to(x.dtype)
    base = y if dropped is x else own(layer, dropped)
    if layer.bias is not None:
        base = base - layer.bias
    return y + (gain - 1) * base + gain * update


def linear_by_blocks(
    blocks: Sequence[tuple[Any, int]], own: Callable[[Any, Tensor], Tensor], name: str, x: Tensor, layer: Any
) -> Tensor:
    """Returns the output of a linear layer for rows of several adapters, computed block by block; `blocks` are their
    routes (None: the bare base) and sizes."""
    rows_by_block = x.split([count for _, count in blocks], dim=-2)
    outputs = [
        own(layer, rows) if route is None else route.linear(name, rows, layer)
        for (route, _), rows in zip(blocks, rows_by_block, strict=True)
        if rows.shape[-2]
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)


# -- embeddings and experts --------------------------------------------------------------------------------------------


def replaceable_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the embeddings of tokens and the modules of stacked experts, by name."""
    experts = {id(module) for module in stacked_parameters(model).values()}
    embedding = model.get_input_embeddings()
    return {name: m for name, m in model.named_modules() if m is embedding or id(m) in experts}


def replaced_parameters(owner: Owner, name: str, module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of the module `name` that an adapter replaces, by their short names."""
    replaced = {}
    if not owner.extras:
        return {}
    for short, weight in module._parameters.items():
        key = f"{name}.{short}"
        if weight is not None and key in owner.extras.modules:
            replaced[short] = owner.extras.modules[key].to(weight.dtype)
        elif weight is not None and key in owner.extras.experts:
            a, b = (w.to(weight.dtype) for w in owner.extras.experts[key])
            delta = owner.scale_of(key) * torch.bmm(b, a)
            if getattr(module, "is_transposed", False):
                delta = delta.mT
            replaced[short] = weight + delta
    return replaced


def call_with(
    module: nn.Module, own: Callable[..., Tensor], replaced: Mapping[str, Tensor], args: Any, kwargs: Any
) -> Tensor:
    """Returns the module's `own` output with some of its parameters replaced."""
    originals = {short: module._parameters[short] for short in replaced}
    parameters: dict[str, Any] = module._parameters
    try:
        parameters.update(replaced)
        return own(*args, **kwargs)
    finally:
        parameters.update(originals)


def call_by_blocks(
    route: Any, name: str, module: nn.Module, own: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Returns the output of the embeddings or experts `name` for rows of several adapters: in one call if none replaces
    a parameter, else block by block."""
    axis = 1 if isinstance(module, nn.Embedding) else args[0].dim() - 2
    size = args[0].shape[axis]
    blocks = [(each, count) for each, count in route.blocks(size) if count]
    replaced = [{} if each is None else replaced_parameters(each.owner, name, module) for each, _ in blocks]
    if not any(replaced):
        return own(*args, **kwargs)
    if len(blocks) == 1:
        return call_with(module, own, replaced[0], args, kwargs)
    outputs = []
    start = 0
    for (_, count), mine in zip(blocks, replaced, strict=True):
        rows = slice(start, start + count)
        block_args = [_rows_of(value, axis, size, rows) for value in args]
        block_kwargs = {k: _rows_of(v, axis, size, rows) for k, v in kwargs.items()}
        outputs.append(call_with(module, own, mine, block_args, block_kwargs))
        start += count
    return torch.cat(outputs, dim=axis)


def _rows_of(value: Any, axis: int, size: int, rows: slice) -> Any:
    if not isinstance(value, Tensor) or value.dim() <= axis or value.shape[axis] != size:
        return value
    return value.narrow(axis, rows.start, rows.stop - rows.start)
