"""LoRA variants compared with `peft`: logits and gradients of the same adapter folder, saved by either; sampling and
training agree; dropout."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from helpers.small_models import write_models
from helpers.tolerances import LOGPROB_ATOL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, Qwen3Config, Qwen3MoeConfig

import palestra
from palestra.core.config import validate
from palestra.core.losses import cross_entropy_loss, gspo_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter, weighted_sum
from palestra.engine.lora.config import LoraConfig
from palestra.engine.lora.routes import SingleAdapterRoute
from palestra.engine.lora.variants import Dropout
from palestra.engine.memory import adapter_params, model_shape
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.engine.training.peft_format import load_adapter, save_adapter, save_snapshot
from palestra.runs import list_checkpoints
from palestra.testing import tiny_lm
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import LoraPolicyConfig

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False, attention_bias=True),
    "tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=4, pad_token_id=0),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS = {
    "rslora": ("qwen3", {"use_rslora": True}),
    "patterns": (
        "qwen3",
        {
            "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.up_proj": 1},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 7.0},
            "use_rslora": True,
        },
    ),
    "dora": ("qwen3", {"use_dora": True}),
    "dora on the head": ("qwen3", {"use_dora": True, "target_modules": ["q_proj", "lm_head"]}),
    "dora on Conv1D": (
        "gpt2",
        {"use_dora": True, "target_modules": ["c_attn", "c_proj"], "rank_pattern": {"c_attn": 2}},
    ),
    "head and embeddings in full": ("qwen3", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "a tied head in full": ("tied", {"modules_to_save": ["lm_head"]}),
    "a layer in full": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"], "use_dora": True}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "use_rslora": True}),
    "experts by rank": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": EXPERTS[1:], "rank_pattern": {"down_proj": 2}},
    ),
    "transposed experts": ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
}
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")  # warnings of PEFT about settings that these tests choose on purpose
    for text in (
        "Setting `save_embedding",
        "fan_in_fan_out is set",
        "Model has `tie_word",
        "The following rank_pattern",
    )
]
IDS = np.random.default_rng(0).integers(5, 90, (3, 14)).astype(np.int32)
IDS[1, :5] = IDS[0, :5]  # a shared prefix


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of small random models by name."""
    return write_models(tmp_path_factory.mktemp("bases"), CONFIGS, seed=3, noise=0.1)


def shake(parameters, seed=0):
    """Moves trained weights away from their initial values, so that every part of an adapter matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in parameters:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)


def samples():
    ones = np.ones(9, np.float32)
    return [Sample(row[:5], row[5:], np.zeros(9, np.float32), ones) for row in IDS]


def our_results(engine, adapter):
    """Log-probabilities of the answers, and the gradients of their mean by PEFT's names."""
    trainer = AdapterWeights(engine, adapter)
    logps = np.concatenate(trainer.logprobs(samples()))
    trainer.forward_backward(samples(), cross_entropy_loss)
    return logps, [w.grad for w in adapter.parameters()]


def their_results(model):
    ids = torch.as_tensor(IDS.astype(np.int64))
    logp = torch.log_softmax(model.eval()(input_ids=ids[:, :-1]).logits, -1)
    answers = logp[:, 4:].gather(2, ids[:, 5:, None])[..., 0]
    (-answers.mean()).backward()
    return answers.detach().numpy().ravel()


def their_adapter(base, options):
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **options}
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    shake([w for w in model.parameters() if w.requires_grad])
    return model


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(5)
def test_logits_and_gradients_equal_peft(bases, tmp_path, name):
    base, options = VARIANTS[name]
    theirs = their_adapter(bases / base, options)
    theirs.save_pretrained(tmp_path / "theirs")
    engine = Engine.load(str(bases / base), device="cpu")
    adapter = load_adapter(tmp_path / "theirs", engine)
    logps, gradients = our_results(engine, adapter)
    np.testing.assert_allclose(logps, their_results(theirs), atol=LOGPROB_ATOL)
    # gradients, written and named as an adapter's weights
    for weight, gradient in zip(adapter.parameters(), gradients, strict=True):
        weight.data.copy_(gradient)
    save_adapter(tmp_path / "gradients", adapter, "base")
    expected = their_gradients(theirs)
    found = peft.utils.load_peft_weights(str(tmp_path / "gradients"), device="cpu")
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(
            found[key], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


def their_gradients(model):
    for weight in model.parameters():
        if weight.requires_grad:
            assert weight.grad is not None
            weight.data.copy_(weight.grad)
    found = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {key: weight for key, weight in found.items() if "base_layer.weight" not in key}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few(5)
def test_peft_loads_saved_variants(bases, tmp_path, name):
    base, options = VARIANTS[name]
    engine = Engine.load(str(bases / base), device="cpu")
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=3, alpha=6, **options), seed=1, model=engine.model)
    start = np.concatenate(AdapterWeights(engine, adapter).logprobs(samples()))
    shake(adapter.parameters())
    logps, _ = our_results(engine, adapter)
    assert np.abs(logps - start).max() > 0.01  # otherwise the test would prove nothing
    save_adapter(tmp_path / "ours", adapter, str(bases / base))
    save_snapshot(tmp_path / "snapshot", adapter.snapshot(), str(bases / base))
    again = load_adapter(tmp_path / "ours", engine)
    assert again.shapes() == adapter.shapes()
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), adapter.parameters(), strict=True))
    for folder in ("ours", "snapshot"):
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases / base), tmp_path / folder)
        with torch.enable_grad():
            model.requires_grad_(True)
            np.testing.assert_allclose(their_results(model), logps, atol=LOGPROB_ATOL)


@pytest.mark.parametrize(
    "name", ["dora", "dora on the head", "head and embeddings in full", "experts", "transposed experts"]
)
def test_sampling_with_several_adapters_has_the_log_probabilities_of_training(bases, name):
    """The variant, plain LoRA and the bare base share batches."""
    base, options = VARIANTS[name]
    engine = Engine.load(str(bases / base), device="cpu")
    variant = Adapter(engine.linear_layers, LoraConfig(rank=3, alpha=6, **options), seed=1, model=engine.model)
    other = Adapter(engine.linear_layers, LoraConfig(rank=2, alpha=6, **options), seed=2, model=engine.model)
    plain = Adapter(engine.linear_layers, LoraConfig(rank=4), seed=3)
    for number, adapter in enumerate((variant, other, plain)):
        shake(adapter.parameters(), seed=number)
    adapters = [variant, None, plain, other]
    sampler = Sampler(engine, max_num_seqs=16)
    config = SamplingConfig(max_tokens=6, stop_at_eos=False)

    async def sample():
        snapshots = [None if adapter is None else adapter.snapshot(f"a{n}") for n, adapter in enumerate(adapters)]
        requests = [Request(IDS[0, : 4 + n], 2, config, snapshot, 7) for n, snapshot in enumerate(snapshots)]
        return await asyncio.gather(*(sampler.sample(request) for request in requests))

    for number, (adapter, completions) in enumerate(zip(adapters, asyncio.run(sample()), strict=True)):
        zeros = np.zeros(6, np.float32)
        rows = [Sample(IDS[0, : 4 + number], c.token_ids, c.logprobs, zeros) for c in completions]
        bare = Adapter(engine.linear_layers, LoraConfig(rank=1), seed=0)
        trained = AdapterWeights(engine, adapter or bare).logprobs(rows)
        for logps, completion in zip(trained, completions, strict=True):
            np.testing.assert_allclose(completion.logprobs, logps, atol=LOGPROB_ATOL)


def test_recomputed_layers_have_the_same_gradients(bases):
    engine = Engine.load(str(bases / "qwen3_moe"), device="cpu")
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "modules_to_save": ["embed_tokens"]}
    gradients = []
    for checkpointing in (False, True):
        adapter = Adapter(engine.linear_layers, LoraConfig(**options), seed=1, model=engine.model)
        shake(adapter.parameters())
        AdapterWeights(engine, adapter, checkpointing=checkpointing).forward_backward(samples(), cross_entropy_loss)
        gradients.append([w.grad for w in adapter.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


def test_a_jobs_separate_gradients_reach_every_weight():
    engine = tiny_lm()
    adapter = Adapter(
        engine.linear_layers, LoraConfig(use_dora=True, modules_to_save=["lm_head"]), seed=0, model=engine.model
    )
    twin = adapter.with_separate_grads()
    assert [w.data_ptr() for w in twin.parameters()] == [w.data_ptr() for w in adapter.parameters()]
    AdapterWeights(engine, twin).forward_backward(samples(), cross_entropy_loss)
    assert all(w.grad is not None for w in twin.parameters()) and all(w.grad is None for w in adapter.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_memory_plan_counts_every_weight(bases, name):
    base, options = VARIANTS[name]
    if base == "gpt2":
        pytest.skip("the plan counts nn.Linear layers only")
    engine = Engine.load(str(bases / base), device="cpu")
    config = LoraConfig(rank=3, **options)
    adapter = Adapter(engine.linear_layers, config, seed=0, model=engine.model)
    count = sum(w.numel() for w in adapter.parameters())
    # the plan leaves out biases of fully trained layers: 64 of 2,560 weights here
    assert adapter_params(model_shape(str(bases / base)), config) == pytest.approx(count, rel=0.03)


@pytest.mark.filterwarnings("ignore:Model has `tie_word")
def test_a_run_with_variants_resumes_and_its_folder_is_read_by_peft(bases, tmp_path, monkeypatch):
    """A run from a config, as a user writes it: two kinds of adapters on one base, stopped and resumed."""
    monkeypatch.chdir(tmp_path)
    speech = {"type": "lora", "base": str(bases / "qwen3"), "sampling": {"max_tokens": 3}, "lr": 1e-2, "rank": 2}
    kinds = {
        "guide": {"use_dora": True, "modules_to_save": ["lm_head"]},
        "walker": {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "optimizer": {"type": "muon"}},
    }
    config = {
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {name: speech | options for name, options in kinds.items()},
        "algorithm": {"type": "grpo", "group_size": 4},
        "episodes": 4,
        "checkpoint_every": 1,
    }
    whole = palestra.train(config, name="whole", steps=3)
    part = palestra.train(config, name="part", steps=2)
    part = palestra.train(resume=part, steps=3)
    for policy in kinds:
        newest = [list_checkpoints(run.path)[-1] for run in (whole, part)]
        folders = [checkpoint.path / checkpoint.names[policy] for checkpoint in newest]
        found = [load_file(folder / "adapter_model.safetensors") for folder in folders]
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0]) and found[0]
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases / "qwen3"), folders[0])


# ---- dropout


def test_dropout_sets_that_share_of_the_inputs_to_zero_and_keeps_their_mean():
    x = torch.ones(400, 100)
    dropped = Dropout(0.3, seed=5).apply("q_proj", x)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert dropped.mean() == pytest.approx(1.0, abs=0.02)  # of 40,000 values: 6 standard deviations are 0.02
    assert torch.equal(dropped, Dropout(0.3, seed=5).apply("q_proj", x))
    assert not torch.equal(dropped, Dropout(0.3, seed=5).apply("k_proj", x))


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_reaches_the_adapters_input_only(dora):
    """The published formula: the base's output for the whole input, with DoRA rescaled for the dropped input."""
    engine = tiny_lm()
    name = "model.layers.0.mlp.up_proj"
    config = LoraConfig(rank=2, alpha=3, target_modules=["up_proj"], use_dora=dora, lora_dropout=0.5)
    adapter = Adapter(engine.linear_layers, config, seed=0)
    shake(adapter.parameters())
    x, dropout = torch.randn(5, 64), Dropout(0.5, seed=9)
    with torch.no_grad():
        found = SingleAdapterRoute(adapter, dropout).linear(name, x, engine.linear_layers[name])
        (a, b), weight, dropped = adapter.weights[name], engine.linear_layers[name].weight, dropout.apply(name, x)
        expected = x @ weight.T + 1.5 * dropped @ a.T @ b.T
        if dora:
            gain = adapter.extras.magnitudes[name] / (weight + 1.5 * b @ a).norm(dim=1)
            expected = x @ weight.T + (gain - 1) * (dropped @ weight.T) + gain * 1.5 * (dropped @ a.T @ b.T)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def dropout_trainer(checkpointing=False):
    engine = tiny_lm()
    config = LoraConfig(rank=2, lora_dropout=0.3)
    trainer = AdapterWeights(
        engine, Adapter(engine.linear_layers, config, seed=4), pack_tokens=20, checkpointing=checkpointing
    )
    shake(trainer.parameters)
    return trainer


def train(trainer, steps):
    for _ in range(steps):
        trainer.forward_backward(samples(), cross_entropy_loss)
        trainer.optim_step(OptimConfig(lr=1e-2))


def test_a_resumed_run_with_dropout_is_bit_identical(tmp_path):
    whole, first, second = dropout_trainer(), dropout_trainer(), dropout_trainer()
    train(whole, 4)
    train(first, 2)
    save_training_state(tmp_path, first)
    load_training_state(tmp_path, second)
    train(second, 2)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters, second.parameters, strict=True))


def test_dropout_is_in_passes_with_gradients_only_and_the_same_when_recomputed():
    trainer, recomputing = dropout_trainer(), dropout_trainer(checkpointing=True)
    before = trainer.logprobs(samples())
    losses = []
    for each in (trainer, recomputing):
        losses.append(each.forward_backward(samples(), cross_entropy_loss)["loss"])
    for one, other in zip(trainer.parameters, recomputing.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-7, rtol=1e-5)
    assert losses[0] == pytest.approx(losses[1])
    assert abs(losses[0] + np.concatenate(before).mean()) > 1e-4  # dropout changes the training pass
    np.testing.assert_array_equal(np.concatenate(before), np.concatenate(trainer.logprobs(samples())))


def test_losses_relative_to_passes_without_dropout_disable_it():
    """The ratio of an unchanged policy is 1, also in the second of two batches."""
    trainer = dropout_trainer()
    old = trainer.logprobs(samples())
    fresh = [replace(one, old_logprobs=found, logprobs=found) for one, found in zip(samples(), old, strict=True)]
    metrics = trainer.forward_backward(fresh, gspo_loss, clip_low_threshold=1 - 3e-4, clip_high_threshold=1 + 4e-4)
    assert metrics["clip_fraction"] == 0.0 and metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_dropout_without_effect_is_refused():
    policy = {"type": "lora", "base": "tiny", "lora_dropout": 0.1}
    config = {"env": {"type": "guess_number"}, "policies": {"agent": policy}, "episodes": 2, "steps": 1}
    with pytest.raises(ValueError, match="lora_dropout has no effect with type: grpo"):
        build(validate(TextConfig, config | {"algorithm": {"type": "grpo"}}))
    stages = [{"algorithm": {"type": kind}, "steps": 1} for kind in ("sft", "grpo")]
    build(validate(TextConfig, config | {"stages": stages}))


# ---- refused options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["norm"]}, "neither a linear layer nor the embeddings"),
        ({"modules_to_save": ["value_head"]}, "no module's name ends in 'value_head'"),
        ({"target_parameters": ["experts.w1"]}, "This base has none that can"),
        ({"rank_pattern": {"query": 3}}, "rank_pattern.query matches no adapted layer"),
    ],
    ids=str,
)
def test_targets_that_are_not_there_are_refused(options, message):
    engine = tiny_lm()
    with pytest.raises(ValueError, match=message):
        Adapter(engine.linear_layers, LoraConfig(**options), seed=0, model=engine.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_parameters": EXPERTS, "use_dora": True}, "cannot be combined with use_dora"),
        ({"target_parameters": EXPERTS, "lora_dropout": 0.1}, "cannot be combined with lora_dropout"),
        ({"rank_pattern": {"(": 3}}, "not a regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "must be at least 1"),
        ({"alpha_pattern": {"q_proj": 0}}, "must be above 0"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        validate(LoraPolicyConfig, {"type": "lora", **options})


def test_an_adapter_with_missing_weights_is_refused(tmp_path):
    engine = tiny_lm()
    save_adapter(tmp_path, Adapter(engine.linear_layers, LoraConfig(), seed=0), "base")
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    for key, value in {"use_dora": True, "modules_to_save": ["lm_head"], "target_parameters": EXPERTS}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | {key: value}))
        with pytest.raises(ValueError, match=f"has {key} in its config, but no weights of that"):
            load_adapter(tmp_path, engine)


def test_a_weighted_sum_with_dora_is_refused_and_one_with_patterns_is_exact():
    engine = tiny_lm()
    dora = Adapter(engine.linear_layers, LoraConfig(use_dora=True), seed=0)
    with pytest.raises(ValueError, match="have no weighted sum"):
        weighted_sum([dora, dora], [0.5, 0.5], engine.linear_layers)
    config = LoraConfig(rank=2, rank_pattern={"q_proj": 3}, alpha_pattern={"k_proj": 5.0}, use_rslora=True)
    adapters = [Adapter(engine.linear_layers, config, seed=seed) for seed in (0, 1)]
    for adapter in adapters:
        shake(adapter.parameters())
    mixed = weighted_sum(adapters, [0.25, 2.0], engine.linear_layers)
    for name, (a, b) in mixed.weights.items():
        parts = [(x.scale_of(name) * x.weights[name][1] @ x.weights[name][0]) for x in adapters]
        torch.testing.assert_close(mixed.scale_of(name) * b @ a, 0.25 * parts[0] + 2 * parts[1])
