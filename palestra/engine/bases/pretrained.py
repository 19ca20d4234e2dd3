"""Loads configs, tokenizers and models by transformers, without ever running code that comes with them.

Everything that palestra loads by name or from a folder goes through these functions. transformers would otherwise ask
on the terminal whether to run a stranger's module, which a config.json may name (`auto_map`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from palestra.core.config.shipped import SHIPPED_BASES_DIR


def load_config(path: str, **options: Any) -> Any:
    """Returns the config of a model. Raises ValueError if there is none, or if it needs code of its own."""
    with _explain(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options)


def load_tokenizer(path: str, **options: Any) -> Any:
    """Returns the tokenizer of a model. Raises as `load_config` does."""
    with _explain(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    # no warning of a long text, which is refused where it is used
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


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
    """Context that says in a line what is wrong with a model, without transformers' advice to trust its code."""
    try:
        yield
    except OSError as error:
        why = next(iter(str(error).splitlines()), "").rstrip(".")
        if "couldn't connect" in why.lower():
            why = "the hub does not answer, and its cache here has no copy: name a local folder or a .gguf file"
        shipped = ", ".join(sorted(p.parent.name for p in SHIPPED_BASES_DIR.glob("*/config.json")))
        raise ValueError(f'cannot load the base "{path}": it is not a shipped one ({shipped}); {why}') from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"the model at {path} needs Python code that comes with it, and palestra runs none: name a model whose "
            "kind is part of transformers"
        ) from None
