"""Folders of weights: whole or absent, refused once altered, and never where a client's words lead."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.service.api.schemas.requests import BadRequest
from palestra.service.storage.weight_store import MIN_SWEEP_AGE_S, TinkerPath, WeightsDamaged, WeightStore


def fill(folder):
    (folder / "adapter.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")


@pytest.fixture
def vault(tmp_path):
    return WeightStore(tmp_path / "weights")


def test_what_is_written_is_read(vault):
    name, size = vault.write(fill)
    folder = vault.read(name)
    assert (folder / "adapter.safetensors").read_bytes() == b"weights" and size > 9


def test_a_write_that_fails_leaves_nothing_to_be_read(vault):
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
def test_a_torn_or_altered_folder_is_refused(vault, harm):
    name, _ = vault.write(fill)
    harm(vault.root / name)
    with pytest.raises(WeightsDamaged, match="again"):
        vault.read(name)


def test_the_sweep_takes_old_folders_that_no_row_names(vault):
    kept, over, young = (vault.write(fill)[0] for _ in range(3))
    past = time.time() - MIN_SWEEP_AGE_S - 1
    for name in (kept, over):
        os.utime(vault.root / name, (past, past))
    assert vault.sweep([kept]) == 1
    assert {path.name for path in vault.root.iterdir()} == {kept, young}


def test_paths_are_read_and_written():
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
def test_anything_else_is_no_path(text):
    with pytest.raises(BadRequest):
        TinkerPath.parse(text)


@given(st.text())
def test_no_text_makes_a_path_that_leads_elsewhere(text):
    try:
        path = TinkerPath.parse(f"tinker://run/weights/{text}")
    except BadRequest:
        return
    assert "/" not in path.name and path.name.strip(".") and str(TinkerPath.parse(str(path))) == str(path)
