"""Checkpoints against `peft` in both directions, mismatched files, and bit-identical resume."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
from helpers.small_models import random_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from palestra.core.losses import clipped_policy_loss, cross_entropy_loss
from palestra.core.optimizers import AdamW
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import load_full_model, load_training_state, save_training_state
from palestra.engine.training.peft_format import HARMLESS, NOTHING, load_adapter, save_adapter
from palestra.testing import tiny_lm, tiny_tokenizer

IDS = np.random.default_rng(0).integers(5, 250, 24).astype(np.int32)


def our_logprobs(engine, adapter):
    sample = Sample(IDS[:4], IDS[4:], np.zeros(20, np.float32), np.ones(20, np.float32))
    if adapter is None:
        adapter = Adapter(engine.linear_layers, LoraConfig(), seed=0)  # B = 0: the base
    return AdapterWeights(engine, adapter).logprobs([sample])[0]


def their_logprobs(model):
    ids = torch.tensor(IDS[None].astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(model.eval()(input_ids=ids[:, :-1]).logits[0], -1)
    return logp[3:].gather(1, ids[0, 4:, None])[:, 0].numpy()


# ---- peft reads and writes


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=1, alpha=1),
        LoraConfig(rank=8, alpha=16),
        LoraConfig(rank=5, alpha=2.5, target_modules="q_proj"),
        LoraConfig(rank=3, target_modules=["k_proj", "down_proj"]),
        LoraConfig(rank=2, target_modules=["model.layers.1.mlp.up_proj", "o_proj"]),
    ],
    ids=str,
)
def test_peft_loads_saved_adapters(base, tmp_path, config):
    engine = Engine.load(str(base), device="cpu")
    adapter = random_adapter(engine, config, 1, 0.1)
    save_adapter(tmp_path / "a", adapter, str(base))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a")
    ours = our_logprobs(engine, adapter)
    np.testing.assert_allclose(their_logprobs(model), ours, atol=1e-4)
    assert np.abs(ours - our_logprobs(engine, None)).max() > 0.01  # otherwise the test would prove nothing
    adapted = {name for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(adapter.weights)
    back = load_adapter(tmp_path / "a", engine)
    assert back.config.rank == config.rank and back.config.alpha == config.alpha
    assert all(torch.equal(x, y) for x, y in zip(back.parameters(), adapter.parameters(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 3, "target_modules": r".*layers\.1\..*(gate|up)_proj"},
        {"r": 3, "lora_alpha": 8, "target_modules": ["o_proj"], "layers_to_transform": [0]},
    ],
    ids=str,
)
def test_adapters_saved_by_peft_load(base, tmp_path, options):
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)  # False: B is random too
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "a")
    engine = Engine.load(str(base), device="cpu")
    ours = our_logprobs(engine, load_adapter(tmp_path / "a", engine))
    np.testing.assert_allclose(ours, their_logprobs(model), atol=1e-4)
    assert np.abs(ours - our_logprobs(engine, None)).max() > 0.01


def test_adapter_config_names_the_base_and_loads_in_vllm(base, tmp_path):
    engine = Engine.load(str(base), device="cpu")
    save_adapter(tmp_path / "a", random_adapter(engine, LoraConfig(target_modules="q_proj"), 1, 0.1), str(base))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["peft_type"] == "LORA"
    assert config["r"] == 8 and config["lora_alpha"] == 16 and config["bias"] == "none"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


# ---- refused adapters


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": "all"},
        {"lora_bias": True},
        {"layer_replication": [[0, 1], [0, 2]]},
        {"trainable_token_indices": [3]},
        {"ensure_weight_tying": True},
        {"peft_type": "LOHA"},
        {"use_next_year": 3},
        {"init_lora_weights": "pissa"},  # the adapter would be relative to a modified base
    ],
    ids=str,
)
def test_adapters_that_are_not_plain_lora_are_refused(base, tmp_path, changes):
    engine = Engine.load(str(base), device="cpu")
    save_adapter(tmp_path / "a", random_adapter(engine, LoraConfig(), 1, 0.1), str(base))
    edit(tmp_path / "a", **changes)
    with pytest.raises(ValueError, match=f"not plain LoRA.*{next(iter(changes))}"):
        load_adapter(tmp_path / "a", engine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(0, 2) | st.text("ab(q_proj.", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab(", max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def small():
    return tiny_lm(0)


OPTIONS = st.sampled_from([*peft.LoraConfig().to_dict(), "use_next_year", "a"])


@given(key=OPTIONS, value=JSON)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_option_of_an_adapter_is_used_or_refused_by_name(small, tmp_path, key, value):
    engine, folder = small, tmp_path / "a"
    if not folder.exists():
        save_adapter(folder, random_adapter(engine, LoraConfig(target_modules="q_proj"), 1, 0.1), "small")
        shutil.copyfile(folder / "adapter_config.json", tmp_path / "own.json")
    shutil.copyfile(tmp_path / "own.json", folder / "adapter_config.json")
    edit(folder, **{key: value})
    try:
        found = load_adapter(folder, engine).config
    except ValueError as error:
        named = key in str(error) or (key in ("r", "rank_pattern") and "do not fit" in str(error))
        assert named and "\n" not in str(error)
        return
    if key in HARMLESS or value in NOTHING:
        return
    used = {"r": "rank", "lora_alpha": "alpha"}.get(key, key)
    if key in ("rank_pattern", "alpha_pattern"):  # PEFT ignores patterns that match no layer
        assert getattr(found, key).items() <= value.items()
    elif key not in ("target_modules", "peft_type", "bias", "init_lora_weights"):  # the tensors show them
        assert getattr(found, used) == value


def test_a_config_that_is_no_object_is_refused(base, tmp_path):
    engine = Engine.load(str(base), device="cpu")
    save_adapter(tmp_path / "a", random_adapter(engine, LoraConfig(), 1, 0.1), str(base))
    for text, why in (("[]", "holds list, not dict"), ('{"r": 4, "r": 8}', "the key 'r' is there twice")):
        (tmp_path / "a" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"adapter_config\.json:? {why}"):
            load_adapter(tmp_path / "a", engine)


@pytest.mark.filterwarnings("ignore:Model has `tie_word:UserWarning", "ignore:Setting `save_embedding:UserWarning")
def test_unsupported_adapter_weights_are_refused(base, tmp_path):
    engine = Engine.load(str(base), device="cpu")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "embed_tokens"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="embed_tokens"):
        load_adapter(tmp_path / "a", engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"has weights for model\.layers\.2\..*, which small has not"),
        ({"hidden_size": 32}, "weights of shape .* do not fit"),
        ({"intermediate_size": 96}, "weights of shape .* do not fit"),
    ],
    ids=str,
)
def test_adapter_of_another_base_is_refused(base, tmp_path, changes, message):
    other = tiny_lm(0, **changes)
    save_adapter(tmp_path / "a", random_adapter(other, LoraConfig(), 1, 0.1), "other")
    engine = Engine.load(str(base), device="cpu")
    engine.name = "small"
    with pytest.raises(ValueError, match=message):
        load_adapter(tmp_path / "a", engine)


def test_folder_without_adapter_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=r"no adapter at .*adapter_config\.json"):
        load_adapter(tmp_path, Engine.load(str(base), device="cpu"))


# ---- full models


@pytest.mark.parametrize("tied", [True, False])
def test_full_model_survives_save_and_load(tmp_path, tied):
    first, second = tiny_lm(1, tie_word_embeddings=tied), tiny_lm(2, tie_word_embeddings=tied)
    first.model.save_pretrained(tmp_path / "m")
    load_full_model(tmp_path / "m", second)
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_sharded_full_model_survives_save_and_load(tmp_path):
    first, second = tiny_lm(1), tiny_lm(2)
    first.model.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    load_full_model(tmp_path / "m", second)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "broadcast", "none"])
def test_full_model_of_another_shape_is_refused(tmp_path, fault):
    tiny_lm(1).model.save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif fault in ("shape", "broadcast"):
        tensors[name] = torch.zeros(7, 7) if fault == "shape" else torch.zeros(1, 64)
    save_file(tensors, file, metadata={"format": "pt"})
    if fault == "none":
        file.unlink()
    engine = tiny_lm(2)
    before = [w.clone() for w in engine.model.parameters()]
    with pytest.raises(ValueError, match="no model at" if fault == "none" else r"up_proj\.weight"):
        load_full_model(tmp_path, engine)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))  # unchanged


TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def random_engine(kind, seed):
    """An engine of a small random model whose weights have other names in files: experts, which are stacked in the
    model, or the language part of a model of images and text."""
    torch.manual_seed(seed)
    if kind == "qwen3_moe":
        config = Qwen3MoeConfig(**TEXT, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION))
    return Engine(model.eval().requires_grad_(False), tiny_tokenizer(), kind)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3"])
def test_model_with_other_names_in_files_survives_save_and_load(tmp_path, kind):
    """Checkpoints are in the format that others read, and load exactly."""
    trainer, resumed = (AdapterWeights(random_engine(kind, seed), None) for seed in (0, 1))
    train(trainer, batches(1))
    save_training_state(tmp_path / "t", trainer)
    mine = trainer.engine.model.state_dict()
    assert set(load_file(tmp_path / "t" / "model.safetensors")) - set(mine)
    load_training_state(tmp_path / "t", resumed)
    assert all(torch.equal(a, b) for a, b in zip(state(trainer), state(resumed), strict=True))
    others = type(trainer.engine.model).from_pretrained(tmp_path / "t").state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())


# ---- resume


def batches(n):
    rng = np.random.default_rng(5)
    return [
        [
            Sample(
                IDS[:6],
                rng.integers(5, 250, 4).astype(np.int32),
                rng.normal(-5, 0.1, 4).astype(np.float32),
                np.full(4, rng.normal(), np.float32),
            )
            for _ in range(4)
        ]
        for _ in range(n)
    ]


def trainer_on(full, seed=0):
    engine = tiny_lm(4)
    return AdapterWeights(engine, None if full else Adapter(engine.linear_layers, LoraConfig(rank=4), seed=seed))


def train(trainer, parts):
    metrics = []
    for i, samples in enumerate(parts):
        figures = trainer.forward_backward(samples, clipped_policy_loss, entropy=0.01)
        metrics.append(figures | trainer.optim_step(OptimConfig(lr=1e-2 / (i + 1), optimizer=AdamW(weight_decay=0.1))))
    return metrics


def state(trainer):
    slots = sorted(trainer.optimizer.state_dict()["state"].items())
    optimizer = [value for _, named in slots for _, value in sorted(named.items())]
    return [*trainer.parameters, *optimizer, torch.tensor(trainer.steps)]


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_trainer_resume_is_bit_identical(tmp_path, full):
    whole = trainer_on(full)
    train(whole, batches(3))
    save_training_state(tmp_path / "t", whole)
    resumed = trainer_on(full, seed=9)  # another start, which loading must replace
    load_training_state(tmp_path / "t", resumed)
    assert len(state(resumed)) == len(state(whole)) and resumed.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(state(whole), state(resumed), strict=True))
    assert train(whole, batches(6)[3:]) == train(resumed, batches(6)[3:])
    assert all(torch.equal(a, b) for a, b in zip(state(whole), state(resumed), strict=True))


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_resume_of_an_untrained_trainer_is_bit_identical(tmp_path, full):
    save_training_state(tmp_path / "t", trainer_on(full))
    resumed = trainer_on(full, seed=9)
    load_training_state(tmp_path / "t", resumed)
    assert resumed.steps == 0
    whole = trainer_on(full)
    assert train(whole, batches(2)) == train(resumed, batches(2))


@pytest.mark.parametrize("kind", ["copy", "disk"])
def test_reference_of_a_full_model_is_saved_and_restored(tmp_path, kind):
    """Its log-probabilities are those of the weights at the last `set_reference`, also after a checkpoint, and
    computing them does not change the trained weights."""

    def full():
        weights = AdapterWeights(tiny_lm(4), None)
        weights.add_full_reference(on_disk=kind == "disk")
        return weights

    (samples,) = batches(1)
    trainer = full()
    base = trainer.logprobs(samples)
    train(trainer, batches(2))
    moved = trainer.logprobs(samples)
    assert all(np.array_equal(a, b) for a, b in zip(base, trainer.logprobs(samples, reference=True), strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(moved, trainer.logprobs(samples), strict=True))
    assert np.abs(moved[0] - base[0]).max() > 1e-2
    save_training_state(tmp_path / "first", trainer)
    assert not (tmp_path / "first" / "reference.safetensors").exists()  # it equals the base
    trainer.set_reference()
    train(trainer, batches(1))
    save_training_state(tmp_path / "second", trainer)
    for folder, expected in (("first", base), ("second", moved)):
        resumed = full()
        load_training_state(tmp_path / folder, resumed)
        found = resumed.logprobs(samples, reference=True)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_saving_twice_writes_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        trainer = trainer_on(full=False)
        train(trainer, batches(2))
        save_training_state(tmp_path / name, trainer)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_checkpoint_of_another_shape_is_refused(tmp_path):
    save_training_state(tmp_path / "t", trainer_on(full=False))
    engine = tiny_lm(4)
    for config in (LoraConfig(rank=8), LoraConfig(rank=4, target_modules="q_proj"), LoraConfig(rank=4, alpha=4)):
        with pytest.raises(ValueError, match="another rank, scale or other targets"):
            load_training_state(tmp_path / "t", AdapterWeights(engine, Adapter(engine.linear_layers, config, seed=0)))


def test_checkpoint_without_optimizer_is_refused(tmp_path):
    """Continuing with a new optimizer would silently be another run."""
    save_training_state(tmp_path / "t", trainer_on(full=False))
    (tmp_path / "t" / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"optimizer\.safetensors"):
        load_training_state(tmp_path / "t", trainer_on(full=False))


def test_merged_adapter_equals_the_trained_policy(tmp_path):
    """Adapters as peft merges them: the saved weights give the trained log-probabilities to a plain model."""
    trainer = trainer_on(full=False)
    for samples in batches(3):
        trainer.forward_backward(samples, cross_entropy_loss)
        trainer.optim_step(OptimConfig(lr=1e-2))
    save_training_state(tmp_path / "t", trainer)
    trainer.engine.model.save_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "t")
    merged = model.merge_and_unload()
    np.testing.assert_allclose(their_logprobs(merged), our_logprobs(trainer.engine, trainer.adapter), atol=1e-4)
