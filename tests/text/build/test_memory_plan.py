"""The planned memory of a run compared with the measured peak of a process, and settings with which a run fits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

from palestra.core.config import override, validate
from palestra.engine.lora.adapters import Adapter, find_linear_layers
from palestra.engine.memory import adapter_params, model_shape, peak_bytes
from palestra.testing import tiny_tokenizer
from palestra.text.build.memory_plan import plan_memory
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import LoraPolicyConfig

GIB = 2**30
PROMPT_TOKENS, MAX_TOKENS, GROUP, MICRO_BATCH = 64, 64, 8, 4096
MARGIN = 0.25  # share of the measured peak, which varies by 0.15 between runs
RUN = """
import asyncio, pathlib, sys
import numpy as np
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.core.config import parse, validate
from palestra.engine.sampling.sampler import Request
from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample

def own_peak():  # bytes; ru_maxrss would count the memory of the process that started this one, too
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

config = validate(TextConfig, parse(sys.stdin.read()))
policy, prompt_tokens, micro_batch = config.policies["default"], int(sys.argv[1]), int(sys.argv[2])
engines = Engines("cpu", config.max_num_seqs)
learner = engines.build_learner("default", policy, 0)
learner.start_stage()
rng, snapshot = np.random.default_rng(0), learner.weights.snapshot("a@0")
prompts = [rng.integers(5, 250, prompt_tokens).astype(np.int32) for _ in range(config.episodes)]
group = config.algorithm.group_size
with engines.rollout_context():
    answers = learner.sampler.sample_all([Request(p, group, policy.sampling, snapshot, seed=i)
                                          for i, p in enumerate(prompts)])
sampled = own_peak()
# full micro-batches: no prefix is shared
samples = [Sample(rng.integers(5, 250, prompt_tokens).astype(np.int32), a.token_ids, a.logprobs, a.logprobs)
           for answer in answers for a in answer][:2 * micro_batch // (prompt_tokens + policy.sampling.max_tokens)]
asyncio.run(learner.forward_backward(samples, clipped_policy_loss, entropy=0.01))
asyncio.run(learner.optim_step())
print(sampled, own_peak())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 13 million weights, which take much less memory than activations and logits."""
    shape = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = Qwen3Config(
        **shape, head_dim=32, intermediate_size=768, vocab_size=32768, max_position_embeddings=1024, eos_token_id=4
    )
    path = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_base_of_images_and_text_has_a_plan_and_a_default_learning_rate(tmp_path: Path):
    """transformers names Qwen2.5-VL among its models of images and text only. Adapters train the language part."""
    text = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 4}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text | {"rope_parameters": rope}, vision_config=vision)
    config.save_pretrained(tmp_path)
    policy = LoraPolicyConfig(base=str(tmp_path))
    assert policy.at(0.0).lr == 1e-3
    model = AutoModelForImageTextToText.from_config(config)
    adapter = Adapter(find_linear_layers(model), policy.lora, seed=0)
    shape = model_shape(str(tmp_path))
    assert shape.params == sum(weight.numel() for weight in model.parameters())
    assert adapter_params(shape, policy.lora) == sum(weight.numel() for weight in adapter.parameters())


def config_of(folder: Path, *changes: str) -> TextConfig:
    sampling = {"max_tokens": MAX_TOKENS, "stop_at_eos": False}
    policy = {"type": "lora", "base": str(folder), "micro_batch_tokens": MICRO_BATCH, "sampling": sampling}
    tree = {
        "env": {"type": "sokoban"},
        "device": "cpu",
        "episodes": 9,
        "policies": {"default": policy},
        "algorithm": {"type": "grpo", "group_size": GROUP},
    }
    return validate(TextConfig, override(tree, changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("policies.default.type=full", "policies.default.micro_batch_tokens=1024")])
def test_planned_peak_memory_matches_a_run(folder, changes):
    config = config_of(folder, *changes)
    plan = plan_memory(config, prompt_tokens=PROMPT_TOKENS)
    call = [sys.executable, "-c", RUN, str(PROMPT_TOKENS), str(config.policies["default"].micro_batch_tokens)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(call, input=config.model_dump_json(), capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    sampled, peak = map(int, run.stdout.split())
    parts = {part.name: part.bytes / GIB for part in plan.parts}
    assert plan.peak == pytest.approx(peak, rel=MARGIN), (sampled / GIB, peak / GIB, parts)


def test_plan_suggests_settings_that_fit(folder):
    config = config_of(folder, "policies.default.micro_batch_tokens=65536")
    plan = plan_memory(config, free=int(4 * GIB))
    assert plan.peak > 4 * GIB and plan.changes == ["policies.default.gradient_checkpointing=true"]
    plan = plan_memory(config, free=int(2 * GIB))
    assert plan.changes is not None and len(plan.changes) == 2
    changed = validate(TextConfig, override(config.model_dump(mode="json"), plan.changes))
    assert changed.policies["default"].micro_batch_tokens < 65536
    fitting = plan_memory(changed, free=int(2 * GIB))
    assert fitting.peak <= 2 * GIB and fitting.changes == []
    assert plan_memory(config, free=GIB // 2).changes is None


def test_only_what_the_peak_needs_is_changed(folder):
    """Training fits, sampling does not: the cache gets less memory, and micro-batches stay as they are."""
    config = config_of(
        folder, "max_num_seqs=256", "episodes=64", "policies.default.sampling.max_tokens=2000", "kv_cache_gib=16"
    )
    parts = plan_memory(config, free=64 * GIB).parts
    sampling, training = (
        peak_bytes([part for part in parts if part.phase != other]) for other in ("training", "sampling")
    )
    free = sampling - GIB // 8
    assert training < free
    changes = plan_memory(config, free=free).changes
    assert changes is not None and [change.partition("=")[0] for change in changes] == ["kv_cache_gib"]


def test_lora_policies_share_base_weights_and_full_models_do_not(folder):
    def weights(*changes: str) -> float:
        parts = plan_memory(config_of(folder, *changes), free=64 * GIB).parts
        return sum(part.bytes for part in parts if part.name.startswith("weights"))

    other = f"{{type: lora, base: {folder}}}"
    assert weights(f"policies.other={other}") == weights()
    assert weights(f"policies.other={other.replace('lora', 'full')}") == 2 * weights()
    assert weights("policies.default.dtype=bfloat16") == weights() / 2


def test_reference_of_a_full_model_takes_memory_only_as_a_copy(folder):
    def reference(kind: str) -> list[int]:
        full = config_of(folder, "policies.default.type=full", f"policies.default.reference={kind}")
        return [p.bytes for p in plan_memory(full, free=64 * GIB).parts if p.name == "reference default"]

    (copied,) = reference("copy")
    assert copied == pytest.approx(4 * 26e6, rel=0.2) and reference("disk") == reference("none") == []


def test_separate_critic_takes_an_adapter_with_its_optimizer(folder):
    """16 bytes a weight: itself, its gradient and two moments. With `shared` the plan has no critic's adapter."""

    def parts(critic: str) -> dict[str, int]:
        ppo = config_of(folder, f"algorithm={{type: ppo, critic: {critic}}}")
        return {part.name: part.bytes for part in plan_memory(ppo, free=64 * GIB).parts}

    separate = parts("separate")
    assert separate["critic default"] == separate["adapter default"] * 16 // 12 > 0
    assert "critic default" not in parts("shared")


def test_planned_cache_is_limited_by_its_budget(folder):
    plan = plan_memory(config_of(folder, "kv_cache_gib=0.01"), free=64 * GIB)
    (cache,) = [part for part in plan.parts if part.name == "KV cache"]
    assert cache.bytes == int(0.01 * GIB) and "wait" in cache.detail


def test_plan_of_a_gpu_on_a_machine_without_one(folder):
    """Weights and cache have two bytes a value, and the cache as much again in reserve (on a CPU an eighth). The
    process itself and the packed weights of CPU sampling are not counted."""
    here, there = (plan_memory(config_of(folder), free=64 * GIB, device=device) for device in ("cpu", "cuda"))
    sizes = [{part.name: part.bytes for part in plan.parts} for plan in (here, there)]
    assert {*sizes[0]} - {*sizes[1]} == {"process", f"packed weights of {folder}"}
    for name in (f"weights of {folder}", "activations default"):
        assert sizes[0][name] == 2 * sizes[1][name]
    assert sizes[1]["KV cache"] == pytest.approx(sizes[0]["KV cache"] / 2 * 2 / (1 + 1 / 8), rel=0.02)
    assert sizes[0]["adapter default"] == sizes[1]["adapter default"]
