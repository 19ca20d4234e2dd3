"""Finds the decoder of a language model: the part between token ids and the output head."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """Returns the module that computes last hidden states from token ids. transformers' own lookup goes by attribute
    names; for some models it returns the whole model or its head."""
    decoder = model.get_decoder()
    if decoder is model or isinstance(decoder, nn.Linear):
        return getattr(model, "model", model)
    return decoder
