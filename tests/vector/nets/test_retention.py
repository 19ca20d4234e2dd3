"""Retention over steps: decay and reset by hand, and the recurrent and the chunkwise form with their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.vector.nets import retention
from palestra.vector.nets.attention import Retention
from palestra.vector.nets.layers import make_generators
from palestra.vector.nets.retention import StepMemory, head_decays, read_chunk


def test_decay_and_reset_by_hand() -> None:
    """One head of one unit, two seats, kappa 1/2, a state of 8, and keys and values of 1 that count for both seats but
    in the second step. Reads: 4; (8/2 + 2) / 2 = 3; 6/4 + 0 = 3/2; 0, since an episode begins; then 2/2 = 1. The state
    after the last step is 1 + 2."""
    keys = torch.ones(1, 1, 5, 2, 1)
    keys[:, :, 1] = 0
    is_first = torch.tensor([[False, False, False, True, False]])
    inputs = (torch.ones(1, 1, 5, 2, 1), keys, torch.ones(1, 1, 5, 2, 1), is_first, torch.tensor([0.5]))
    read, state = read_chunk(*inputs, torch.full((1, 1, 1, 1), 8.0))
    assert read[0, 0, :, 0, 0].tolist() == read[0, 0, :, 1, 0].tolist() == [4.0, 3.0, 1.5, 0.0, 1.0]
    assert state.item() == 3.0


def test_decays_of_heads() -> None:
    """As of RetNet's heads and of Sable's `decay_kappas`: 1 - exp(linspace(log 1/32, log 1/512))."""
    like = torch.zeros((), dtype=torch.float64)
    assert head_decays(1.0, 3, like).tolist() == pytest.approx([1 - 1 / 32, 1 - 1 / 128, 1 - 1 / 512])
    assert head_decays(0.5, 1, like).tolist() == pytest.approx([0.5 * 31 / 32])


def memory_of(inputs: dict[str, Tensor], state: Tensor, steps: slice) -> StepMemory:
    return StepMemory(state, inputs["kappa"], inputs["acts"][:, steps], inputs["is_first"][:, steps])


@pytest.mark.parametrize("chunk_positions", [1, 12, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_recurrent_and_chunkwise_forms_agree(causal: bool, chunk_positions: int, monkeypatch: Any) -> None:
    """A layer over 3 games of 11 steps of 4 seats, of which some do not act, with episodes that begin at random, in
    chunks of 1, 3 and all steps: outputs, the last state and gradients of weights, inputs and the first state equal
    those of one step (and, in a decoder, one seat) after another to 1e-9 in float64."""
    monkeypatch.setattr(retention, "CHUNK_POSITIONS", chunk_positions)
    torch.manual_seed(causal)
    P, G, T, S, H, heads = 2, 3, 11, 4, 8, 2
    layer = Retention(H, heads, make_generators(range(P))).double()
    x = torch.randn(P, G * T, S, H, dtype=torch.float64, requires_grad=True)
    first_state = torch.randn(P * G, heads, 4, 4, dtype=torch.float64, requires_grad=True)
    acts, is_first = torch.rand(P * G, T, S) < 0.7, torch.rand(P * G, T) < 0.2
    given = {"kappa": head_decays(0.7, heads, x), "acts": acts, "is_first": is_first}
    mask = (acts.view(P, G * T, 1, S) | torch.eye(S, dtype=torch.bool)) & (
        torch.ones(S, S, dtype=torch.bool).tril() if causal else torch.ones(S, S, dtype=torch.bool)
    )
    weight = torch.randn(P, G * T, S, H, dtype=torch.float64)

    def results(out: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        total = (weight * out).sum() + state.square().sum()
        return out, state, *torch.autograd.grad(total, [x, first_state, *layer.parameters()])

    memory = memory_of(given, first_state, slice(None))
    chunkwise = results(layer(x, x, mask, memory), memory.state)

    by_time, masks, state, outputs = x.view(P, G, T, S, H), mask.view(P, G, T, S, S), first_state, []
    for t in range(T):
        memory = memory_of(given, state, slice(t, t + 1))
        if causal:
            past, rows = [memory.before_seats()], []
            for i in range(S):
                one = by_time[:, :, t, i : i + 1]
                rows.append(layer(one, one, masks[:, :, t, i : i + 1, : i + 1], past))
            outputs.append(torch.cat(rows, 2))
            memory.after_seats(*past)
        else:
            outputs.append(layer(by_time[:, :, t], by_time[:, :, t], masks[:, :, t], memory))
        state = memory.state
    recurrent = results(torch.stack(outputs, 2).view(x.shape), state)
    assert len(recurrent) == 4 + 8
    for one, other in zip(recurrent, chunkwise, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    assert all(bool((gradient != 0).any()) for gradient in recurrent[2:])


def test_no_decay_left_is_no_memory() -> None:
    """With decays of 0 a layer's outputs are those without a memory, bit for bit."""
    torch.manual_seed(0)
    layer, x = Retention(8, 2, make_generators([0])), torch.randn(1, 10, 3, 8)
    acts, is_first = torch.ones(2, 5, 3, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    memory = StepMemory(torch.randn(2, 2, 4, 4), torch.zeros(2), acts, is_first)
    assert torch.equal(layer(x, x, None, memory), layer(x, x, None))
