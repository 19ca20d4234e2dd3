"""Squashed and sampled actions: densities against torch.distributions, values by hand, marginals, gradients."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from palestra.envs.vector_base import Continuous, Discrete
from palestra.vector.nets.continuous_heads import ActionEncoder, SquashedHead, TanhHead, gumbel_softmax, one_hot
from palestra.vector.nets.heads import MASKED_LOGIT, CategoricalHead, GaussianHead
from palestra.vector.nets.seat_mapping import SeatMapping

SPACE = Continuous((-2.0, 0.0, -1.0), (2.0, 5.0, 1.0))
HALF = torch.tensor([2.0, 2.5, 1.0])
MIDDLE = torch.tensor([0.0, 2.5, 0.0])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=generator(1)) * 0.7


# ---- squashed normal numbers


def test_log_densities_equal_the_transformed_distribution():
    head, out = SquashedHead(SPACE), outputs(500)
    action, logp = head.sample(out, None, generator())
    mean, log_std = out.chunk(2, -1)
    transforms = [TanhTransform(cache_size=1), AffineTransform(MIDDLE, HALF)]
    reference = TransformedDistribution(Normal(mean.double(), log_std.exp().double()), transforms)
    expected = (reference.log_prob(action.double()) + HALF.log()).sum(-1)  # this density is of units, not of actions
    inside = (head.to_unit(action).abs() < 0.999).all(-1)  # closer to the bound float32 cannot invert the squashing
    assert inside.sum() > 400
    torch.testing.assert_close(logp[inside], expected[inside].float(), atol=2e-3, rtol=0)
    torch.testing.assert_close(
        head.evaluate_actions(out, action, None)[0][inside], expected[inside].float(), atol=2e-3, rtol=0
    )


def test_log_density_by_hand():
    head = SquashedHead(Continuous((0.0,), (10.0,)))
    out = torch.zeros(1, 2)  # a standard normal number, squashed
    action = torch.tensor([[5 + 5 * math.tanh(1.0)]])
    expected = -0.5 - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(1.0) ** 2)
    assert head.evaluate_actions(out, action, None)[0].item() == pytest.approx(expected, abs=1e-4)
    assert head.evaluate_actions(out, torch.tensor([[5.0]]), None)[0].item() == pytest.approx(
        -0.5 * math.log(2 * math.pi)
    )


def test_actions_stay_in_bounds_and_densities_finite_at_the_edge():
    head = SquashedHead(SPACE)
    out = torch.tensor([[60.0, -60.0, 60.0, 9.0, 9.0, -90.0]])
    action, logp = head.sample(out, None, generator())
    low, high = torch.tensor(SPACE.low), torch.tensor(SPACE.high)
    assert bool(((action >= low) & (action <= high)).all()) and bool(torch.isfinite(logp).all())
    assert bool(torch.isfinite(head.evaluate_actions(out, action, None)[0]).all())


def test_entropy_is_minus_the_mean_log_density():
    head, out = SquashedHead(SPACE), outputs(4)
    _, logp = head.sample(out.expand(50_000, 4, 6), None, generator())
    assert bool(((head.entropy(out) + logp.mean(0)).abs() < 4 * logp.std(0) / 50_000**0.5).all())
    narrow = SquashedHead(Continuous((-1.0,), (1.0,))).entropy(torch.tensor([[0.0, -5.0]]))  # hardly squashed
    assert narrow.item() == pytest.approx(-5 + 0.5 * math.log(2 * math.pi * math.e), abs=1e-3)


def test_samples_are_reparameterised():
    head = SquashedHead(Continuous((-1.0,), (1.0,)))
    out = torch.tensor([[0.3, -0.4]], requires_grad=True)
    unit, _ = head.sample_units(out, generator(5))
    unit.sum().backward()
    slope = 1 - unit.item() ** 2
    noise = torch.empty(1, 1).normal_(generator=generator(5)).item()
    assert out.grad is not None
    torch.testing.assert_close(out.grad, torch.tensor([[slope, slope * noise * math.exp(-0.4)]]))


def test_mode_is_the_squashed_mean():
    best = SquashedHead(SPACE).mode(torch.tensor([[0.0, 0.5, -1.0, 1.0, 1.0, 1.0]]), None)
    torch.testing.assert_close(best, torch.tensor([[0.0, 2.5 + 2.5 * math.tanh(0.5), -math.tanh(1.0)]]))


@pytest.mark.parametrize("head", [SquashedHead, TanhHead])
def test_unbounded_space_is_refused(head):
    with pytest.raises(ValueError, match="finite bounds"):
        head(Continuous((-math.inf,), (1.0,)))


@pytest.mark.parametrize("kind", [SquashedHead, TanhHead])
def test_number_with_a_single_value_has_finite_densities(kind):
    """Actions are sampled within 1 around that value, to which the env clips them."""
    head = kind(Continuous((-1.0, 0.5), (1.0, 0.5)))
    out = torch.randn(100, head.outputs, generator=generator(1)).requires_grad_()
    action, logp = head.sample(out.detach(), None, generator())
    assert bool(((action[:, 1] - 0.5).abs() <= 1).all()) and bool(torch.isfinite(logp).all())
    for played in (action, torch.tensor([[0.3, 0.5]]).expand(100, 2)):
        score, entropy = head.evaluate_actions(out, played, None)
        (slope,) = torch.autograd.grad(score.sum() + entropy.sum(), out)
        assert bool(torch.isfinite(score).all()) and bool(torch.isfinite(slope).all())
    assert torch.equal(head.mode(torch.zeros(1, head.outputs), None), torch.tensor([[0.0, 0.5]]))


# ---- deterministic actions


def test_deterministic_actions_and_their_noise_by_hand():
    space = Continuous((0.0, -1.0), (10.0, 1.0))
    out = torch.tensor([[0.5, 4.0]])
    torch.testing.assert_close(TanhHead(space).mode(out, None), torch.tensor([[5 + 5 * math.tanh(0.5), math.tanh(4)]]))
    action, logp = TanhHead(space, noise=0.2).sample(out, None, generator(3))
    noise = torch.empty(1, 2).normal_(generator=generator(3))
    unit = (torch.tanh(out) + 0.2 * noise).clamp(-1, 1)
    torch.testing.assert_close(action, torch.tensor([[5.0, 0.0]]) + torch.tensor([5.0, 1.0]) * unit)
    expected = Normal(0.0, 0.2).log_prob(0.2 * noise).sum(-1)
    torch.testing.assert_close(logp, expected)
    inner = torch.tensor([[7.0, 0.9]])
    score, entropy = TanhHead(space, noise=0.2).evaluate_actions(out, inner, None)
    reference = Normal(torch.tanh(out), 0.2)
    torch.testing.assert_close(score, reference.log_prob(torch.tensor([[0.4, 0.9]])).sum(-1))
    torch.testing.assert_close(entropy, reference.entropy().sum(-1))


def test_zero_noise_gives_the_mode():
    head, out = TanhHead(SPACE, noise=0.0), outputs(7)[:, :3]
    action, logp = head.sample(out, None, generator())
    assert torch.equal(action, head.mode(out, None)) and torch.equal(logp, torch.zeros(7))
    assert torch.equal(head.evaluate_actions(out, action, None)[0], torch.zeros(7))


# ---- samples of discrete actions


def test_gumbel_samples_have_softmax_marginals():
    logits = torch.tensor([0.0, 1.0, -1.0, MASKED_LOGIT])
    expected = torch.softmax(logits, -1)
    rows = 40_000
    for temperature in (0.3, 1.0, 5.0):
        drawn = gumbel_softmax(logits.expand(rows, 4), generator(2), temperature=temperature)
        assert bool(((drawn == 0) | (drawn == 1)).all()) and torch.equal(drawn.sum(-1), torch.ones(rows))
        error = 4 * (expected * (1 - expected) / rows).sqrt()
        assert bool(((drawn.mean(0) - expected).abs() <= error).all())
        assert drawn[:, 3].sum() == 0


def test_gumbel_gradient_equals_that_of_the_relaxed_softmax():
    logits = torch.tensor([[0.2, -0.3, 0.9]], requires_grad=True)
    worth = torch.tensor([[1.0, -2.0, 0.5]])
    (gumbel_softmax(logits, generator(4), temperature=0.7) * worth).sum().backward()
    gumbel = -torch.empty(1, 3).exponential_(generator=generator(4)).log()
    soft = torch.softmax((logits.detach() + gumbel) / 0.7, -1)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, soft * (worth - (soft * worth).sum()) / 0.7)


# ---- encoded actions


def seating(seats: tuple[tuple[int, ...], ...]) -> SeatMapping:
    return SeatMapping(tuple(f"p{i}" for i in range(len(seats))), seats, 4, (2,), Discrete(2))


def test_encoded_discrete_actions_by_hand():
    """Seat 1 does not learn; seat 3 has three actions, the others two."""
    two, three = CategoricalHead(Discrete(2)), CategoricalHead(Discrete(3))
    codes = ActionEncoder({3: three, 0: two, 2: two})
    everyone = torch.ones(2, 4, dtype=torch.bool)
    joint = codes.encode(torch.tensor([[1, 9, 0, 2], [0, 9, 1, 0]]), everyone)
    assert joint.tolist() == [[0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 1, 1, 0, 0]]
    both = seating(((2,), (0,)))  # two members, one seat each
    assert codes.own_actions(joint, both).tolist() == [[[1, 0], [0, 1]], [[0, 1], [1, 0]]]
    others = codes.other_actions(joint, both)  # [P, M, S, J]
    assert others[0, :, 0].tolist() == [[0, 1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0]]
    assert others[1, :, 0].tolist() == [[0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 0]]
    shared = seating(((0, 2),))  # one member at two seats
    assert codes.own_actions(joint, shared).tolist() == [[[0, 1], [1, 0], [1, 0], [0, 1]]]
    assert codes.other_actions(joint, shared)[0, 0].tolist() == [[0, 0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 1]]
    written = torch.zeros_like(joint)
    for stack in (shared, seating(((3,),))):
        codes.write(written, stack, codes.own_actions(joint, stack))
    assert torch.equal(written, joint)
    last = torch.tensor([[True, True, True, False]])
    assert codes.encode(torch.tensor([[1, 9, 1, 2]]), last).tolist() == [
        [0, 1, 0, 1, 1, 0, 0]
    ]  # a seat that does not act has the first action


def test_encoded_continuous_actions_omit_padding():
    short, wide = Continuous((0.0,), (4.0,)), Continuous((-1.0, -2.0), (1.0, 2.0))
    codes = ActionEncoder({0: TanhHead(short), 1: SquashedHead(wide)})
    actions = torch.tensor([[[3.0, 99.0], [0.5, -2.0]]])
    assert codes.encode(actions, torch.tensor([[True, True]])).tolist() == [[0.5, 0.5, -1.0]]
    assert codes.encode(actions, torch.tensor([[True, False]])).tolist() == [[0.5, 0.0, 0.0]]


def test_one_hot():
    assert np.array_equal(one_hot(torch.tensor([[2, 0]]), 3).numpy(), [[[0, 0, 1], [1, 0, 0]]])


@pytest.mark.parametrize("kind", [SquashedHead, TanhHead, GaussianHead])
def test_actions_outside_the_space_are_encoded_as_the_env_clips_them(kind):
    """As recorded actions of a Gaussian policy are; its density needs the unclipped ones."""
    encoder = ActionEncoder({0: kind(SPACE)})
    actions = torch.tensor([[[3.0, -1.0, 0.5]], [[-2.0, 9.0, -7.0]]])
    clipped = torch.minimum(torch.maximum(actions, torch.tensor(SPACE.low)), torch.tensor(SPACE.high))
    acts = torch.ones(2, 1, dtype=torch.bool)
    codes = encoder.encode(actions, acts)
    torch.testing.assert_close(codes, torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -1.0]]))
    assert torch.equal(codes, encoder.encode(clipped, acts))
