"""Tiny Llama models written as GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, LlamaFileType
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "norm": "output_norm",
}  # fmt: skip


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": len(VOCABULARY)}
    config = LlamaConfig(**shape | {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2} | settings)
    return LlamaForCausalLM(config).eval()


def as_gguf(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and weights of a tensor as llama.cpp's converter writes them: rotary halves of q and k interleaved."""
    parts = name.split(".")
    heads = {"q_proj": 4, "k_proj": 2}.get(parts[-2])
    if heads:
        rows = tensor.reshape(heads, 2, -1, tensor.shape[1])
        tensor = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{layer}{NAMES[parts[-2]]}.weight", tensor


def write_gguf(
    path: Path, model: LlamaForCausalLM, add: Callable[[GGUFWriter], None] = lambda _: None, split: str = "smollm"
) -> Path:
    """Writes a model as llama.cpp's converter does; `add` writes further fields and tensors, `split` names how the
    tokenizer splits texts."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(model.config.max_position_embeddings)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.named_parameters():
        writer.add_tensor(*as_gguf(name, weight.detach().numpy()))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
