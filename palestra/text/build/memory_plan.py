"""Plans the peak memory of a run before it starts, and finds settings with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from palestra.core.accel.devices import resolve_device
from palestra.core.accel.malloc import free_memory
from palestra.core.config import override, validate
from palestra.engine.cache.kv_cache import budget_bytes, default_cache_bytes, default_prefill_tokens, token_bytes
from palestra.engine.forward.quantized import quantized_bytes
from palestra.engine.lora.adapters import is_in_layer
from palestra.engine.memory import (
    FLOAT32,
    PROCESS,
    MemoryPart,
    ModelShape,
    activation_bytes,
    adapter_params,
    cache_bytes,
    logits_bytes,
    model_shape,
    packed_copy_bytes,
    pass_bytes,
    peak_bytes,
)
from palestra.engine.training.optimizers import state_bytes
from palestra.text.config import TextConfig
from palestra.text.learners.lm_config import (
    FullPolicyConfig,
    LMLearnerConfig,
    LMPolicyConfig,
    LoraPolicyConfig,
    autocast_dtype,
)
from palestra.text.policy_configs import FrozenConfig

DTYPE_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIN_MICRO_BATCH_TOKENS = 512
MIN_SEQUENCES = 8
CACHE_SHARES = (0.75, 0.5, 0.25, 0.125)  # of the KV cache's budget


@dataclass(frozen=True)
class MemoryPlan:
    """The parts of a run's memory, the free memory of its device in bytes, and `--set` changes with which it fits:
    empty if it fits as it is, None if there are none."""

    parts: list[MemoryPart]
    free: int
    changes: list[str] | None

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return peak_bytes(self.parts)


def plan_memory(
    config: TextConfig, *, prompt_tokens: int = 512, free: int | None = None, device: str | None = None
) -> MemoryPlan:
    """Returns the memory plan of a run whose prompts have at most `prompt_tokens` tokens. `device` (None: the config's)
    need not exist if `free` is given, its free memory in bytes (None: as much as is free now). Raises ValueError for a
    base whose config cannot be read."""
    device = device or resolve_device(config.device)
    config = config.model_copy(update={"device": device})  # the functions below read the device from the config
    free = free_memory(device) if free is None else free
    shapes = {policy.base: model_shape(policy.base) for policy in _models(config).values()}

    def parts_of(candidate: TextConfig) -> list[MemoryPart]:
        return list(_parts(candidate, shapes, prompt_tokens, free))

    parts = parts_of(config)
    changes = _changes(config, lambda candidate: peak_bytes(parts_of(candidate)) <= free, free)
    return MemoryPlan(parts, free, changes)


def _models(config: TextConfig) -> dict[str, LMPolicyConfig]:
    return {name: policy for name, policy in config.policies.items() if isinstance(policy, LMPolicyConfig)}


def _parts(config: TextConfig, shapes: dict[str, ModelShape], prompt_tokens: int, free: int) -> Iterator[MemoryPart]:
    if config.device == "cpu":
        yield MemoryPart("process", PROCESS, "Python, torch and transformers")
    shared: set[tuple[str, str, str | None]] = set()
    critic = any(part.algorithm.has_separate_critic for part in config.stage_configs())
    for name, policy in _models(config).items():
        shape = shapes[policy.base]
        full = isinstance(policy, FullPolicyConfig)
        if (
            full
            or (isinstance(policy, FrozenConfig) and policy.path)
            or (policy.base, policy.dtype, policy.quantize) not in shared
        ):
            yield from _engine_parts(config, name, policy, shape, prompt_tokens, free)
        if not full:
            shared.add((policy.base, policy.dtype, policy.quantize))
        yield from _trained_parts(name, policy, shape, critic=critic)
    learners = {n: p for n, p in _models(config).items() if isinstance(p, LMLearnerConfig)}
    passes = [_training_parts(config, n, p, shapes[p.base], prompt_tokens) for n, p in learners.items()]
    if passes:  # learners train one after the other
        yield from max(passes, key=peak_bytes)


def _engine_parts(
    config: TextConfig, name: str, policy: LMPolicyConfig, shape: ModelShape, prompt_tokens: int, free: int
) -> Iterator[MemoryPart]:
    """Yields the memory of a base's weights and of sampling from it."""
    size = _weight_size(config, policy)
    held = shape.params * size
    detail = f"{shape.params / 1e6:,.1f} M of {size} bytes"
    if policy.quantize:
        packed = sum(inputs * outputs for name, (inputs, outputs) in shape.linears.items() if is_in_layer(name))
        held = (shape.params - packed) * size + quantized_bytes(packed, policy.quantize)
        detail = f"{packed / 1e6:,.1f} M in {policy.quantize}, others of {size} bytes; while it is loaded, all"
    yield MemoryPart(f"weights of {policy.base}", held, detail)
    on_cpu = config.device == "cpu"
    is_frozen = not isinstance(policy, FullPolicyConfig)
    if on_cpu and is_frozen and size == FLOAT32 and not policy.quantize and (packed := packed_copy_bytes(shape)):
        yield MemoryPart(f"packed weights of {policy.base}", packed, "copies for faster sampling")
    cache_size = _product_size(config, policy)
    if cache_size < size:
        detail = "cast once for each rollout"
        yield MemoryPart(f"weights of {policy.base}", shape.params * cache_size, detail, "sampling")
    group = _group_size(config)
    answers = min(config.max_num_seqs, config.episodes * group)
    prompts = -(-answers // group)
    tokens = policy.sampling.max_tokens
    lengths = {"max_tokens": tokens, "prompt_tokens": prompt_tokens}
    wanted = cache_bytes(shape, answers, prompts, **lengths, size=cache_size, on_cpu=on_cpu)
    budget = budget_bytes(config.kv_cache_gib) or default_cache_bytes(free)
    detail = f"{answers} answers of {tokens} tokens, {prompts} prompts of {prompt_tokens}"
    if wanted > budget:
        detail += f"; they wait for {budget / 2**30:.1f} GiB (kv_cache_gib)"
    yield MemoryPart("KV cache", min(wanted, budget), detail, "sampling")
    most = default_prefill_tokens(budget, token_bytes(shape.layers, shape.kv, cache_size))
    rows = min(most, prompts * prompt_tokens)
    yield MemoryPart("passes", pass_bytes(shape, rows, size=cache_size), f"one layer of {rows:,} tokens", "sampling")
    logits = logits_bytes(shape, answers, trained=False, on_cpu=on_cpu)
    yield MemoryPart("logits", logits, f"at most {answers} rows", "sampling")


def _trained_parts(name: str, policy: LMPolicyConfig, shape: ModelShape, *, critic: bool) -> Iterator[MemoryPart]:
    """Yields the memory of a policy's own weights, their gradients and optimizer state, and with `critic` the same of a
    critic that is an adapter of its own."""
    if isinstance(policy, LoraPolicyConfig):
        trained = adapter_params(shape, policy.lora)
        detail = f"{trained / 1e6:,.1f} M of rank {policy.rank}, with reference and snapshot"
        yield MemoryPart(f"adapter {name}", 3 * FLOAT32 * trained, detail)
        if critic:
            state = 2 * FLOAT32 * trained + state_bytes(policy.optimizer, trained)
            yield MemoryPart(f"critic {name}", state, "an adapter, its gradients and optimizer")
    elif isinstance(policy, FullPolicyConfig):
        trained = shape.params
        if policy.reference == "copy":
            yield MemoryPart(f"reference {name}", FLOAT32 * trained, "a copy of all weights")
    else:
        return
    kind = policy.optimizer
    held = {
        "adamw": "AdamW's two moments",
        "adamw_8bit": "AdamW's two moments in 8 bits",
        "muon": "Muon's momentum",
        "sgd": "SGD's momentum",
    }.get(kind.type, "two moments")
    yield MemoryPart(f"optimizer {name}", FLOAT32 * trained + state_bytes(kind, trained), f"gradients and {held}")


def _training_parts(
    config: TextConfig, name: str, policy: LMLearnerConfig, shape: ModelShape, prompt_tokens: int
) -> list[MemoryPart]:
    """Returns the memory of a training pass of one micro-batch."""
    # a group, whose answers share one prompt, is not split
    group = prompt_tokens + _group_size(config) * policy.sampling.max_tokens
    tokens = max(policy.micro_batch_tokens, group)
    size = _product_size(config, policy)
    kept = activation_bytes(shape, tokens, size=size, checkpointing=policy.gradient_checkpointing)
    answered = tokens * policy.sampling.max_tokens // (prompt_tokens + policy.sampling.max_tokens)
    how = "recomputed by layer" if policy.gradient_checkpointing else "kept for the backward pass"
    return [
        MemoryPart(f"activations {name}", kept, f"{tokens:,} tokens, {how}", "training"),
        MemoryPart(f"logits {name}", logits_bytes(shape, answered, trained=True, on_cpu=False), "a chunk", "training"),
    ]


def _group_size(config: TextConfig) -> int:
    return int(getattr(config.algorithm, "group_size", 1))


def _weight_size(config: TextConfig, policy: LMPolicyConfig) -> int:
    """Returns the bytes of a stored weight."""
    if policy.dtype != "auto":
        return DTYPE_SIZES[policy.dtype]
    return DTYPE_SIZES["float32" if config.device == "cpu" or isinstance(policy, FullPolicyConfig) else "bfloat16"]


def _product_size(config: TextConfig, policy: LMPolicyConfig) -> int:
    """Returns the bytes of an activation, and of a key or value in the cache."""
    if isinstance(policy, FullPolicyConfig) and autocast_dtype(policy, config.device) is not None:
        return 2
    return _weight_size(config, policy)


def _changes(config: TextConfig, fits: Callable[[TextConfig], bool], free: int) -> list[str] | None:
    """Returns `--set` changes with which the run fits, the least harmful first and each no larger than needed; None if
    no changes suffice."""
    tree = config.model_dump(mode="json")
    learners = {name: p for name, p in _models(config).items() if isinstance(p, LMLearnerConfig)}
    values: dict[str, list[str]] = {}  # the values tried for each key, the mildest first

    def fits_with(changes: Mapping[str, str]) -> bool:
        return fits(validate(TextConfig, override(tree, [f"{key}={value}" for key, value in changes.items()])))

    if fits_with({}):
        return []
    chosen: dict[str, str] = {}
    for key, value in _candidates(config, learners, free):
        values.setdefault(key, []).append(value)
        chosen[key] = value
        if fits_with(chosen):
            break
    else:
        return None
    for key, tried in values.items():
        others = {other: value for other, value in chosen.items() if other != key}
        options = [others, *({**chosen, key: value} for value in tried)]
        chosen = next(option for option in options if fits_with(option))  # the last one tried fits
    return [f"{key}={value}" for key, value in chosen.items()]


def _candidates(config: TextConfig, learners: dict[str, LMLearnerConfig], free: int) -> Iterator[tuple[str, str]]:
    """Yields keys and the values to try, the least harmful first."""
    yield from (
        (f"policies.{n}.gradient_checkpointing", "true") for n, p in learners.items() if not p.gradient_checkpointing
    )
    tokens = max((p.micro_batch_tokens for p in learners.values()), default=0)
    while (tokens := tokens // 2) >= MIN_MICRO_BATCH_TOKENS:
        larger = [name for name, policy in learners.items() if policy.micro_batch_tokens > tokens]
        yield from ((f"policies.{name}.micro_batch_tokens", str(tokens)) for name in larger)
    budget = budget_bytes(config.kv_cache_gib) or default_cache_bytes(free)
    yield from (("kv_cache_gib", f"{budget * share / 2**30:.2g}") for share in CACHE_SHARES)
    sequences = config.max_num_seqs
    while (sequences := sequences // 2) >= MIN_SEQUENCES:
        yield "max_num_seqs", str(sequences)
    frozen = {n: p for n, p in _models(config).items() if not isinstance(p, FullPolicyConfig)}
    yield from ((f"policies.{n}.dtype", "bfloat16") for n, p in frozen.items() if _weight_size(config, p) > 2)
    yield from ((f"policies.{n}.type", "lora") for n, p in learners.items() if isinstance(p, FullPolicyConfig))
