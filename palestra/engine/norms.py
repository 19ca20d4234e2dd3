"""RMS norms by torch's own kernel: the same numbers in one call where `transformers` makes six.

On small models those calls are a large share of a step. A norm is replaced only after it was seen to give the same
output as torch's kernel on a random input; any other kind of norm is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fuse_norms(model: nn.Module) -> int:
    """Replaces the forward of each plain RMS norm in place and returns how many there were."""
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and (fused := _fused(module)) is not None:
            module.forward = fused
            count += 1
    return count


def _fused(module: Any) -> Any:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if weight is None or eps is None or weight.dim() != 1:
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)

    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, len(weight), generator=generator).to(weight)
    with torch.no_grad():
        same = torch.allclose(module(probe), forward(probe), rtol=2e-2 if weight.dtype != torch.float32 else 1e-5)
    return forward if same else None
