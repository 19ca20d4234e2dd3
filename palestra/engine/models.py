"""One base model in memory, of an architecture that supported.py lets through, run on flat rows of tokens.

Every pass, in sampling and in training, feeds the model one row `[1, S]` that holds the tokens of many sequences end to
end. Linear layers thus never see padding. What a token may attend to is said by a *layout* (attention.py for training,
cache.py for sampling), which the model hands through to our attention function; which adapter a row uses is said by a
*route* (lora.py), which the linear layers ask. The last decoder layer makes keys and values of every row, but goes on
only with the rows whose logits are kept: nobody reads the others.

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

from palestra.engine.memory import keep_freed_memory
from palestra.engine.norms import fuse_norms
from palestra.engine.supported import check_supported

BASES = Path(__file__).parent.parent / "bases"
LONGEST_BASE = 4096  # characters of a name or a path


class Layout(Protocol):
    """Says what each token of a flat row attends to.

    One of a pass that keeps fewer rows than it has also gives `narrow(keep_M)`: the layout in which those rows alone
    ask, and the keys and values are still all rows'.
    """

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        """Attention output [S, H, D]."""
        ...


class Route(Protocol):
    """Says which adapter each row of a flat row uses."""

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        """`layer(x)` plus what the rows' adapters add at the linear layer `name`."""
        ...

    def narrow(self, keep_M: Tensor) -> Route:
        """The route of the rows `keep_M` alone, which rise."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    out = kwargs["layout"].attend(module.layer_idx, query[0], key[0], value[0], kwargs["scaling"])
    return out[None], None


AttentionInterface.register("palestra", _attention)


class Parts(Protocol):
    """Weights of which every rank keeps a part (sharded.py)."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within, all are here."""
        ...

    def part(self) -> None:
        """Keeps the own ones only."""
        ...


class KeysKnown(Exception):
    """Ends the first of the last layer's two passes."""


class TwoPasses:
    """The last layer's layout: one pass of all rows, up to keys and values, and one of the kept rows, to the end."""

    def __init__(self, kept: Layout) -> None:
        self.kept = kept
        self.kv_HSD: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        if self.kv_HSD is None:
            self.kv_HSD = k_HSD, v_HSD
            raise KeysKnown
        return self.kept.attend(layer, q_HSD, *self.kv_HSD, scale)


class Engine:
    """A resident base model with its tokenizer. Adapters (lora.py), samplers and trainers work on top of it.

    `dtype` is what its passes make keys and values in; `mixed`, where the weights are kept in another type, what the
    products of a pass are computed in; `shards`, where each rank keeps a part of the weights, makes them whole.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.mixed: torch.dtype | None = None
        self.shards: Parts | None = None
        self.linears: dict[str, nn.Linear] = {}
        self._route: Route | None = None
        self._kept: Route | None = None
        self._features: Tensor | None = None
        self._recompute = False
        fuse_norms(model)
        self._route_linears()
        self._narrows = self._narrow_last_layer()
        self._let_layers_be_recomputed()

    @classmethod
    def load(cls, base: str, *, device: str = "auto", dtype: str = "auto", threads: int = 1) -> Engine:
        """The base `base`: the name of a shipped one ("tiny"), a local folder, or a hub name.

        `device` "auto" takes CUDA where there is one; `dtype` "auto" is bfloat16 there and float32 on a CPU. Raises
        ValueError for models that supported.py refuses.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        disable_progress_bar()  # transformers draws one for each file it reads
        device = device_name(device)
        dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
        torch_dtype = getattr(torch, dtype)
        path = resolve_base(base)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation="palestra")
            tokenizer = AutoTokenizer.from_pretrained(path)
        except OSError as error:
            shipped = ", ".join(sorted(p.parent.name for p in BASES.glob("*/config.json"))) or "none"
            raise ValueError(
                f'cannot load the base "{base}": it is not a shipped one ({shipped}), and transformers says: {error}'
            ) from error
        check_supported(model, base)
        return cls(model.to(device).eval().requires_grad_(False), tokenizer, base)

    def _route_linears(self) -> None:
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                self.linears[name] = module
                setattr(module, "forward", self._forward_of(name, module, module is head))  # noqa: B010 (mypy: a method)

    def _forward_of(self, name: str, layer: nn.Linear, is_head: bool) -> Any:
        def forward(x: Tensor) -> Tensor:
            route = self._kept if is_head else self._route
            if is_head:
                self._features = x
            return F.linear(x, layer.weight, layer.bias) if route is None else route.linear(name, x, layer)

        return forward

    def _narrow_last_layer(self) -> bool:
        """Lets the last decoder layer go on with fewer rows; false where the model does not name its layers."""
        layers = getattr(self.model.get_decoder(), "layers", None)
        if layers is None:
            return False
        last = layers[self.model.config.get_text_config().num_hidden_layers - 1]
        whole = last.forward

        def forward(hidden: Tensor, *args: Any, keep_M: Tensor | None = None, **kwargs: Any) -> Any:
            if keep_M is None:
                return whole(hidden, *args, **kwargs)
            kwargs["layout"] = TwoPasses(kwargs["layout"].narrow(keep_M))
            with contextlib.suppress(KeysKnown):
                whole(hidden, *args, **kwargs)
            args, kwargs = _rows(((hidden, *args), kwargs), keep_M, hidden.shape[1])
            with self.routed(self._kept):
                return whole(*args, **kwargs)

        last.forward = forward
        return True

    def _let_layers_be_recomputed(self) -> None:
        for layer in getattr(self.model.get_decoder(), "layers", ()):
            layer.forward = self._recomputed(layer.forward)

    def _recomputed(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """`whole`, a layer's forward, of which under `recomputing` only the input is kept for the backward pass."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self._recompute and torch.is_grad_enabled()):
                return whole(*args, **kwargs)
            routes = self._route, self._kept  # in the backward pass they are no longer what they are now

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
    def computing(self, mixed: torch.dtype | None, *, recompute: bool = False) -> Iterator[None]:
        """Within, passes are computed in `mixed` (None: as the engine has it), and their backward passes compute each
        decoder layer again, where `recompute`, in place of keeping what happened in it."""
        before = self.mixed, self._recompute
        self.mixed, self._recompute = mixed or self.mixed, recompute
        try:
            yield
        finally:
            self.mixed, self._recompute = before

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Around a rollout: weights kept in parts are whole within, those kept in another type than they are computed
        in are there in that type. Each is done once, not for every token."""
        with contextlib.ExitStack() as stack:
            if self.shards:
                stack.enter_context(self.shards.whole())
            elif self.mixed:
                stack.enter_context(_cast(list(self.model.parameters()), self.mixed))
            yield

    @contextlib.contextmanager
    def routed(self, route: Route | None, keep_M: Tensor | None = None) -> Iterator[None]:
        """Within, every linear layer adds what `route` says; where only the rows `keep_M` go on to the end, the head
        adds what it says of those."""
        before = self._route, self._kept
        self._route, self._kept = route, route if route is None or keep_M is None else route.narrow(keep_M)
        try:
            yield
        finally:
            self._route, self._kept = before

    def logits(self, ids_S: Tensor, positions_S: Tensor, layout: Layout, route: Route | None, keep_M: Tensor) -> Tensor:
        """Next-token logits [M, V] at the flat indices `keep_M`, in rising order."""
        return self.logits_and_features(ids_S, positions_S, layout, route, keep_M)[0]

    def logits_and_features(
        self, ids_S: Tensor, positions_S: Tensor, layout: Layout, route: Route | None, keep_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Next-token logits [M, V] at the flat indices `keep_M`, in rising order, and the features [M, H] that the
        model's head made them of."""
        fewer = len(keep_M) < len(ids_S)
        narrow = self._narrows and fewer
        with self.routed(route, keep_M if fewer else None), self._autocast():
            out = self.model(
                input_ids=ids_S[None],
                position_ids=positions_S[None],
                use_cache=False,
                logits_to_keep=0 if narrow else keep_M,
                layout=layout,
                keep_M=keep_M if narrow else None,
            )
        features, self._features = self._features, None  # nothing here outlives the pass
        assert features is not None
        return out.logits[0], features[0]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.mixed or torch.bfloat16, enabled=self.mixed is not None)

    def tensor(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)


@contextlib.contextmanager
def _cast(parameters: list[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Within, copies in `dtype` stand in for the parameters."""
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _rows(value: Any, keep_M: Tensor, size: int) -> Any:
    """`value` with every tensor of `size` rows `[1, size, ...]` in it cut to the rows `keep_M`."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == size:
        return value.index_select(1, keep_M)
    if isinstance(value, tuple):
        return tuple(_rows(v, keep_M, size) for v in value)
    if isinstance(value, dict):
        return {k: _rows(v, keep_M, size) for k, v in value.items()}
    return value


def device_name(device: str) -> str:
    """The device that `device` means: for "auto" CUDA where there is one. Raises ValueError where it is not there."""
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
    """The folder of a shipped base or a local folder; anything else is taken as a hub name. Raises ValueError for what
    is near the name of a shipped one."""
    shipped = sorted(path.parent.name for path in BASES.glob("*/config.json"))
    if base in shipped:
        return str(BASES / base)
    if not base.isprintable() or not base or len(base) > LONGEST_BASE:
        raise ValueError(f"{base!r:.40} is no base: write the name of a shipped one, a local folder or a hub name")
    if "/" not in base and (near := difflib.get_close_matches(base, shipped, n=1, cutoff=0.7)):
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
