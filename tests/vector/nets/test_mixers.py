"""Mixed team values by hand, and their monotonicity in each seat's value."""

import math
from typing import Any

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.vector.nets.mixers import QMIXMixer, QPLEXMixer, SeatValues, VDNMixer


def test_vdn_by_hand() -> None:
    mixed = VDNMixer()(SeatValues(torch.tensor([[1.0, 2.0, -4.0], [0.0, 0.5, 0.25]])), torch.zeros(2, 0))
    assert mixed.tolist() == [-1, 0.75]


def test_qmix_by_hand() -> None:
    """Two seats, a state of one number, two units; the hypernetworks are linear in the state."""
    mixer = QMIXMixer(seats=2, state=1, units=2, seed=0)
    first, second = mixer.weights
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        first.layers[0].weight[:] = torch.tensor([[1.0, -2.0, 3.0, 0.0]])  # seat 0's two units, then seat 1's
        first.layers[0].bias[:] = torch.tensor([0.0, 0.0, 0.0, -1.0])
        second.layers[0].weight[:] = torch.tensor([[-0.5, 1.0]])
        mixer.bias.layers[0].weight[:] = torch.tensor([[0.0, -4.0]])
        mixer.last.layers[0].weight[:] = torch.tensor([[1.0, -1.0]])
        mixer.last.layers[1].weight[:] = torch.tensor([[10.0], [100.0]])
        mixer.last.layers[1].bias[:] = 0.25
    # state 2: first weights |2, -4|, |6, -1|; hidden 1 * 2 + .5 * 6 = 5 and 1 * 4 + .5 * 1 - 8 = -3.5, by ELU
    # e^-3.5 - 1; second |-1, 2|; last ReLU(2) * 10 + ReLU(-2) * 100 + .25
    mixed = mixer(SeatValues(torch.tensor([[1.0, 0.5]])), torch.tensor([[2.0]]))
    assert mixed.item() == pytest.approx(5 * 1 + (math.exp(-3.5) - 1) * 2 + 20.25, rel=1e-6)


def test_qplex_by_hand() -> None:
    """Two seats of two actions, a state of one number, one unit, one head; biases of the last layers only."""
    mixer = QPLEXMixer(seats=2, actions=2, state=1, units=1, heads=1, seed=0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.scale.layers[1].bias[:] = torch.tensor([2.0, -3.0])
        mixer.shift.layers[1].bias[:] = torch.tensor([0.5, 1.0])
        mixer.key.layers[1].bias[:] = -4.0
        mixer.by_action.layers[0].weight[0, 2] = 1.0  # for seat 0's second action
        mixer.by_action.layers[1].weight[:] = torch.tensor([[0.0, 1.0]])  # sigmoid(1) for seat 1
    q, best = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[1.5, 4.0]])
    actions = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    # values 2 * 1 + .5 and 3 * 2 + 1; advantages 2 * -.5 and 3 * -2; weights 4 * sigmoid(0) * (sigmoid(0), sigmoid(1))
    mixed = mixer(SeatValues(q, best, actions), torch.tensor([[9.0]]))
    sigmoid = 1 / (1 + math.exp(-1))
    assert mixed.item() == pytest.approx(2.5 + 7 + (4 * 0.25 - 1) * -1 + (4 * 0.5 * sigmoid - 1) * -6, rel=1e-6)
    assert torch.autograd.grad(mixed.sum(), q)[0][0].tolist() == pytest.approx([2, 3])


@settings(max_examples=60)
@given(seed=st.integers(0, 1000), size=st.floats(0.1, 4))
def test_individual_argmax_is_the_joint_argmax_of_qplex(seed: int, size: float) -> None:
    mixer, generator = QPLEXMixer(2, 3, 4, 8, 2, seed).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(0, size, generator=generator)
        q, state = torch.randn(2, 3, generator=generator).double(), torch.randn(1, 4, generator=generator).double()
        action = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        values = mixer(
            SeatValues(
                torch.stack([q[0, action[:, 0]], q[1, action[:, 1]]], 1),
                q.amax(1).expand(9, 2),
                torch.nn.functional.one_hot(action, 3).flatten(1).double(),
            ),
            state.expand(9, 4),
        )
    assert values[int(q[0].argmax()) * 3 + int(q[1].argmax())] >= values.max() - 1e-9


numbers = st.floats(-50, 50, width=32)


@settings(max_examples=60)
@given(
    q=arrays.arrays(np.float32, (4, 3), elements=numbers),
    rise=arrays.arrays(np.float32, (4, 3), elements=st.floats(0, 50, width=32)),
    state=arrays.arrays(np.float32, (4, 5), elements=numbers),
    weights=st.integers(0, 1000),
)
def test_qmix_is_monotone(q: np.ndarray, rise: np.ndarray, state: np.ndarray, weights: int) -> None:
    mixer = QMIXMixer(seats=3, state=5, units=8, seed=weights).double()
    with torch.no_grad():  # any weights that training may reach, not only the initial ones
        generator = torch.Generator().manual_seed(weights)
        for parameter in mixer.parameters():
            parameter.normal_(0, 2, generator=generator)
        low, high, where = (torch.from_numpy(x).double() for x in (q, q + rise, state))
        assert (mixer(SeatValues(high), where) >= mixer(SeatValues(low), where) - 1e-9).all()


def test_individual_argmax_equals_the_joint_argmax() -> None:
    mixer = QMIXMixer(seats=2, state=3, units=4, seed=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        q, state = torch.randn(2, 3, generator=generator) * 3, torch.randn(1, 3, generator=generator)
        joint = torch.stack([torch.stack([q[0, i], q[1, j]]) for i in range(3) for j in range(3)])
        values = mixer(SeatValues(joint), state.expand(9, 3))
        assert values[int(q[0].argmax()) * 3 + int(q[1].argmax())] == values.max()


def test_qmix_represents_non_additive_values(check_score: Any) -> None:
    """The best additive fit of [[0, 1], [1, 8]] is [[-1.5, 2.5], [2.5, 6.5]]."""
    mixer = QMIXMixer(seats=2, state=1, units=8, seed=0)
    q = torch.zeros(2, 2, requires_grad=True)
    payoff, state = torch.tensor([0.0, 1.0, 1.0, 8.0]), torch.ones(4, 1)
    adam = torch.optim.Adam([q, *mixer.parameters()], 0.05)
    for _ in range(300):
        joint = torch.stack([torch.stack([q[0, i], q[1, j]]) for i in (0, 1) for j in (0, 1)])
        loss = (mixer(SeatValues(joint), state) - payoff).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    check_score(loss.item())


def test_mixing_weights_depend_on_the_state() -> None:
    mixer = QMIXMixer(seats=2, state=3, units=4, seed=1)
    q = torch.tensor([[1.0, 2.0]]).expand(2, 2)
    a, b = mixer(SeatValues(q), torch.eye(3)[:2])
    assert abs(a - b) > 1e-3


@pytest.mark.parametrize("monotonic", [True, False])
def test_initial_mixing_network_is_near_the_sum(monotonic: bool) -> None:
    """Also with large states each seat's value has a weight of about 1. Larger weights multiply every learning rate,
    and with bootstrapped targets the values grow without bound."""
    mixer = QMIXMixer(seats=3, state=54, units=32, seed=0, monotonic=monotonic)
    state = torch.randn(500, 54, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(500, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(mixer(SeatValues(q), state).sum(), q)
    assert 0.6 < float(slope.mean()) < 1.4 and float(slope.max()) < 3
