"""Compares sampling, training and LoRA gradients of every decoder of transformers, run by palestra, with transformers'
own eager forward of single unpadded sequences, with adapters loaded by `peft`. Writes the page docs/models.md.

    python scripts/architectures.py                     # all of them, a few minutes; writes docs/models.md
    python scripts/architectures.py llama qwen3_next    # some of them; prints their rows

Models are tiny and random, of transformers' own classes. Each samples answers to prompts of several lengths in one
batch, with siblings, with an adapter and without, then a second turn; the longest prompts are longer than every window.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from palestra.core.losses import cross_entropy_loss
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.bases.names import model_class
from palestra.engine.check.reference_results import with_adapter
from palestra.engine.check.self_check import choose_engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.peft_format import MISREAD, save_adapter
from palestra.testing import tiny_tokenizer

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TOLERANCE = 1e-4
WINDOW = 16
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 4,
}
# Set only in configs that have the key.
OPTIONAL = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# fmt: off
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
WINDOWED = {"sliding_window": WINDOW}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "num_key_value_heads": 4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONV = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16,
         "mamba_n_groups": 1}
DELTA = LATENT | {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4,
                  "mlp_layer_types": ["dense", "sparse"], "num_experts_per_token": 2, "num_expert_group": 1}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8, "n_ctx": 256}

# Families in common use, which run on packed rows, and further settings of their configs.
PACKED: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": ROPE}, "arcee": {}, "bitnet": {}, "cohere": {}, "cohere2": SLIDING,
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "dots1": {}, "ernie4_5": {}, "ernie4_5_moe": {}, "exaone4": SLIDING,
    "flex_olmo": {}, "gemma": {}, "gemma2": SLIDING, "gemma3_text": SLIDING, "glm": {}, "glm4": {}, "glm4_moe": {},
    "glm4_moe_lite": LATENT, "gpt2": {}, "gpt_bigcode": {}, "gpt_neox": {}, "gpt_oss": SLIDING, "granite": {},
    "granitemoe": {}, "granitemoeshared": {}, "helium": {}, "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {}, "hy_v3": {},
    "llama": {}, "mellum": {}, "minicpm3": LATENT, "minimax_m2": {}, "ministral": WINDOWED,
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": WINDOW}},
    "mistral": WINDOWED, "mixtral": WINDOWED,
    "nanochat": {}, "olmo": {}, "olmo2": {}, "olmo3": SLIDING, "olmoe": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "persimmon": {}, "phi": {}, "phi3": WINDOWED, "phimoe": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, "qwen2_moe": {},
    "qwen3": {"rope_parameters": YARN}, "qwen3_moe": {}, "seed_oss": {}, "smollm3": {}, "solar_open": {},
    "starcoder2": WINDOWED, "vaultgemma": {}, "youtu": LATENT,
}
# Models with a state, a convolution or another kind of attention, which run by transformers' own forward and cache.
PLAIN: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]}, "bloom": {}, "diffllama": {}, "doge": {}, "falcon_h1": MAMBA |
    {"mamba_d_ssm": 64}, "falcon_mamba": {"state_size": 8}, "granitemoehybrid": MAMBA | {"layer_types":
    ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "jetmoe": {}, "kimi_linear": DELTA, "lfm2": CONV, "lfm2_moe": CONV | {"num_dense_layers": 1}, "lfm3": CONV,
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW,
                    "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": WINDOW},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]}, "mpt": {"n_heads": 4, "d_model": 32,
    "n_layers": 2, "max_seq_len": 256}, "nemotron": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
    "olmo_hybrid": LINEAR, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR, "qwen3_next": LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": WINDOW},
    "rwkv": {"attention_hidden_size": 32}, "stablelm": {},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4,
               "mamba_headdim": 16, "chunk_size": 16},
}
# Models of images and text, whose language part runs.
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
PATCHES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
TEXT = SHAPE | {"num_key_value_heads": 2}
COMPOSITES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT | SLIDING | {"head_dim": 8}, "vision_config": VISION},
    "gemma4": {"text_config": TEXT | SLIDING | {"head_dim": 8, "hidden_size_per_layer_input": 8, "per_layer_config": {},
               "vocab_size_per_layer_input": 272}, "vision_config": VISION | {"head_dim": 16}, "audio_config": None},
    "llama4": {"text_config": TEXT | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "layer_types":
               ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0],
               "floor_scale": WINDOW}, "vision_config": VISION |
               {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    "mistral3": {"text_config": TEXT | {"model_type": "mistral", "head_dim": 8},
                 "vision_config": VISION | {"model_type": "pixtral"}},
    "qwen2_5_vl": {"text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
                   "vision_config": PATCHES},
    "qwen3_5": {"text_config": TEXT | LINEAR | {"head_dim": 8}, "vision_config": PATCHES},
    "qwen3_vl": {"text_config": TEXT | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
                 "vision_config": PATCHES | {"deepstack_visual_indexes": []}},
}
# Others, built if their configs allow it.
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {}, "axk1": LATENT, "axk2": LATENT, "bailing_hybrid": DELTA, "codegen": GPT, "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT, "gptj": GPT, "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": WINDOW,
    "attention_types": [[["global", "local"], 1]]}, "minimax_m3_vl_text": {"layer_types": ["full_attention",
    "minimax_m3_sparse"], "index_block_size": WINDOW, "index_topk_blocks": 2},
    "longcat_flash": LATENT | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "moe_topk": 2,
    "zero_expert_num": 2, "head_dim": 8},
}
# Encoders, sequence-to-sequence models, and models of images or sound, whose classes can also be decoders of text.
NO_DECODERS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt",
    "camembert", "ctrl", "data2vec-text", "electra", "emu3", "ernie", "fuyu", "git", "got_ocr2", "marian", "mbart",
    "megatron-bert", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "openai-gpt",
    "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
}
# fmt: on
CONFIGS = PACKED | PLAIN | OTHERS
MAX_WEIGHTS = 30e6  # of a model to build: defaults of keys that are not set here may make it large


class Row(NamedTuple):
    """Results of one architecture: how it runs (`way`), why not on packed rows or why it is refused (`reason`), the
    largest differences of log-probabilities in nats (sampled, trained), and that of gradients, relative to the largest
    gradient of all weights, and whether `peft` loaded the adapter."""

    kind: str
    way: str
    reason: str
    sampled: float = 0.0
    trained: float = 0.0
    gradient: float = 0.0
    by_peft: bool = True


def random_model(kind: str, **changes: Any) -> PreTrainedModel:
    """Returns a small model in which all weights, norms and biases differ from their initial values. Raises what its
    class raises, and ValueError if the model would have more than `MAX_WEIGHTS` weights."""
    if kind in COMPOSITES:
        return _randomised(AutoConfig.for_model(kind, **COMPOSITES[kind]))
    default = AutoConfig.for_model(kind)
    optional = {key: value for key, value in OPTIONAL.items() if hasattr(default, key)}
    if hasattr(default, "kv_lora_rank") or kind == "falcon":
        optional.pop("head_dim", None)  # the width of the rotary part there, or a property
    return _randomised(AutoConfig.for_model(kind, **(SHAPE | optional | CONFIGS.get(kind, {}) | changes)))


def _randomised(config: Any) -> PreTrainedModel:
    kind = model_class(config, config.model_type)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind.from_config(config, trust_remote_code=False).parameters())
    if size > MAX_WEIGHTS:
        raise ValueError(f"{size / 1e6:.0f} million weights")
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager", trust_remote_code=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=0.1)
    return model.requires_grad_(False)


def random_adapter(engine: Engine) -> Adapter:
    """Returns an adapter that changes the output of its base."""
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=2, alpha=4.0), seed=1)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1, generator=torch.Generator().manual_seed(b.numel()))
    return adapter


def play(engine: Engine, adapter: Adapter) -> tuple[list[Sample], list[bool]]:
    """Returns sampled answers to prompts of several lengths in one batch, with siblings, and to a second turn; and for
    each answer whether it was sampled with the adapter."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, n).astype(np.int32) for n in (7, 7, 21, 2 * WINDOW + 9)]
    snapshot, sampler = adapter.snapshot("adapter"), Sampler(engine)
    adapters = [snapshot, snapshot, None, snapshot]
    settings = SamplingConfig(max_tokens=6)
    requests = [Request(p, 2, settings, a, i, True) for i, (p, a) in enumerate(zip(prompts, adapters, strict=True))]
    answers = sampler.sample_all(requests)
    later = np.concatenate([prompts[3], answers[3][1].token_ids, rng.integers(5, 250, 5)]).astype(np.int32)
    requests.append(Request(later, 2, settings, snapshot, 7))
    answers += sampler.sample_all(requests[-1:])
    samples = [
        Sample(request.prompt_ids, answer.token_ids, answer.logprobs, np.ones(len(answer.token_ids), np.float32))
        for request, group in zip(requests, answers, strict=True)
        for answer in group
    ]
    return samples, [request.adapter is not None for request in requests for _ in range(request.n)]


def in_peft(plain: PreTrainedModel, adapter: Adapter) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Returns the model with the saved adapter, loaded by `peft`, and its weights in the order of the adapter's. Raises
    ValueError if `peft` refuses it, or finds not all of its tensors."""
    if plain.config.model_type in MISREAD:
        raise ValueError("peft looks for tensors under other names")
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(Path(folder), adapter, "base", plain)
        model = PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()
    weights = dict(model.named_parameters())
    names = [f"base_model.model.{name}.lora_{letter}.default.weight" for name in adapter.weights for letter in "AB"]
    return model, [weights[name] for name in names]


def own_logprobs(plain: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Returns the log-probabilities [T] of an answer from one unpadded eager forward of transformers, with
    gradients."""
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    logits = plain(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
    answer = ids[0, len(sample.prompt_ids) :, None]
    return torch.log_softmax(logits, -1)[len(sample.prompt_ids) - 1 :].gather(1, answer)[:, 0]


def measure(kind: str, **changes: Any) -> Row:
    """Returns the row of an architecture. Raises what building its model raises."""
    model = random_model(kind, **changes)
    plain = copy.deepcopy(model)
    try:
        engine = choose_engine(model, kind, lambda of, is_plain: Engine(of, tiny_tokenizer(), kind, plain=is_plain))
    except ValueError as error:
        return Row(kind, "refused", str(error))
    path = engine.plain_path
    way = "packed" if path is None else "plain" if path.uses_cache else "plain, without a cache"
    adapter = random_adapter(engine)
    samples, adapted = play(engine, adapter)
    try:
        adapted_model, weights = in_peft(copy.deepcopy(plain), adapter)
        hooks: Adapter | None = None
    except ValueError:  # peft refuses to adapt some layers of some architectures
        adapted_model, weights, hooks = plain, adapter.parameters(), adapter
    own = []
    for sample, with_it in zip(samples, adapted, strict=True):
        with with_adapter(plain, hooks if with_it else None):
            own.append(own_logprobs(adapted_model if with_it else plain, sample))
    sampled = max(_gap(s.logprobs, logp) for s, logp in zip(samples, own, strict=True))
    trainer = AdapterWeights(engine, adapter)
    mine = [s for s, with_it in zip(samples, adapted, strict=True) if with_it]
    own = [logp for logp, with_it in zip(own, adapted, strict=True) if with_it]
    trained = max(_gap(logp, expected) for logp, expected in zip(trainer.logprobs(mine), own, strict=True))
    loss = -torch.stack([logp.sum() for logp in own]).sum() / sum(len(logp) for logp in own)
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    trainer.forward_backward(mine, cross_entropy_loss)
    largest = max(float(g.abs().max()) for g in expected if g is not None)
    gaps = [_gradient_gap(w.grad, g) for w, g in zip(adapter.parameters(), expected, strict=True)]
    return Row(kind, way, path.reason if path else "", sampled, trained, max(gaps) / largest, hooks is None)


def _gap(found: np.ndarray, expected: torch.Tensor) -> float:
    return float(np.abs(found - expected.detach().numpy()).max())


def _gradient_gap(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        gradient = expected if found is None else found
        return 0.0 if gradient is None else float(gradient.abs().max())
    return float((found - expected).abs().max())


# -- the page ----------------------------------------------------------------------------------------------------------


def rows(kinds: list[str]) -> Iterator[Row]:
    """Yields the rows of architectures; those that cannot be built here are rows too."""
    for kind in kinds:
        try:
            with contextlib.redirect_stdout(None), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = measure(kind)
        except Exception as error:  # a class may raise anything for a config of unusual sizes
            row = Row(kind, "not built", f"{type(error).__name__}: {error}".split("\n")[0])
        print(
            f"{kind:24} {row.way:10} {row.sampled:.0e} {row.trained:.0e} {row.gradient:.0e} {row.reason:.150}",
            flush=True,
        )
        yield row


def page(found: list[Row]) -> str:
    """Returns the page of docs with all rows."""
    packed = [row for row in found if row.way == "packed"]
    plain = [row for row in found if row.way.startswith("plain")]
    refused = [f"- `{row.kind}`: {_why(row)}" for row in found if row.way == "refused"]
    rest = ", ".join(f"`{row.kind}`" for row in found if row.way == "not built")
    uncached = ", ".join(f"`{row.kind}`" for row in plain if row.way != "plain")
    alone = ", ".join(f"`{row.kind}`" for row in [*packed, *plain] if not row.by_peft)
    parts = [
        *(f"## On packed rows ({len(packed)})", "", *_table(packed), ""),
        *(f"## On the plain path ({len(plain)})", "", *_table(plain), ""),
        *(f"Without a cache, since transformers' own is wrong or cannot be divided: {uncached}.", ""),
        *(f"`peft` refuses or misreads adapters of all linear layers, so palestra's own were compared: {alone}.", ""),
        *("## Refused", "", *refused, ""),
        *("## Not compared", "", NOT_COMPARED + rest + ".", ""),
    ]
    return HEAD + "\n".join(parts)


def _why(row: Row) -> str:
    """Returns the first reason of a refusal, shortened."""
    return row.reason.split("transformers: ", 1)[-1].split("; by its own forward, without")[0][:300]


def _table(found: list[Row]) -> list[str]:
    lines = [f"| `{r.kind}` | {_power(r.sampled)} | {_power(r.trained)} | {_power(r.gradient)} |" for r in found]
    return ["| `model_type` | sampling | training | gradient |", "|---|---|---|---|", *lines]


def _power(value: float) -> str:
    """Returns the next power of ten above `value`."""
    return f"1e{int(np.ceil(np.log10(max(value, 1e-7))))}"


NOT_COMPARED = (
    "Images and sound beside text, or configs that do not take the small sizes of this comparison; the check at load "
    "decides: "
)
HEAD = """# Supported models

Made by `python scripts/architectures.py`. A decoder of transformers either gives the same numbers as in transformers or
is refused at load: a check compares sampling and training with the model's own eager forward, on a small model of the
same architecture (`engine/check/self_check.py`); there is no list of supported names. The tables have differences
measured on tiny random models: the largest of log-probabilities in nats, sampled from the cache and computed in
training, and of LoRA gradients, relative to the largest gradient. Compared are prompts of several lengths with siblings
in one batch, with an adapter, which `peft` loads, and without, a second turn, and prompts longer than every window.

- **On packed rows**: prompts are computed once for all their answers, and nothing is padded. Sliding windows, chunked
  attention, attention sinks, capped scores and latent attention (MLA) are included.
- **On the plain path**: the model's own forward and transformers' own cache, for recurrent layers, convolutions,
  attention of other kinds, and queries that are scaled by their place in the row (Llama 4). Everything else is the
  same: several adapters on one base, groups of answers, turns, resume. It is slower: only sequences of equal length
  share a batch in sampling, and a later turn computes its whole prompt. A run prints at its start that a model is on
  the plain path, and why.

In models of images and text (Gemma 3, Qwen2.5-VL, Qwen3-VL, Llama 4), only the language part runs, on text; adapters
train only that part. In mixtures of experts, adapters train attention and shared layers. Stacked expert weights are not
trained unless `target_parameters` names them ([kinds of adapters](real-models.md#kinds-of-adapters)); a run prints this
at its start. With LongRoPE (Phi-3 for 128k tokens), prompt and answer together are limited to the length from which the
embedding would depend on the longest sequence of a batch (4,096 tokens for Phi-3). A policy with `long_context: true`,
which needs the engine in this process, has no such limit: it uses the long factors for sequences of every length, as
vLLM does with a longer `max_model_len`. Sequences longer than the limit are then computed as in transformers.

"""


def main() -> None:
    """Prints the rows of the architectures that the arguments name, or writes the page of all of them."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="architectures whose rows to print; no page is written then")
    parser.add_argument("--quick", action="store_true", help="a smoke test: llama alone")
    options = parser.parse_args()
    if kinds := options.kinds or (["llama"] if options.quick else []):
        list(rows(kinds))
        return
    every = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NO_DECODERS} | COMPOSITES.keys()
    PAGE.write_text(page(list(rows(sorted(every)))))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
