"""Costs of devices from their data sheets, for plans of runs on other machines than this one.

The shares of the published rates that passes reach are assumptions. The time to start a layer was measured on one host
with one small model (docs/scaling/gpu.md), where launching kernels takes most of the time. Both are in the constants
below; calibration.py measures them on this machine.
"""

from __future__ import annotations

from typing import NamedTuple

from palestra.builders.capacity import Machine

FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6  # of the published rates
ATTENTION_FACTOR = 2.0  # products of attention reach half of the rate of products with weights
LAYER_S, TRAINED_LAYER_S, PASS_S = 1.9e-3, 8.8e-3, 1e-3  # of the host: kernels launched one by one, from Python
GRAPH_PASS_S, GRAPH_LAYER_S = 1.5e-3, 65e-6  # of a recorded decoding step: the draws after it; its small kernels
ROW_S, TENSOR_S = 2e-6, 5e-6  # of the host: a token drawn, a tensor updated
ANSWER_S, STEP_S = 5e-4, 2e-2  # of the host: an answer recorded, a step logged
LOGIT_BYTES, TRAINED_LOGIT_BYTES = 28, 20  # as engine/memory.py counts them


class Published(NamedTuple):
    """A data sheet: dense bfloat16 FLOP/s, bytes/s and GiB of memory."""

    flops: float
    bandwidth: float
    memory_gib: float


DATA_SHEETS = {
    "a100": Published(312e12, 2.04e12, 80),
    "h100": Published(989e12, 3.35e12, 80),
    "h200": Published(989e12, 4.8e12, 141),
    "l4": Published(121e12, 0.3e12, 24),
    "l40s": Published(362e12, 0.864e12, 48),
    "rtx4090": Published(165e12, 1.01e12, 24),
}


def published_machine(name: str) -> Machine:
    """Returns the machine of a data sheet. Raises ValueError for an unknown name."""
    if name not in DATA_SHEETS:
        raise ValueError(
            f'no data sheet of "{name}": name one of {", ".join(DATA_SHEETS)}, or give --flops and --bandwidth'
        )
    sheet = DATA_SHEETS[name]
    note = f"data sheet, at {FLOPS_SHARE:.0%} of its FLOP/s and {BANDWIDTH_SHARE:.0%} of its bandwidth"
    flops, bandwidth = FLOPS_SHARE * sheet.flops, BANDWIDTH_SHARE * sheet.bandwidth
    return machine_of_rates(name, flops, bandwidth, memory=int(sheet.memory_gib * 2**30), note=note)


def machine_of_rates(name: str, flops: float, bandwidth: float, *, memory: int | None, note: str) -> Machine:
    """Returns a GPU with `flops` FLOP/s in matrix products and a memory bandwidth of `bandwidth` bytes/s, with the
    assumed costs of its host."""
    byte = 1 / bandwidth
    costs = {
        "flops": 1 / flops,
        "small_flops": 1 / flops,
        "attention": ATTENTION_FACTOR / flops,
        "trained_attention": ATTENTION_FACTOR / flops,
        "weight_bytes": byte,
        "activation_bytes": byte,
        "trained_activation_bytes": 2 * byte,
        "logits": LOGIT_BYTES * byte,
        "trained_logits": TRAINED_LOGIT_BYTES * byte,
        "passes": PASS_S,
        "trained_passes": PASS_S,
        "layers": LAYER_S,
        "mixed_layers": LAYER_S,
        "graph_passes": GRAPH_PASS_S,
        "graph_layers": GRAPH_LAYER_S,
        "trained_layers": TRAINED_LAYER_S,
        "rows": ROW_S,
        "tensors": TENSOR_S,
        "answers": ANSWER_S,
        "steps": STEP_S,
    }
    return Machine(name, costs, overlaps=True, memory=memory, note=note)
