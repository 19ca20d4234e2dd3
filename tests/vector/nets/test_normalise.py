"""Running means and deviations, against NumPy's."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.vector.nets.normalise import RunningNorm


def drawn(rows: int, seed: int = 0, members: int = 2, size: int = 3) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    scale, shift = np.array([1.0, 10.0, 0.1]), np.array([0.0, -50.0, 3.0])
    return torch.from_numpy(rng.normal(size=(members, rows, size)) * scale[:size] + shift[:size])


def everything(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(rows.shape[:2])


@settings(max_examples=25)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 1000))
def test_batched_statistics_equal_the_whole(sizes: list[int], seed: int) -> None:
    rows, norm = drawn(sum(sizes) + 2, seed), RunningNorm(2, 3)
    for part in rows.split([*sizes, 2], 1):
        norm.update(part, everything(part))
    np.testing.assert_allclose(norm.mean, rows.mean(1), rtol=1e-9)
    np.testing.assert_allclose(norm.std(), rows.numpy().std(1), rtol=1e-6)
    assert norm.count.flatten().tolist() == [sum(sizes) + 2] * 2


def test_statistics_are_weighted_and_per_member() -> None:
    rows, norm = drawn(8), RunningNorm(2, 3)
    weight = torch.tensor([[1.0] * 4 + [0.0] * 4, [0.0] * 2 + [1.0] * 6])
    norm.update(rows, weight)
    np.testing.assert_allclose(norm.mean[0], rows[0, :4].mean(0), rtol=1e-9)
    np.testing.assert_allclose(norm.std()[1], rows[1, 2:].numpy().std(0), rtol=1e-6)


def test_member_without_data_keeps_its_statistics() -> None:
    rows, norm = drawn(8), RunningNorm(2, 3)
    norm.update(rows, everything(rows))
    mean, deviation = norm.mean.clone(), norm.std()
    norm.update(rows + 5, torch.tensor([[1.0] * 8, [0.0] * 8]))
    assert torch.equal(norm.mean[1], mean[1]) and torch.equal(norm.std()[1], deviation[1])
    assert (norm.mean[0] > mean[0]).all()


def test_old_rows_decay() -> None:
    norm = RunningNorm(1, 1, decay=0.5)
    norm.update(torch.tensor([[[1.0], [3.0]]]), torch.ones(1, 2))  # mean 2, square 5, of 2
    norm.update(torch.tensor([[[8.0]]]), torch.ones(1, 1))  # the 2 old rows count as 1 now: half and half
    assert norm.mean.item() == pytest.approx((2 + 8) / 2)
    assert norm.square.item() == pytest.approx((5 + 64) / 2)
    assert norm.std().item() == pytest.approx(np.sqrt(34.5 - 25))


def test_normalise_is_the_identity_before_data() -> None:
    x, norm = drawn(4), RunningNorm(2, 3)
    assert torch.equal(norm.normalise(x), x) and torch.equal(norm.denormalise(x), x)
    norm.update(x[:, :0], torch.ones(2, 0))
    assert torch.equal(norm.normalise(x), x)


def test_restore_undoes_normalise_in_any_shape() -> None:
    rows, norm = drawn(50), RunningNorm(2, 3)
    norm.update(rows, everything(rows))
    x = rows.view(2, 5, 10, 3).float()
    scaled = norm.normalise(x)
    assert scaled.dtype == torch.float32
    np.testing.assert_allclose(scaled.mean((1, 2)), np.zeros((2, 3)), atol=1e-4)
    np.testing.assert_allclose(scaled.numpy().std((1, 2)), np.ones((2, 3)), rtol=1e-3)
    torch.testing.assert_close(norm.denormalise(scaled), x, rtol=1e-5, atol=1e-5)


def test_summed_statistics_of_processes_equal_the_whole() -> None:
    first, second = drawn(5, 1), drawn(9, 2)
    norm, whole = RunningNorm(2, 3), RunningNorm(2, 3)
    ones = everything(second)
    others = torch.cat([second.sum(1), second.square().sum(1), ones.sum(1, keepdim=True).double()], -1)
    norm.update(first, everything(first), lambda sums: sums + others)
    rows = torch.cat([first, second], 1)
    whole.update(rows, everything(rows))
    torch.testing.assert_close(norm.mean, whole.mean)
    torch.testing.assert_close(norm.std(), whole.std())


def test_constant_input_is_normalised_to_finite_values() -> None:
    rows, norm = torch.full((1, 6, 1), 0.1), RunningNorm(1, 1)
    norm.update(rows, everything(rows))
    assert norm.std().item() == pytest.approx(1e-4)
    assert norm.normalise(rows).abs().max() < 1e-2


def test_state_restores_the_normaliser() -> None:
    rows, norm, other = drawn(7), RunningNorm(2, 3, 0.9), RunningNorm(2, 3, 0.9)
    norm.update(rows, everything(rows))
    other.load_state_dict(norm.state_dict())
    for one in (norm, other):
        one.update(rows * 2, everything(rows))
    assert torch.equal(norm.mean, other.mean) and torch.equal(norm.std(), other.std())


def test_bytes_are_normalised_as_numbers() -> None:
    rows, norm = torch.tensor([[[0, 10], [1, 20], [1, 60]]], dtype=torch.uint8), RunningNorm(1, 2)
    norm.update(rows, everything(rows))
    torch.testing.assert_close(norm.normalise(rows), norm.normalise(rows.float()))
