"""Helpers for tests of envs, policies and algorithms: a contract check, a small language model, scripted policies."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from palestra.engine.bases.model import Engine
from palestra.envs import check_env
from palestra.text.policies.scripted import ScriptedPolicy

__all__ = ["ScriptedPolicy", "check_env", "tiny_lm", "tiny_tokenizer"]

SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with the chat template of the shipped base model. It encodes any text and needs no
    download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL_TOKENS[1:4],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# Entries of a config of transformers, of any architecture.
TINY_SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "eos_token_id": 4,
}


def tiny_lm(seed: int = 0, **changes: object) -> Engine:
    """Returns an engine with a small Qwen3 model (about 0.1M parameters) with random weights on the CPU. `changes` are
    entries of Qwen3Config. Sets torch to one thread."""
    torch.set_num_threads(1)
    own = {**TINY_SHAPE, "tie_word_embeddings": True, "attn_implementation": "palestra"}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**own, **changes}))
    return Engine(model.eval().requires_grad_(False), tiny_tokenizer(), "tiny-random")
