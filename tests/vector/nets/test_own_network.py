"""Networks of a user's own in stacks."""

import pytest
import torch
from helpers.own_things import Layers, Memory

from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.layers import Net, make_generators, member_weights, with_member_weights

SEEDS = [3, 8]


def own(name: str, **more) -> NetPolicyConfig:
    return NetPolicyConfig(network={"type": f"helpers.own_things:{name}"}, **more)


def single(cls, seed: int):
    torch.manual_seed(seed)
    return cls((4,))


def test_members_of_a_stack_are_the_single_modules() -> None:
    net = Net((4,), 3, own("Layers"), make_generators(SEEDS))
    obs = torch.randn(2, 5, 4)
    for p, seed in enumerate(SEEDS):
        features = single(Layers, seed)(obs[p])
        expected = features @ net.head.weight[p] + net.head.bias[p]
        assert torch.allclose(net(obs)[p], expected, atol=1e-6)
        alone = with_member_weights(Net((4,), 3, own("Layers"), make_generators([0])), member_weights(net, p))
        assert torch.equal(alone(obs[p : p + 1])[0], net(obs)[p])


def test_state_of_a_recurrent_module_starts_anew_with_a_game() -> None:
    net = Net((4,), 3, own("Memory"), make_generators(SEEDS))
    obs = torch.randn(2, 4, 5, 4)
    is_first = torch.zeros(2, 4, 5, dtype=torch.bool)
    is_first[:, 2] = True
    features, states = net.features(obs, None, is_first)
    assert net.recurrent_units == 32 and states.shape == (2, 4, 5, 32)
    for p, seed in enumerate(SEEDS):
        module = single(Memory, seed)
        for begin in (0, 2):
            state = torch.zeros(5, 32)
            for t in range(begin, begin + 2):
                feature, state = module(obs[p, t], state)
                assert torch.allclose(features[p, t], feature, atol=1e-6)
                assert torch.allclose(states[p, t], state, atol=1e-6)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"network": "helpers.own_things:Reinforce"}, "is not a subclass of torch.nn"),
        ({"network": {"type": "helpers.own_things:Layers", "unit": 2}}, "unknown key unit: did you mean units?"),
        (
            {"network": {"type": "helpers.own_things:Layers"}, "hidden": [8]},
            "replaces the layers that hidden describes",
        ),
        ({"network": {"type": "layers"}}, "write module:name"),
    ],
)
def test_config_that_does_not_fit_is_refused(settings, says) -> None:
    with pytest.raises(ValueError, match=says):
        NetPolicyConfig(**settings)


@pytest.mark.parametrize(
    "name, more, says",
    [
        ("Flat", {}, r"network helpers.own_things:Flat returns \(24,\) for observations of shape \(3, 4\): it must"),
        ("Double", {}, "returns torch.float64 .* it must return torch.float32"),
        ("Noisy", {}, "returns other features for equal inputs"),
        ("Centred", {}, "returns other features for a row when other rows, which are other games, are there"),
        ("Normed", {}, "has the buffer layers.3"),
        ("Memory", {"gru_units": 4}, "leave gru_units and communication_rounds out"),
    ],
)
def test_module_that_does_not_fit_is_refused_when_it_is_built(name, more, says) -> None:
    with pytest.raises(ValueError, match=says):
        Net((4,), 3, own(name, **more), make_generators(SEEDS))
