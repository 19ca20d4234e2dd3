"""Distributions over actions, against PyTorch's own and against frequencies."""

import math

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributions import Categorical, Normal

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space
from palestra.vector.nets.heads import (
    ActionHead,
    CategoricalHead,
    GaussianHead,
    MultiCategoricalHead,
    encode_actions,
    kl_divergence,
    make_head,
    mean_and_log_std,
)

SPACES: list[Space] = [Discrete(4), MultiDiscrete((2, 3)), Continuous((-1.0, 0.0), (1.0, 4.0))]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


def test_each_space_has_its_distribution() -> None:
    kinds = [(type(head), head.outputs, head.width) for head in map(make_head, SPACES)]
    assert kinds == [(CategoricalHead, 4, 0), (MultiCategoricalHead, 5, 2), (GaussianHead, 4, 2)]


@pytest.mark.parametrize("space", SPACES)
def test_sampled_logprobs_equal_the_trainers(space: Space) -> None:
    head = make_head(space)
    out = noise(2, 50, head.outputs)
    action, logp = head.sample(out, None, generator(1))
    again, _ = head.evaluate_actions(out, action, None)
    torch.testing.assert_close(again, logp, rtol=1e-4, atol=1e-5)
    assert logp.shape == (2, 50)


@pytest.mark.parametrize("space", SPACES)
def test_samples_depend_on_the_generator_only(space: Space) -> None:
    head = make_head(space)
    out = noise(1, 30, head.outputs)
    torch.manual_seed(0)
    first, _ = head.sample(out, None, generator(1))
    torch.manual_seed(1)
    second, _ = head.sample(out, None, generator(1))
    other, _ = head.sample(out, None, generator(2))
    assert torch.equal(first, second) and not torch.equal(first, other)


# ---- one of n


def test_sample_frequencies_match_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    action, _ = CategoricalHead(Discrete(4)).sample(probabilities.log().expand(20_000, 4), None, generator())
    counts = torch.bincount(action, minlength=4) / 20_000
    torch.testing.assert_close(counts, probabilities, rtol=0, atol=4 * math.sqrt(0.25 / 20_000))


def test_logprobs_and_entropy_equal_torch() -> None:
    head, out = CategoricalHead(Discrete(4)), noise(3, 7, 4)
    action = torch.randint(0, 4, (3, 7), generator=generator())
    logp, entropy = head.evaluate_actions(out, action, None)
    torch.testing.assert_close(logp, Categorical(logits=out).log_prob(action))
    torch.testing.assert_close(entropy, Categorical(logits=out).entropy())


@given(
    arrays.arrays(np.float32, (6, 5), elements=st.floats(-50, 50, width=32)),
    arrays.arrays(np.bool_, (6, 5)),
    st.integers(0, 2**31),
)
@settings(max_examples=50)
def test_illegal_actions_are_never_sampled(out: np.ndarray, mask: np.ndarray, seed: int) -> None:
    mask[:, seed % 5] = True  # a seat that acts has a legal action
    head, action_mask = CategoricalHead(Discrete(5)), torch.from_numpy(mask)
    action, logp = head.sample(torch.from_numpy(out), action_mask, generator(seed))
    assert action_mask.gather(1, action[:, None]).all()
    assert action_mask.gather(1, head.mode(torch.from_numpy(out), action_mask)[:, None]).all()
    again, entropy = head.evaluate_actions(torch.from_numpy(out), action, action_mask)
    assert torch.equal(again, logp) and torch.isfinite(entropy).all()
    assert (entropy <= torch.log(action_mask.sum(1)) + 1e-5).all()
    everything = head.logits(torch.from_numpy(out), action_mask).exp()
    torch.testing.assert_close(everything.sum(1), torch.ones(6))
    assert not everything[~action_mask].any()


def test_action_mask_renormalises_probabilities() -> None:
    head, action_mask = CategoricalHead(Discrete(4)), torch.tensor([True, False, True, False])
    out = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    logp, entropy = head.evaluate_actions(out, torch.tensor(0), action_mask)
    assert logp.exp().item() == pytest.approx(2 / 3)
    assert entropy.item() == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert head.mode(out, action_mask).item() == 0


def test_action_mask_blocks_gradients_without_nan() -> None:
    out = noise(6, 4).requires_grad_()
    action_mask = torch.tensor([True, False, True, True]).expand(6, 4)
    logp, entropy = CategoricalHead(Discrete(4)).evaluate_actions(out, torch.zeros(6, dtype=torch.long), action_mask)
    (logp.sum() + entropy.sum()).backward()
    assert out.grad is not None and torch.isfinite(out.grad).all()
    assert not out.grad[:, 1].any() and out.grad[:, [0, 2, 3]].any()


def test_logits_below_a_billion_do_not_make_illegal_actions_likely() -> None:
    head, mask = CategoricalHead(Discrete(3)), torch.tensor([[True, True, False]])
    out = torch.tensor([[-2e9, -3e9, 0.0]], requires_grad=True)
    assert head.mode(out, mask).item() == 0
    assert head.sample(out, mask, torch.Generator().manual_seed(0))[0].item() == 0
    logp, entropy = head.evaluate_actions(out, torch.tensor([0]), mask)
    (logp + entropy).sum().backward()
    assert logp.item() == 0 and entropy.item() == 0 and torch.isfinite(out.grad).all()


def test_masks_may_be_wider_than_the_actions() -> None:
    """Seats with fewer actions than others have masks padded at the end."""
    head, out = CategoricalHead(Discrete(2)), noise(5, 2)
    wide = torch.tensor([True, True, False, False]).expand(5, 4)
    assert torch.equal(head.logits(out, wide), head.logits(out, None))


def test_empty_action_mask_gives_finite_outputs() -> None:
    """The mask of a seat that does not act may be empty."""
    head, out, action_mask = CategoricalHead(Discrete(3)), noise(5, 3), torch.zeros(5, 3, dtype=torch.bool)
    action, logp = head.sample(out, action_mask, generator())
    assert torch.isfinite(logp).all() and ((action >= 0) & (action < 3)).all()


# ---- several choices


def test_multi_discrete_parts_are_independent() -> None:
    head, out = MultiCategoricalHead(MultiDiscrete((2, 3))), noise(4, 5)
    action = torch.tensor([[0, 2], [1, 1], [1, 0], [0, 0]])
    logp, entropy = head.evaluate_actions(out, action, None)
    first, second = Categorical(logits=out[:, :2]), Categorical(logits=out[:, 2:])
    torch.testing.assert_close(logp, first.log_prob(action[:, 0]) + second.log_prob(action[:, 1]))
    torch.testing.assert_close(entropy, first.entropy() + second.entropy())
    assert torch.equal(head.mode(out, None), torch.stack([out[:, :2].argmax(1), out[:, 2:].argmax(1)], 1))


def test_multi_discrete_parts_are_sampled_separately() -> None:
    head = MultiCategoricalHead(MultiDiscrete((2, 2)))
    action, _ = head.sample(torch.zeros(10_000, 4), None, generator())
    counts = torch.bincount(action[:, 0] * 2 + action[:, 1], minlength=4) / 10_000
    torch.testing.assert_close(counts, torch.full((4,), 0.25), rtol=0, atol=0.02)


# ---- numbers


def test_gaussian_head_equals_torch() -> None:
    head = make_head(Continuous((-1.0, 0.0), (1.0, 4.0)))  # centres 0 and 2, half-widths 1 and 2
    out = torch.tensor([0.5, -0.25, math.log(0.5), math.log(2.0)])
    action = torch.tensor([0.2, 3.0])
    logp, entropy = head.evaluate_actions(out, action, None)
    raw, normal = torch.tensor([0.2, 0.5]), Normal(out[:2], torch.tensor([0.5, 2.0]))
    assert logp.item() == pytest.approx(normal.log_prob(raw).sum().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(normal.entropy().sum().item(), rel=1e-5)
    assert head.mode(out, None).tolist() == pytest.approx([0.5, 2 + 2 * -0.25])


def test_gaussian_samples_have_the_given_mean_and_deviation() -> None:
    head = make_head(Continuous((0.0,), (4.0,)))
    action, _ = head.sample(torch.tensor([0.5, math.log(0.25)]).expand(20_000, 2), None, generator())
    assert action.mean().item() == pytest.approx(2 + 2 * 0.5, abs=0.02)
    assert action.std().item() == pytest.approx(2 * 0.25, rel=0.03)


def test_deviation_is_clamped() -> None:
    head = make_head(Continuous((-1.0,), (1.0,)))
    assert isinstance(head, GaussianHead)
    for far, bound in ((-100.0, -5.0), (100.0, 2.0)):
        assert mean_and_log_std(torch.tensor([0.0, far]))[1].item() == bound
        action, logp = head.sample(torch.tensor([[0.0, far]]), None, generator())
        assert torch.isfinite(action).all() and torch.isfinite(logp).all()


@pytest.mark.parametrize("space", SPACES)
def test_mode_is_the_likeliest_action(space: Space) -> None:
    head: ActionHead = make_head(space)
    out = noise(1, head.outputs)
    best, _ = head.evaluate_actions(out, head.mode(out, None), None)
    drawn = [head.sample(out, None, generator(seed))[1].item() for seed in range(30)]
    assert best.item() >= max(drawn) - 1e-5


def test_unbounded_spaces_are_supported_or_refused() -> None:
    try:
        head = make_head(Continuous((-math.inf, 0.0), (math.inf, 1.0)))
    except ValueError:
        return
    action, logp = head.sample(torch.zeros(5, 4), None, generator())
    assert torch.isfinite(action).all() and torch.isfinite(logp).all()


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_categorical_scores_match_finite_differences(masked):
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    action = torch.randint(4, (2, 6), generator=generator)
    mask = (torch.rand(2, 6, 4, generator=generator) < 0.6).scatter_(-1, action[..., None], True) if masked else None
    head = CategoricalHead(Discrete(4))
    assert torch.autograd.gradcheck(lambda x: head.evaluate_actions(x, action, mask), out)


def test_number_with_a_single_value_has_finite_densities() -> None:
    """Actions are sampled around that value, to which the env clips them."""
    space = Continuous((-1.0, 0.5), (1.0, 0.5))
    head = GaussianHead(space)
    out = noise(200, 4).requires_grad_()
    action, logp = head.sample(out.detach(), None, generator(1))
    again, entropy = head.evaluate_actions(out, action, None)
    torch.testing.assert_close(again, logp, rtol=1e-4, atol=1e-5)
    (slope,) = torch.autograd.grad(again.sum() + entropy.sum(), out)
    assert torch.isfinite(slope).all() and torch.isfinite(kl_divergence(head, out, out + 0.1, None)).all()
    assert torch.equal(head.mode(torch.zeros(1, 4), None), torch.tensor([[0.0, 0.5]]))
    codes = encode_actions(space, torch.tensor([[0.3, 0.5], [0.3, 9.0]]))
    torch.testing.assert_close(codes, torch.tensor([[0.3, 0.0], [0.3, 1.0]]))
