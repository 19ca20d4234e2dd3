"""Folders of weights: complete or absent, refused if altered, and never outside the store."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.service.storage.weight_store import MIN_SWEEP_AGE_S, TinkerPath, WeightsDamaged, WeightStore
from palestra.service.wire.schemas.wire_model import BadRequest


def fill(folder):
    (folder / "adapter.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")


@pytest.fixture
def vault(tmp_path):
    return WeightStore(tmp_path / "weights")


def test_weights_survive_a_write_and_read(vault):
    name, size = vault.write(fill)
    folder = vault.read(name)
    assert (folder / "adapter.safetensors").read_bytes() == b"weights" and size > 9


def test_failed_write_leaves_no_folder(vault):
    def torn(folder):
        fill(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        vault.write(torn)
    assert [path for path in vault.root.iterdir() if not path.name.startswith(".tmp-")] == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "adapter.safetensors").write_bytes(b"weighty"),
        lambda folder: (folder / "adapter.safetensors").write_bytes(b"weig"),
        lambda folder: (folder / "adapter.safetensors").unlink(),
        lambda folder: (folder / "more.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
)
def test_torn_or_altered_folder_is_refused(vault, harm):
    name, _ = vault.write(fill)
    harm(vault.root / name)
    with pytest.raises(WeightsDamaged, match="again"):
        vault.read(name)


def test_sweep_removes_old_unreferenced_folders(vault):
    kept, over, young = (vault.write(fill)[0] for _ in range(3))
    past = time.time() - MIN_SWEEP_AGE_S - 1
    for name in (kept, over):
        os.utime(vault.root / name, (past, past))
    assert vault.sweep([kept]) == 1
    assert {path.name for path in vault.root.iterdir()} == {kept, young}


def test_tinker_paths_are_parsed_and_formatted():
    path = TinkerPath.parse("tinker://s1:train:0/weights/step-10")
    assert path == ("s1:train:0", "training", "step-10") and path.id == "weights/step-10"
    assert str(path) == "tinker://s1:train:0/weights/step-10"
    assert TinkerPath.parse("mint://s_0/sampler_weights/a").kind == "sampler"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "tinker://run/weights",
        "tinker://run/weights/a/b",
        "tinker://run/other/a",
        "http://run/weights/a",
        "tinker://run/weights/..",
        "tinker://../weights/a",
        "tinker://run/weights/a%2fb",
        "tinker://run/weights/a\x00",
        "tinker://run/weights/" + "a" * 201,
    ],
)
def test_invalid_paths_are_refused(text):
    with pytest.raises(BadRequest):
        TinkerPath.parse(text)


@given(st.text())
def test_parsed_paths_never_escape_the_store(text):
    try:
        path = TinkerPath.parse(f"tinker://run/weights/{text}")
    except BadRequest:
        return
    assert "/" not in path.name and path.name.strip(".") and str(TinkerPath.parse(str(path))) == str(path)
