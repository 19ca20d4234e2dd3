"""Checkpoints as tar.gz archives, packed and unpacked in blocks.

Uploaded archives are parsed header by header: only regular files with known names are extracted, other content is
rejected or skipped, and neither names nor sizes from the archive reach the file system or allocate memory.
"""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from palestra.engine.bases.names import model_without_weights
from palestra.engine.lora.adapters import find_linear_layers, is_in_layer, layer_shape
from palestra.engine.training.peft_format import PEFT_PREFIX, check_plain_lora
from palestra.service.wire.schemas.requests import MAX_EXACT_INT, MAX_RANK, LoraConfig
from palestra.service.wire.schemas.wire_model import BadRequest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TAR_BLOCK_BYTES = tarfile.BLOCKSIZE
CHUNK_BYTES = 2**20
MAX_CONFIG_BYTES = 2**20  # bytes
EXTENSION_HEADER_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def pack_archive(files: Iterable[Path]) -> Iterator[bytes]:
    """Yields a tar.gz archive of the files in pieces, as it is compressed."""
    zipped = zlib.compressobj(level=1, wbits=31)  # weights are hardly compressible
    for block in _tar(files):
        yield zipped.compress(block)
    yield zipped.flush()


def _tar(files: Iterable[Path]) -> Iterator[bytes]:
    for path in files:
        info = tarfile.TarInfo(path.name)
        info.size = path.stat().st_size
        info.mtime = int(path.stat().st_mtime)
        yield info.tobuf()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        yield bytes(-info.size % TAR_BLOCK_BYTES)
    yield bytes(2 * TAR_BLOCK_BYTES)


def unpack_archive(archive: BinaryIO, folder: Path, limit: int) -> None:
    """Extracts the adapter in a tar.gz archive to `folder`. Raises BadRequest if the file is no such archive, holds
    anything but regular files and folders, has a path that leaves the folder, lacks an adapter file, or has more than
    `limit` bytes unpacked (413)."""
    stream = _Stream(archive, limit)
    try:
        while any(block := stream.take(TAR_BLOCK_BYTES)):
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            _unpack_one(stream, info, folder)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadRequest(f"the file is not a tar.gz archive: {error}") from None
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).exists()]
    if missing:
        raise BadRequest(f"the archive has no {' and no '.join(missing)}: send an adapter as PEFT saves it")


def _unpack_one(stream: _Stream, info: tarfile.TarInfo, folder: Path) -> None:
    path = PurePosixPath(info.name)
    plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
    if info.size < 0 or path.is_absolute() or ".." in path.parts or not (plain or info.type in EXTENSION_HEADER_TYPES):
        raise BadRequest(f'the archive has "{_quote(info.name)}", which is not a plain file in a folder of its own')
    if not info.isreg() or path.name not in (CONFIG_FILE, WEIGHTS_FILE):
        stream.skip(info.size)
    elif (folder / path.name).exists():
        raise BadRequest(f"the archive has two files called {path.name}: send one adapter")
    else:
        with (folder / path.name).open("xb") as file:
            for chunk in stream.chunks(info.size):
                file.write(chunk)
    stream.skip(-info.size % TAR_BLOCK_BYTES)


def _quote(name: str) -> str:
    return name[:100].encode("ascii", "replace").decode()


class _Stream:
    """Decompressed content of a gzip file, limited to `left` bytes."""

    def __init__(self, archive: BinaryIO, left: int) -> None:
        self._file = gzip.GzipFile(fileobj=archive, mode="rb")
        self.left = left

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes. Raises EOFError if there are fewer, and BadRequest (413) beyond the limit."""
        self.left -= size
        if self.left < 0:
            raise BadRequest("the archive is too large", 413)
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends in the middle")
        return data

    def chunks(self, size: int) -> Iterator[bytes]:
        for start in range(0, size, CHUNK_BYTES):
            yield self.take(min(CHUNK_BYTES, size - start))

    def skip(self, size: int) -> None:
        for _ in self.chunks(size):
            pass


def check_adapter(folder: Path, shapes: dict[str, tuple[int, int]]) -> tuple[int, float, list[str]]:
    """Returns rank, alpha and linear layers of the adapter in `folder`. `shapes` are those of the base's layers, [out,
    in] by name. Raises BadRequest if the adapter cannot be read or does not fit."""
    config = read_config(folder)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if (
        not isinstance(rank, int)
        or not 1 <= rank <= MAX_RANK
        or not isinstance(alpha, int | float)
        or not 0 < alpha < MAX_EXACT_INT
    ):
        raise BadRequest(f"{CONFIG_FILE} has no lora_alpha, or no rank r from 1 to {MAX_RANK}")
    try:
        check_plain_lora(config, folder)
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError) as error:
        raise BadRequest(f"the adapter cannot be read: {str(error).replace(str(folder), 'the archive')}") from None
    return rank, float(alpha), _check_shapes(found, rank, shapes)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the adapter's config as a dict. Raises BadRequest if it is too long or no JSON object."""
    path = folder / CONFIG_FILE
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise BadRequest(f"{CONFIG_FILE} is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise BadRequest(f"{CONFIG_FILE} is not JSON") from None
    if not isinstance(config, dict):
        raise BadRequest(f"{CONFIG_FILE} is not a JSON object")
    return config


def _check_shapes(found: dict[str, tuple[int, ...]], rank: int, shapes: dict[str, tuple[int, int]]) -> list[str]:
    names = {key.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0] for key in found}
    unknown = sorted(names - shapes.keys())
    if unknown or not names:
        raise BadRequest(f'{WEIGHTS_FILE} has weights for "{_quote((unknown or [""])[0])}", which the base has not')
    wanted: dict[str, tuple[int, ...]] = {}
    for name in names:
        out, into = shapes[name]
        wanted |= {
            f"{PEFT_PREFIX}{name}.lora_A.weight": (rank, into),
            f"{PEFT_PREFIX}{name}.lora_B.weight": (out, rank),
        }
    wrong = sorted(set(found.items()) ^ set(wanted.items()))
    if wrong:
        raise BadRequest(f"{WEIGHTS_FILE} does not fit the base: see {_quote(wrong[0][0])}")
    return sorted(names)


def lora_targets(linear_layers: Iterable[str], lora: LoraConfig) -> list[str]:
    """Returns the names of the linear layers that the three switches select."""

    def is_selected(name: str) -> bool:
        if not is_in_layer(name):
            return lora.train_unembed
        return lora.train_attn if "attn" in name or "attention" in name else lora.train_mlp

    return [name for name in linear_layers if is_selected(name)]


@lru_cache(maxsize=64)
def layer_shapes(base: str) -> dict[str, tuple[int, int]]:
    """Returns the shapes [out, in] of a base's linear layers by name, as the engine finds them. `base` is a folder or a
    hub name. Only its config is read: weights may be anywhere and in any format."""
    return {name: layer_shape(layer) for name, layer in find_linear_layers(model_without_weights(base)).items()}
