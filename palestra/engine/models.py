"""One base model in memory: any decoder that `transformers` can load, run on flat rows of tokens.

Every pass, in sampling and in training, feeds the model one row `[1, S]` that holds the tokens of many sequences end to
end. Linear layers thus never see padding. What a token may attend to is said by a *layout* (attention.py for training,
cache.py for sampling), which the model hands through to our attention function; which adapter a row uses is said by a
*route* (lora.py), which the linear layers ask.

Shapes: `S` tokens of a flat row, `M` rows of logits kept, `V` vocabulary, `H` heads, `D` head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from palestra.engine.memory import keep_freed_memory
from palestra.engine.norms import fuse_norms

BASES = Path(__file__).parent.parent / "bases"


class Layout(Protocol):
    """Says what each token of a flat row attends to."""

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        """Attention output [S, H, D]."""
        ...


class Route(Protocol):
    """Says which adapter each row of a flat row uses."""

    def linear(self, name: str, x: Tensor, layer: nn.Linear) -> Tensor:
        """`layer(x)` plus what the rows' adapters add at the linear layer `name`."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    out = kwargs["layout"].attend(module.layer_idx, query[0], key[0], value[0], kwargs["scaling"])
    return out[None], None


AttentionInterface.register("palestra", _attention)


class Engine:
    """A resident base model with its tokenizer. Adapters (lora.py), samplers and trainers work on top of it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.linears: dict[str, nn.Linear] = {}
        self._route: Route | None = None
        fuse_norms(model)
        self._route_linears()

    @classmethod
    def load(cls, base: str, *, device: str = "auto", dtype: str = "auto", threads: int = 1) -> Engine:
        """The base `base`: the name of a shipped one ("tiny"), a local folder, or a hub name.

        `device` "auto" takes CUDA where there is one; `dtype` "auto" is bfloat16 there and float32 on a CPU. Raises
        ValueError for models whose attention this engine would compute wrongly.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        disable_progress_bar()  # transformers draws one for each file it reads
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        torch_dtype = getattr(torch, ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype)
        path = resolve_base(base)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation="palestra")
            tokenizer = AutoTokenizer.from_pretrained(path)
        except OSError as error:
            shipped = ", ".join(sorted(p.parent.name for p in BASES.glob("*/config.json"))) or "none"
            raise ValueError(
                f'cannot load the base "{base}": it is not a shipped one ({shipped}), and transformers says: {error}'
            ) from error
        check_attention(model, base)
        return cls(model.to(device).eval().requires_grad_(False), tokenizer, base)

    def _route_linears(self) -> None:
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                self.linears[name] = module
                setattr(module, "forward", self._forward_of(name, module))  # noqa: B010 (mypy: a method)

    def _forward_of(self, name: str, layer: nn.Linear) -> Any:
        def forward(x: Tensor) -> Tensor:
            if self._route is None:
                return F.linear(x, layer.weight, layer.bias)
            return self._route.linear(name, x, layer)

        return forward

    @contextlib.contextmanager
    def routed(self, route: Route | None) -> Iterator[None]:
        """Within, every linear layer adds what `route` says."""
        self._route, before = route, self._route
        try:
            yield
        finally:
            self._route = before

    def logits(self, ids_S: Tensor, positions_S: Tensor, layout: Layout, route: Route | None, keep_M: Tensor) -> Tensor:
        """Next-token logits [M, V] at the flat indices `keep_M`."""
        with self.routed(route):
            out = self.model(
                input_ids=ids_S[None],
                position_ids=positions_S[None],
                use_cache=False,
                logits_to_keep=keep_M,
                layout=layout,
            )
        return out.logits[0]

    def tensor(self, values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)


def resolve_base(base: str) -> str:
    """The folder of a shipped base or a local folder; anything else is taken as a hub name."""
    shipped = BASES / base
    if "/" not in base and shipped.is_dir():
        return str(shipped)
    if base.startswith((".", "/", "~")):
        path = Path(base).expanduser()
        if not (path / "config.json").exists():
            raise ValueError(f"no model at {path}: it holds no config.json. Name a folder that save_pretrained wrote.")
        return str(path)
    return base


def check_attention(model: PreTrainedModel, base: str) -> None:
    """Raises ValueError where the model needs an attention that the layouts do not compute."""
    config = model.config.get_text_config()
    reasons = []
    if not getattr(model, "_supports_attention_backend", False):
        reasons.append("its code does not take an attention function")
    if any("sliding" in kind or "linear" in kind for kind in getattr(config, "layer_types", None) or ()):
        reasons.append("it has sliding-window or linear-attention layers")
    if getattr(config, "attn_logit_softcapping", None):
        reasons.append("it caps attention logits")
    if reasons:
        raise ValueError(
            f"cannot run {base!r} ({type(model).__name__}): {' and '.join(reasons)}. "
            "Use a decoder with plain causal attention, such as Llama, Qwen2, Qwen3 or SmolLM."
        )
