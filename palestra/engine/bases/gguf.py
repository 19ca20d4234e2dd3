"""Bases in GGUF files: converted once to a folder of safetensors in the user's cache, then loaded like any folder.

A quantised file is dequantised to float32. Its tokenizer and chat template are converted too.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils
from transformers.utils.logging import disable_progress_bar

from palestra.core.files import DamagedFile, acquire_lock, atomic_folder, checksums, find_damage
from palestra.engine.bases.gguf_fields import REMEDY, check_tensors, complete_config, refuse
from palestra.engine.bases.packaged_bases import Parts, cache_folder, gguf_stem
from palestra.engine.bases.pretrained import load_config, load_model, load_tokenizer, model_from_config

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # older versions of transformers choose a split by the architecture
    GGUF_PRE_TOKENIZER_SPLITS = None

# Written last: {"gguf": file name, "files": sizes and checksums of the folder, "converter": CONVERTER}
MANIFEST = "converted.json"
CONVERTER = 3  # folders of a lower one are written again: some attention scales and splits were wrong before
MAGIC = b"GGUF"  # first bytes of every GGUF file
KNOWN_TO_READ = "transformers 5.23"
# Kinds of splits as llama.cpp names them: each digit alone; a word that is a token stays whole; GPT-2's.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
GPT2_SPLITS = ("gpt-2", "phi-2", "olmo", "mpt", "gigachat", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "mellum")
SAMPLE_TEXT = "Two  words, 12 +3,\nCafé."


def converted_folder(parts: Parts) -> Path:
    """Returns the folder with the model and tokenizer of a GGUF file, in a form that `from_pretrained` loads.

    The first call converts the file (4 bytes of disk per parameter) and says so on stderr; others find the folder in
    the cache, by the checksum of the file, and verify its checksums. Processes that convert one file at the same time
    wait for the first of them; after a crash or damage the folder is written again. Raises ValueError if the package
    `gguf` is missing, or the file is damaged, of an architecture that transformers does not convert, or has fields or
    tensors that would be dropped.
    """
    stats = [part.stat() for part in parts]
    changes = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    return _convert_once(tuple(part.resolve() for part in parts), changes)


@cache  # hashes a file once per process
def _convert_once(parts: Parts, changes: tuple[tuple[int, int], ...]) -> Path:
    folder = cache_folder(parts)
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with acquire_lock(folder.with_name(f"{folder.name}.lock"), f"the converted model {folder}", wait=True):
        if not _is_intact(folder):  # another process may have converted it meanwhile
            atomic_folder(folder, lambda temporary: _convert(parts, temporary))
    return folder


def _is_intact(folder: Path) -> bool:
    """True if a folder is complete and has the checksums that it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["converter"] == CONVERTER and not find_damage(folder, manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(parts: Parts, folder: Path) -> None:
    """Writes the model of a GGUF file, its tokenizer and the manifest to `folder`."""
    file = parts[0] if len(parts) == 1 else _join(parts, folder)
    if find_spec("gguf") is None:
        raise ValueError(f"reading {file.name} needs the package gguf: pip install 'palestra[smollm]'")
    with open(file, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise DamagedFile(f"{file} is not a GGUF file: it does not begin with the bytes GGUF. Copy it again")
    disable_progress_bar()
    with _reading_once():
        model, tokenizer, reader = _read(file)
    config = model.config
    del config.quantization_config  # save_pretrained refuses models that were quantised
    with torch.device("meta"):
        plain = model_from_config(AutoModelForCausalLM, config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    split_as_stated(tokenizer, reader, file)
    check_tokenizer(tokenizer, reader, file)
    tokenizer.save_pretrained(folder)
    if file.parent == folder:
        file.unlink()
    manifest = {"gguf": file.name, "files": checksums(folder), "converter": CONVERTER}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _join(parts: Parts, folder: Path) -> Path:
    """Writes the parts of a file to one in `folder`; returns its path."""
    joined = folder / f"{gguf_stem(parts)}.gguf"
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, out)
    return joined


def _read(file: Path) -> tuple[Any, Any, Any]:
    """Returns the model of a GGUF file in float32, its tokenizer, and a reader of the file's fields. Raises ValueError
    if a field or a tensor of the file would be dropped, or a weight of the model is not in the file."""
    from gguf import GGUFReader

    where = {"path": str(file.parent), "gguf_file": file.name}
    with _explain_damage(file):
        reader = GGUFReader(str(file))
        config = load_config(**where)
    complete_config(config, reader, str(file))
    with torch.device("meta"):
        empty = model_from_config(AutoModelForCausalLM, config, dtype=torch.float32)
    check_tensors(empty, reader, str(file))
    _announce(
        file, sum(weight.numel() for weight in empty.parameters()), len(reader.fields["tokenizer.ggml.tokens"].data)
    )
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    with _explain_damage(file):
        model, loading = load_model(AutoModelForCausalLM, **where, **options)
        tokenizer = load_tokenizer(**where)
    refuse(loading["unexpected_keys"], file.name)
    refuse([f"no {name}" for name in loading["missing_keys"]], file.name, "the model needs these weights")
    return model, tokenizer, reader


def _announce(file: Path, weights: int, tokens: int) -> None:
    """Prints what is done and how long it takes, as measured on a core of 2021: the vocabulary takes most of it."""
    seconds = 1 + weights / 60e6 + tokens / 20e3
    print(f"converting {file.name} to float32 once, about {seconds:.0f} s on an idle core", file=sys.stderr, flush=True)


@contextmanager
def _explain_damage(file: Path) -> Iterator[None]:
    """Context that raises DamagedFile for whatever the parser of a damaged file raises."""
    try:
        yield
    except Exception as error:  # of many types
        raise DamagedFile(
            f"cannot read the GGUF file {file}: it is damaged, or transformers does not convert its architecture "
            f"({type(error).__name__}: {error}). Copy or install it again, or name a folder that save_pretrained wrote"
        ) from error


@contextmanager
def _reading_once() -> Iterator[None]:
    """Context in which transformers parses the header of a file and builds its table of tensor names once, without a
    progress bar. It would parse it for each of config, weights and tokenizer, which is most of the time for a large
    vocabulary, and build the table for each module of the model."""
    import gguf

    class Header(gguf.GGUFReader):
        """A reader that slices the mapped file as a plain array, three times as fast as a `np.memmap`."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    with ExitStack() as stack:
        stack.enter_context(_patch_attribute(gguf, "GGUFReader", cache(Header)))
        stack.enter_context(_patch_attribute(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        stack.enter_context(_patch_attribute(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items))
        yield


@contextmanager
def _patch_attribute(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def split_as_stated(tokenizer: Any, fields: Any, file: Path) -> None:
    """Makes a byte-level tokenizer split texts as the file states (`tokenizer.ggml.pre`), which transformers reads for
    some kinds only and takes for GPT-2's otherwise. Prints it if the file does not say; raises ValueError for a kind
    that is not known."""
    if _field(fields, "model") != "gpt2" or GGUF_PRE_TOKENIZER_SPLITS is None:
        return
    kind = _field(fields, "pre")
    if kind in DIGITS_APART:
        words = ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), words])
    elif kind in WHOLE_WORDS_FIRST:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    elif kind in (None, "default"):
        print(f"{file.name} does not say how its tokenizer splits texts: as GPT-2's does", file=sys.stderr)
    elif kind not in GGUF_PRE_TOKENIZER_SPLITS and kind not in GPT2_SPLITS:
        raise ValueError(
            f'the tokenizer of {file.name} splits texts as "{kind}" (tokenizer.ggml.pre), which is not known here, and '
            f"its tokens would be others. {REMEDY}"
        )


def check_tokenizer(tokenizer: Any, fields: Any, file: Path) -> None:
    """Raises ValueError unless the tokenizer has the end token of the file, and decodes a text's tokens to the same
    text (transformers 5.17 takes another end token, and decodes bytes as characters)."""
    end = _field(fields, "eos_token_id")
    fault = ""
    if end is not None and tokenizer.eos_token_id != end:
        fault = f"its end token is {tokenizer.eos_token_id}, but the file has {end}"
    elif _field(fields, "model") == "gpt2":  # by bytes: every text has tokens
        decoded = tokenizer.decode(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False))
        if decoded != SAMPLE_TEXT:
            fault = f"{SAMPLE_TEXT!r} becomes {decoded!r}"
    elif _field(fields, "add_space_prefix") is False and _begins_with_space(tokenizer):
        fault = "it puts a space before a text, and the file forbids that"
    if fault:
        raise ValueError(
            f"transformers {transformers.__version__} reads the tokenizer of {file.name} wrongly: {fault}. "
            f"Install {KNOWN_TO_READ} or newer"
        )


def _begins_with_space(tokenizer: Any) -> bool:
    first: str = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
    return first.startswith("\u2581")


def _field(fields: Any, name: str) -> Any:
    """Returns a field of the file's tokenizer, or None."""
    field = fields.get_field(f"tokenizer.ggml.{name}")
    return field.contents() if field else None
