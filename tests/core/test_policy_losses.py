"""Policy losses by hand: both signs of the advantage on both sides of the clip, and where the gradient must be zero."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.losses import (
    LOSSES,
    LossInputs,
    cispo_loss,
    clipped_policy_loss,
    cross_entropy_loss,
    dro_loss,
    gspo_loss,
    importance_sampling_loss,
)
from palestra.core.types import Sample
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.micro_batch import micro_batches
from palestra.testing import tiny_lm


def scored(logp, old, advantage, *, weight=None, entropy=None, ref=None, sequence=None):
    logp = torch.tensor(logp, requires_grad=True)
    n = len(logp)
    return LossInputs(
        logp,
        torch.tensor(entropy or [0.0] * n, requires_grad=True),
        torch.tensor(old),
        None if ref is None else torch.tensor(ref),
        torch.tensor(advantage),
        torch.tensor(weight or [1 / n] * n),
        None if sequence is None else torch.tensor(sequence),
    )


def slopes(tokens, value):
    """d loss / d logp [M]."""
    (grad,) = torch.autograd.grad(value, tokens.logp_M)
    return grad.tolist()


# ---- the clipped surrogate

INSIDE, ABOVE, BELOW = math.log(1.1), math.log(1.5), math.log(0.5)


@pytest.mark.parametrize(
    ("gap", "advantage", "loss", "slope", "clipped"),
    [  # slope: d loss / d logp; of -ratio * A it is -ratio * A, and 0 where the clip applies
        (INSIDE, 2.0, -2.2, -2.2, 0),
        (INSIDE, -2.0, 2.2, 2.2, 0),
        (ABOVE, 2.0, -2.4, 0.0, 1),  # positive advantage, already likelier: 1.2 * 2, no gradient
        (ABOVE, -2.0, 3.0, 3.0, 0),  # negative advantage, likelier: full gradient, however far
        (BELOW, 2.0, -1.0, -1.0, 0),  # positive advantage, less likely: full gradient
        (BELOW, -2.0, 1.6, 0.0, 1),  # negative advantage, already less likely: 0.8 * -2, no gradient
        (0.0, 2.0, -2.0, -2.0, 0),
    ],
)
def test_clipped_loss_by_hand(gap, advantage, loss, slope, clipped):
    tokens = scored([-1.0 + gap], [-1.0], [advantage])
    value, figures = clipped_policy_loss(tokens)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert tokens.logp_M.grad.item() == pytest.approx(slope, abs=1e-6)
    assert figures["clip_fraction"].item() == clipped


def test_clip_high_widens_the_upper_bound_only():
    above = scored([math.log(1.25)], [0.0], [1.0])
    assert clipped_policy_loss(above, clip=0.2)[0].item() == pytest.approx(-1.2)
    assert clipped_policy_loss(above, clip=0.2, clip_high=0.28)[0].item() == pytest.approx(-1.25)
    below = scored([math.log(0.75)], [0.0], [-1.0])
    assert clipped_policy_loss(below, clip=0.2, clip_high=0.28)[0].item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (2.0, -2.0, 4.0, 4.0, 0),  # negative advantage, likelier, within three times its advantage: unchanged
        (5.0, -2.0, 6.0, 0.0, 1),  # above it: 3 * 2, no gradient
        (5.0, 2.0, -2.4, 0.0, 1),  # positive advantage: the usual clip, whatever `dual_clip`
        (0.5, -2.0, 1.6, 0.0, 1),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, loss, slope, clipped):
    tokens = scored([math.log(ratio)], [0.0], [advantage])
    value, figures = clipped_policy_loss(tokens, dual_clip=3.0)
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert slopes(tokens, value) == pytest.approx([slope], abs=1e-5)
    assert figures["clip_fraction"].item() == clipped


@pytest.mark.parametrize("loss", [clipped_policy_loss, cispo_loss, gspo_loss])
def test_every_surrogate_supports_kl_penalty_and_entropy_bonus(loss):
    """At ratio 1 and advantage 0 only these are left: 0.5 * (1 - ln 2) - 0.1 * 2."""
    tokens = scored([-1.0], [-1.0], [0.0], ref=[-1.0 + math.log(2)], entropy=[2.0], sequence=[0])
    value, figures = loss(tokens, kl=0.5, entropy=0.1)
    assert value.item() == pytest.approx(0.5 * (1 - math.log(2)) - 0.2, abs=1e-6)
    assert figures["reference_kl"].item() == pytest.approx(1 - math.log(2), abs=1e-6)


def test_gradient_step_raises_positive_advantage_tokens():
    tokens = scored([-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0])
    clipped_policy_loss(tokens)[0].backward()
    good, bad = (-tokens.logp_M.grad).tolist()
    assert good > 0 > bad


def test_kl_to_the_reference_by_hand():
    """k3 = exp(ref - logp) - (ref - logp) - 1: at ref - logp = ln 2 it is 2 - ln 2 - 1, and its slope is 1 - 2."""
    tokens = scored([-1.0], [-1.0], [0.0], ref=[-1.0 + math.log(2)])
    value, figures = clipped_policy_loss(tokens, kl=0.5)
    value.backward()
    assert value.item() == pytest.approx(0.5 * (1 - math.log(2)), abs=1e-6)
    assert figures["reference_kl"].item() == pytest.approx(1 - math.log(2), abs=1e-6)
    # along the negative gradient: towards the reference
    assert tokens.logp_M.grad.item() == pytest.approx(0.5 * (1 - 2), abs=1e-6)
    assert clipped_policy_loss(scored([-1.0], [-1.0], [0.0], ref=[-1.0]), kl=1.0)[0].item() == 0
    with pytest.raises(ValueError, match="reference"):
        clipped_policy_loss(scored([-1.0], [-1.0], [1.0]), kl=0.5)


def test_an_entropy_bonus_is_subtracted():
    tokens = scored([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], weight=[0.75, 0.25], entropy=[2.0, 4.0])
    value, figures = clipped_policy_loss(tokens, entropy=0.1)
    value.backward()
    assert value.item() == pytest.approx(-0.1 * (0.75 * 2 + 0.25 * 4))
    assert figures["entropy"].item() == pytest.approx(2.5)
    np.testing.assert_allclose(tokens.entropy_M.grad, [-0.075, -0.025], rtol=1e-6)


def test_metrics_by_hand():
    tokens = scored([math.log(1.5), math.log(0.9)], [0.0, 0.0], [1.0, 1.0], weight=[0.25, 0.75], entropy=[1.0, 3.0])
    _, figures = clipped_policy_loss(tokens)
    assert figures["clip_fraction"].item() == 0.25
    k3 = 0.25 * (1.5 - 1 - math.log(1.5)) + 0.75 * (0.9 - 1 - math.log(0.9))
    assert figures["kl"].item() == pytest.approx(k3, abs=1e-6) and figures["entropy"].item() == 2.5
    assert not any(figure.requires_grad for figure in figures.values())


@given(st.floats(-0.5, 0.5), st.floats(-5, 5), st.floats(0.05, 0.5))
def test_clipped_objective_is_a_lower_bound(gap, advantage, clip):
    """The surrogate is a lower bound of ratio * advantage (Schulman et al., 2017, sec. 3)."""
    value, _ = clipped_policy_loss(scored([gap], [0.0], [advantage]), clip=clip)
    assert -value.item() <= math.exp(gap) * advantage + 1e-5


# ---- cross entropy


def test_cross_entropy_by_hand():
    tokens = scored([-1.0, -3.0], [0.0, 0.0], [1.0, 0.5], weight=[0.5, 0.5])
    value, figures = cross_entropy_loss(tokens)
    value.backward()
    assert value.item() == pytest.approx(0.5 * 1 + 0.5 * 0.5 * 3)
    assert figures["nll"].item() == pytest.approx(2.0)
    np.testing.assert_allclose(tokens.logp_M.grad, [-0.5, -0.25])


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-1e3, 1e3)), min_size=1, max_size=9))
def test_cross_entropy_accepts_negative_weights(pairs):
    """A custom loss C of a client is trained by weights -dC/dlogp, which may be negative."""
    logps, weights = (list(column) for column in zip(*pairs, strict=True))
    tokens = scored(logps, [0.0] * len(logps), weights, weight=[1.0] * len(logps))
    value, _ = cross_entropy_loss(tokens)
    assert slopes(tokens, value) == (-torch.tensor(weights)).tolist()
    assert value.item() == pytest.approx(-np.dot(np.float32(logps), np.float32(weights)), rel=1e-4, abs=1e-2)


# ---- sums over tokens, as in a training service

HALF, DOUBLE = math.log(0.5), math.log(2)


def test_importance_sampling_by_hand():
    """Ratios 2 and 1/2, advantages 3 and -1: the loss is -(2 * 3 - 1/2) = -5.5, its slopes -6 and 1/2."""
    tokens = scored([-1 + DOUBLE, -1 + HALF], [-1.0, -1.0], [3.0, -1.0], weight=[1.0, 1.0])
    value, figures = importance_sampling_loss(tokens)
    assert value.item() == pytest.approx(-5.5, abs=1e-5)
    assert slopes(tokens, value) == pytest.approx([-6.0, 0.5], abs=1e-5)
    assert figures["kl"].item() == pytest.approx((2 - 1 - DOUBLE) + (0.5 - 1 - HALF), abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "coefficient", "clipped"),
    [
        (2.0, 1.0, {}, 2.0, 0),
        (8.0, 1.0, {}, 4.0, 1),  # capped, but the gradient does not vanish: that of a clipped surrogate would
        (8.0, -1.0, {}, 4.0, 1),
        (0.1, 1.0, {}, 0.1, 0),  # no lower bound
        (0.1, -1.0, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 0.8, 1),
        (2.0, 1.0, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 1.2, 1),
    ],
)
def test_cispo_by_hand(ratio, advantage, options, coefficient, clipped):
    """The loss is -coefficient * logp * advantage, the coefficient constant: its slope is -coefficient * advantage."""
    tokens = scored([-2.0], [-2.0 - math.log(ratio)], [advantage], weight=[1.0])
    value, figures = cispo_loss(tokens, **options)
    assert value.item() == pytest.approx(2 * coefficient * advantage, rel=1e-5)
    assert slopes(tokens, value) == pytest.approx([-coefficient * advantage], rel=1e-5)
    assert figures["clip_fraction"].item() == clipped


def test_dro_by_hand():
    """logp -1, old -3, advantage 2, beta 0.5: -(-1 * 2 - 0.25 * 2^2) = 3, and the slope is -(2 - 0.5 * 2) = -1."""
    tokens = scored([-1.0], [-3.0], [2.0], weight=[1.0])
    value, figures = dro_loss(tokens, beta=0.5)
    assert value.item() == pytest.approx(3.0) and slopes(tokens, value) == pytest.approx([-1.0])
    assert figures["penalty"].item() == pytest.approx(1.0)
    at_best = scored([-1.0], [-5.0], [2.0], weight=[1.0])  # the gradient is 0 where logp - old = advantage / beta
    assert slopes(at_best, dro_loss(at_best, beta=0.5)[0]) == pytest.approx([0.0], abs=1e-6)


def test_gspo_by_hand():
    """Two sequences. The first has ratios 2 and 1/2, so 1 for both tokens: within bounds, slopes -1 * A. The second has
    2 and 8, so 4: above 1.2, so the token of positive advantage (-1.2 * 1) has no gradient, but that of negative
    advantage has (4 * 3, slope 12)."""
    old = [-2.0, -2.0, -2.0, -2.0]
    logp = [-2 + DOUBLE, -2 + HALF, -2 + DOUBLE, -2 + 3 * DOUBLE]
    tokens = scored(logp, old, [1.0, 5.0, 1.0, -3.0], weight=[1.0] * 4, sequence=[0, 0, 1, 1])
    value, figures = gspo_loss(tokens)
    assert value.item() == pytest.approx(-1 - 5 - 1.2 + 12, rel=1e-5)
    assert slopes(tokens, value) == pytest.approx([-1.0, -5.0, 0.0, 12.0], abs=1e-4)
    assert figures["clip_fraction"].item() == 1


def test_gspo_averages_over_masked_tokens_only():
    """A prompt's tokens have no log-probability of the sampler: here -inf, which must not enter the mean. Order and
    numbers of the sequences do not matter."""
    tokens = scored(
        [-1.0, -9.0, -1 + DOUBLE], [-1.0, -math.inf, -1.0], [1.0, 0.0, 1.0], weight=[1.0] * 3, sequence=[3, 0, 0]
    )
    mask = torch.tensor([1.0, 0.0, 1.0])
    value, _ = gspo_loss(tokens, clip_high_threshold=9.0, sequence_ratio_mask=mask)
    assert value.item() == pytest.approx(-(1 + 2), rel=1e-5)
    unmarked = scored([-1.0], [-2.0], [3.0], weight=[1.0], sequence=[0])
    assert gspo_loss(unmarked, sequence_ratio_mask=torch.zeros(1))[0].item() == pytest.approx(-3.0)  # ratio 1
    with pytest.raises(ValueError, match="sequence"):
        gspo_loss(scored([-1.0], [-1.0], [1.0]))


@pytest.mark.parametrize("loss", [clipped_policy_loss, cispo_loss, gspo_loss])
def test_clip_bounds_may_be_per_token(loss):
    """A tensor of bounds has the same effect on each token as single numbers; one bound may be a tensor and the other a
    number."""
    names = ("clip", "clip_high") if loss is clipped_policy_loss else ("clip_low_threshold", "clip_high_threshold")

    def run(gaps, advantages, low, high):
        n = len(gaps)
        tokens = scored(gaps, [0.0] * n, advantages, weight=[1.0] * n, sequence=list(range(n)))
        return loss(tokens, **dict(zip(names, (low, high), strict=True)))[0].item()

    gaps, advantages, low, high = [0.7, -1.5, 0.2], [1.0, -1.0, 2.0], [0.5, 0.1, 0.9], [0.3, 0.9, 0.1]
    alone = [run([gap], [a], *bounds) for gap, a, *bounds in zip(gaps, advantages, low, high, strict=True)]
    assert run(gaps, advantages, torch.tensor(low), torch.tensor(high)) == pytest.approx(sum(alone), abs=1e-5)
    number = run(gaps, advantages, torch.tensor(low), 0.4)
    assert number == pytest.approx(run(gaps, advantages, torch.tensor(low), torch.full((3,), 0.4)), abs=1e-6)


def naive(name, logp, old, advantage, sequence):
    """The losses again, as in the papers, token by token."""
    total = torch.zeros(())
    for t in range(len(logp)):
        ratio = torch.exp(logp[t] - old[t])
        if name == "importance_sampling":
            total = total - ratio * advantage[t]
        elif name == "cispo":
            total = total - min(max(ratio.item(), 0.0), 4.0) * logp[t] * advantage[t]
        elif name == "dro":
            total = total - (logp[t] * advantage[t] - 0.05 / 2 * (logp[t] - old[t]) ** 2)
        else:
            if name == "gspo":
                mine = [i for i in range(len(logp)) if sequence[i] == sequence[t]]
                mean = sum((logp[i] - old[i]).item() for i in mine) / len(mine)
                ratio = math.exp(mean) * torch.exp(logp[t]) / torch.exp(logp[t]).detach()
            total = total - torch.min(ratio * advantage[t], ratio.clamp(0.8, 1.2) * advantage[t])
    return total


POLICY_GRADIENTS = ["clipped_policy", "importance_sampling", "cispo", "gspo"]


@pytest.mark.parametrize("name", [*POLICY_GRADIENTS, "dro"])
@given(seed=st.integers(0, 2**32 - 1))
def test_losses_and_gradients_equal_their_formulas(name, seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    logp, old, advantage = rng.normal(-3, 0.5, n), rng.normal(-3, 0.5, n), rng.normal(0, 2, n)
    sequence = rng.integers(0, 3, n).tolist()
    columns = [c.astype(np.float32).tolist() for c in (logp, old, advantage)]
    tokens = scored(*columns, weight=[1.0] * n, sequence=sequence)
    value, figures = LOSSES[name](tokens)
    expected = naive(name, tokens.logp_M, tokens.old_logp_M, tokens.advantage_M, sequence)
    torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(slopes(tokens, value), slopes(tokens, expected), atol=1e-4, rtol=1e-4)
    assert not any(figure.requires_grad for figure in figures.values())


@pytest.mark.parametrize("name", [*POLICY_GRADIENTS, "dro"])
@given(pairs=st.lists(st.tuples(st.floats(-9, 0), st.floats(-5, 5), st.floats(-2, 2)), min_size=1, max_size=9))
def test_on_policy_gradients_equal_the_policy_gradient(name, pairs):
    """At ratio 1 the gradient is -weight * advantage * dlogp, for every loss, so tokens of positive advantage become
    likelier."""
    logps, advantages, weights = (list(column) for column in zip(*pairs, strict=True))
    tokens = scored(logps, logps, advantages, weight=weights, sequence=[0] * len(logps))
    expected = [-a * w for a, w in zip(advantages, weights, strict=True)]
    assert slopes(tokens, LOSSES[name](tokens)[0]) == pytest.approx(expected, abs=1e-5)


@given(st.floats(-0.5, 0.5), st.floats(-5, 5))
def test_gspo_of_one_token_equals_ppo(gap, advantage):
    tokens = scored([gap], [0.0], [advantage], sequence=[0])
    gspo, ppo = gspo_loss(tokens)[0], clipped_policy_loss(tokens)[0]
    assert gspo.item() == pytest.approx(ppo.item(), abs=1e-5)
    assert slopes(tokens, gspo) == pytest.approx(slopes(tokens, ppo), abs=1e-5)


def test_every_loss_is_registered_by_name():
    names = {"clipped_policy", "actor_critic", "cross_entropy", "importance_sampling", "cispo", "dro", "gspo"}
    assert set(LOSSES) == names and all(LOSSES[name].__name__ == f"{name}_loss" for name in names)


# ---- weights over micro-batches


def samples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rng.integers(5, 250, 10).astype(np.int32),
            rng.integers(5, 250, n).astype(np.int32),
            rng.normal(-5, 0.2, n).astype(np.float32),
            np.full(n, rng.normal(), np.float32),
        )
        for n in lengths
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 100))
def test_micro_batches_partition_samples_in_order_and_shares_sum_to_one(lengths, tokens):
    given_samples = samples(lengths)
    parts = micro_batches(given_samples, tokens)
    assert [s for p in parts for s in p.samples] == given_samples
    total = sum(share * len(s.token_ids) for p in parts for s, share in zip(p.samples, p.token_weights, strict=True))
    assert total == pytest.approx(1)
    for part in parts:
        size = sum(len(s.prompt_ids) + len(s.token_ids) for s in part.samples)
        assert size <= tokens or len(part.samples) == 1


def test_no_samples_give_no_micro_batches():
    assert micro_batches([], 100) == []


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (clipped_policy_loss, {}),
        (clipped_policy_loss, {"kl": 0.3, "entropy": 0.05, "clip_high": 0.3}),
        (cross_entropy_loss, {}),
        (importance_sampling_loss, {}),
        (cispo_loss, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        (gspo_loss, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        (dro_loss, {"beta": 0.2}),
    ],
)
def test_micro_batches_sum_to_the_full_batch(loss, options):
    """Loss, metrics and gradient do not depend on the split of a batch, though its parts have different lengths."""
    engine = tiny_lm(6)
    batch = samples([1, 9, 2, 5, 3])
    results = []
    for pack_tokens in (10_000, 30, 1):
        adapter = Adapter(engine.linear_layers, LoraConfig(rank=3), seed=4)
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
        trainer = AdapterWeights(engine, adapter, pack_tokens=pack_tokens)
        metrics = trainer.forward_backward(with_reference(trainer, batch), loss, **options)
        results.append((metrics, torch.cat([w.grad.flatten() for w in trainer.parameters])))
    for metrics, gradient in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, results[0][1], **GRADIENTS)


def with_reference(trainer, batch):
    """The samples with their log-probabilities under the trainer's reference."""
    found = trainer.logprobs(batch, reference=True)
    return [replace(sample, reference_logprobs=logprobs) for sample, logprobs in zip(batch, found, strict=True)]


def disturb(adapter, seed=1):
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))


def distance(trainer, batch):
    return trainer.forward_backward(with_reference(trainer, batch), clipped_policy_loss, kl=1.0)["reference_kl"]


def test_reference_is_the_base_until_anchored():
    engine = tiny_lm(6)
    trainer = AdapterWeights(
        engine, Adapter(engine.linear_layers, LoraConfig(), seed=0)
    )  # B = 0: equals the base, so the distance is 0
    batch = samples([4, 4])
    assert distance(trainer, batch) == 0
    disturb(trainer.adapter)
    assert distance(trainer, batch) > 1e-4
    trainer.set_reference()
    assert distance(trainer, batch) == 0
    disturb(trainer.adapter, seed=2)
    assert distance(trainer, batch) > 1e-4
    with pytest.raises(ValueError, match="this full model has no reference"):
        AdapterWeights(engine, None).logprobs(batch, reference=True)


def test_token_mean_weights_all_tokens_equally():
    """A mean over tokens, not over samples: three tokens of 1 and one of 5 make (3 + 5) / 4."""
    engine = tiny_lm(6)
    trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0))
    long, short = samples([3, 1])
    long.advantages[:], short.advantages[:] = 1.0, 5.0
    for sample, logprobs in zip((long, short), trainer.logprobs([long, short]), strict=True):
        sample.logprobs = logprobs  # ratio 1
    metrics = trainer.forward_backward([long, short], clipped_policy_loss)
    assert metrics["loss"] == pytest.approx(-(3 * 1 + 5) / 4, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_fraction"] == 0
