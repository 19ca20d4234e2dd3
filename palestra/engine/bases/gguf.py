"""Bases in GGUF files: converted once to a folder of safetensors in the user's cache, then loaded like any folder.

A quantised file is dequantised to float32. Its tokenizer and chat template are converted too.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from palestra.core.files import DamagedFile, acquire_lock, atomic_folder, checksums, find_damage
from palestra.engine.bases.packaged_bases import cache_folder
from palestra.engine.bases.pretrained import load_model, load_tokenizer, model_from_config

MANIFEST = "converted.json"  # written last: {"gguf": file name, "files": sizes and checksums of the folder}
MAGIC = b"GGUF"  # first bytes of every GGUF file
KNOWN_TO_READ = "transformers 5.23"
SAMPLE_TEXT = "Two  words, 12 +3,\nCafé."


def converted_folder(file: Path) -> Path:
    """Returns the folder with the model and tokenizer of a GGUF file, in a form that `from_pretrained` loads.

    The first call converts the file (seconds, and 4 bytes of disk per parameter); others find the folder in the cache,
    by the checksum of the file, and verify its checksums. Processes that convert one file at the same time wait for the
    first of them; after a crash or damage the folder is written again. Raises ValueError if the package `gguf` is
    missing, or the file is damaged or of an architecture that transformers does not convert.
    """
    stat = file.stat()
    return _converted(file.resolve(), stat.st_size, stat.st_mtime_ns)


@cache  # hashes a file once per process
def _converted(file: Path, size: int, mtime_ns: int) -> Path:
    folder = cache_folder(file)
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with acquire_lock(folder.with_name(f"{folder.name}.lock"), f"the converted model {folder}", wait=True):
        if not _is_intact(folder):  # another process may have converted it meanwhile
            atomic_folder(folder, lambda temporary: _convert(file, temporary))
    return folder


def _is_intact(folder: Path) -> bool:
    """True if a folder is complete and has the checksums that it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return not find_damage(folder, manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file, its tokenizer and the manifest to `folder`."""
    _check_readable(file)
    from gguf import GGUFReader

    disable_progress_bar()
    folder_path = str(file.parent)
    try:
        quantized = load_model(AutoModelForCausalLM, folder_path, gguf_file=file.name, dtype=torch.float32)
        tokenizer = load_tokenizer(folder_path, gguf_file=file.name)
    except Exception as error:  # the parser of a damaged file raises errors of many types
        raise DamagedFile(
            f"cannot read the GGUF file {file}: it is damaged, or transformers does not convert its architecture "
            f"({type(error).__name__}: {error}). Copy or install it again, or name a folder that save_pretrained wrote"
        ) from error
    config = quantized.config
    del config.quantization_config  # save_pretrained refuses models that were quantised
    with torch.device("meta"):
        model = model_from_config(AutoModelForCausalLM, config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    fields = GGUFReader(file)
    split_digits(tokenizer, fields)
    check_tokenizer(tokenizer, fields, file)
    tokenizer.save_pretrained(folder)
    (folder / MANIFEST).write_text(json.dumps({"gguf": file.name, "files": checksums(folder)}))


def split_digits(tokenizer: Any, fields: Any) -> None:
    """Makes the tokenizer of a SmolLM file split numbers into digits, as the file asks for; transformers 5.23 does not
    read that field, and tokenises spaces before digits differently."""
    if _field(fields, "pre") == "smollm":
        digits, words = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, words])


def check_tokenizer(tokenizer: Any, fields: Any, file: Path) -> None:
    """Raises ValueError unless the tokenizer has the end token of the file, and decodes a text's tokens to the same
    text (transformers 5.17 takes another end token, and decodes bytes as characters)."""
    end = _field(fields, "eos_token_id")
    fault = ""
    if end is not None and tokenizer.eos_token_id != end:
        fault = f"its end token is {tokenizer.eos_token_id}, but the file has {end}"
    elif _field(fields, "model") == "gpt2":  # by bytes: every text has tokens
        found = tokenizer.decode(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False))
        fault = "" if found == SAMPLE_TEXT else f"{SAMPLE_TEXT!r} becomes {found!r}"
    if fault:
        raise ValueError(
            f"transformers {transformers.__version__} reads the tokenizer of {file.name} wrongly: {fault}. "
            f"Install {KNOWN_TO_READ} or newer"
        )


def _field(fields: Any, name: str) -> Any:
    """Returns a field of the file's tokenizer, or None."""
    field = fields.get_field(f"tokenizer.ggml.{name}")
    return field.contents() if field else None


def _check_readable(file: Path) -> None:
    if find_spec("gguf") is None:
        raise ValueError(f"reading {file.name} needs the package gguf: pip install 'palestra[smollm]'")
    with open(file, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise DamagedFile(f"{file} is not a GGUF file: it does not begin with the bytes GGUF. Copy it again")
