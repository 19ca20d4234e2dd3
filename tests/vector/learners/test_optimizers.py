"""Optimizers of stacks of networks, against torch's own on each network."""

import pytest
import torch
from helpers.own_things import SignDescent

from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.layers import Net, make_generators

OWN = "helpers.own_things:SignDescent"
CASES = {
    "adam": ({"type": "adam", "betas": [0.8, 0.9], "eps": 1e-3}, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-3}),
    "adamw": (
        {"type": "adamw", "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.5},
        torch.optim.AdamW,
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.5},
    ),
    "sgd": ({"type": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "own": ({"type": OWN, "beta": 0.5}, SignDescent, {"beta": 0.5}),
}
OBS = torch.linspace(-1, 1, 2 * 5 * 4).view(2, 5, 4)


def build(optimizer) -> tuple[Net, StackedOptimizer]:
    config = NetPolicyConfig(hidden=[6], lr=1e-2, max_grad_norm=1e9, optimizer=optimizer)
    net = Net((4,), 3, config, make_generators([1, 2]))
    return net, StackedOptimizer(net, ["a", "b"], config, SINGLE_PROCESS)


def take_steps(net: Net, optimizer: StackedOptimizer, count: int) -> None:
    for _ in range(count):
        optimizer.step(net(OBS).square().sum(), 0.0)


@pytest.mark.parametrize("optimizer, cls, options", CASES.values(), ids=CASES)
def test_each_member_is_trained_as_by_torch(optimizer, cls, options) -> None:
    net, stacked = build(optimizer)
    alone = [build(optimizer)[0] for _ in range(2)]
    take_steps(net, stacked, 3)
    for p, single in enumerate(alone):
        plain = cls(single.parameters(), lr=1e-2, **options)
        for _ in range(3):
            plain.zero_grad()
            single(OBS)[p].square().sum().backward()
            plain.step()
        for mine, theirs in zip(net.parameters(), single.parameters(), strict=True):
            assert torch.allclose(mine[p], theirs[p], atol=1e-6)


@pytest.mark.parametrize("optimizer, cls, options", CASES.values(), ids=CASES)
def test_restored_optimizer_continues_bit_for_bit(optimizer, cls, options) -> None:
    whole, part, restored = (build(optimizer) for _ in range(3))
    take_steps(*whole, 4)
    take_steps(*part, 2)
    restored[0].load_state_dict(part[0].state_dict())
    restored[1].rule.load(part[1].rule.arrays())
    take_steps(*restored, 2)
    for mine, theirs in zip(whole[0].parameters(), restored[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "optimizer, says",
    [
        ({"type": "admw"}, "unknown optimizer.type .admw.: did you mean adamw"),
        ("sdg", "unknown optimizer.type .sdg.: did you mean sgd"),
        ({"type": "helpers.own_things:Layers"}, "is not a subclass of torch.optim.optimizer.Optimizer"),
        ({"type": OWN, "betta": 1}, "unknown key betta: did you mean beta?"),
        ({"type": OWN, "lr": 1}, "unknown key lr"),
    ],
)
def test_optimizer_that_does_not_fit_is_refused(optimizer, says) -> None:
    with pytest.raises(ValueError, match=says):
        build(optimizer)
