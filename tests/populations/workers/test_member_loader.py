"""Members from their folders: a table plays as the network that it was computed from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Push

from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.mpe import SimpleSpread
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, empty_step
from palestra.populations.tabular.game_tree import build_game_tree, uniform_policy
from palestra.populations.workers import member_loader
from palestra.populations.workers.member_loader import UNIFORM_MEMBER, MemberLoader, rules_of_env, write_table
from palestra.vector.algorithms.ddpg import TD3
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.mat import MAT
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_frozen_member, read_policy
from palestra.vector.policies.frozen import NetMember, TableMember, UniformMember

ENV = KuhnPoker(4)
KUHN = rules_of_env({"type": "kuhn_poker", "num_envs": 4})
assert KUHN is not None
TREE = build_game_tree(KUHN)


def save_member(folder: Path, seats: tuple[int, ...] = (1,), **changes: object) -> dict[str, Path]:
    """The folder of an untrained network, whose policy is far from uniform."""
    policy = NetPolicyConfig.model_validate({"hidden": [16], **changes})
    learner = PPO().build_learner(ENV, {"it": list(seats)}, {"it": policy}, {"it": 5})
    with torch.no_grad():
        for parameter in learner.stacks[0].net.parameters():
            parameter.mul_(2).add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    learner.member_writers()["it"](folder)
    return {"it": folder}


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seats", [(1,), (0, 1)])
def test_network_member_as_a_policy_table(best: bool, norm: bool, seats: tuple[int, ...], tmp_path: Path) -> None:
    members = save_member(tmp_path, seats, seat_one_hot=True, normalize_observations=norm)
    table = MemberLoader(ENV, TREE, greedy=best).policy("it", members)
    member = MemberLoader(ENV, TREE, greedy=best, tables=False).member("it", members, [1])
    assert isinstance(member, NetMember)
    ids = (
        torch.eye(2)[torch.from_numpy(TREE.state_player)] if len(seats) > 1 else torch.zeros(len(TREE.state_player), 0)
    )
    seen = torch.cat([torch.from_numpy(TREE.info_state_tensors), ids], -1)[None]
    seen = member.norm.normalise(seen) if member.norm else seen
    wanted = torch.softmax(member.net(seen)[0].detach(), -1).numpy()
    wanted = np.eye(2)[wanted.argmax(1)] if best else wanted
    np.testing.assert_allclose(table, wanted, atol=1e-6)
    assert abs(table - 0.5).max() > 0.2


def pictures() -> Push:
    """An env whose seats observe white pictures."""
    env = Push(4, (Discrete(3),) * 2)
    env.observation_shapes, env.vector_step = ((20, 20, 3),) * 2, empty_step(4, 2, (20, 20, 3))
    return env


ALIKE: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # algorithm, env, network
    "tanh": (PPO(), ENV, {}),
    "relu, layer_norm": (PPO(), ENV, {"activation": "relu", "layer_norm": True}),
    "norm, seat": (PPO(), ENV, {"normalize_observations": True, "seat_one_hot": True}),
    "memory": (PPO(), ENV, {"gru_units": 4}),
    "communication": (PPO(), SimpleSpread(4), {"communication_rounds": 2}),
    "attention": (PPO(), SimpleSpread(4), {"encoder": "attention", "hidden": [16, 8]}),
    "transformer": (MAT(), SimpleSpread(4), {}),
    "pixels": (PPO(), pictures(), {"convolutions": "small", "precision": "bfloat16"}),
    "action values": (DQN(duelling=False), ENV, {}),
    "duelling": (DQN(duelling=True), ENV, {}),
    "several numbers": (PPO(), Push(4, (MultiDiscrete((2, 3)),) * 2), {}),
    "real numbers": (SAC(), Push(4, (Continuous((-1.0,), (1.0,)),) * 2), {}),
    "deterministic": (TD3(), Push(4, (Continuous((-1.0,), (1.0,)),) * 2), {}),
}


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.few(6)
def test_members_of_one_shape_have_the_outputs_of_their_networks_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Each of two members plays as its learner does, although networks of one shape are built once."""
    algorithm, env, changes = ALIKE[kind]
    seats, policy = list(range(len(env.seats))), NetPolicyConfig.model_validate({"hidden": [8], **changes})
    learners = {name: algorithm.build_learner(env, {name: seats}, {name: policy}, {name: 5}) for name in "ab"}
    for name, learner in learners.items():
        noise = torch.Generator().manual_seed(ord(name))
        for parameter in learner.stacks[0].net.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
        if norm := learner.stacks[0].norm:
            norm.update(torch.randn(1, 50, norm.mean.shape[1], generator=noise) + 1, torch.ones(1, 50))
        learner.member_writers()[name](tmp_path / name)
    frame = env.reset(np.arange(env.num_envs))
    is_first = np.ones(env.num_envs, bool)
    played = []
    for name, learner in learners.items():
        (mine,), theirs = learner.greedy_policies(), read_policy(tmp_path / name, env, seats, best=True)
        acted = [player.act(frame, player.initial_state(env.num_envs), is_first) for player in (mine, theirs)]
        np.testing.assert_array_equal(acted[0][0], acted[1][0])
        found, _ = read_frozen_member(tmp_path / name, env, seats)
        x = found.seat_mapping.network_inputs(frame.obs, 1).flatten(1, 2)[:, None]
        assert (found.norm is None) == (learner.stacks[0].norm is None)
        given = x if found.norm is None else found.norm.normalise(x)
        own = x if found.norm is None else learner.stacks[0].norm.normalise(x)
        out, wanted = found.net.unroll(given)[0], learner.stacks[0].net.unroll(own)[0]
        assert torch.equal(out, wanted[..., : out.shape[-1]]) or kind == "duelling"  # whose streams are saved as one
        played.append(out)
    assert not torch.equal(*played)


def test_members_load_as_tables_or_networks(tmp_path: Path) -> None:
    nets, remembering = save_member(tmp_path / "net"), save_member(tmp_path / "gru", gru_units=4)
    write_table(tmp_path / "table", uniform_policy(TREE))
    table = {"table": tmp_path / "table"}
    reader = MemberLoader(ENV, TREE)
    assert isinstance(reader.member("it", nets, [1]), TableMember)
    assert reader.member("it", nets, [1]) is reader.member("it", {}, [1])  # read once
    assert isinstance(MemberLoader(ENV, TREE).member("it", remembering, [1]), NetMember)
    assert isinstance(MemberLoader(ENV).member("it", nets, [1]), NetMember)
    assert isinstance(MemberLoader(ENV, TREE, tables=False).member("table", table, [1]), TableMember)
    assert isinstance(reader.member(UNIFORM_MEMBER, {}, [0]), TableMember)
    assert isinstance(MemberLoader(ENV).member(UNIFORM_MEMBER, {}, [0]), UniformMember)
    np.testing.assert_array_equal(reader.policy("table", table), uniform_policy(TREE))


def test_least_recently_used_members_are_dropped_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_loader, "MAX_MEMBERS", 2)
    members = {}
    for number, name in enumerate("abc"):
        write_table(tmp_path / name, np.tile([number / 4, 1 - number / 4], (len(uniform_policy(TREE)), 1)))
        members[name] = tmp_path / name
    reader = MemberLoader(ENV, TREE)
    first = {name: reader.member(name, members, [1]) for name in "ab"}
    assert reader.member("a", members, [1]) is first["a"]
    reader.member("c", members, [1])
    assert reader.member("a", members, [1]) is first["a"]
    again = reader.member("b", members, [1])
    assert again is not first["b"]
    assert [reader.policy(name, members)[0, 0] for name in "abca"] == [0, 0.25, 0.5, 0]


def test_members_without_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is recurrent, so its play is not a table"):
        MemberLoader(ENV, TREE).policy("it", save_member(tmp_path, gru_units=4))
    with pytest.raises(ValueError, match="has no rules here"):
        MemberLoader(ENV).policy(UNIFORM_MEMBER, {})
    with pytest.raises(ValueError, match='does not bring the files of member "who"'):
        MemberLoader(ENV, TREE).policy("who", {})


def test_perfect_recall_table_is_refused_for_ambiguous_observations(tmp_path: Path) -> None:
    """If all information states look equal, only a policy with the same plan everywhere can play by observations."""
    blind = replace(TREE, info_state_tensors=np.zeros_like(TREE.info_state_tensors))
    write_table(tmp_path / "even", uniform_policy(TREE))
    write_table(tmp_path / "odd", np.eye(2)[np.arange(len(TREE.state_player)) % 2])
    members = {name: tmp_path / name for name in ("even", "odd")}
    even = MemberLoader(ENV, blind).member("even", members, [0])
    assert isinstance(even, TableMember) and even.table.tolist() == [[0.5, 0.5]]
    with pytest.raises(ValueError, match="member odd plays differently at equal observations in kuhn_poker"):
        MemberLoader(ENV, blind).member("odd", members, [0])


def test_members_play_as_themselves_if_observations_hide_the_legal_actions(tmp_path: Path) -> None:
    """No table by observation can represent them there, since legal actions differ between states of one
    observation."""
    some = TREE.action_mask.copy()
    some[::2, 1] = False
    blind = replace(TREE, info_state_tensors=np.zeros_like(TREE.info_state_tensors), action_mask=some)
    loader, members = MemberLoader(ENV, blind), save_member(tmp_path)
    assert isinstance(loader.member("it", members, [1]), NetMember)
    assert isinstance(loader.member(UNIFORM_MEMBER, {}, [0]), UniformMember)
    assert loader.policy("it", members)[::2, 0].tolist() == [1.0] * len(some[::2])
