"""Loads configs, tokenizers and models by transformers, without ever running code that comes with them.

Everything that palestra loads by name or from a folder goes through these functions. transformers would otherwise ask
on the terminal whether to run a stranger's module, which a config.json may name (`auto_map`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoTokenizer


def load_config(path: str, **options: Any) -> Any:
    """Returns the config of a model. Raises OSError if there is none, ValueError if it needs code of its own."""
    with _explain(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options)


def load_tokenizer(path: str, **options: Any) -> Any:
    """Returns the tokenizer of a model. Raises as `load_config` does."""
    with _explain(path):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)


def load_model(kind: Any, path: str, **options: Any) -> Any:
    """Returns what `kind.from_pretrained` loads, for a model class of transformers. Raises as `load_config` does."""
    with _explain(path):
        return kind.from_pretrained(path, trust_remote_code=False, **options)


def model_from_config(kind: Any, config: Any, **options: Any) -> Any:
    """Returns a new model, for an automatic class of transformers. Raises ValueError if it needs code of its own."""
    with _explain(config.name_or_path):
        return kind.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _explain(path: str) -> Iterator[None]:
    """Context that replaces transformers' advice to trust the code of a model."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"the model at {path} needs Python code that comes with it, and palestra runs none: name a model whose "
            "kind is part of transformers"
        ) from None
