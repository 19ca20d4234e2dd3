"""Retention: a case by hand, the parallel and the recurrent form, and masks."""

import pytest
import torch
from torch import Tensor

from palestra.vector.nets.attention import Attention, BlockShape, Retention, make_attention
from palestra.vector.nets.layers import make_generators


def retention(members: int = 2, units: int = 8, heads: int = 2) -> Retention:
    return Retention(units, heads, make_generators(range(members)))


def causal(acts: Tensor) -> Tensor:
    """The seats that act before each seat, and itself [P, G, S, S]."""
    S = acts.shape[2]
    return (acts[:, :, None] | torch.eye(S, dtype=torch.bool)).tril()


def test_two_positions_by_hand() -> None:
    """One head of two units, keys and values that are the inputs, queries that are 1 and -1; the gate is 0 for the
    first position, whose result is then the bias of the last layer, and swish(2) for the second.

    Second position: keys (1, 0) and (0, 2) over sqrt(2), values (3, 1) and (1, 5). Scores are 1 / sqrt(2) and -2 /
    sqrt(2), the sum (1, -9) / sqrt(2): mean -4 / sqrt(2), deviation 5 / sqrt(2), so (1, -1).
    """
    layer = Retention(2, 1, make_generators([0]))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.query.bias[0, 0] = torch.tensor([1.0, -1.0])
        # inputs are (a key of the second position, 1, 0): rows of the weight belong to the inputs' parts
        layer.key_value.weight[0] = torch.tensor([[0.0, 2, 1, 5], [1, 0, 3, 1]])
        layer.gate.weight[0, 0] = 2.0
        layer.out.weight[0], layer.out.bias[0, 0] = torch.eye(2), torch.tensor([10.0, 20.0])
    x = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    found = layer(x, x, causal(torch.ones(1, 1, 2, dtype=torch.bool)))
    swish = 2 / (1 + torch.exp(torch.tensor(-2.0)))
    expected = torch.tensor([[10.0, 20.0], [10 + swish, 20 - swish]])
    torch.testing.assert_close(found[0, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dead", [False, True])
def test_parallel_and_recurrent_forms_agree(dead: bool) -> None:
    """To 1e-6, in float64: queries of other features than keys, some seats that others leave out."""
    torch.manual_seed(0)
    layer = retention().double()
    x, context = torch.randn(2, 2, 5, 6, 8, dtype=torch.float64)
    acts = torch.rand(2, 5, 6) < 0.5 if dead else torch.ones(2, 5, 6, dtype=torch.bool)
    mask = causal(acts)
    past: list[Tensor] = []
    rows = [slice(i, i + 1) for i in range(6)]
    steps = [layer(x[:, :, i], context[:, :, i], mask[:, :, i, : i.stop], past) for i in rows]
    torch.testing.assert_close(torch.cat(steps, 2), layer(x, context, mask), atol=1e-6, rtol=0)
    assert [tuple(kept.shape) for kept in past] == [(10, 2, 4, 4)] * 2  # as large after six positions as after one


def test_masked_positions_do_not_count() -> None:
    """Nor do later ones with a causal mask; the others do."""
    torch.manual_seed(0)
    layer, x = retention(), torch.randn(2, 3, 4, 8)
    acts = torch.tensor([True, False, True, True]).expand(2, 3, 4)
    before = layer(x, x, causal(acts))
    for position, moves in enumerate([[0, 1, 2, 3], [1], [2, 3], [3]]):
        changed = x.clone()
        changed[:, :, position] += 1
        moved = (layer(changed, changed, causal(acts)) - before).abs().amax((0, 1, 3))
        assert [i for i in range(4) if moved[i] > 1e-3] == moves
        assert all(moved[i] == 0 for i in range(4) if i not in moves)


def test_order_of_positions_does_not_matter_without_a_mask() -> None:
    torch.manual_seed(0)
    layer, x, order = retention(), torch.randn(2, 3, 5, 8), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(layer(x[:, :, order], x[:, :, order], None), layer(x, x, None)[:, :, order])


def test_heads_and_kinds() -> None:
    assert isinstance(make_attention(BlockShape(8, 2, "relu", "softmax"), make_generators([0])), Attention)
    assert isinstance(make_attention(BlockShape(8, 2, "relu", "retention"), make_generators([0])), Retention)
    with pytest.raises(ValueError, match="attention_heads: 3 heads do not divide 8 units"):
        make_attention(BlockShape(8, 3, "relu", "retention"), make_generators([0]))
    with pytest.raises(ValueError, match="8 heads have one unit each"):
        make_attention(BlockShape(8, 8, "relu", "retention"), make_generators([0]))
