"""Loads configs, tokenizers and models by transformers, without ever running code that comes with them.

Everything that palestra loads by name or from a folder goes through these functions. transformers would otherwise ask
on the terminal whether to run a stranger's module, which a config.json may name (`auto_map`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from palestra.core.config.shipped import SHIPPED_BASES_DIR
from palestra.core.failures import is_out_of_memory, one_line

# Tensors of parts beside a language model: towers of pictures and sound, layers that predict several tokens, a critic.
OTHER_PARTS = re.compile(
    r"(^|\.)(vision|visual|image|audio|multi_modal|mm_|embed_vision|embed_audio|mtp|v_head|value_head)"
)


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


def load_whole_model(kind: Any, path: str, **options: Any) -> Any:
    """Returns a model all of whose weights are in its files, as `load_model` does, and prints which parts of the files
    it has not, such as a vision tower. Raises ValueError for a weight that is missing, which transformers would draw at
    random, and for tensors that no weight takes."""
    model, loading = load_model(kind, path, output_loading_info=True, **options)
    missing = sorted(loading["missing_keys"])
    unread = sorted(loading["unexpected_keys"])
    others = [name for name in unread if OTHER_PARTS.search(name)]
    if missing:
        _refuse_weights(path, f"{_listed(missing)} is not in its files, and would be drawn at random")
    if len(unread) > len(others):
        unread = [name for name in unread if name not in others]
        _refuse_weights(path, f"its files have {_listed(unread)}, which {type(model).__name__} does not use")
    if others:
        print(f"{path}: not loaded, since no part of the language model: {_listed(others)}", file=sys.stderr)
    return model


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _refuse_weights(path: str, why: str) -> None:
    raise ValueError(
        f'cannot load the base "{path}": {why}. Copy it again, correct its config.json, or save it whole as a language '
        "model (save_pretrained)"
    )


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


@contextmanager
def explain_damage(path: str) -> Iterator[None]:
    """Context that raises ValueError, in a line, for whatever transformers raises at a damaged file, or at a config
    that it does not support."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of many types, for damaged files and configs
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f'cannot load the base "{path}": a file of it is damaged, or its config names what is not supported '
            f"({one_line(error)}). Copy it again, or name another"
        ) from error
