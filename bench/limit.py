"""The least time of a shared-prefix GRPO step: the FLOPs that the step cannot avoid, and this machine's matmul rate."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MATMULS = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024), (4096, 128, 384), (4096, 384, 128))


class StepFlops(NamedTuple):
    """Floating-point operations of one step, by part."""

    prefill: float
    decode: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """The sum of all four parts."""
        return sum(self)


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """The CPU seconds of the fastest of `repeats` runs, after one that warms up."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def matmul_rate(seconds: float = 1.0) -> float:
    """FLOP per CPU second of float32 matrix products on one thread: the best of `MATMULS`, about `seconds` for all.

    Sets torch to one thread, which stays set. Takes the best of many short runs, since other load only slows them.
    """
    torch.set_num_threads(1)
    return max(_rate(*shape, seconds / len(MATMULS)) for shape in MATMULS)


def _rate(rows: int, inner: int, columns: int, seconds: float) -> float:
    a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
    torch.mm(a, b, out=out)
    best, end = float("inf"), time.process_time() + seconds
    while (start := time.process_time()) < end:
        torch.mm(a, b, out=out)
        best = min(best, time.process_time() - start)
    return 2 * rows * inner * columns / best


def layer_matrices(config: Qwen3Config) -> dict[str, tuple[int, int]]:
    """The sizes `(in, out)` of the seven linear maps of one decoder layer, by name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "q": (hidden, heads),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (heads, hidden),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }


def shared_prefix_step_flops(config: Qwen3Config, prompt: int, new: int, K: int, groups: int, rank: int) -> StepFlops:
    """FLOPs of one GRPO step on `groups` prompts, K samples each, when siblings share all they can.

    Counted per group, a multiply-add as 2, matrix products only (no norms, softmax, rotations, optimizer):

    - *prefill*: the `prompt` tokens once. *decode*: `K * (new - 1)` tokens, since nothing reads the last one's output.
    - *forward*: the same tokens packed, the prompt once and then K branches. *backward*: with LoRA (`rank` > 0) the
      base is frozen, so 2 per parameter and token for the gradient of activations, plus 4 per LoRA parameter and
      token; with `rank` 0 everything trains, so 4 per parameter and token.
    - LoRA is computed beside the base, on all seven maps of each layer, so it costs 2 per LoRA parameter and token in
      prefill, decode and forward. (Merging it would save about a tenth, for one adapter at a time.)
    - Attention: 4 per pair of query and visible key, per head and head dimension, 8 in the backward. A prompt token
      sees the prompt up to itself, a branch token the prompt and its own branch up to itself.
    - The last layer: only the last prompt token and the branches are read, so the other prompt tokens stop at its keys
      and values. The first layer: only the embedding is below it, so LoRA needs no gradient of its input.
    - LM head, tied to the embedding: `1 + K * (new - 1)` positions, in sampling and in training; siblings share one.

    The step is taken to be sampling, then one forward and backward. A sampler that stored its activations could save
    the forward, at a cost in memory.
    """
    branch = K * (new - 1)
    root = (_tokens(config, prompt, 1, rank), _attention(config, prompt, new, 0), _head(config, 1, rank))
    leaves = (_tokens(config, branch, branch, rank), _attention(config, prompt, new, K), _head(config, branch, rank))
    prefill, decode = (groups * sum(forward for forward, _ in part) for part in (root, leaves))
    return StepFlops(prefill, decode, prefill + decode, groups * sum(backward for _, backward in root + leaves))


def _tokens(config: Qwen3Config, tokens: int, read: int, rank: int) -> tuple[float, float]:
    """Forward and backward FLOPs of the linear maps for `tokens`, of which `read` pass through the whole last layer."""
    forward = backward = 0.0
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        for name, (inputs, outputs) in layer_matrices(config).items():
            rows = read if last and name not in ("k", "v") else tokens
            base, lora = inputs * outputs, rank * (inputs + outputs)
            below = rank == 0 or layer > 0 or name not in ("q", "k", "v")
            input_gradient = 2 * (base + rank * inputs) * below
            weight_gradient = 2 * lora + 2 * rank * outputs if rank else 2 * base
            forward += rows * 2 * (base + lora)
            backward += rows * (input_gradient + weight_gradient)
    return forward, backward


def _attention(config: Qwen3Config, prompt: int, new: int, K: int) -> tuple[float, float]:
    """Forward and backward FLOPs of attention for K branches on a prompt, or for the prompt itself where K is 0."""
    pairs = sum(prompt + token for token in range(1, new)) * K if K else prompt * (prompt + 1) // 2
    last_layer_pairs = pairs if K else prompt
    width = config.num_attention_heads * config.head_dim
    forward = 4.0 * width * (pairs * (config.num_hidden_layers - 1) + last_layer_pairs)
    return forward, 2 * forward


def _head(config: Qwen3Config, positions: int, rank: int) -> tuple[float, float]:
    """Forward and backward FLOPs of the LM head, which is frozen where there is LoRA."""
    forward = 2.0 * positions * config.hidden_size * config.vocab_size
    return forward, forward if rank else 2 * forward


def tiny_config(vocabulary: int = 512) -> Qwen3Config:
    """The benchmark's model: Qwen3's architecture at 1.05 million parameters, input and output embedding tied."""
    return qwen3_config(vocabulary, hidden=128, layers=5, heads=4, head_dim=32, mlp=384)


def qwen3_06b_config(layers: int = 28) -> Qwen3Config:
    """The shape of Qwen3-0.6B, with `layers` of its 28 layers."""
    return qwen3_config(151936, hidden=1024, layers=layers, heads=16, head_dim=128, mlp=3072)


def qwen3_config(
    vocabulary: int, *, hidden: int, layers: int, heads: int, head_dim: int, mlp: int, kv_heads: int | None = None
) -> Qwen3Config:
    """Qwen3's architecture with tied embeddings and by default two query heads for each key head; token 0 pads, 1
    ends."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads // 2,
        head_dim=head_dim,
        intermediate_size=mlp,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def tiny_random(path: str | Path, vocabulary: int = 512, seed: int = 0) -> Qwen3ForCausalLM:
    """Saves the benchmark's model with random weights in float32 at `path`, with a tokenizer of words t2, t3, ...;
    returns the model."""
    return save_random(tiny_config(vocabulary), path, seed)


def save_random(config: Qwen3Config, path: str | Path, seed: int = 0) -> Qwen3ForCausalLM:
    """Saves a model with random weights in float32 at `path`, with a tokenizer of words t2, t3, ...; returns the
    model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(path)
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, config.vocab_size)}
    splitter = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return model


def random_prompts(count: int, length: int, vocabulary: int = 512, seed: int = 0) -> list[list[int]]:
    """Random token ids of `count` prompts of `length` tokens, without the two special tokens of `tiny_random`."""
    generator = random.Random(seed)
    return [[generator.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]
