"""Rotary embeddings that depend on the longest sequence of a batch (LongRoPE, "dynamic"), kept to where they do not.

Beyond a length that the config names, the embedding of every token changes. A packed row would differ from separate
sequences then, and keys in the cache from those of the whole sequence. Up to that length all is as ever, so sequences
end there.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from palestra.engine.decoder import decoder_of


def length_limit(config: Any) -> int | None:
    """Returns the number of tokens from which a base's rotary embedding depends on the longest sequence of a batch;
    None if it never does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = [
        entry.get("original_max_position_embeddings") or config.max_position_embeddings
        for entry in (parameters, *(value for value in parameters.values() if isinstance(value, dict)))
        if entry.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def check_length(config: Any, longest: int) -> None:
    """Raises ValueError for a sequence of `longest` tokens if the base's rotary embedding changes before its end."""
    limit = length_limit(config)
    if limit and longest > limit:
        raise ValueError(
            f"a sequence of {longest} tokens: from {limit} on, this base's rotary embedding depends on the longest "
            "sequence of a batch, and log-probabilities with it. Shorten prompts and answers."
        )


def limit_length(model: PreTrainedModel) -> None:
    """Makes passes of packed rows with longer sequences raise ValueError; does nothing for other rotary embeddings."""
    decoder, config = decoder_of(model), model.config.get_text_config()
    if length_limit(config) is None or decoder._forward_pre_hooks:
        return

    def check(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is not None:
            check_length(config, int(kwargs["position_ids"].max()) + 1)

    decoder.register_forward_pre_hook(check, with_kwargs=True)
