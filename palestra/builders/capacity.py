"""Counts the work of a training step, and computes the seconds that it takes on a machine.

`Work` counts a pass of a decoder: FLOPs of its matrix products, bytes of weights that are read, numbers that its layers
write, layers that are started, tokens that are drawn. A `Machine` has the seconds of one unit of each, measured by a
short probe (calibration.py) or taken from a data sheet; the seconds of a phase are the sum over units of amount times
seconds. The model is linear, so a probe finds these costs by least squares.

The counts are those of the engine's own passes: a prompt is computed once for all of its answers, stops at the keys and
values of the last layer, and a training pass shares prompts too. Attention counts as products of queries with the keys
that they attend to. Full models are trained with 6 FLOPs for each weight and token, adapters with 4 and their own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from palestra.engine.linear import MIN_WEIGHTS
from palestra.engine.memory import ModelShape, activation_bytes, pass_bytes

DEVICE_UNITS = (
    "flops",
    "attention",
    "trained_attention",
    "weight_bytes",
    "activation_bytes",
    "logits",
    "trained_activation_bytes",
    "trained_logits",
    "graph_passes",
    "graph_layers",
)
DRIVER_UNITS = ("answers", "steps")
ADAM_BYTES = 44  # read and written for each trained weight: clipping, two moments, the weight
SNAPSHOT_BYTES = 12  # read and written for each weight of an adapter that a snapshot copies
FULL, ADAPTER = 6, 4  # FLOPs of a forward and a backward pass for each weight and token


@dataclass(frozen=True)
class Work:
    """Amounts of work; the work of several parts is their sum.

    `flops` counts products with large weight matrices, `small_flops` those with small ones, which run at a lower rate
    (engine/linear.py), `attention` the products of queries with keys and values. `logits` are logits that tokens are
    drawn from; the prefix `trained_` marks passes with gradients, forward and backward together. `layers` are started
    in passes with at most one adapter, `mixed_layers` in passes with several. `graph_passes` are decoding steps that a
    GPU repeats from a CUDA graph, with the draws between them, `graph_layers` their layers. `rows` are tokens drawn,
    `tensors` trained tensors updated or copied, `answers` the answers that are encoded, recorded and credited, `steps`
    the training steps."""

    flops: float = 0.0
    small_flops: float = 0.0
    attention: float = 0.0
    trained_attention: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    logits: float = 0.0
    trained_activation_bytes: float = 0.0
    trained_logits: float = 0.0
    passes: float = 0.0
    trained_passes: float = 0.0
    layers: float = 0.0
    mixed_layers: float = 0.0
    graph_passes: float = 0.0
    graph_layers: float = 0.0
    trained_layers: float = 0.0
    rows: float = 0.0
    tensors: float = 0.0
    answers: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in UNITS))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, name) for name in UNITS))

    __rmul__ = __mul__


UNITS = tuple(field.name for field in fields(Work))


@dataclass(frozen=True)
class Machine:
    """Cost model of one device: seconds per unit of each kind of work, by the names of `Work`. `cache_bytes`: weights
    of at most that many bytes stay in a cache and are not read again for each pass. `overlaps`: the host issues work
    while the device runs it, so the slower of the two counts. `slowdown`: wall-clock seconds per second of work, above
    1 if other programs use the same cores. `memory` is the memory of the device in bytes (None: this machine's),
    `network` bytes per second between nodes, `note` the source of the costs."""

    name: str
    seconds_per: Mapping[str, float]
    cache_bytes: float = 0.0
    overlaps: bool = False
    slowdown: float = 1.0
    memory: int | None = None
    network: float = 1.25e9
    note: str = ""

    def seconds(self, work: Work) -> float:
        """Seconds that `work` takes on one device."""
        parts = {name: getattr(work, name) * self.seconds_per.get(name, 0.0) for name in UNITS}
        device = sum(parts[name] for name in DEVICE_UNITS)
        alone = sum(parts[name] for name in DRIVER_UNITS)
        host = sum(parts.values()) - device - alone
        return alone + (max(device, host) if self.overlaps else device + host)


@dataclass(frozen=True)
class DecoderLoad:
    """Sizes of a base that determine the work of its passes: its shape, `size` bytes of a weight, adapter weights of
    one policy (0: no adapter, or a full model), FLOPs of adding an adapter to the weights, the number of adapted
    layers, the size in bytes up to which weights stay in a cache, and whether decoding steps are CUDA graphs."""

    shape: ModelShape
    size: int = 4
    adapter_params: int = 0
    merge_flops: float = 0.0
    adapted: int = 0
    cache_bytes: float = 0.0
    graphs: bool = False

    @property
    def decoder_params(self) -> float:
        """Weights of the decoder layers that a token is multiplied with; of the experts, only those that it uses."""
        return sum(self._dense) + (
            3 * self.shape.width * self.shape.inner * self.shape.layers if self.shape.experts else 0
        )

    @property
    def small_params(self) -> float:
        """The part of `decoder_params` that is in small matrices."""
        return sum(size for size in self._dense if size <= MIN_WEIGHTS)

    @property
    def _dense(self) -> list[int]:
        return [i * o for name, (i, o) in self.shape.linears.items() if _in_layer(name)]

    def products(self, per_weight: float, rows: float, head_rows: float) -> Work:
        """Work of `per_weight` FLOPs with each weight of the decoder for `rows` tokens and of the head for
        `head_rows`."""
        small, head = rows * self.small_params, head_rows * self.head_params
        large = rows * self.decoder_params - small
        if self.head_params > MIN_WEIGHTS:
            return Work(flops=per_weight * (large + head), small_flops=per_weight * small)
        return Work(flops=per_weight * large, small_flops=per_weight * (small + head))

    @property
    def head_params(self) -> int:
        """Weights of the head."""
        return self.shape.vocab * self.shape.width

    @property
    def read_bytes(self) -> float:
        """Bytes of the weights that a pass reads from memory; 0 if they stay in a cache."""
        whole = self.size * (self.decoder_params + self.head_params)
        return whole if whole > self.cache_bytes else 0.0


def _in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def prefill_work(
    load: DecoderLoad, prompts: float, tokens: float, *, context: float = 0.0, mixed: bool = False, passes: float = 1.0
) -> Work:
    """Work of the passes that compute `prompts` prompts of `tokens` new tokens each, after `context` tokens that are
    in the cache. In the last layer only the last token of each prompt continues beyond its keys and values."""
    shape = load.shape
    rows = prompts * (1 + (tokens - 1) * (shape.layers - 1) / shape.layers)
    pairs = prompts * tokens * (context + (tokens + 1) / 2)
    return load.products(2, rows, prompts) + Work(
        small_flops=2 * rows * load.adapter_params,
        attention=4 * shape.query * shape.layers * pairs,
        passes=passes,
        weight_bytes=passes * load.read_bytes,
        activation_bytes=shape.layers * pass_bytes(shape, 1, size=load.size) * rows,
        layers=0.0 if mixed else passes * shape.layers,
        mixed_layers=passes * shape.layers if mixed else 0.0,
    )


def decode_work(
    load: DecoderLoad, answers: float, tokens: float, *, prompt: float, mixed: bool = False, passes: float | None = None
) -> Work:
    """Work of sampling `answers` answers of `tokens` tokens each, whose first tokens come from the prompts' logits, in
    `passes` passes (None: all answers in one batch). `prompt` is the length of a prompt in tokens."""
    shape, rows = load.shape, answers * max(0.0, tokens - 1)
    passes = max(0.0, tokens - 1) if passes is None else passes
    keys = prompt + tokens / 2
    begun = ("graph_passes", "graph_layers") if load.graphs else ("passes", "mixed_layers" if mixed else "layers")
    return load.products(2, rows, rows) + Work(
        small_flops=2 * rows * load.adapter_params,
        attention=4 * shape.query * shape.layers * rows * keys,
        weight_bytes=passes * load.read_bytes,
        activation_bytes=shape.layers * rows * (pass_bytes(shape, 1, size=load.size) + 2 * shape.kv * load.size * keys),
        logits=answers * tokens * shape.vocab,
        **dict(zip(begun, (passes, passes * shape.layers), strict=True)),
        rows=answers * tokens,
    )


@dataclass(frozen=True)
class TrainingLoad:
    """Samples of a training pass: `prompts` different prompts of `prompt_tokens` tokens, `answers` answers of
    `answer_tokens` tokens, in `micro_batches` passes."""

    prompts: float
    answers: float
    prompt_tokens: float
    answer_tokens: float
    micro_batches: float

    @property
    def pairs(self) -> float:
        """Query-key pairs of the attention."""
        new = max(0.0, self.answer_tokens - 1)
        own = self.answers * new * (self.prompt_tokens + (new + 1) / 2)
        return self.prompts * self.prompt_tokens * (self.prompt_tokens + 1) / 2 + own

    def rows(self, layers: int) -> float:
        """Tokens that pass through a layer, as a mean over layers: tokens of prompts skip the last layer."""
        return self.answers * max(0.0, self.answer_tokens - 1) + self.prompts * (
            1 + (self.prompt_tokens - 1) * (layers - 1) / layers
        )


def training_work(load: DecoderLoad, batch: TrainingLoad, *, checkpointing: bool = False) -> Work:
    """Work of a forward and a backward pass of an adapter, or of a full model if the load has no adapter. In float32 an
    adapter is added to each layer's weight, twice per micro-batch."""
    shape, rows = load.shape, batch.rows(load.shape.layers)
    scored = batch.answers * batch.answer_tokens
    per_weight = ADAPTER if load.adapter_params else FULL
    again = 2 if checkpointing else 0
    merged = 2 * load.merge_flops * batch.micro_batches if load.size == 4 else 2 * load.adapter_params * rows
    reads = 6.0 if load.adapter_params and load.size == 4 else 4.0
    products = load.products(per_weight, rows, scored) + load.products(again, rows, 0)
    return products + Work(
        small_flops=4 * load.adapter_params * rows + merged,
        trained_attention=(12 + 2 * again) * shape.query * shape.layers * batch.pairs,
        trained_passes=batch.micro_batches,
        weight_bytes=reads * batch.micro_batches * load.read_bytes,
        trained_activation_bytes=activation_bytes(shape, 1, size=load.size, checkpointing=False) * rows,
        trained_logits=scored * shape.vocab,
        trained_layers=batch.micro_batches * shape.layers * (1 + again / 6),
    )


def scoring_work(load: DecoderLoad, batch: TrainingLoad) -> Work:
    """Work of a forward pass over the samples of a training pass, for log-probabilities or values."""
    shape, rows = load.shape, batch.rows(load.shape.layers)
    scored = batch.answers * batch.answer_tokens
    return load.products(2, rows, scored) + Work(
        small_flops=2 * rows * load.adapter_params,
        attention=4 * shape.query * shape.layers * batch.pairs,
        passes=batch.micro_batches,
        weight_bytes=batch.micro_batches * load.read_bytes,
        activation_bytes=shape.layers * pass_bytes(shape, 1, size=load.size) * rows,
        trained_logits=scored * shape.vocab / 2,
        layers=batch.micro_batches * shape.layers,
    )


def optimizer_work(load: DecoderLoad) -> Work:
    """Work of one optimizer step of an adapter, or of a full model if the load has no adapter."""
    trained = load.adapter_params or load.shape.params
    return Work(activation_bytes=ADAM_BYTES * trained, tensors=2 * (load.adapted or len(load.shape.linears)))


def publish_work(load: DecoderLoad) -> Work:
    """Work of copying an adapter for sampling and adding it to the weights of the layers; none for a full model."""
    if not load.adapter_params:
        return Work()
    return Work(
        activation_bytes=SNAPSHOT_BYTES * load.adapter_params, tensors=2 * load.adapted, small_flops=load.merge_flops
    )
