"""`palestra serve --check`: what will not work with the given options.

It is found without serving, and without loading a model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch

from palestra.core.accel.devices import resolve_device
from palestra.core.accel.malloc import free_memory
from palestra.core.http.listen import open_listener
from palestra.core.http.origin_middleware import is_loopback
from palestra.engine.bases.model import describe_base
from palestra.engine.bases.names import tokenizer_of
from palestra.engine.conversation.report import check_conversations
from palestra.engine.lora.config import LoraConfig
from palestra.engine.memory import adapter_params, model_shape
from palestra.service.serve import ServeOptions, hold_data, load_base_info
from palestra.service.server.api_keys import ApiKeys, read_keys
from palestra.service.storage.database import Database

RANK = 32  # rank of the example model in training whose memory is printed
BYTES_IN_TRAINING = 16  # of a weight: float32 itself, its gradient and the two moments of Adam
MIN_DISK_GIB = 1.0

Verdict = Literal["ok", "note", "fails"]


class Finding(NamedTuple):
    """Result of one check: its subject, a verdict and a text. `fails` will not work, `note` is a
    limitation."""

    what: str
    verdict: Verdict
    text: str


def check_options(options: ServeOptions) -> Iterator[Finding]:
    """Yields what `palestra serve` would meet with these options, in its order."""
    checks: dict[str, Callable[[ServeOptions], Iterator[Finding]]] = {
        "aliases": check_aliases,
        "bases": check_bases,
        "memory": check_memory,
        "data": check_data,
        "store": check_store,
        "keys": check_keys,
        "port": check_port,
    }
    told: set[str] = set()
    for what, check in checks.items():
        try:
            yield from check(options)
        except (ValueError, OSError) as error:
            if str(error) not in told:
                yield Finding(what, "fails", str(error))
                told.add(str(error))


def check_aliases(options: ServeOptions) -> Iterator[Finding]:
    """Yields the aliases of bases that are not served."""
    for alias, name in options.aliases.items():
        if name not in options.bases:
            text = f"{alias} means {name}, which is not served: add --base {name}"
            yield Finding("aliases", "fails", text)


def check_bases(options: ServeOptions) -> Iterator[Finding]:
    """Yields how each base runs, its length, and what its chat template does not do."""
    for name, path in options.bases.items():
        what = f"base {name}"
        info = load_base_info(name, path, options.aliases)
        lines = describe_base(path)
        names = ", ".join([name, *info.public_names])
        length = f"up to {info.max_length:,} tokens"
        yield Finding(what, "ok", f"{info.architecture}, {length}, as {names}")
        for line in lines:
            yield Finding(what, "ok" if "packed rows" in line else "note", line)
        for found in check_conversations(tokenizer_of(info.path)):
            if found.verdict in ("differs", "refused"):
                note = found.note or found.verdict
                yield Finding(what, "note", f"/chat/completions, {found.probe}: {note}")


def check_memory(options: ServeOptions) -> Iterator[Finding]:
    """Yields whether the bases' weights fit, and what a model in training adds."""
    device = resolve_device(options.device)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    weight_dtype = getattr(torch, dtype, None)
    if not isinstance(weight_dtype, torch.dtype):
        raise ValueError(f"--dtype {dtype} is none of torch's: write auto, float32 or bfloat16")
    shapes = {name: model_shape(path) for name, path in options.bases.items()}
    weights = sum(shape.params for shape in shapes.values()) * weight_dtype.itemsize / 2**30
    free = free_memory(device) / 2**30
    text = f"{weights:.2f} GiB of weights ({dtype}) on {device}, of {free:.1f} GiB free"
    if weights > free:
        yield Finding("memory", "fails", f"{text}: serve fewer or smaller bases")
        return
    yield Finding("memory", "ok", text)
    left = free - weights
    cache = left / 2 if options.kv_cache_gib is None else options.kv_cache_gib
    if cache >= left:
        text = f"--kv-cache-gib {cache:g} leaves no memory for models in training"
        yield Finding("memory", "fails", text)
        return
    for name, shape in shapes.items():
        trained = adapter_params(shape, LoraConfig(rank=RANK)) * BYTES_IN_TRAINING / 2**30
        text = f"a model of rank {RANK} takes {trained:.3f} GiB in training: beside a KV cache of "
        text += f"{cache:.1f} GiB there is room for {int((left - cache) / trained):,}"
        yield Finding(f"base {name}", "ok", text)


def check_data(options: ServeOptions) -> Iterator[Finding]:
    """Yields whether the data folder can be written, is free, private and large enough."""
    existing = options.data
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        yield Finding("data", "fails", f"{existing} cannot be written: choose another --data")
        return
    if options.front_only or (options.data / "server.lock").exists():
        with hold_data(options):
            pass
    free = shutil.disk_usage(existing).free / 2**30
    verdict: Verdict = "ok" if free >= MIN_DISK_GIB else "note"
    yield Finding("data", verdict, f"{options.data}, {free:.1f} GiB free on its disk")
    if options.data.exists() and options.data.stat().st_mode & 0o077:
        yield Finding("data", "note", f"others can list {options.data}: chmod 700 {options.data}")


def check_store(options: ServeOptions) -> Iterator[Finding]:
    """Yields whether the database answers, if it is not a file in the data folder."""
    if options.store is None:
        if options.front_only:
            yield Finding("store", "note", "SQLite: all front ends must be on this machine")
        return
    yield Finding("store", "ok", f"{Database(options.store)} answers")


def check_keys(options: ServeOptions) -> Iterator[Finding]:
    """Yields who may use the server."""
    auth = options.auth
    if auth is None:
        if is_loopback(options.host):
            yield Finding("keys", "ok", "any key is accepted, from this machine")
        else:
            yield Finding("keys", "note", "anyone who reaches this machine may use it: set --auth")
        return
    ApiKeys(auth)  # raises ValueError if there is no such file
    keys = read_keys(auth)
    if not keys:
        text = f"{auth} has no key, so nobody is let in: `palestra keys add NAME --auth {auth}`"
        yield Finding("keys", "fails", text)
        return
    yield Finding("keys", "ok", f"{len(keys)} keys in {auth}; a change counts at once")
    if auth.stat().st_mode & 0o077:
        yield Finding("keys", "note", f"others can read the hashes in {auth}: chmod 600 {auth}")


def check_port(options: ServeOptions) -> Iterator[Finding]:
    """Yields whether the address can be listened at."""
    with open_listener(options.host, options.port) as listener:
        port = listener.getsockname()[1]
    chosen = "" if options.port else " (a free one)"
    yield Finding("port", "ok", f"{options.host}:{port}{chosen}")
