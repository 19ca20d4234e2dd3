"""A base model in memory, of an architecture that supported.py accepts, run on flat rows of tokens.

Every pass, in sampling and in training, runs the model on one row `[1, S]` that holds the tokens of many sequences end
to end, so linear layers never process padding. A *layout* (tree_attention.py for training, cached_attention.py for
sampling) defines which tokens each token attends to; the model passes it to our attention function. A *route* (lora.py)
defines which adapter each row uses; the linear layers call it. The last decoder layer computes keys and values of all
rows, but continues only with the rows whose logits are kept, since the others are not used.

Shapes: `S` tokens of a flat row, `M` rows whose logits are kept, `V` vocabulary, `H` heads, `D` head width.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from palestra.engine.gguf import converted_folder
from palestra.engine.malloc import keep_freed_memory
from palestra.engine.norms import fuse_norms
from palestra.engine.packaged_bases import PACKAGED_BASES, find_gguf
from palestra.engine.supported import check_supported

SHIPPED_BASES_DIR = Path(__file__).parent.parent / "bases"
MAX_BASE_NAME_LENGTH = 4096  # maximum characters of a name or a path


class AttentionLayout(Protocol):
    """Defines which tokens each token of a flat row attends to.

    A layout of a pass that keeps fewer rows than it has also implements `narrow(keep_M)`, which returns the layout in
    which only those rows have queries; keys and values are still those of all rows.
    """

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        """Returns the attention output [S, H, D] of queries [H, S, D] over keys and values [h, S, D], in their
        dtype."""
        ...


class AdapterRoute(Protocol):
    """Defines which adapter each row of a flat row uses."""

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        """Returns `layer(x)` plus the output of the rows' adapters at the linear layer `name`."""
        ...

    def narrow(self, keep_M: Tensor) -> AdapterRoute:
        """Returns the route of the rows `keep_M` (rising indices) only."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    out = kwargs["layout"].attend(module.layer_idx, query[0], key[0], value[0], kwargs["scaling"])
    return out[None], None


AttentionInterface.register("palestra", _attention)


class ShardedParams(Protocol):
    """Weights that are sharded over the ranks (fsdp.py)."""

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which all weights are gathered on this rank."""
        ...

    def reshard(self) -> None:
        """Drops all weights but this rank's own shard."""
        ...


class StopAfterKV(Exception):
    """Stops the first of the two passes of the last layer."""


class KVFirstLayout:
    """The layout of the last layer: a first pass of all rows up to keys and values, and a second pass of the kept rows
    to the end."""

    def __init__(self, kept: AttentionLayout) -> None:
        self.kept_layout = kept
        self.kv_HSD: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        if self.kv_HSD is None:
            self.kv_HSD = k_HSD, v_HSD
            raise StopAfterKV
        return self.kept_layout.attend(layer, q_HSD, *self.kv_HSD, scale)


class Engine:
    """A base model with its tokenizer, shared by adapters (lora.py), samplers and trainers.

    `dtype` is the dtype of keys and values; `autocast_dtype` is the autocast dtype if it differs from that of the
    weights (else None); `sharded_params` gathers the weights if they are sharded over ranks.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.autocast_dtype: torch.dtype | None = None
        self.sharded_params: ShardedParams | None = None
        self.linear_layers: dict[str, nn.Linear] = {}
        self._route: AdapterRoute | None = None
        self._kept: AdapterRoute | None = None
        self._features: Tensor | None = None
        self._recompute = False
        fuse_norms(model)
        self._route_linears()
        self._narrows = self._narrow_last_layer()
        self._let_layers_be_recomputed()

    @classmethod
    def load(cls, base: str, *, device: str = "auto", dtype: str = "auto", threads: int = 1) -> Engine:
        """Loads the base `base`: the name of a shipped one ("tiny") or a packaged one ("smollm2"), a local folder,
        a GGUF file, or a Hugging Face hub name.

        `device` "auto" uses CUDA if available; `dtype` "auto" is bfloat16 on CUDA and float32 on CPU. Raises ValueError
        if the base cannot be loaded or supported.py refuses it.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        disable_progress_bar()  # transformers shows one for each file
        device = resolve_device(device)
        dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
        torch_dtype = getattr(torch, dtype)
        path = resolve_base(base)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation="palestra")
            tokenizer = AutoTokenizer.from_pretrained(path)
        except OSError as error:
            shipped = ", ".join(sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json"))) or "none"
            raise ValueError(
                f'cannot load the base "{base}": it is not a shipped one ({shipped}), and transformers says: {error}'
            ) from error
        check_supported(model, base)
        return cls(model.to(device).eval().requires_grad_(False), tokenizer, base)

    def _route_linears(self) -> None:
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                self.linear_layers[name] = module
                setattr(module, "forward", self._forward_of(name, module, module is head))  # noqa: B010 (mypy: a method)

    def _forward_of(self, name: str, layer: nn.Linear, is_head: bool) -> Any:
        def forward(x: Tensor) -> Tensor:
            route = self._kept if is_head else self._route
            if is_head:
                self._features = x
            return F.linear(x, layer.weight, layer.bias) if route is None else route.linear(name, x, layer)

        return forward

    def _narrow_last_layer(self) -> bool:
        """Lets the last decoder layer continue with fewer rows; returns False if the model does not name its layers."""
        layers = getattr(self.model.get_decoder(), "layers", None)
        if layers is None:
            return False
        last = layers[self.model.config.get_text_config().num_hidden_layers - 1]
        whole = last.forward

        def forward(hidden: Tensor, *args: Any, keep_M: Tensor | None = None, **kwargs: Any) -> Any:
            if keep_M is None:
                return whole(hidden, *args, **kwargs)
            kwargs["layout"] = KVFirstLayout(kwargs["layout"].narrow(keep_M))
            with contextlib.suppress(StopAfterKV):
                whole(hidden, *args, **kwargs)
            args, kwargs = _select_rows(((hidden, *args), kwargs), keep_M, hidden.shape[1])
            with self.use_route(self._kept):
                return whole(*args, **kwargs)

        last.forward = forward
        return True

    def _let_layers_be_recomputed(self) -> None:
        for layer in getattr(self.model.get_decoder(), "layers", ()):
            layer.forward = self._recomputed(layer.forward)

    def _recomputed(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a layer's forward `whole` with gradient checkpointing, which is active inside
        `precision_context(recompute=True)`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self._recompute and torch.is_grad_enabled()):
                return whole(*args, **kwargs)
            routes = self._route, self._kept  # they change before the backward pass

            def again(*args: Any, **kwargs: Any) -> Any:
                before = self._route, self._kept
                self._route, self._kept = routes
                try:
                    return whole(*args, **kwargs)
                finally:
                    self._route, self._kept = before

            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return forward

    @contextlib.contextmanager
    def precision_context(self, autocast_dtype: torch.dtype | None, *, recompute: bool = False) -> Iterator[None]:
        """Context in which passes are computed in the dtype `autocast_dtype` (None: the engine's default). With
        `recompute`, backward passes recompute each decoder layer instead of keeping its activations."""
        before = self.autocast_dtype, self._recompute
        self.autocast_dtype, self._recompute = autocast_dtype or self.autocast_dtype, recompute
        try:
            yield
        finally:
            self.autocast_dtype, self._recompute = before

    @contextlib.contextmanager
    def rollout_context(self) -> Iterator[None]:
        """Context of a rollout: gathers sharded weights, or casts the weights to the autocast dtype, once instead of
        for every token."""
        with contextlib.ExitStack() as stack:
            if self.sharded_params:
                stack.enter_context(self.sharded_params.gathered())
            elif self.autocast_dtype:
                stack.enter_context(_cast(list(self.model.parameters()), self.autocast_dtype))
            yield

    @contextlib.contextmanager
    def use_route(self, route: AdapterRoute | None, keep_M: Tensor | None = None) -> Iterator[None]:
        """Context in which every linear layer uses `route`. If only the rows `keep_M` continue to the end, the head
        uses the route of those."""
        before = self._route, self._kept
        self._route, self._kept = route, route if route is None or keep_M is None else route.narrow(keep_M)
        try:
            yield
        finally:
            self._route, self._kept = before

    def logits(
        self, ids_S: Tensor, positions_S: Tensor, layout: AttentionLayout, route: AdapterRoute | None, keep_M: Tensor
    ) -> Tensor:
        """Returns next-token logits [M, V] at the flat indices `keep_M` int64, which must rise. `ids_S` and
        `positions_S` are int64."""
        return self.logits_and_features(ids_S, positions_S, layout, route, keep_M)[0]

    def logits_and_features(
        self, ids_S: Tensor, positions_S: Tensor, layout: AttentionLayout, route: AdapterRoute | None, keep_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns next-token logits [M, V] at the flat indices `keep_M` int64, which must rise, and the inputs [M,
        width] of the model's output head."""
        fewer = len(keep_M) < len(ids_S)
        narrow = self._narrows and fewer
        with self.use_route(route, keep_M if fewer else None), self._autocast():
            out = self.model(
                input_ids=ids_S[None],
                position_ids=positions_S[None],
                use_cache=False,
                logits_to_keep=0 if narrow else keep_M,
                layout=layout,
                keep_M=keep_M if narrow else None,
            )
        features, self._features = self._features, None  # release the activations after the pass
        assert features is not None
        return out.logits[0], features[0]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None
        )

    def tensor(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        """Converts `values` to a tensor on the engine's device (default: int64)."""
        return torch.as_tensor(values, dtype=dtype, device=self.device)


@contextlib.contextmanager
def _cast(parameters: list[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Context in which the parameters' data are replaced by copies in `dtype`."""
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _select_rows(value: Any, keep_M: Tensor, size: int) -> Any:
    """Returns `value` with every tensor `[1, size, ...]` in it reduced to the rows `keep_M`."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value.index_select(1, keep_M)
    if isinstance(value, tuple):
        return tuple(_select_rows(v, keep_M, size) for v in value)
    if isinstance(value, dict):
        return {k: _select_rows(v, keep_M, size) for k, v in value.items()}
    return value


def resolve_device(device: str) -> str:
    """Resolves "auto" to cuda if available, else cpu. Raises ValueError if the device is unknown or not available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise ValueError(f"unknown device {device!r:.40}: write auto, cpu, cuda, cuda:1 or mps")
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(number or 0) >= there:
        built = "" if kind != "cuda" or torch.version.cuda else ", and this torch is built without CUDA"
        raise ValueError(
            f"device: {device} is not there: torch sees {there} {kind} devices{built}. Set device: cpu, or install a "
            "torch for your GPU (https://pytorch.org/get-started)"
        )
    return device


def resolve_base(base: str) -> str:
    """Returns the folder of a shipped base, of a GGUF file (gguf.py) or a local folder; anything else is returned as a
    hub name. Raises ValueError for an invalid name, a folder without a model, and a name similar to that of a shipped
    base."""
    shipped = sorted(path.parent.name for path in SHIPPED_BASES_DIR.glob("*/config.json"))
    if base in shipped:
        return str(SHIPPED_BASES_DIR / base)
    if not base.isprintable() or not base or len(base) > MAX_BASE_NAME_LENGTH:
        raise ValueError(f"{base!r:.40} is no base: write the name of a shipped one, a local folder or a hub name")
    if file := find_gguf(base):
        return str(converted_folder(file))
    if "/" not in base and (near := difflib.get_close_matches(base, [*shipped, *PACKAGED_BASES], n=1, cutoff=0.7)):
        raise ValueError(
            f'cannot load the base "{base}": did you mean {near[0]}? A folder of that name is ./{base}; one of '
            f"the hub is OWNER/{base}"
        )
    if base.startswith((".", "/", "~")):
        path = Path(base).expanduser()
        if not (path / "config.json").exists():
            raise ValueError(f"no model at {path}: it holds no config.json. Name a folder that save_pretrained wrote.")
        return str(path)
    return base
