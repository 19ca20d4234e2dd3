"""Adapters of mixtures of experts with dense or shared layers: PEFT reads them as they were trained, or they are
refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL
from peft import PeftModel
from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.api.agents.publish import publish
from palestra.api.agents.trained_agent import TrainedAgent
from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.peft_format import REMAPPED, check_plain_lora, load_adapter, load_into, save_adapter
from palestra.testing import tiny_tokenizer
from palestra.text.build.engines import Engines
from palestra.text.learners.lm_config import LoraPolicyConfig

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": ROUTED | {"head_dim": 8},
    "deepseek_v3": ROUTED | LATENT | {"num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {"rank_pattern": {"gate_proj": 5, "o_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 9.0}},
    "rslora and dropout": {"use_rslora": True, "lora_dropout": 0.2},
}
IDS = np.random.default_rng(0).integers(5, 250, 24).astype(np.int32)


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SHAPE | MIXTURES[request.param]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Engine.load(str(folder), device="cpu")


def trained(engine: Engine, **options: Any) -> Adapter:
    """An adapter that changes the output of its base."""
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=3, alpha=6, **options), seed=1, model=engine.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1, generator=generator)
    return adapter


def sample() -> Sample:
    return Sample(IDS[:8], IDS[8:], np.zeros(len(IDS) - 8, np.float32), np.ones(len(IDS) - 8, np.float32))


def in_peft(engine: Engine, folder: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(engine.name, attn_implementation="eager")
    return PeftModel.from_pretrained(base, folder, is_trainable=True).eval()


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.from_numpy(IDS.astype(np.int64))[None]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[7:].gather(1, ids[0, 8:, None])[:, 0]


# PEFT looks for the patterns among target modules alone when it warns; it uses them for parameters too.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.few(6)
def test_peft_reads_the_saved_adapter_as_it_was_trained(mixture: Engine, options: str, tmp_path: Path):
    adapter = trained(mixture, **OPTIONS[options])
    trainer = AdapterWeights(mixture, adapter)
    (ours,) = trainer.logprobs([sample()])
    save_adapter(tmp_path / "a", adapter, mixture.name, mixture.model)
    found = logprobs(in_peft(mixture, tmp_path / "a"))
    np.testing.assert_allclose(found.detach().numpy(), ours, atol=LOGPROB_ATOL)
    again = load_adapter(tmp_path / "a", mixture)
    assert again.shapes() == adapter.shapes()
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), adapter.parameters(), strict=True))
    load_into(adapter, tmp_path / "a", mixture)  # raises if ranks or scales differ
    with torch.no_grad():
        base = logprobs(AutoModelForCausalLM.from_pretrained(mixture.name, attn_implementation="eager"))
    assert np.abs(base.numpy() - ours).max() > 0.1  # otherwise the test would prove nothing


def test_gradients_are_those_of_peft(mixture: Engine, tmp_path: Path):
    adapter = trained(mixture)
    save_adapter(tmp_path / "a", adapter, mixture.name, mixture.model)
    model = in_peft(mixture, tmp_path / "a")
    (-logprobs(model).mean()).backward()
    theirs = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    AdapterWeights(mixture, adapter).forward_backward([sample()], cross_entropy_loss)
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, pair in adapter.weights.items():
        for letter, weight in zip("AB", pair, strict=True):
            grad = theirs[f"base_model.model.{name}.lora_{letter}.default.weight"]
            torch.testing.assert_close(weight.grad, grad, atol=1e-4 * largest, rtol=1e-4)


def agent_of(engine: Engine, folder: Path) -> TrainedAgent:
    return TrainedAgent("speaker", 1, folder, "adapter", {"base": engine.name})


def test_older_checkpoints_are_published_as_peft_reads_them(mixture: Engine, tmp_path: Path):
    adapter = trained(mixture)
    save_adapter(tmp_path / "old", adapter, mixture.name)  # without the base: all are target modules
    publish(agent_of(mixture, tmp_path / "old"), tmp_path / "new")
    (ours,) = AdapterWeights(mixture, adapter).logprobs([sample()])
    found = logprobs(in_peft(mixture, tmp_path / "new")).detach().numpy()
    np.testing.assert_allclose(found, ours, atol=LOGPROB_ATOL)
    check_plain_lora(json.loads((tmp_path / "new" / "adapter_config.json").read_text()), tmp_path)


def test_dora_that_peft_cannot_read_is_not_published(mixture: Engine, tmp_path: Path):
    adapter = trained(mixture, use_dora=True)
    save_adapter(tmp_path / "dora", adapter, mixture.name, mixture.model)
    with pytest.raises(ValueError, match=r"peft would give DoRA of .*_proj to the experts.*train without use_dora"):
        publish(agent_of(mixture, tmp_path / "dora"), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_all_layers_that_peft_remaps_are_known():
    assert {name for names in _MOE_TARGET_MODULE_MAPPING.values() for name in names} <= {*REMAPPED}


@pytest.mark.few(2)
def test_training_dora_that_peft_cannot_read_is_noted(mixture: Engine):
    def notes(**options: Any) -> list[str]:
        engines = Engines("cpu", 8)
        engines.shared_engine(LoraPolicyConfig(base=mixture.name, **options))
        return [line for line in engines.notes() if "DoRA" in line]

    (line,) = notes(use_dora=True)
    assert "it will not be published; without use_dora it is" in line
    assert notes() == notes(use_dora=True, target_modules=["o_proj"]) == []


def test_laguna_whose_shared_experts_peft_does_not_find_is_not_published(tmp_path: Path):
    config = AutoConfig.for_model("laguna", **SHAPE | {"num_experts": 4, "head_dim": 8})
    config.save_pretrained(tmp_path / "base")
    about = {"peft_type": "LORA", "target_modules": ["model.layers.1.mlp.shared_experts.up_proj"]}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(about))
    agent = TrainedAgent("speaker", 1, tmp_path / "a", "adapter", {"base": str(tmp_path / "base")})
    with pytest.raises(ValueError, match=r"does not find the adapter's tensors of shared_experts.*--merge"):
        publish(agent, tmp_path / "x")
