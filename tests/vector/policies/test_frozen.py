"""Frozen members: grouped members play as each does alone, and tabular members play their probabilities."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorStep, empty_step
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.layers import Net, NetConfig, make_generators
from palestra.vector.nets.normalise import RunningNorm
from palestra.vector.nets.seat_mapping import SeatMapping
from palestra.vector.policies.frozen import (
    MIN_BLOCK_ROWS,
    ActBatch,
    InfoStateIndex,
    NetGroup,
    NetMember,
    TableGroup,
    TableMember,
    assign_blocks,
)
from palestra.vector.policies.nets import NetVectorPolicy, greedy_selector

SMALL = NetConfig(hidden=[8])
VIEW = 5


def net(
    seed: int, config: NetConfig = SMALL, space: Space = Discrete(3), *, norm: bool = False, seat_id: bool = False
) -> NetMember:
    """A network that plays greedily at seat 1 of 2."""
    seating = SeatMapping(("m",), ((1,),), 2, (VIEW,), space, seat_id)
    head = make_head(space)
    scale = None
    if norm:
        (size,) = seating.input_shape
        scale = RunningNorm(1, size)
        scale.update(seed + 3 * torch.randn(1, 50, size, generator=noise(seed)), torch.ones(1, 50))
    return NetMember(
        seating, Net(seating.input_shape, head.outputs, config, make_generators([seed])), head, scale, greedy=True
    )


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(seed: int, games: int, members: np.ndarray, memory: int = 0, actions: int | None = 3) -> ActBatch:
    """Rows of seat 1 in a vector step of random observations."""
    rng = np.random.default_rng(seed)
    frame = empty_step(games, 2, (VIEW,), num_actions=actions)
    frame.obs[:] = rng.normal(size=frame.obs.shape)
    if frame.action_mask is not None:
        frame.action_mask[:, :, 0] = rng.random((games, 2)) < 0.5
    here = np.arange(len(members))
    remembered = torch.from_numpy(rng.normal(size=(len(members), memory)).astype(np.float32))
    is_first = rng.random(len(members)) < 0.3
    return ActBatch(frame, here, np.ones_like(here), members, remembered, is_first, rng, noise(seed))


def play_alone(member: NetMember, given: ActBatch) -> tuple[np.ndarray, torch.Tensor | None]:
    """The actions of a member in all games, played alone, and its recurrent state afterwards."""
    player = NetVectorPolicy(member.seat_mapping, member.net, greedy_selector(member.head), norm=member.norm)
    memory = given.recurrent_state[None] if given.recurrent_state.shape[1] else None
    actions, _, kept = player.act(given.frame, memory, given.is_first)
    return actions[:, 0], None if kept is None else kept[0]


@settings(max_examples=40, deadline=None)
@given(
    members=st.lists(st.integers(0, 4), min_size=1, max_size=70),
    memory=st.sampled_from([0, 6]),
    norm=st.booleans(),
    seat_id=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_group_plays_as_its_members_alone(
    members: list[int], memory: int, norm: bool, seat_id: bool, seed: int
) -> None:
    config = NetConfig(hidden=[8], gru_units=memory)
    cast = [net(i, config, norm=norm, seat_id=seat_id) for i in range(5)]
    who = np.array(members)
    given = rows(seed, len(who), who, memory)
    actions, kept = NetGroup(cast).act(given)
    for number, member in enumerate(cast):
        wanted, remembered = play_alone(member, given)
        np.testing.assert_array_equal(actions[who == number], wanted[who == number])
        if remembered is not None:
            assert kept is not None
            torch.testing.assert_close(kept[who == number], remembered[who == number])


@pytest.mark.parametrize("seed", range(4))
def test_members_clip_normalised_observations_alone_and_in_a_group(seed: int) -> None:
    """Each at its own limit: observations of 50 deviations distinguish members that clip from those that do not."""
    cast = [net(i, norm=True) for i in range(3)]
    for member, clip in zip(cast, (10.0, 0.5, math.inf), strict=True):
        assert member.norm
        member.norm.clip = clip
    who = np.repeat(np.arange(3), 40)
    given = rows(seed, len(who), who)
    given.frame.obs[:] *= 150
    together, _ = NetGroup(cast).act(given)
    unclipped = play_alone(replace(cast[1], norm=None), given)[0]
    for number, member in enumerate(cast):
        own = np.flatnonzero(who == number)
        wanted, _ = play_alone(member, given)
        np.testing.assert_array_equal(together[own], wanted[own])
        single, _ = NetGroup([member]).act(replace(given, member_index=np.zeros_like(who)))
        np.testing.assert_array_equal(single[own], wanted[own])
    assert (unclipped[who == 1] != together[who == 1]).any()


@pytest.mark.parametrize("space", [MultiDiscrete((2, 3)), Continuous((-1.0, 0.0), (1.0, 4.0))])
def test_group_supports_every_action_space(space: Space) -> None:
    cast = [net(i, space=space) for i in range(3)]
    who = np.arange(12) % 3
    given = rows(0, 12, who, actions=None)
    actions, _ = NetGroup(cast).act(given)
    for number, member in enumerate(cast):
        np.testing.assert_allclose(actions[who == number], play_alone(member, given)[0][who == number], rtol=1e-5)


def test_live_member_uses_its_current_weights() -> None:
    member = net(0)
    live = NetMember(member.seat_mapping, member.net, member.head, greedy=True, live=True)
    group, given = NetGroup([live]), rows(0, 30, np.zeros(30, np.int64))
    before = group.act(given)[0]
    with torch.no_grad():
        for parameter in member.net.parameters():
            parameter.normal_(generator=noise(1))
    after = group.act(given)[0]
    assert (before != after).any()
    np.testing.assert_array_equal(after, play_alone(member, given)[0])


def test_group_does_not_change_its_members() -> None:
    cast = [net(i) for i in range(3)]
    before = [p.detach().clone() for member in cast for p in member.net.parameters()]
    NetGroup(cast).act(rows(0, 9, np.arange(9) % 3))
    for old, new in zip(before, (p for member in cast for p in member.net.parameters()), strict=True):
        assert torch.equal(old, new)


def test_group_key_separates_incompatible_networks() -> None:
    one = net(0)
    assert one.group_key == net(1).group_key
    others = [net(0, NetConfig(hidden=[9])), net(0, NetConfig(hidden=[8], activation="relu")), net(0, norm=True)]
    others += [net(0, NetConfig(hidden=[8], attention_heads=2))]  # the same weights, used in another way
    others += [net(0, space=Discrete(4)), net(0, seat_id=True), NetMember(one.seat_mapping, one.net, one.head)]
    assert one.group_key not in {other.group_key for other in others}


@given(members=st.lists(st.integers(0, 30), min_size=1, max_size=300))
def test_row_blocks_belong_to_one_member_with_little_padding(members: list[int]) -> None:
    rows, there = np.array(members), len(set(members))
    who, place, width = assign_blocks(rows)
    assert len(set(place.tolist())) == len(rows)
    np.testing.assert_array_equal(who[place // width], rows)
    assert len(who) * width <= 2 * len(rows) + MIN_BLOCK_ROWS * there


# ---- tables


def frame_of(views: np.ndarray) -> VectorStep:
    frame = empty_step(len(views), 2, views.shape[1:], num_actions=3)
    frame.obs[:, 1] = views
    return frame


def test_table_policy_samples_its_probabilities() -> None:
    views = np.array([[0, 1, 0.5], [1, 0, 0.5], [1, 1, -2]], np.float32)
    tables = np.array([[[0.2, 0.5, 0.3], [0, 1, 0], [0.5, 0, 0.5]], [[1, 0, 0], [0, 0, 1], [0, 1, 0]]])
    known = InfoStateIndex(views)
    group = TableGroup([TableMember(known, table) for table in tables])
    games = 6000
    at, who = np.arange(games) % 3, np.arange(games) // 3 % 2
    here, rng = np.arange(games), np.random.default_rng(0)
    given = ActBatch(frame_of(views[at]), here, np.ones_like(here), who, torch.zeros(games, 0), here < 0, rng, noise(0))
    actions, _ = group.act(given)
    for member in (0, 1):
        for state in range(3):
            drawn = actions[(who == member) & (at == state)]
            share = np.bincount(drawn, minlength=3) / len(drawn)
            assert (share[tables[member, state] == 0] == 0).all()
            np.testing.assert_allclose(share, tables[member, state], atol=5 * 0.5 / np.sqrt(1000))


def test_observations_are_found_in_the_index() -> None:
    views = np.random.default_rng(0).integers(0, 2, (3000, 14)).astype(np.float32)
    views = np.unique(views, axis=0)
    known = InfoStateIndex(views)
    np.testing.assert_array_equal(known.find(views), np.arange(len(views)))
    np.testing.assert_array_equal(known.find(-views[:1] * 0), known.find(views[:1] * 0))
    assert (known.find(views + 2) == -1).all()


def test_ambiguous_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="information state 2 has the observation of an earlier one"):
        InfoStateIndex(np.array([[1, 0], [0, 1], [1, 0]], np.float32))


def test_table_of_another_game_is_refused() -> None:
    group = TableGroup([TableMember(InfoStateIndex(np.eye(3, dtype=np.float32)), np.full((3, 3), 1 / 3))])
    here = np.arange(2)
    frame = frame_of(np.array([[1, 0, 0], [1, 1, 0]], np.float32))
    given = ActBatch(
        frame, here, here * 0 + 1, here * 0, torch.zeros(2, 0), here < 0, np.random.default_rng(0), noise(0)
    )
    with pytest.raises(ValueError, match="has no entry for an observation of seat 1"):
        group.act(given)
