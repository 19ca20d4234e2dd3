"""Folders of strangers whose config names a Python module: no command runs it, or asks whether to."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from helpers.warm_processes import run_palestra

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
