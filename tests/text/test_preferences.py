"""Preference losses by hand: the margin, its loss, and independence of everything but the two sides."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.losses import LossInputs
from palestra.core.types import Sample
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.micro_batch import micro_batches
from palestra.testing import tiny_lm
from palestra.text.losses import kto_loss, preference_loss

# Chosen: log-ratios 0.2 and 0.3, sum 0.5. Rejected: -0.2 and 0.1, sum -0.1. The margin is 0.6; that of means 0.3.
LOGP = [-0.5, -1.0, -2.0, -0.4]
REF = [-0.7, -1.3, -1.8, -0.5]
SIGNS = [1.0, 1.0, -1.0, -1.0]


def scored(logp=LOGP, ref=REF, advantage=SIGNS, *, weight=None, group=None):
    """Tokens of one pair, unless `group` assigns others."""
    n = len(logp)
    return LossInputs(
        torch.tensor(logp, dtype=torch.float64, requires_grad=True),
        torch.zeros(n),
        torch.full((n,), -9.0),  # the sampler's log-probabilities do not matter
        None if ref is None else torch.tensor(ref, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(weight or [1 / n] * n, dtype=torch.float64),
        group_M=torch.tensor(group or [0] * n),
    )


def slopes(tokens, value):
    """d loss / d logp [M]."""
    (grad,) = torch.autograd.grad(value, tokens.logp_M)
    return grad.tolist()


def softplus(x):
    """-log sigmoid(-x)."""
    return math.log(1 + math.exp(x))


# ---- one pair of two tokens each, beta 0.5


def test_orpo_by_hand():
    """Means -ln 2 and -ln 4: probabilities 1/2 and 1/4, odds 1 and 1/3, log-odds ratio ln 3, its sigmoid 3/4. The
    likelihood has slope -1/2 a token, the odds -beta (1 - 3/4) / (1 - p) / 2."""
    two, four = -math.log(2), -math.log(4)
    tokens = scored([two, two, four, four], None, [0.5, 0.5, -0.5, -0.5])
    value, metrics = preference_loss(tokens, kind="orpo", beta=0.4)
    assert value.item() == pytest.approx(math.log(2) - 0.4 * math.log(0.75))
    assert slopes(tokens, value) == pytest.approx([-0.5 - 0.1, -0.5 - 0.1, 0.2 / 3, 0.2 / 3])
    assert metrics["accuracy"].item() == 1 and metrics["margin"].item() == pytest.approx(0.4 * math.log(2))
    certain = scored([0.0, -1.0], None, [1.0, -1.0])  # a side of probability 1
    value, _ = preference_loss(certain, kind="orpo")
    assert math.isfinite(value.item()) and np.isfinite(slopes(certain, value)).all()


def test_kto_by_hand():
    """Log-ratios 0.5 of the desirable side of weight 2, -0.1 of the undesirable one of weight 1, beta 0.5; each side is
    half of the mean."""
    tokens = scored(advantage=[2.0, 2.0, -1.0, -1.0], group=[0, 0, 1, 1])
    value, metrics = kto_loss(tokens, beta=0.5)
    good, bad = 1 / (1 + math.exp(0.25)), 1 / (1 + math.exp(0.05))
    assert value.item() == pytest.approx(0.5 * 2 * good + 0.5 * bad)
    good, bad = -0.5 * 2 * 0.5 * good * (1 - good), 0.5 * 0.5 * bad * (1 - bad)
    assert slopes(tokens, value) == pytest.approx([good, good, bad, bad])
    assert metrics["accuracy"].item() == 1 and metrics["reward"].item() == pytest.approx(0.15)
    for missing, message in ((tokens._replace(group_M=None), "side"), (tokens._replace(ref_logp_M=None), "reference")):
        with pytest.raises(ValueError, match=message):
            kto_loss(missing)


@pytest.mark.parametrize(
    ("options", "loss", "slope"),
    # the reward's margin is 0.5 * 0.6 = 0.3; slope: d loss / d logp of a chosen token; of a rejected one it is the
    # negative
    [
        ({"kind": "sigmoid"}, 0.554355, -0.212779),  # log(1 + e^-0.3), -0.5 / (1 + e^0.3)
        ({"kind": "hinge"}, 0.7, -0.5),  # 1 - 0.3
        ({"kind": "sigmoid", "label_smoothing": 0.1}, 0.584355, -0.162779),  # and a tenth of log(1 + e^0.3) = 0.854355
        ({"kind": "hinge", "label_smoothing": 0.1}, 0.76, -0.4),  # 0.9 * 0.7 + 0.1 * 1.3
        ({"kind": "sigmoid", "reference_free": True}, 0.493249, -0.194681),  # margin -1.5 + 2.4 = 0.9: log(1 + e^-0.45)
        ({"kind": "ipo"}, 0.16, -0.8),  # (0.6 - 1)^2, 2 (0.6 - 1)
        ({"kind": "simpo", "target_margin": 0.25}, 0.598139, -0.225083),  # log(1 + e^-0.2): 0.45 - 0.25, no reference
    ],
)
def test_preference_loss_by_hand(options, loss, slope):
    tokens = scored()
    value, _ = preference_loss(tokens, beta=0.5, **options)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert slopes(tokens, value) == pytest.approx([slope, slope, -slope, -slope], abs=1e-6)


def test_ipo_by_hand_with_sides_of_different_lengths():
    """Chosen: the mean of 0.2 and 0.3. Rejected: -0.2 alone. (0.25 + 0.2 - 1)^2, and 2 * -0.55 a half or whole."""
    tokens = scored(LOGP[:3], REF[:3], [0.5, 0.5, -1.0])
    value, figures = preference_loss(tokens, kind="ipo", beta=0.5)
    assert value.item() == pytest.approx(0.3025)
    assert slopes(tokens, value) == pytest.approx([-0.55, -0.55, 1.1])
    assert figures["margin"].item() == pytest.approx(0.5 * 0.45)
    assert figures["chosen_logp"].item() == pytest.approx(-0.75)


def test_wrongly_ranked_pair_by_hand():
    tokens = scored(advantage=[-1.0, -1.0, 1.0, 1.0])
    value, figures = preference_loss(tokens, beta=0.5)
    assert value.item() == pytest.approx(0.854355, abs=1e-6)  # log(1 + e^0.3)
    assert figures["margin"].item() == pytest.approx(-0.3) and figures["accuracy"].item() == 0


def test_satisfied_hinge_has_no_gradient():
    tokens = scored([-0.5, -9.0], [-5.0, -5.0], [1.0, -1.0])  # 0.5 * (4.5 + 4) > 1
    value, _ = preference_loss(tokens, kind="hinge", beta=0.5)
    assert value.item() == 0 and slopes(tokens, value) == [0, 0]


def test_metrics_by_hand():
    """The first pair as above; the second has log-ratios -0.2 and 0.3, margin -0.5. Each counts half."""
    tokens = scored(
        [*LOGP, -0.6, -0.9],
        [*REF, -0.4, -1.2],
        [*SIGNS, 1.0, -1.0],
        weight=[1 / 8] * 4 + [1 / 4] * 2,
        group=[0] * 4 + [1] * 2,
    )
    value, figures = preference_loss(tokens, beta=0.5)
    assert {name: figure.item() for name, figure in figures.items()} == pytest.approx(
        {
            "margin": (0.3 - 0.25) / 2,
            "accuracy": 0.5,
            "chosen_logp": (-1.5 - 0.6) / 2,
            "rejected_logp": (-2.4 - 0.9) / 2,
        }
    )
    assert value.item() == pytest.approx((softplus(-0.3) + softplus(0.25)) / 2)
    assert not any(figure.requires_grad for figure in figures.values())


def test_policy_equal_to_its_reference_has_zero_margin():
    value, figures = preference_loss(scored(ref=LOGP), beta=0.5)
    assert value.item() == pytest.approx(math.log(2)) and figures["margin"].item() == figures["accuracy"].item() == 0


# ---- refused inputs


def test_missing_reference_is_refused_unless_reference_free():
    with pytest.raises(ValueError, match="log-probabilities of the reference, or reference_free"):
        preference_loss(scored(ref=None))
    free, _ = preference_loss(scored(ref=None), reference_free=True)
    assert free.item() == preference_loss(scored(), reference_free=True)[0].item()


def test_ipo_refuses_label_smoothing():
    with pytest.raises(ValueError, match="takes no label_smoothing"):
        preference_loss(scored(), kind="ipo", label_smoothing=0.1)


def test_tokens_without_pair_numbers_are_refused():
    with pytest.raises(ValueError, match="the number of each token's pair"):
        preference_loss(scored()._replace(group_M=None))


@pytest.mark.parametrize("advantage", [[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 0.0, -1.0, -1.0]])
def test_pair_with_one_side_is_refused(advantage):
    with pytest.raises(ValueError, match="its chosen and its rejected side"):
        preference_loss(scored(advantage=advantage))
    with pytest.raises(ValueError, match="its chosen and its rejected side"):
        preference_loss(scored(group=[0, 0, 1, 1]))


# ---- properties

logps = st.lists(st.floats(-8, -0.01), min_size=4, max_size=4)
KINDS = st.sampled_from([("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("hinge", 0.2), ("ipo", 0.0)])


@given(logps, logps, KINDS, st.floats(0.05, 1))
def test_loss_decreases_with_the_margin(logp, ref, kind, beta):
    """Up to a minimum: for ipo a margin of 1 / (2 beta), with label smoothing its log-odds."""
    tokens = scored(logp, ref)
    value, figures = preference_loss(tokens, kind=kind[0], label_smoothing=kind[1], beta=beta)
    first, second, third, fourth = slopes(tokens, value)
    assert first == second == -third == -fourth
    content = {("sigmoid", 0.2): math.log(0.8 / 0.2), ("hinge", 0.0): 1.0, ("hinge", 0.2): 1.0, ("ipo", 0.0): 0.5}
    reward = figures["margin"].item()
    if reward < content.get(kind, math.inf) - 1e-6:
        assert first < 0
    elif reward > content[kind] + 1e-6:
        assert first == 0 if kind == ("hinge", 0.0) else first > 0


@given(logps, logps, st.sampled_from(["sigmoid", "hinge"]))
def test_label_smoothing_of_one_half_is_symmetric(logp, ref, kind):
    """Both labels are equally likely: swapping the sides does not change the loss."""
    there = preference_loss(scored(logp, ref), kind=kind, label_smoothing=0.5)[0]
    back = preference_loss(scored(logp, ref, [-1.0, -1.0, 1.0, 1.0]), kind=kind, label_smoothing=0.5)[0]
    assert there.item() == pytest.approx(back.item())


@given(logps, logps, st.permutations(range(4)), st.integers(0, 5))
def test_loss_is_invariant_to_order_and_numbering(logp, ref, order, first):
    pairs = scored(logp, ref, [1.0, -1.0, 1.0, -1.0], group=[0, 0, 1, 1])
    picked = torch.tensor(order)
    moved = LossInputs(*(None if field is None else field[picked] for field in pairs))
    moved = moved._replace(group_M=moved.group_M * 3 + first)
    (value, figures), (again, same) = preference_loss(pairs), preference_loss(moved)
    assert again.item() == pytest.approx(value.item())
    assert {n: f.item() for n, f in same.items()} == pytest.approx({n: f.item() for n, f in figures.items()})


@given(logps, logps, st.floats(-3, 3))
def test_loss_is_invariant_to_a_common_shift(logp, ref, shift):
    """A change that makes both sides likelier by the same amount is no preference."""
    value = preference_loss(scored(logp, ref))[0].item()
    assert preference_loss(scored([x + shift for x in logp], ref))[0].item() == pytest.approx(value)


# ---- through the trainer


def side(rng, prompt, n, sign, *, pair, tokens, mean):
    return Sample(
        np.asarray(prompt, np.int32),
        rng.integers(5, 250, n).astype(np.int32),
        np.full(n, -5.0, np.float32),
        np.full(n, sign / n if mean else sign, np.float32),
        weight=1 / tokens,
        group=pair,
    )


def some_pairs(lengths, *, mean=False):
    rng = np.random.default_rng(3)
    batch = []
    for pair, (chosen, rejected) in enumerate(lengths):
        prompt = rng.integers(5, 250, 7)
        for n, sign in ((chosen, 1.0), (rejected, -1.0)):
            batch.append(side(rng, prompt, n, sign, pair=pair, tokens=chosen + rejected, mean=mean))
    return batch


def with_reference(trainer, batch):
    found = trainer.logprobs(batch, reference=True)
    return [replace(sample, reference_logprobs=logprobs) for sample, logprobs in zip(batch, found, strict=True)]


def moved_adapter(engine):
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=3), seed=4)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return adapter


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_micro_batches_of_whole_pairs_sum_to_the_full_batch(kind):
    """Loss, metrics and gradient do not depend on the split of a batch; no split separates a pair."""
    engine = tiny_lm(6)
    batch = some_pairs([(1, 4), (3, 3), (5, 2), (2, 2)], mean=kind == "ipo")
    results = []
    for pack_tokens, parts in ((10_000, 1), (45, 2), (1, 4)):
        trainer = AdapterWeights(engine, moved_adapter(engine), pack_tokens=pack_tokens)
        assert len(micro_batches(batch, pack_tokens)) == parts
        metrics = trainer.forward_backward(with_reference(trainer, batch), preference_loss, kind=kind, beta=0.7)
        results.append((metrics, torch.cat([w.grad.flatten() for w in trainer.parameters])))
    for metrics, gradient in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, results[0][1], **GRADIENTS)


def test_gradient_equals_plain_transformers_without_prompt_tokens():
    """Full weights: palestra's packed forest against DPO computed one sequence at a time, without prompt tokens."""
    engine = tiny_lm(7)
    trainer = AdapterWeights(engine, None)
    batch = some_pairs([(2, 3), (4, 1)])
    references = [np.full(len(s.token_ids), -5.5, np.float32) for s in batch]
    batch = [replace(s, reference_logprobs=ref) for s, ref in zip(batch, references, strict=True)]
    metrics = trainer.forward_backward(batch, preference_loss, beta=0.3)
    packed = [w.grad.clone() for w in trainer.parameters]
    trainer.optimizer.zero_grad(set_to_none=True)
    engine.model.config._attn_implementation = "eager"
    ratios = []
    for s in batch:
        ids = torch.tensor([[*s.prompt_ids.tolist(), *s.token_ids.tolist()]])
        logp = torch.log_softmax(engine.model(ids[:, :-1], use_cache=False).logits[0, len(s.prompt_ids) - 1 :], -1)
        said = logp.gather(1, ids[0, len(s.prompt_ids) :, None])[:, 0]
        ratios.append((said + 5.5).sum())
    total = sum(-torch.nn.functional.logsigmoid(0.3 * (ratios[i] - ratios[i + 1])) for i in (0, 2)) / 2
    total.backward()
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-5)
    for ours, w in zip(packed, trainer.parameters, strict=True):
        torch.testing.assert_close(ours, w.grad, **GRADIENTS)


def test_training_widens_the_margin_with_a_fixed_reference(check_score):
    engine = tiny_lm(6)
    trainer = AdapterWeights(engine, Adapter(engine.linear_layers, LoraConfig(), seed=0))
    batch = with_reference(trainer, some_pairs([(2, 3), (4, 1)]))
    seen = []
    for _ in range(8):
        seen.append(trainer.forward_backward(batch, preference_loss, beta=0.5))
        trainer.optim_step(OptimConfig(lr=1e-2))
    assert seen[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and seen[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert seen[-1]["accuracy"] == 1
    check_score(seen[-1]["loss"], "loss")
    check_score(seen[-1]["margin"], "margin")
