"""A base that cannot run on packed rows: a whole run with two agents, turns and groups, and its resume."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from palestra import train
from palestra.cli.main import app
from palestra.testing import tiny_tokenizer


@pytest.fixture(scope="module")
def conv_base(tmp_path_factory):
    """A base with a convolution layer and an attention layer."""
    shape = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256, "eos_token_id": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"], pad_token_id=0, **shape)
    folder = tmp_path_factory.mktemp("conv")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def config(base):
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 4}, "lr": 1e-2}
    return {
        "name": "plain",
        "episodes": 3,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech | {"history": "conversation"}, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 3, "kl_coef": 0.01},
        "checkpoint_every": 1,
        "device": "cpu",
    }


def metrics(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_plain_path_learns_and_resumes_bit_identically(conv_base, tmp_path, capsys):
    whole = train(config(conv_base), steps=3, root=tmp_path / "a")
    assert "runs by transformers' own forward and cache" in capsys.readouterr().out
    cut = train(config(conv_base), steps=2, root=tmp_path / "b")
    resumed = train(resume=cut.path, steps=3)
    assert metrics(resumed) == metrics(whole)
    assert any(row.get("grad_norm", 0) > 0 for row in metrics(whole))
    episodes = [pq.read_table(run.path / "episodes" / "step-000002.parquet").to_pylist() for run in (whole, resumed)]
    assert len(episodes[0]) == len(episodes[1]) > 0
    for one, other in zip(*episodes, strict=True):
        assert one["token_ids"] == other["token_ids"] and np.array_equal(one["logprobs"], other["logprobs"])


def test_info_prints_how_a_base_runs(conv_base):
    done = CliRunner().invoke(app, ["info", "--base", str(conv_base)])
    assert done.exit_code == 0, done.output
    assert "runs by transformers' own forward and cache" in done.output and "conv" in done.output
    assert "tiny (Qwen3ForCausalLM) runs on packed rows" in CliRunner().invoke(app, ["info", "--base", "tiny"]).output
