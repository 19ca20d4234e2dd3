"""Folders of strangers whose config names a Python module: no command runs it, or asks whether to."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from helpers.warm_processes import run_palestra
from safetensors.torch import load_file, save_file

from palestra.engine.bases.model import Engine
from palestra.engine.bases.names import resolve_base

AUTO_MAP = {
    "AutoConfig": "evil.Conf",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokens", None],
}
EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
from transformers import PreTrainedConfig
class Conf(PreTrainedConfig):
    model_type = "evil"
Model = Tokens = Conf
"""


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A published model of an unknown kind, with a module that creates the file `ran` when it is imported."""
    folder = tmp_path / "evil"
    copytree(resolve_base("tiny"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "evil", "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    return folder


@pytest.mark.parametrize("command", ["serve-agent", "info", "publish", "train", "serve"])
def test_code_of_a_received_model_is_not_run_and_not_asked_for(command: str, evil: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(evil), "r": 4}))
    (tmp_path / "run.yaml").write_text(f"env: {{type: sokoban}}\npolicies: {{default: {{type: lora, base: {evil}}}}}\n")
    words: dict[str, list[object]] = {
        "serve-agent": [evil, "--port", 0],
        "info": ["--base", evil],
        "publish": [adapter, "--out", tmp_path / "out", "--merge"],
        "train": ["run.yaml"],
        "serve": ["--base", f"evil={evil}", "--port", 0, "--data", tmp_path / "data"],
    }
    done = run_palestra(command, *words[command], cwd=tmp_path)
    assert done.returncode == 2, done
    assert len(done.stderr.splitlines()) == 1 and "palestra runs none" in done.stderr
    assert "trust_remote_code" not in done.stdout + done.stderr and "y/N" not in done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


# ---- weights that are missing, or that nothing takes


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Returns a copy of the base `tiny` with other tensors in its file."""
    copytree(resolve_base("tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_config(folder: Path, **changes: object) -> Path:
    copytree(resolve_base("tiny"), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
            r"model.layers.2.mlp.up_proj.weight is not in its files, and would be drawn at random",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(128)}),
            r"its files have model.layers.1.self_attn.q_proj.bias, which Qwen3ForCausalLM does not use",
        ),
        (lambda tensors: tensors.update({"score.weight": torch.ones(2, 128)}), r"its files have score.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.load(str(with_weights(tmp_path / "base", change)), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
            r"its files have model\.layers\.4\.input_layernorm\.weight, .* and 8 more",
        ),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is not in its files"),
        ({"intermediate_size": 64}, r"cannot load the base .*a file of it is damaged"),
        ({"hidden_act": "none"}, "cannot load the base"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Engine.load(str(with_config(tmp_path / "base", **changes)), device="cpu")
    assert len(str(refused.value).splitlines()) == 1


def test_parts_beside_the_language_model_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_weights(
        tmp_path / "base", lambda tensors: tensors.update({"v_head.summary.weight": torch.ones(1, 8)})
    )
    Engine.load(str(folder), device="cpu")
    assert "not loaded, since no part of the language model: v_head.summary.weight" in capsys.readouterr().err


def test_a_file_that_is_cut_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = copytree(resolve_base("tiny"), tmp_path / "base")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cannot load the base .*a file of it is damaged") as refused:
        Engine.load(str(folder), device="cpu")
    assert len(str(refused.value).splitlines()) == 1
