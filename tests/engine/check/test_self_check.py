"""Architectures of transformers compared with its own forward, and models that are refused or limited at load."""

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tolerances import LOGPROB_ATOL
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.check import self_check
from palestra.engine.check.reduced_model import reduced_model
from palestra.engine.check.reference_results import own_results
from palestra.engine.check.self_check import choose_engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.plain_batch import PlainBatch
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.testing import tiny_tokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "architectures.py"
spec = importlib.util.spec_from_file_location("architectures", SCRIPT)
assert spec is not None and spec.loader is not None
architectures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(architectures)

FAST = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "lfm2", "mamba", "qwen2_5_vl"]
SLOW = [kind for kind in architectures.PACKED | architectures.PLAIN | architectures.COMPOSITES if kind not in FAST]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
LONGROPE["factor"] = 4.0


def chosen(model: PreTrainedModel, name: str = "mine") -> Engine:
    return choose_engine(model, name, lambda of, plain: Engine(of, tiny_tokenizer(), name, plain=plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_sampling_training_and_lora_gradients_equal_transformers(kind: str):
    row = architectures.measure(kind)
    assert (row.way == "packed") == (kind not in architectures.PLAIN and kind not in ("qwen3_5", "llama4")), row
    assert row.way != "refused", row
    assert max(row.sampled, row.trained, row.gradient) <= architectures.TOLERANCE, row


def test_small_model_has_few_layers_of_each_kind():
    model = architectures.random_model("qwen2", num_hidden_layers=24, max_window_layers=21, layer_types=None)
    assert model.config.layer_types[20:22] == ["full_attention", "sliding_attention"]
    assert reduced_model(model, 0).config.num_hidden_layers == 22
    unused = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}  # as in Qwen2.5-0.5B
    model = architectures.random_model("qwen2", num_hidden_layers=24, max_window_layers=21, **unused)
    assert reduced_model(model, 0).config.num_hidden_layers == 2


@pytest.mark.parametrize("scaled", [True, False])
def test_queries_scaled_by_place_in_the_row_are_not_packed(scaled):
    """Llama 4 scales queries from position 8191 on, by their place in the row, which the small model has to show."""
    row = architectures.measure("llama4_text", floor_scale=8192, attn_temperature_tuning=scaled)
    assert row.way == ("plain" if scaled else "packed"), row
    assert max(row.sampled, row.trained, row.gradient) <= architectures.TOLERANCE, row


def test_small_model_scales_queries_from_a_short_length():
    rope = architectures.YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    model = architectures.random_model("ministral3", rope_parameters=rope)
    small = reduced_model(model, 0).config.rope_parameters
    assert small == model.config.rope_parameters | {"original_max_position_embeddings": 16}


def test_half_precision_is_packed_although_its_own_rounding_is_large(monkeypatch):
    """In half precision a model's own results differ from those of its float32 weights, by 0.08 nats in SmolLM2-135M.
    A tolerance below twice that would send it to the slow plain path on some processors, or refuse it."""
    model = architectures.random_model("llama", num_hidden_layers=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(48)
    model = model.bfloat16()
    assert own_results(model, long=False).rounding > 2 * self_check.HALF_TOLERANCE
    assert chosen(copy.deepcopy(model)).plain_path is None
    monkeypatch.setattr(self_check, "ROUNDING_FACTOR", 0)
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "_checked", set())
    with pytest.raises(ValueError, match="differs by"):
        chosen(model)


def test_non_causal_model_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match=r"cannot run 'mine' \(BertLMHeadModel\).*attention mask.*differs by .* nats"):
        chosen(architectures.random_model("bert"))


def test_model_whose_forward_fails_is_refused_with_its_error():
    model = architectures.random_model("llama")
    model.model.layers[0].mlp.up_proj = nn.Linear(31, 48)
    with pytest.raises(ValueError, match=r"cannot run .* its own forward fails \(RuntimeError: .*shapes"):
        chosen(model)


def test_sliding_window_model_loads_and_keeps_its_window(tmp_path):
    architectures.random_model("mistral", sliding_window=None).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = np.random.default_rng(0).integers(5, 250, 60)
    sample = Sample(ids[:50], ids[50:], np.zeros(10, np.float32), np.ones(10, np.float32))
    found = []
    for window in (None, 32):
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
        engine = Engine.load(str(tmp_path), device="cpu")
        assert engine.plain_path is None
        own = architectures.own_logprobs(load_model(tmp_path), sample).detach().numpy()
        found.append(AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)).logprobs([sample])[0])
        np.testing.assert_allclose(found[-1], own, atol=LOGPROB_ATOL)
    assert np.abs(found[0] - found[1]).max() > 0.01


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


class Halved(nn.Linear):
    """A linear layer with its own forward, like quantised layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Router(nn.Linear):
    """A linear layer that returns more than one tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


def test_custom_linear_forward_is_kept_and_adapters_add_to_it():
    model = architectures.random_model("llama")
    layer = model.model.layers[0].mlp
    layer.up_proj.__class__ = Halved
    layer.act_fn = nn.Sequential(layer.act_fn)
    layer.router = Router(2, 3)
    ids = torch.arange(5, 25)[None]
    expected = model(input_ids=ids).logits[0]
    engine = chosen(model)
    assert "model.layers.0.mlp.up_proj" in engine.linear_layers
    assert not any("router" in name for name in engine.linear_layers)
    adapter = architectures.random_adapter(engine)
    tokens = ids[0].numpy()
    sample = Sample(tokens[:10], tokens[10:], np.zeros(10, np.float32), np.ones(10, np.float32))
    bare = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)).logprobs([sample])[0]
    own = torch.log_softmax(expected, -1)[9:19].gather(1, ids[0, 10:, None])[:, 0].numpy()
    np.testing.assert_allclose(bare, own, atol=LOGPROB_ATOL)
    changed = Adapter(engine.linear_layers, LoraConfig(rank=2, target_modules="up_proj"), seed=0)
    with torch.no_grad():
        changed.weights["model.layers.0.mlp.up_proj"][1].fill_(0.1)
    adapted = AdapterWeights(engine, changed).logprobs([sample])[0]
    assert np.abs(adapted - bare).max() > 1e-4
    assert adapter.weights.keys() == {n for n in engine.linear_layers if "layers" in n}


def test_longrope_is_exact_up_to_its_limit_and_refused_beyond():
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": None}
    row = architectures.measure("phi3", **rope)
    assert row.way == "packed" and max(row.sampled, row.trained, row.gradient) <= 1e-4, row
    engine = chosen(architectures.random_model("phi3", **rope))
    with pytest.raises(ValueError, match="exceed the base's context length, 64"):
        Sampler(engine).sample_all([Request(np.arange(5, 65), 1, SamplingConfig(max_tokens=5))])
    long = Sample(np.arange(5, 65), np.arange(5, 15), np.zeros(10, np.float32), np.ones(10, np.float32))
    with pytest.raises(ValueError, match=r"from 64 on, this base's rotary embedding depends on the longest"):
        AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)).logprobs([long])


def test_long_factors_are_exact_beyond_the_original_length(tmp_path):
    """Sequences of 80, 100 and 30 tokens in one pack, and answers that cross 64 tokens with keys in the cache."""
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": None}
    own = architectures.random_model("phi3", **rope)
    own.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = Engine.load(str(tmp_path), device="cpu", long_context=True)
    assert engine.plain_path is None
    rng, zeros = np.random.default_rng(0), np.zeros(15, np.float32)
    ids = [rng.integers(5, 250, size) for size in (80, 100, 30)]
    samples = [Sample(each[:-15], each[-15:], zeros, zeros) for each in ids]
    ids[2] = np.concatenate([ids[2], rng.integers(5, 250, 40)])  # as the beginning of a long sequence

    def check(found: np.ndarray, whole: np.ndarray, first: int) -> None:
        with torch.no_grad():
            logp_TV = torch.log_softmax(own(input_ids=torch.as_tensor(whole)[None]).logits[0], -1)
        next_T = torch.as_tensor(whole[first : first + len(found)])
        expected = logp_TV[first - 1 : first - 1 + len(found)].gather(1, next_T[:, None])[:, 0]
        np.testing.assert_allclose(found, expected, atol=LOGPROB_ATOL)

    trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0))
    for sample, whole, found in zip(samples, ids, trainer.logprobs(samples), strict=True):
        check(found, whole, len(sample.prompt_ids))
    prompts = [ids[0][:size].astype(np.int32) for size in (50, 70)]
    settings = SamplingConfig(max_tokens=30, stop_at_eos=False)
    for prompt, answers in zip(
        prompts, Sampler(engine).sample_all([Request(p, 2, settings) for p in prompts]), strict=True
    ):
        for answer in answers:
            check(answer.logprobs, np.concatenate([prompt, answer.token_ids]), len(prompt))


def test_long_factors_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match=r"'tiny' has no short and long factors \(LongRoPE\) to choose"):
        Engine.load("tiny", device="cpu", long_context=True)


# ---- the plain path


@pytest.fixture(scope="module")
def plain_engine() -> Engine:
    engine = chosen(architectures.random_model("lfm2"), "lfm2")
    assert engine.plain_path is not None and engine.plain_path.uses_cache
    assert "conv" in engine.plain_path.reason
    return engine


def requests(engine: Engine) -> list[Request]:
    snapshot = architectures.random_adapter(engine).snapshot("a")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 250, n).astype(np.int32) for n in (6, 6, 9, 9)]
    settings = SamplingConfig(max_tokens=7)
    adapters = [snapshot, None, snapshot, snapshot]
    return [
        Request(p, 3, settings, a, seed=i, client=f"c{i % 2}")
        for i, (p, a) in enumerate(zip(prompts, adapters, strict=True))
    ]


def tokens(answers) -> list[list[int]]:
    return [answer.token_ids.tolist() for group in answers for answer in group]


def test_plain_path_answers_do_not_depend_on_the_batch(plain_engine: Engine):
    every = requests(plain_engine)
    alone = [tokens(Sampler(plain_engine).sample_all([request])) for request in every]
    for max_num_seqs in (512, 4):  # with 4, siblings start at different times
        sampler = Sampler(plain_engine, max_num_seqs=max_num_seqs)
        assert isinstance(sampler.batch, PlainBatch)
        assert tokens(sampler.sample_all(every)) == [answer for group in alone for answer in group]
        assert not sampler.batch.rows and not sampler.batch.cohorts and not sampler.batch.groups


def test_equal_prompts_are_computed_once_on_the_plain_path(plain_engine: Engine):
    request, sampler = requests(plain_engine)[0], Sampler(plain_engine)
    sampler.sample_all([request, request])
    assert sampler.batch.counts["prefill_tokens"] == 6


def test_failed_pass_on_the_plain_path_is_retried(plain_engine: Engine):
    every, path = requests(plain_engine), plain_engine.plain_path
    assert path is not None
    expected = tokens(Sampler(plain_engine).sample_all(every))
    decode, calls = path.decode, []

    def failing(*args):
        calls.append(args)
        found = decode(*args)  # the cache is extended, then the pass fails
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return found

    path.decode = failing
    try:
        assert tokens(Sampler(plain_engine).sample_all(every)) == expected
    finally:
        del path.decode
    assert len(calls) > 4


def test_cancellation_works_on_the_plain_path(plain_engine: Engine):
    every, sampler = requests(plain_engine), Sampler(plain_engine)
    expected = tokens(Sampler(plain_engine).sample_all(every[:2]))
    found: dict[int, object] = {}
    groups = [
        sampler.submit(request, lambda answers, i=i: found.__setitem__(i, answers)) for i, request in enumerate(every)
    ]
    for _ in range(3):
        sampler.step()
    sampler.cancel(groups[2])
    sampler.cancel(groups[3])
    while sampler.step():
        pass
    assert sorted(found) == [0, 1] and tokens([found[0], found[1]]) == expected


def test_base_that_is_not_a_language_model_is_refused(tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot run .* no language model of its kind \(vit\)"):
        Engine.load(str(tmp_path), device="cpu")


def test_only_a_model_of_the_same_weights_is_not_checked_again(base: Path) -> None:
    """The second of two equal models is built without a pass; one changed weight, and it is checked, and refused."""

    def broken(of: PreTrainedModel, plain: bool) -> Engine:
        engine = Engine(of, tiny_tokenizer(), "mine", plain=plain)
        if of in models:
            of.get_input_embeddings().weight.mul_(3)
        return engine

    models = [AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval() for _ in range(3)]
    for model in models:
        model.requires_grad_(False)
        model.get_input_embeddings().weight[5] += 0.25
    chosen(models[0])
    assert choose_engine(models[1], "mine", broken).model is models[1]
    models[2].get_input_embeddings().weight[7, 3] += 1e-3
    with pytest.raises(ValueError, match="would not be those of transformers"):
        choose_engine(models[2], "mine", broken)
