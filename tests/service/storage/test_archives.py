"""Weights as files: downloads at signed addresses, and uploads."""

import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fronts import Front
from safetensors.torch import save
from transformers import AutoConfig

from palestra.service.serve import load_base_info
from palestra.service.storage.archives import layer_shapes, pack_archive
from palestra.service.storage.tables import checkpoints
from palestra.testing import tiny_tokenizer

Q = "model.layers.0.self_attn.q_proj"


def adapter(
    base: Path | str, rank: int = 2, name: str = Q, shape: tuple[int, int] | None = None, **changes: Any
) -> dict[str, bytes]:
    """The two files of an adapter on one layer of the tiny base, or on one of the shape [out, in]."""
    out, into = shape or layer_shapes(str(base))[Q]
    tensors = {"lora_A": torch.ones(rank, into), "lora_B": torch.ones(out, rank)}
    weights = {f"base_model.model.{name}.{key}.weight": tensor for key, tensor in tensors.items()}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": "tiny", **changes}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(weights)}


def archived(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info)
    return buffer.getvalue()


def upload(front: Front, archive: bytes) -> Any:
    return front.post("/checkpoints/upload", files={"file": ("a.tar.gz", archive)})


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_archive_download_is_complete(front: Front) -> None:
    front.weights(model := front.model())
    reply = front.get(f"/training_runs/{model}/checkpoints/weights/one/archive")
    assert reply.status_code == 302
    assert reply.headers["expires"].endswith("GMT")
    data = front.get(reply.headers["location"], headers={"X-API-Key": ""}).content
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert tar.extractfile("adapter_model.safetensors").read() == bytes(range(256)) * 10  # type: ignore[union-attr]


def test_each_file_has_a_signed_url(front: Front) -> None:
    front.weights(model := front.model(), kind="external")
    urls = front.get(f"/training_runs/{model}/checkpoints/external_weights/one/external_weights_urls").json()["urls"]
    assert front.get(urls["adapter_config.json"]).content == b'{"r": 4}'


def test_altered_signed_urls_are_refused(front: Front) -> None:
    model = front.model()
    front.weights(model)
    front.weights(model, "two")
    address = front.get(f"/training_runs/{model}/checkpoints/weights/one/archive").headers["location"]
    expires = address.partition("expires=")[2].partition("&")[0]
    for old, new in (
        ("/one/", "/two/"),
        ("archive.tar.gz", "adapter_config.json"),
        ("archive.tar.gz", "..%2f..%2fsecret"),
        (expires, str(int(expires) + 1)),
        ("signature=", "signature=0"),
        ("signature=", "signature=é"),
    ):
        assert old in address
        assert front.get(address.replace(old, new)).status_code in (403, 404)
    front.weights(model)  # other weights at the same path
    assert front.get(address).status_code == 403


def test_signed_urls_expire(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    front.weights(model := front.model())
    address = front.get(f"/training_runs/{model}/checkpoints/weights/one/archive").headers["location"]
    later = time.time() + 4000
    monkeypatch.setattr("palestra.service.server.routes.archives.time.time", lambda: later)
    assert front.get(address).status_code == 403


def test_damaged_weights_are_not_served(front: Front) -> None:
    front.weights(model := front.model())
    (file,) = front.context.weight_store.root.glob("*/adapter_model.safetensors")
    file.write_bytes(b"x")
    reply = front.get(f"/training_runs/{model}/checkpoints/weights/one/external_weights_urls")
    assert reply.status_code == 410
    assert "damaged" in reply.json()["detail"]


def test_adapter_archive_can_be_uploaded(front: Front, tiny: Any) -> None:
    base = Path(tiny.path)
    files = {f"folder/{name}": data for name, data in adapter(base).items()} | {"folder/README.md": b"hello"}
    reply = upload(front, archived(files, special("folder", tarfile.DIRTYPE)))
    assert reply.status_code == 200, reply.text
    info = front.post("/weights_info", {"tinker_path": reply.json()["path"]}).json()
    assert (info["lora_rank"], info["train_attn"], info["train_mlp"], info["train_unembed"]) == (2, True, False, False)
    (row,) = front.context.store.find(checkpoints)
    assert sorted(path.name for path in front.context.weight_store.read(row.folder).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert row.lora["alpha"] == 8


GEMMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BASES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "gemma3": (
        "model.language_model.layers.0.self_attn.q_proj",
        (16, 32),
        {"text_config": GEMMA | {"vocab_size": 272}, "vision_config": VISION | {"image_size": 28, "patch_size": 14}},
    ),
    "gpt2": ("transformer.h.0.attn.c_attn", (96, 32), {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 272}),
}


@pytest.mark.parametrize("kind", BASES)
def test_adapters_of_a_base_in_the_cache_of_the_hub_can_be_uploaded(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is no folder, and its weights are no safetensors."""
    layer, shape, changes = BASES[kind]
    cached = tmp_path / "hub" / f"models--acme--{kind}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    AutoConfig.for_model(kind, **changes).save_pretrained(cached / "snapshots" / ("0" * 40))
    tiny_tokenizer().save_pretrained(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    front.context.bases["far"] = load_base_info("far", f"acme/{kind}", {})
    files = adapter("", name=layer, shape=shape, base_model_name_or_path=f"acme/{kind}")
    reply = upload(front, archived(files))
    assert reply.status_code == 200, reply.text
    reply = upload(front, archived(adapter("", name=layer, shape=shape[::-1], base_model_name_or_path="far")))
    assert reply.status_code == 400 and "does not fit the base" in reply.json()["detail"]


@pytest.mark.parametrize(
    "more",
    [
        special("../../evil", tarfile.REGTYPE),
        special("/etc/evil", tarfile.REGTYPE),
        special("a/../../evil", tarfile.DIRTYPE),
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("adapter_model.safetensors", tarfile.LNKTYPE, "/etc/passwd"),
        special("device", tarfile.CHRTYPE),
        special("pipe", tarfile.FIFOTYPE),
        special("x/adapter_config.json", tarfile.REGTYPE),
    ],
    ids=lambda info: info.name,
)
def test_malicious_archive_members_are_refused(front: Front, tiny: Any, tmp_path: Path, more: tarfile.TarInfo) -> None:
    before = sorted(tmp_path.rglob("*"))
    reply = upload(front, archived(adapter(Path(tiny.path)), more))
    assert reply.status_code == 400
    assert sorted(tmp_path.rglob("*")) == before


def test_decompression_bombs_are_refused(front: Front, tiny: Any) -> None:
    front.context.limits.upload = 100_000
    files = adapter(Path(tiny.path))
    assert upload(front, archived({"zeros": bytes(10_000_000), **files})).status_code == 413
    assert upload(front, bytes(200_000)).status_code == 413


CHANGES: list[Callable[[Path], dict[str, bytes]]] = [
    lambda base: {},
    lambda base: {**adapter(base), "adapter_config.json": b"no"},
    lambda base: {**adapter(base), "adapter_model.safetensors": b"no"},
    lambda base: adapter(base, base_model_name_or_path="other"),
    lambda base: adapter(base, base_model_name_or_path=None),
    lambda base: adapter(base, peft_type="IA3"),
    lambda base: adapter(base, use_dora=True),
    lambda base: adapter(base, r=3),
    lambda base: adapter(base, r="2"),
    lambda base: adapter(base, r=10**9),
    lambda base: adapter(base, lora_alpha=None),
    lambda base: adapter(base, name="model.layers.0.mlp.up_proj"),
    lambda base: adapter(base, name="model.layers.99.self_attn.q_proj"),
]


@pytest.mark.parametrize("make", CHANGES)
@pytest.mark.few(5)
def test_upload_that_fits_no_base_is_refused(front: Front, tiny: Any, make: Callable[[Path], Any]) -> None:
    reply = upload(front, archived(make(Path(tiny.path))))
    assert reply.status_code == 400, reply.text
    assert reply.json()["detail"]


@pytest.mark.parametrize("data", [b"", b"hello", b"\x1f\x8b" + bytes(100)])
def test_upload_that_is_not_an_archive_is_refused(front: Front, data: bytes) -> None:
    assert upload(front, data).status_code == 400
    assert front.post("/checkpoints/upload", data).status_code == 400
    assert front.post("/checkpoints/upload", data, headers={"Content-Type": "multipart/form-data"}).status_code == 400


def test_truncated_archive_is_refused(front: Front, tiny: Any) -> None:
    whole = archived(adapter(Path(tiny.path)))
    for size in (100, len(whole) // 2):
        assert upload(front, whole[:size]).status_code == 400


def test_packed_archive_is_a_plain_tar(tmp_path: Path) -> None:
    for name, size in (("a", 0), ("b", 512), ("c", 3_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    data = b"".join(pack_archive(sorted(tmp_path.iterdir())))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {info.name: info.size for info in tar} == {"a": 0, "b": 512, "c": 3_000_000}
