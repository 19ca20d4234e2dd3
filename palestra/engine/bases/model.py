"""A base model in memory, run on flat rows of tokens.

Every pass, in sampling and in training, runs the model on one row `[1, S]` that holds the tokens of many sequences end
to end, so linear layers never process padding. A *layout* defines which tokens each token attends to, a *route* which
adapter each row uses (flat_row.py). The last decoder layer computes keys and values of all rows, but continues only
with the rows whose logits are kept, since the others are not used.

Models whose layers do more than attention run on the *plain path* instead (plain.py): the same flat rows go in and come
out, and in between the model runs as transformers does. self_check.py decides at load which of the two gives the
model's own results.

Shapes: `S` tokens of a flat row, `M` rows whose logits are kept, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.logging import disable_progress_bar

from palestra.core.accel.devices import resolve_device
from palestra.core.accel.malloc import keep_freed_memory, release_freed_memory
from palestra.engine.bases.names import expert_notes, model_class, model_without_weights, plain_note, resolve_base
from palestra.engine.bases.pretrained import explain_damage, load_config, load_tokenizer, load_whole_model
from palestra.engine.check.probe import AttentionShape, probe_attention, set_attention
from palestra.engine.check.self_check import choose_engine, small_verdict
from palestra.engine.forward.decoder import decoder_of
from palestra.engine.forward.flat_row import AdapterRoute, AttentionLayout, KVFirstLayout, StopAfterKV, select_rows
from palestra.engine.forward.fused_layers import fuse_layers
from palestra.engine.forward.length_limit import limit_length, use_long_factors
from palestra.engine.forward.plain import PlainPath
from palestra.engine.forward.quantized import Quantization, quantize_model
from palestra.engine.forward.routing_replay import ReplayedExperts, Router, find_routers, replay_experts
from palestra.engine.forward.tree_attention import Forest, TreeLayout
from palestra.engine.lora.adapters import find_linear_layers, own_output
from palestra.engine.lora.variants import call_by_blocks, replaceable_modules

LARGE_MODEL_BYTES = 2**30  # of weights: with less, page faults cost more (7 % of a step) than memory is worth (2 %)


class ShardedParams(Protocol):
    """Weights that are sharded over the ranks (fsdp.py)."""

    def gather_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which all weights are gathered on this rank."""

    def in_pass(self, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, called inside a pass of the whole model."""

    def reshard(self) -> None:
        """Drops all weights but this rank's own shard."""


class Engine:
    """A base model with its tokenizer, shared by adapters (lora.py), samplers and trainers.

    `dtype` is the dtype of keys and values; `autocast_dtype` is the autocast dtype if it differs from that of the
    weights (else None); `sharded_params` gathers the weights if they are sharded over ranks. `plain_path` runs the
    model as transformers does; None if it runs on packed rows, where `attention` is the shape of keys and values.

    With `plain` false, raises UnsupportedAttention if the model's attention cannot run on packed rows.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str, *, plain: bool = False) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.autocast_dtype: torch.dtype | None = None
        self.sharded_params: ShardedParams | None = None
        self.linear_layers = find_linear_layers(model)
        self.attention: AttentionShape | None = None
        self.plain_path: PlainPath | None = None
        self._route: AdapterRoute | None = None
        self._kept: AdapterRoute | None = None
        self._experts: ReplayedExperts | None = None
        self._routers: list[Router] | None = None
        self._decoder_output: Any = BaseModelOutputWithPast  # of the last pass: models have output classes of their own
        self._recompute = False
        if plain:
            set_attention(model, "eager")
        else:
            self.attention = probe_attention(model)
            set_attention(model, "palestra")
            fuse_layers(model)
            limit_length(model)
        head = model.get_output_embeddings()
        for name, layer in self.linear_layers.items():
            setattr(layer, "forward", self._forward_of(name, layer, layer is head))  # noqa: B010 (mypy: a method)
        for name, module in replaceable_modules(model).items():  # their parameters may be replaced by adapters'
            setattr(module, "forward", self._module_forward(name, module, module.forward))  # noqa: B010
        if plain:
            self.plain_path = PlainPath(self)
        self._narrows = plain or self._narrow_last_layer()
        for layer in getattr(decoder_of(self.model), "layers", ()):
            layer.forward = self._with_checkpointing(layer.forward)

    @classmethod
    def load(
        cls,
        base: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 1,
        quantize: Quantization | None = None,
        long_context: bool = False,
    ) -> Engine:
        """Loads the base `base`: the name of a shipped one ("tiny") or a packaged one ("smollm2"), a local folder,
        a GGUF file, or a Hugging Face hub name.

        `device` "auto" uses CUDA if available; `dtype` "auto" is bfloat16 on CUDA and float32 on CPU; `quantize`
        quantises the linear layers after loading (quantized.py); `long_context` uses LongRoPE's long factors
        (length_limit.py). Raises ValueError if the base cannot be loaded, or if its results here are not those of
        transformers (self_check.py).
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        disable_progress_bar()  # transformers shows one for each file
        device = resolve_device(device)
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        torch_dtype = getattr(torch, dtype)
        path = resolve_base(base)
        config = load_config(path)
        changed = {"config": use_long_factors(config, base)} if long_context else {}
        kind = model_class(config, base)
        with explain_damage(path):
            model = load_whole_model(kind, path, dtype=torch_dtype, attn_implementation="eager", **changed)
            tokenizer = load_tokenizer(path)
        if quantize:
            quantize_model(model, quantize)
        model = model.to(device).eval().requires_grad_(False)
        engine = choose_engine(model, base, lambda of, plain: cls(of, tokenizer, base, plain=plain))
        release_freed_memory()  # memory that loading used beyond the weights
        return engine

    def release_freed_memory(self) -> None:
        """Returns freed memory to the system between the parts of a step, for large models: the next part could not use
        its pieces and would allocate new memory in addition."""
        if self.device.type == "cpu" and sum(p.nbytes for p in self.model.parameters()) >= LARGE_MODEL_BYTES:
            release_freed_memory()

    def notes(self) -> list[str]:
        """Returns notes for the user on how the base runs, a line each: that it is on the plain path, and that adapters
        reach stacked experts by `target_parameters` only."""
        lines = expert_notes(self.name, self.model)
        if path := self.plain_path:
            lines.insert(0, plain_note(self.name, path.reason, uses_cache=path.uses_cache))
        return lines

    def _forward_of(self, name: str, layer: Any, is_head: bool) -> Any:
        def forward(x: Tensor) -> Tensor:
            route = self._kept if is_head else self._route
            if route is not None:
                return route.linear(name, x, layer)
            return own_output(layer, x)

        return forward

    def _module_forward(self, name: str, module: nn.Module, base_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._route is None:
                return base_forward(*args, **kwargs)
            return call_by_blocks(self._route, name, module, base_forward, args, kwargs)

        return forward

    def _narrow_last_layer(self) -> bool:
        """Lets the last decoder layer continue with fewer rows; returns False if the model does not name its layers."""
        layers = getattr(decoder_of(self.model), "layers", None)
        if layers is None:
            return False
        last = layers[self.model.config.get_text_config().num_hidden_layers - 1]
        full_forward = last.forward

        def forward(hidden: Tensor, *args: Any, keep_M: Tensor | None = None, **kwargs: Any) -> Any:
            if keep_M is None:
                return full_forward(hidden, *args, **kwargs)
            kwargs["layout"] = KVFirstLayout(kwargs["layout"].narrow(keep_M))
            with contextlib.suppress(StopAfterKV):
                full_forward(hidden, *args, **kwargs)
            args, kwargs = select_rows(((hidden, *args), kwargs), keep_M, hidden.shape[1])
            with self.use_route(self._kept):
                return full_forward(*args, **kwargs)

        last.forward = forward
        return True

    def _with_checkpointing(self, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a layer's forward `layer_forward` with gradient checkpointing, which is active inside
        `precision_context(recompute=True)`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self._recompute and torch.is_grad_enabled()):
                return layer_forward(*args, **kwargs)
            state = self._route, self._kept, self._experts  # they change before the backward pass

            def again(*args: Any, **kwargs: Any) -> Any:
                before = self._route, self._kept, self._experts
                self._route, self._kept, self._experts = state
                try:
                    return layer_forward(*args, **kwargs)
                finally:
                    self._route, self._kept, self._experts = before

            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return forward

    @contextlib.contextmanager
    def precision_context(self, autocast_dtype: torch.dtype | None, *, recompute: bool = False) -> Iterator[None]:
        """Context in which passes are computed in the dtype `autocast_dtype` (None: the engine's default). With
        `recompute`, backward passes recompute each decoder layer instead of keeping its activations."""
        before = self.autocast_dtype, self._recompute
        self.autocast_dtype = autocast_dtype or self.autocast_dtype
        self._recompute = recompute
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
                stack.enter_context(self.sharded_params.gather_weights())
            elif self.autocast_dtype:
                parameters = list(self.model.parameters())
                stack.enter_context(replaced_data(parameters, (p.data.to(self.autocast_dtype) for p in parameters)))
            yield

    @property
    def route(self) -> AdapterRoute | None:
        """The route of the pass that is running."""
        return self._route

    @contextlib.contextmanager
    def use_route(self, route: AdapterRoute | None, keep_M: Tensor | None = None) -> Iterator[None]:
        """Context in which every linear layer uses `route`. If only the rows `keep_M` continue to the end, the head
        uses the route of these rows."""
        before = self._route, self._kept
        self._route = route
        self._kept = route if route is None or keep_M is None else route.narrow(keep_M)
        try:
            yield
        finally:
            self._route, self._kept = before

    @property
    def routers(self) -> list[Router]:
        """The routers of a mixture of experts; inside `use_experts` they use the experts given there. Raises ValueError
        if they cannot, or the base is on the plain path."""
        if self._routers is None:
            if self.plain_path:
                raise ValueError(
                    "the sampler returned routed experts, which a base on the plain path cannot use: start vLLM "
                    "without --enable-return-routed-experts"
                )
            self._routers = find_routers(self.model)
            replay_experts(self._routers, lambda: self._experts)
        return self._routers

    @contextlib.contextmanager
    def use_experts(self, experts_SLK: Tensor | None, keep_M: Tensor) -> Iterator[None]:
        """Context of a pass in which the routers use the experts `experts_SLK` (None: their own choice)."""
        if experts_SLK is not None:
            self._experts = ReplayedExperts(experts_SLK, experts_SLK[keep_M])
        try:
            yield
        finally:
            self._experts = None

    def logits(
        self, ids_S: Tensor, positions_S: Tensor, layout: AttentionLayout, route: AdapterRoute | None, keep_M: Tensor
    ) -> Tensor:
        """Returns next-token logits [M, V] at the flat indices `keep_M` int64, which must rise. `ids_S` and
        `positions_S` are int64."""
        fewer = len(keep_M) < len(ids_S)
        narrow = self._narrows and fewer
        with self.use_route(route, keep_M if fewer else None), self._autocast():
            if self.plain_path:
                assert isinstance(layout, TreeLayout)
                return self.plain_path.head_logits(self.plain_path.hidden_states(layout, keep_M))
            out = self.model(
                input_ids=ids_S[None],
                position_ids=positions_S[None],
                use_cache=False,
                logits_to_keep=0 if narrow else keep_M,
                layout=layout,
                keep_M=keep_M if narrow else None,
            )
        logits_MV: Tensor = out.logits[0]
        return logits_MV

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary: logits per row."""
        return int(self.model.config.get_text_config().vocab_size)

    def hidden_states(
        self, ids_S: Tensor, positions_S: Tensor, layout: AttentionLayout, route: AdapterRoute | None, keep_M: Tensor
    ) -> Tensor:
        """Returns the last hidden states [M, width] at the flat indices `keep_M` int64, which must rise: the inputs of
        `head_logits`. Both need the weights of a sharded model gathered (`in_pass`)."""
        fewer = len(keep_M) < len(ids_S)
        narrow = self._narrows and fewer
        with self.use_route(route, keep_M if fewer else None), self._autocast():
            out = decoder_of(self.model)(
                input_ids=ids_S[None],
                position_ids=positions_S[None],
                use_cache=False,
                layout=layout,
                keep_M=keep_M if narrow else None,
            )
        self._decoder_output = type(out)
        hidden_MH: Tensor = out.last_hidden_state[0]
        if fewer and not narrow:
            hidden_MH = hidden_MH.index_select(0, keep_M)
        return hidden_MH

    def forest_states(self, forest: Forest, route: AdapterRoute | None, keep_M: np.ndarray) -> Tensor:
        """Returns the last hidden states [M, width] of a forest's rows `keep_M`, which must rise."""
        ids_S = self.tensor(forest.ids_S)
        positions_S = self.tensor(forest.positions_S)
        layout = TreeLayout(forest, self.device)
        return self.hidden_states(ids_S, positions_S, layout, route, self.tensor(keep_M))

    def head_logits(self, hidden_MH: Tensor, route: AdapterRoute | None) -> Tensor:
        """Returns the logits [M, V] of last hidden states, computed by the model itself: some models scale or cap the
        head's output. `route` is that of these rows."""
        with self.use_route(route), self._autocast():
            if self.plain_path:
                return self.plain_path.head_logits(hidden_MH)
            decoder = decoder_of(self.model)
            known = self._decoder_output(last_hidden_state=hidden_MH[None])
            decoder_forward = decoder.forward
            decoder.forward = lambda *args, **kwargs: known
            ids = torch.zeros(1, len(hidden_MH), dtype=torch.long, device=hidden_MH.device)  # some read its shape
            try:
                # a squeezed tensor's gradient is a view, that of [0] is not
                # the class's forward: a sharded model's hooks are those of the pass around this
                logits: Tensor = type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits.squeeze(0)
            finally:
                decoder.forward = decoder_forward
        return logits

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None
        )

    def tensor(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        """Converts `values` to a tensor on the engine's device (default: int64)."""
        return torch.as_tensor(values, dtype=dtype, device=self.device)


def describe_base(base: str) -> list[str]:
    """Returns lines about how a base runs, from its config alone. Raises ValueError if it cannot be loaded."""
    model = model_without_weights(base)
    try:
        verdict = small_verdict(model, lambda of, plain: Engine(of, None, base, plain=plain))
    except ValueError as error:
        return [f"{base} ({type(model).__name__}): {error}"]
    note = f"{base} ({type(model).__name__}) runs on packed rows"
    if verdict.way.plain:
        note = plain_note(base, verdict.reason, uses_cache=verdict.way.uses_cache)
    return [note, *expert_notes(base, model)]


@contextlib.contextmanager
def replaced_data(parameters: Sequence[Tensor], tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context in which the parameters' data are `tensors`."""
    originals = [parameter.data for parameter in parameters]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor
    try:
        yield
    finally:
        for parameter, data in zip(parameters, originals, strict=True):
            parameter.data = data
