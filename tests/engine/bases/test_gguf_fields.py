"""What a GGUF file states beyond what transformers reads is in the converted model, or refused by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, Keys, RopeScalingType
from helpers.gguf_files import tiny_llama, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from palestra.engine.bases import gguf
from palestra.engine.bases.gguf_fields import ATTRIBUTES, HARMLESS, NEUTRAL, check_tensors, complete_config
from palestra.engine.bases.model import Engine
from palestra.engine.bases.names import resolve_base

THETA = 10_000.0
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf._convert_once.cache_clear()


def scaled_llama(rope: dict[str, Any]) -> LlamaForCausalLM:
    """A model whose results depend much on positions."""
    model = tiny_llama(rope_parameters={"rope_theta": THETA} | rope)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    return model


def llama3_divisors(config: LlamaConfig) -> np.ndarray:
    """The tensor that llama.cpp's converter writes for Llama 3.1 and later."""
    plain = 1.0 / THETA ** (torch.arange(0, 8, 2) / 8)
    return (plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]).numpy()


def write_scaling(rope: dict[str, Any], config: LlamaConfig, writer: GGUFWriter) -> None:
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        LINEAR,
        YARN,
        YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
        LLAMA3 | {"original_max_position_embeddings": 64},
        LLAMA3 | {"original_max_position_embeddings": 200, "factor": 32.0},
        LLAMA3 | {"original_max_position_embeddings": 8192},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}-{rope.get('original_max_position_embeddings')}",
)
@pytest.mark.few(3)
def test_scaled_rotary_embeddings_are_those_of_the_model(rope: dict[str, Any], tmp_path: Path):
    true = scaled_llama(rope)
    file = write_gguf(tmp_path / "scaled.gguf", true, lambda writer: write_scaling(rope, true.config, writer))
    found = AutoModelForCausalLM.from_pretrained(resolve_base(str(file)))
    ids = torch.arange(120)[None] % 200
    with torch.no_grad():
        expected = torch.log_softmax(true(ids).logits, -1)
        torch.testing.assert_close(torch.log_softmax(found(ids).logits, -1), expected, atol=1e-5, rtol=0)
        plain = torch.log_softmax(scaled_llama({"rope_type": "default"})(ids).logits, -1)
    assert rope["rope_type"] == "default" or (plain - expected).abs().max() > 0.01  # the test can fail


def test_scaled_model_passes_the_check_at_load(tmp_path: Path):
    true = scaled_llama(YARN)
    file = write_gguf(tmp_path / "yarn.gguf", true, lambda writer: write_scaling(YARN, true.config, writer))
    assert Engine.load(str(file), device="cpu").model.config.rope_parameters["rope_type"] == "yarn"


def add_longrope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (lambda w: w.add_float32("llama.logit_scale", 0.5), r"llama\.logit_scale \(0\.5\)"),
        (lambda w: w.add_float32("llama.attention.scale", 0.1), r"llama\.attention\.scale"),
        (lambda w: w.add_float32("llama.attn_logit_softcapping", 50.0), r"llama\.attn_logit_softcapping"),
        (lambda w: w.add_uint32("llama.expert_count", 8), r"llama\.expert_count \(8\)"),
        (lambda w: w.add_uint32("llama.attention.sliding_window", 16), r"llama\.attention\.sliding_window"),
        (lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), r"llama\.rope\.scaling\.yarn_ext_factor"),
        (add_longrope, r"llama\.rope\.scaling\.type \(longrope\), llama\.rope\.scaling\.factor"),
        (lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)), r"rope_factors_long\.weight"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(4, 0.5, np.float32)), r"rope_freqs\.weight"),
        (lambda w: w.add_tensor("blk.0.attn_q.scale", np.ones(1, np.float32)), r"blk\.0\.attn_q\.scale"),
    ],
)  # fmt: skip
def test_what_would_be_dropped_is_refused_by_name(add: Callable[[GGUFWriter], None], named: str, tmp_path: Path):
    file = write_gguf(tmp_path / "extra.gguf", tiny_llama(), add)
    with pytest.raises(ValueError, match=f"{named}.*own weights") as refused:
        resolve_base(str(file))
    assert "\n" not in str(refused.value) and "damaged" not in str(refused.value)


def test_missing_tensor_is_refused_by_name(tmp_path: Path):
    model = tiny_llama(num_hidden_layers=1)  # the file says 2
    file = write_gguf(tmp_path / "short.gguf", model)
    with pytest.raises(ValueError, match=r"has no model\.layers\.1.*needs these weights.*own weights"):
        resolve_base(str(file))


def test_harmless_and_neutral_fields_pass_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_finetuned(True)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_logit_scale(1.0)
        writer.add_causal_attention(True)
        writer.add_key_length(8)
        writer.add_value_length(8)
        writer.add_string("general.quantized_by", "someone")
        writer.add_string("quantize.imatrix.file", "of.a.tool")
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))

    resolve_base(str(write_gguf(tmp_path / "plain.gguf", tiny_llama(), add)))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("converting plain.gguf to float32 once, about")


def test_values_that_transformers_leaves_at_their_defaults_are_set():
    class Field:
        def __init__(self, value: Any) -> None:
            self.value = value

        def contents(self) -> Any:
            return self.value

    class Reader:
        fields = {
            "general.architecture": Field("gemma2"),
            "gemma2.final_logit_softcapping": Field(20.0),
            "gemma2.attn_logit_softcapping": Field(0.0),
            "gemma2.rope.scaling.type": Field("linear"),
            "gemma2.rope.scaling.factor": Field(8.0),
        }
        get_field = fields.get
        tensors: list[Any] = []

    config = Gemma2Config()
    complete_config(config, Reader(), "gemma.gguf")
    assert config.final_logit_softcapping == 20.0 and config.attn_logit_softcapping is None
    assert config.rope_parameters["rope_type"] == "linear" and config.rope_parameters["factor"] == 8.0


def test_architectures_of_the_newer_loader_are_checked_too(tmp_path: Path):
    def header(name: str, add: Callable[[GGUFWriter], None]) -> Path:
        writer = GGUFWriter(tmp_path / name, "lfm2")
        writer.add_context_length(128)
        writer.add_embedding_length(32)
        writer.add_block_count(2)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv([0, 2])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(THETA)
        writer.add_shortconv_l_cache(3)
        writer.add_token_list(["a", "b"])
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / name

    known = header("known.gguf", lambda w: w.add_vocab_size(2))
    complete_config(Lfm2Config(), GGUFReader(known), str(known))
    unknown = header("unknown.gguf", lambda w: w.add_logit_scale(0.5))
    with pytest.raises(ValueError, match=r"which has lfm2\.logit_scale \(0\.5\):"):
        complete_config(Lfm2Config(), GGUFReader(unknown), str(unknown))


def test_widths_of_heads_and_windows_of_layers_are_those_of_the_file(tmp_path: Path):
    def add(writer: GGUFWriter) -> None:
        writer.add_key_length(64)
        writer.add_rope_dimension_count(64)

    def changed(config: Any, name: str, architecture: str, add: Callable[[GGUFWriter], None]) -> Any:
        writer = GGUFWriter(tmp_path / name, architecture)
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        complete_config(config, GGUFReader(tmp_path / name), name)
        return config

    assert changed(Qwen3Config(), "qwen3.gguf", "qwen3", add).head_dim == 64
    layers = [True, False, False]
    gemma = Gemma3TextConfig(num_hidden_layers=3)
    changed(gemma, "gemma3.gguf", "gemma3", lambda w: w.add_sliding_window_pattern(layers))
    assert [kind == "sliding_attention" for kind in gemma.layer_types] == layers
    for value in ([True], 0):
        with pytest.raises(ValueError, match=r"gemma3\.attention\.sliding_window_pattern"):
            changed(gemma, f"{value}.gguf", "gemma3", lambda w, v=value: w.add_sliding_window_pattern(v))
    with pytest.raises(ValueError, match=r"bloom\.rope\.scaling\.factor"):  # it has no rotary embedding
        changed(BloomConfig(), "bloom.gguf", "bloom", lambda w: w.add_rope_scaling_factor(2.0))


# ---- any field, any tensor

KEYS = [value for group in (Keys.LLM, Keys.Attention, Keys.Rope, Keys.SSM) for value in vars(group).values()]
NAMES = {key.removeprefix("{arch}.") for key in KEYS if isinstance(key, str) and key.startswith("{arch}.")}
NAMES -= GGUF_CONFIG_MAPPING["llama"].keys()  # these are read, and shapes must fit to them
# Of a scaling: nothing without its type and factor.
DETAILS = ["rope.scaling." + name for name in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")]
VALUES = st.one_of(st.floats(0, 100, width=32), st.integers(0, 2**31), st.booleans(), st.text("abc", min_size=1))
ANY_NAME = st.text("abcxyz_.", min_size=1, max_size=20)


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kind[type(value)](key, value)


def values_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [value for part in tree.values() for value in values_of(part)]
    return [tree]


@given(key=st.sampled_from(sorted(NAMES)) | ANY_NAME, value=VALUES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_field_is_used_or_refused(key: str, value: Any, tmp_path: Path):
    def add(writer: GGUFWriter) -> None:
        if f"llama.{key}" not in writer.kv_data[0]:
            add_value(writer, f"llama.{key}", value)

    path = write_gguf(tmp_path / "any.gguf", tiny_llama(), add)
    reader, config = GGUFReader(path), tiny_llama().config
    own = reader.get_field(f"llama.{key}").contents()
    try:
        complete_config(config, reader, path.name)
    except ValueError as error:
        assert f"llama.{key}" in str(error) and "\n" not in str(error)
    else:
        used = any(type(v) is type(own) and v == own for v in values_of(config.to_dict()))
        nothing = key in HARMLESS or (key in NEUTRAL and own == NEUTRAL[key])
        assert used or nothing or key in DETAILS or (key == "rope.scaling.factor" and own in (0, 1))


TENSORS = ["rope_factors_short", "blk.0.attn_q", "blk.2.attn_q", "output", "blk.0.exp_probs_b"]


@given(name=st.sampled_from(TENSORS) | ANY_NAME, end=st.sampled_from([".weight", ".bias", ".scale", ""]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensor_has_a_weight_or_is_refused(name: str, end: str, tmp_path: Path):
    def add(writer: GGUFWriter) -> None:
        if not any(f"{name}{end}" in shard for shard in writer.tensors):
            writer.add_tensor(f"{name}{end}", np.ones(4, np.float32))

    model = tiny_llama()
    path = write_gguf(tmp_path / "any.gguf", model, add)
    if f"{name}{end}" in ("blk.0.attn_q.weight", "output.weight"):  # of every Llama
        check_tensors(model, GGUFReader(path), path.name)
        return
    with pytest.raises(ValueError, match="does not read that") as refused:
        check_tensors(model, GGUFReader(path), path.name)
    assert f"{name}{end}" in str(refused.value)


def test_tables_do_not_overlap():
    assert not HARMLESS & {*ATTRIBUTES, *NEUTRAL}


@pytest.mark.parametrize(
    ("architecture", "shape", "scale"),
    [
        ("gemma2", {"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256}, 256),
        ("gemma2", {"num_hidden_layers": 46, "hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}, 144),
        ("gemma3", {"num_hidden_layers": 34, "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256}, 256),
        ("gemma3", {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}, 168),
        ("gemma3", {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}, 32),
    ],
)
def test_attention_of_gemma_has_the_scale_of_its_size(
    architecture: str, shape: dict[str, int], scale: int, tmp_path: Path
):
    writer = GGUFWriter(tmp_path / "gemma.gguf", architecture)
    writer.add_key_length(shape["head_dim"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = {"gemma2": Gemma2Config, "gemma3": Gemma3TextConfig}[architecture](**shape)
    complete_config(config, GGUFReader(tmp_path / "gemma.gguf"), "gemma.gguf")
    assert config.query_pre_attn_scalar == scale


def tokens_of(path: Path) -> list[str]:
    tokenizer = Engine.load(str(path), device="cpu").tokenizer
    return tokenizer.convert_ids_to_tokens(tokenizer.encode("a 12", add_special_tokens=False))


@pytest.mark.parametrize("split", ["smollm", "starcoder", "command-r"])
def test_digits_are_apart_where_the_file_says_so(split: str, tmp_path: Path):
    assert tokens_of(write_gguf(tmp_path / "digits.gguf", tiny_llama(), split=split)) == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "default", ""])
def test_digits_are_together_elsewhere(split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert tokens_of(write_gguf(tmp_path / "words.gguf", tiny_llama(), split=split)) == ["a", "Ġ", "12"]
    is_silent = split in ("gpt-2", "llama-bpe")
    assert ("does not say how its tokenizer splits texts" in capsys.readouterr().err) != is_silent


@pytest.mark.parametrize("split", ["falcon", "deepseek-llm", "no-such-pre"])
def test_an_unknown_split_is_refused(split: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f'splits texts as "{split}" .tokenizer.ggml.pre., which is not known here'):
        Engine.load(str(write_gguf(tmp_path / "odd.gguf", tiny_llama(), split=split)), device="cpu")
