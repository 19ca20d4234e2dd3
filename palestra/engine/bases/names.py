"""Names of base models: what they resolve to, and notes on how a base runs."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.engine.bases.gguf import converted_folder
from palestra.engine.bases.packaged_bases import PACKAGED_BASES, find_gguf
from palestra.engine.bases.pretrained import load_config, load_tokenizer, model_from_config
from palestra.engine.forward.decoder import decoder_of

MIN_EXPERT_SHARE = 0.01  # share of the weights from which on a note is printed
MAX_BASE_NAME_LENGTH = 4096  # maximum characters of a name or a path


def model_class(config: Any, base: str) -> Any:
    """Returns transformers' class that loads a base with `config`. A model of images and text is loaded whole; its
    language part is run. Raises ValueError for a base of any other kind."""
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"cannot run {base!r}: transformers has no language model of its kind ({config.model_type}). Name a base that "
        "continues text."
    )


def model_without_weights(base: str) -> PreTrainedModel:
    """Returns the model of a base on the device "meta", from its config alone. Raises ValueError if
    transformers cannot read the config or build a language model from it."""
    config = load_config(resolve_base(base))
    with torch.device("meta"):
        model: PreTrainedModel = model_from_config(model_class(config, base), config, attn_implementation="eager")
    return model


def tokenizer_of(base: str) -> Any:
    """Returns the tokenizer of a base that is on this machine or can be downloaded."""
    return load_tokenizer(resolve_base(base))


def plain_note(name: str, reason: str, *, uses_cache: bool) -> str:
    """Returns the line that says why a model runs by transformers' own forward."""
    how = "forward and cache" if uses_cache else "forward, without a cache"
    return f"{name} runs by transformers' own {how}, which is slower than packed rows: {reason}"


def expert_notes(name: str, model: PreTrainedModel) -> list[str]:
    """Returns a line about the experts of a mixture, which adapters leave out; none for a model without experts."""
    weights = list(decoder_of(model).parameters())
    stacked = [w for w in weights if w.dim() == 3 and w.shape[1] > 1]  # not the weights of convolutions
    share = sum(w.numel() for w in stacked) / sum(w.numel() for w in weights)
    if share < MIN_EXPERT_SHARE:
        return []
    return [
        f"{name}: {share:.0%} of its weights are experts, stacked in tensors; they stay as they are, unless an "
        "adapter's target_parameters names them"
    ]


def shipped_bases() -> list[str]:
    """Returns the names of the bases that are part of the package."""
    return sorted(path.parent.name for path in SHIPPED_BASES_DIR.glob("*/config.json"))


def looks_like_base(name: str) -> bool:
    """True for what can only name a base: a shipped one, one of a package, a file, a folder, OWNER/NAME of the hub."""
    return name in (*shipped_bases(), *PACKAGED_BASES) or "/" in name or name.endswith(".gguf")


def resolve_base(base: str) -> str:
    """Returns the folder of a shipped base, of a GGUF file (gguf.py) or a local folder; anything else is returned as a
    hub name. Raises ValueError for an invalid name, a folder without a model, and a name similar to that of a shipped
    base."""
    shipped = shipped_bases()
    if base in shipped:
        return str(SHIPPED_BASES_DIR / base)
    if not base.isprintable() or not base or len(base) > MAX_BASE_NAME_LENGTH:
        raise ValueError(f"{base!r:.40} is not a base: write the name of a shipped one, a local folder or a hub name")
    if parts := find_gguf(base):
        return str(converted_folder(parts))
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
