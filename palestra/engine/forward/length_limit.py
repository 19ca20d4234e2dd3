"""Length limits for rotary embeddings that depend on the longest sequence of a batch (LongRoPE, "dynamic").

Beyond a length that the config names, the embedding of every token changes. A packed row would then differ from
separate sequences, and keys in the cache from those of the whole sequence. Up to that length nothing depends on the
batch, so sequences end there.

Bases with LongRoPE have two sets of factors, short ones up to that length and long ones beyond. With the long ones for
sequences of every length (`use_long_factors`) nothing depends on the batch, and sequences may be as long as the base
allows. Longer sequences are then computed as transformers does, shorter ones as the beginning of a longer one.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from palestra.engine.forward.decoder import decoder_of


def position_limit(config: Any) -> int | None:
    """Returns the maximum number of tokens, prompt and answer together, of bases with `config` (that of the text
    model); None if it names no limit, as with Mamba."""
    size = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # MPT's name for it
    return min((limit for limit in (size, length_limit(config)) if limit), default=None)


def length_limit(config: Any) -> int | None:
    """Returns the number of tokens from which a base's rotary embedding depends on the longest sequence of a batch;
    None if it never does."""
    limits = [
        entry.get("original_max_position_embeddings") or config.max_position_embeddings
        for entry in _rope_entries(config)
        if entry.get("rope_type") == "dynamic"
        or (_is_longrope(entry) and entry["short_factor"] != entry["long_factor"])
    ]
    return min(limits, default=None)


def use_long_factors(config: Any, base: str) -> Any:
    """Makes models of `config` use LongRoPE's long factors for sequences of every length; returns the config. Raises
    ValueError if the base has no such factors."""
    entries = [entry for entry in _rope_entries(config.get_text_config()) if _is_longrope(entry)]
    if not entries:
        raise ValueError(
            f"long_context: the rotary embedding of the base {base!r} has no short and long factors (LongRoPE) to "
            "choose from: set long_context: false"
        )
    for entry in entries:
        entry["short_factor"] = entry["long_factor"]
    return config


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of the rotary embeddings of all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _is_longrope(entry: dict[str, Any]) -> bool:
    return entry.get("rope_type") == "longrope"


def check_length(config: Any, longest: int) -> None:
    """Raises ValueError for a sequence of `longest` tokens if the base's rotary embedding changes before its end."""
    if (limit := length_limit(config)) and longest > limit:
        raise ValueError(
            f"a sequence of {longest} tokens: from {limit} on, this base's rotary embedding depends on the longest "
            "sequence of a batch, and log-probabilities with it. Shorten prompts and answers, or for LongRoPE set "
            "long_context: true."
        )


def limit_length(model: PreTrainedModel) -> None:
    """Makes passes of packed rows with longer sequences raise ValueError; does nothing for other rotary embeddings."""
    decoder = decoder_of(model)
    config = model.config.get_text_config()
    if length_limit(config) is None or decoder._forward_pre_hooks:
        return

    def check(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is not None:
            check_length(config, int(kwargs["position_ids"].max()) + 1)

    decoder.register_forward_pre_hook(check, with_kwargs=True)
