"""Small random models, and adapters that change what they say."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.testing import tiny_tokenizer


def random_adapter(engine: Engine, config: LoraConfig, seed: int, scale: float = 0.05) -> Adapter:
    """An adapter whose B is not zero, so that it changes the outputs of the base."""
    adapter = Adapter(engine.linear_layers, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, scale, generator=generator)
    return adapter


def plain_logps(engine: Engine, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities [T, V] by transformers' own eager attention, without palestra's layouts."""
    engine.model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            logits = engine.model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
    finally:
        engine.model.config._attn_implementation = "palestra"
    return torch.log_softmax(logits / temperature, -1).numpy()


def write_models(folder: Path, configs: dict[str, Any], seed: int, noise: float) -> Path:
    """Writes a base of each config to `folder`, by name; all weights differ from their initial values."""
    for name, config in configs.items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=noise)
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder
