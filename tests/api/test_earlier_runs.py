"""Runs that began before `optimizer` was a config of its own are played, resumed and compared as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import palestra, refused

from palestra.core.config import parse, validate
from palestra.core.config.tree import to_yaml
from palestra.text.policy_configs import LoraWithTeacherConfig
from palestra.vector.config import TrainedNetConfig

# Policies of two such runs, as their config.yaml has them.
LORA = """
{lr: 0.001, adam_betas: [0.9, 0.95], adam_eps: 1.0e-08, weight_decay: 0.01, max_grad_norm: 1.0, critic_lr: null,
  critic_max_grad_norm: 1.0, base: tiny, sampling: {max_tokens: 9, temperature: 1.0, top_p: 1.0, top_k: 0,
    stop: [], stop_token_ids: [], stop_at_eos: true, keep_sampling_mask: false, thinking_token_budget: null},
  system: null, history: none, context: {max_tokens: null, target: 0.5, compress: drop_oldest, max_tool_tokens: null},
  chat_template: null, chat_template_kwargs: {}, history_thoughts: template, dtype: auto, quantize: null,
  long_context: false, batch_size: 256, epochs: 1, optimizer: muon, lr_schedule: linear, warmup_ratio: 0.0,
  micro_batch_tokens: 16384, precision: auto, gradient_checkpointing: false, seed: null, use_rslora: false,
  use_dora: false, lora_dropout: 0.0, rank_pattern: {}, alpha_pattern: {}, target_parameters: [], modules_to_save: [],
  type: lora, rank: 8, alpha: 16.0, target_modules: all-linear, path: null, teacher: null}
"""
NET = """
{hidden: [32], activation: tanh, layer_norm: null, gru_units: 0, communication_rounds: 0, encoder: flat,
  graph_neighbours: null, attention_blocks: 1, attention_heads: 1, attention_type: softmax, retention_decay: 0.0,
  convolutions: nature, precision: float32, network: null, type: net, lr: 0.003, lr_schedule: linear,
  max_grad_norm: 0.5, adam_eps: 1.0e-06, normalize_observations: false, seat_one_hot: false, share_network: true}
"""


def test_optimizers_of_earlier_runs_are_read():
    optimizer = validate(LoraWithTeacherConfig, parse(LORA, "old")).optimizer
    assert optimizer.model_dump() == {"type": "muon", "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = validate(TrainedNetConfig, parse(NET, "old")).optimizer
    assert optimizer.model_dump() == {"type": "adam", "betas": (0.9, 0.999), "eps": 1e-6}


def make_older(run: Path) -> None:
    """Writes the config of a run as it was before: the optimizer's name, and its options beside it."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for policy in tree["policies"].values():
        optimizer: dict[str, Any] = policy.pop("optimizer")
        betas = optimizer.pop("betas")
        policy["adam_eps"] = optimizer.pop("eps")
        if policy["type"] == "lora":
            policy |= {"optimizer": optimizer["type"], "adam_betas": betas, "weight_decay": optimizer["weight_decay"]}
    (run / "config.yaml").write_text(to_yaml(tree))
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps(meta | {"config": to_yaml(tree)}))


@pytest.mark.parametrize(
    ("config", "short", "longer"),
    [
        pytest.param("demo.yaml", ["steps=1", "episodes=2", "evals={}"], "steps=2", marks=pytest.mark.slow),
        ("kuhn_ppo.yaml", ["env_steps=2000", "evals={}"], "env_steps=6000"),
    ],
)
def test_earlier_runs_are_played_and_resumed(config, short, longer, tmp_path):
    settings = [word for setting in short for word in ("--set", setting)]
    palestra("train", config, *settings, "--root", tmp_path, "--name", "old")
    make_older(tmp_path / "old")
    assert "return" in palestra("eval", tmp_path / "old", "--episodes", 2)
    assert "resuming after" in palestra("train", "--resume", tmp_path / "old", "--set", longer)
    stored = yaml.safe_load((tmp_path / "old" / "config.yaml").read_text())
    assert all(isinstance(policy["optimizer"], dict) for policy in stored["policies"].values())


def test_the_keys_of_earlier_runs_are_no_names_for_new_ones(tmp_path):
    message = refused("train", "kuhn_ppo.yaml", "--set", "policies.player_0.adam_eps=1e-6", "--root", tmp_path)
    assert "did you mean policies.player_0.optimizer.eps" in message
