"""RMS norms and gated MLPs with fewer passes over memory equal those of transformers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.engine.forward.fused_layers import SwiGLU, fuse_layers
from palestra.engine.forward.linear import padded_rows
from palestra.engine.forward.logits import row_chunks

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def with_gradients(compute: object, *arguments: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in arguments]
    out = compute(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view_as(out).to(out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 700, 640), (3, 5), (2, 0, 8), (1, 1, 600_000)], ids=str)
def test_swiglu_equals_its_formula_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype):
    gate, up = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    fused = with_gradients(SwiGLU.apply, gate, up)
    plain = with_gradients(lambda gate, up: F.silu(gate) * up, gate, up)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused, plain, strict=True))


def test_swiglu_of_a_transposed_gradient():
    gate, up = torch.randn(2, 6, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda g, u: SwiGLU.apply(g, u).T, (gate.requires_grad_(), up.requires_grad_()))


def build(kind: str, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes)).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "smollm3"])
def test_a_fused_model_equals_the_plain_one(kind: str):
    plain, fused = build(kind), build(kind)
    mlps = sum("mlp" in name and hasattr(module, "gate_proj") for name, module in fused.named_modules())
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in fused.modules())
    assert mlps == 2
    assert fuse_layers(fused) == mlps + norms
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    found = [model(ids, labels=ids) for model in (plain, fused)]
    torch.testing.assert_close(found[1].logits, found[0].logits, atol=1e-5, rtol=1e-5)
    for each in found:
        each.loss.backward()
    for (name, ours), (_, theirs) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)


def test_gate_other_than_silu_is_not_replaced():
    model = build("llama", hidden_act="gelu")
    own = [module.forward for module in model.modules() if hasattr(module, "gate_proj")]
    fuse_layers(model)
    now = [module.forward for module in model.modules() if hasattr(module, "gate_proj")]
    assert len(own) == 2
    assert own == now


def test_mlp_with_another_forward_is_not_replaced():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5

    class ReadsMore(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.multiplier

    assert fuse_layers(nn.Sequential(Scaled(), ReadsMore())) == 0


def test_chunks_of_logits_have_rows_that_products_need_not_pad():
    chunks = list(row_chunks(1000, 49_152))
    assert [padded_rows(rows.stop - rows.start) for rows in chunks[:-1]] == [168] * (len(chunks) - 1)
    assert [rows.start for rows in chunks[1:]] == [rows.stop for rows in chunks[:-1]]
    assert chunks[-1].stop == 1000
