"""Passes of several adapters on one base, made together: each has the gradients and metrics of its own pass."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_models import random_adapter

from palestra.core.losses import actor_critic_loss, clipped_policy_loss, cross_entropy_loss
from palestra.core.types import Metrics, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training import train_pass
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.engine.training.train_pass import TrainPass, join_passes, run_together
from palestra.testing import tiny_lm

ROLES = [
    LoraConfig(rank=1),
    LoraConfig(rank=128, target_modules=["q_proj", "down_proj"]),
    LoraConfig(rank=8, use_dora=True),
    LoraConfig(rank=3, target_modules=["v_proj", "lm_head"]),
    LoraConfig(rank=16, use_rslora=True),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_lm(2)


@pytest.fixture(autouse=True)
def joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are joined on a CPU, too."""
    monkeypatch.setattr(train_pass, "JOINING_DEVICES", ("cpu",))


def weights_of(engine: Engine, number: int, **options: Any) -> AdapterWeights:
    return AdapterWeights(engine, random_adapter(engine, ROLES[number % len(ROLES)], number), **options)


def samples_of(number: int, groups: int = 2, **more: Any) -> list[Sample]:
    """Groups of three answers of 1 to 6 tokens."""
    rng = np.random.default_rng(number)
    samples = []
    for group in range(groups):
        prompt = rng.integers(5, 250, int(rng.integers(3, 12))).astype(np.int32)
        for length in rng.integers(1, 7, 3).tolist():
            ids = rng.integers(5, 250, length).astype(np.int32)
            logprobs, advantages, values, returns = rng.normal(size=(4, length)).astype(np.float32)
            own = {"values": values, "returns": returns, "group": group} | more
            samples.append(Sample(prompt, ids, logprobs - 5, advantages, **own))
    return samples


def gradients(weights: AdapterWeights) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in weights.parameters if parameter.grad is not None]
    assert len(found) == len(weights.parameters) and any(grad.abs().max() > 1e-4 for grad in found)
    return found


def make(queues: Sequence[Sequence[TrainPass]]) -> int:
    """Makes all passes, joined; returns how many were left."""
    return sum(1 for together in join_passes(queues) if run_together(together) is None)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_passes_made_together_equal_separate_ones(engine: Engine, checkpointing: bool, temperature: float) -> None:
    """Of five roles with different ranks, layers and kinds of adapters, one with a critic, losses with entropy."""
    losses = [(clipped_policy_loss, {"entropy": 0.1, "kl": 0.0}), (clipped_policy_loss, {})]
    data = [samples_of(number, temperature=temperature) for number in range(len(ROLES))]
    found: list[list[Metrics]] = []
    grads = []
    for is_joined in (False, True):
        roles = [weights_of(engine, i, critic=i == 4, checkpointing=checkpointing) for i in range(len(ROLES))]
        queues = []
        for number, (weights, samples) in enumerate(zip(roles, data, strict=True)):
            loss, options = (actor_critic_loss, {"value_coef": 0.5}) if number == 4 else losses[number % 2]
            queues.append(weights.passes(samples, loss, **options))
        if is_joined:
            assert make(queues) == 1
        else:
            for (each,) in queues:
                run_together([each])
        found.append([weights.metrics_of(queue) for weights, queue in zip(roles, queues, strict=True)])
        grads.append([gradients(weights) for weights in roles])
    for separate, joined in zip(*found, strict=True):
        assert joined == pytest.approx(separate, rel=1e-5, abs=1e-6) and joined["loss"] != 0
    for alone, together in zip(*grads, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def test_a_role_whose_loss_is_not_finite_leaves_the_others_alone(engine: Engine) -> None:
    broken, sound, alone = weights_of(engine, 0), weights_of(engine, 1), weights_of(engine, 1)
    bad = samples_of(0)
    bad[0].advantages[:] = np.nan
    assert make([broken.passes(bad, clipped_policy_loss), sound.passes(samples_of(1), clipped_policy_loss)]) == 1
    alone.forward_backward(samples_of(1), clipped_policy_loss)
    torch.testing.assert_close(gradients(sound), gradients(alone), rtol=1e-4, atol=1e-6)
    assert all(grad.isnan().any() for grad in [w.grad for w in broken.parameters if w.grad is not None])


def test_which_passes_are_made_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones of all roles, as many as fit; none of another base, precision, or with dropout; none on a CPU,
    where learners on Ray, which make theirs alone, have the same numbers."""
    other = tiny_lm(2)
    roles = [weights_of(engine, i) for i in range(3)]
    odd = [weights_of(other, 0), AdapterWeights(tiny_lm(2), None), weights_of(engine, 1, checkpointing=True)]
    with_dropout = AdapterWeights(engine, random_adapter(engine, LoraConfig(rank=2, lora_dropout=0.5), 0))
    queues = [weights.passes(samples_of(1), clipped_policy_loss) for weights in [*roles, *odd]]
    queues.append(with_dropout.passes(samples_of(1), cross_entropy_loss))
    sets = list(join_passes(queues))
    assert sorted(map(len, sets)) == [1, 1, 1, 1, 3]
    assert {id(each) for each in chain(*sets)} == {id(queue[0]) for queue in queues}

    size = queues[0][0].num_tokens
    for weights in roles:
        weights.pack_tokens = size
    queues = [weights.passes(samples_of(1) * count, clipped_policy_loss) for count, weights in enumerate(roles, 1)]
    assert list(map(len, queues)) == [1, 2, 3]
    sets = list(join_passes(queues))
    assert list(map(len, sets)) == [1] * 6  # each is as large as a pass may be
    rows = [[queue.index(each) for queue in queues for each in queue if each is one] for (one,) in sets]
    assert rows == [[0], [0], [0], [1], [1], [2]]
    for weights in roles:
        weights.pack_tokens = 2 * size
    assert list(map(len, join_passes(queues))) == [2, 1, 2, 1]
    monkeypatch.undo()
    assert train_pass.JOINING_DEVICES == ("cuda",)
    assert list(map(len, join_passes(queues))) == [1] * 6
