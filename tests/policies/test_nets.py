"""Networks at seats: who sits where, what they see, and that sampler and trainer agree."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.envs.vector.base import Continuous, Discrete, Frame, MultiDiscrete, Space, VectorEnv, empty_frame
from palestra.nets.heads import head_for
from palestra.nets.layers import Net, NetConfig, generators
from palestra.nets.normalise import RunningNorm
from palestra.nets.seating import Seating, seat_stacks
from palestra.policies.nets import Choose, NetPlayer, greedy, sampling
from palestra.policies.vector import Scripted, Uniform


class Room(VectorEnv):
    """Seats that see random numbers; a view starts with its seat's number. Nothing ever happens."""

    name = "room"

    def __init__(self, views: list[int], actions: list[Space], games: int = 3) -> None:
        self.games, self.seats = games, tuple(f"seat{i}" for i in range(len(views)))
        self.views, self.actions = tuple((v,) for v in views), tuple(actions)
        masks = max(a.n for a in actions if isinstance(a, Discrete)) if isinstance(actions[0], Discrete) else None
        self.frame = empty_frame(games, len(views), (max(views),), actions=masks)

    def reset(self, seeds: np.ndarray) -> Frame:
        frame, rng = self.frame, np.random.default_rng(int(seeds[0]))
        for n, (width,) in enumerate(self.views):
            frame.obs[:, n, :width] = rng.normal(size=(self.games, width))
            frame.obs[:, n, 0] = n
            if frame.legal is not None:
                size = self.actions[n].n  # type: ignore[union-attr]
                frame.legal[:, n] = np.arange(frame.legal.shape[2]) < size
                frame.legal[:, n, :size] &= rng.random((self.games, size)) < 0.7
                frame.legal[:, n, 0] = True
        return frame

    def step(self, actions: np.ndarray) -> Frame:
        return self.frame


FOUR = Discrete(4)
FRESH = np.zeros(3, bool)


def player(env: Room, seats: dict[str, list[int]], config: NetConfig, choose: Choose | None = None) -> NetPlayer:
    """Policies that fit one stack; the weights of a name are always the same."""
    (seating,) = seat_stacks(env, seats, dict.fromkeys(seats, config))
    head = head_for(seating.space)
    seeds = [int.from_bytes(name.encode(), "big") for name in seating.names]
    net = Net(seating.inputs, head.outputs, config, generators(seeds))
    made = NetPlayer(seating, net, choose or sampling(head))
    made.begin(0)
    return made


# ---- who sits where


def test_policies_of_one_shape_share_a_stack() -> None:
    env = Room([4, 4, 6, 4, 4], [FOUR] * 5)
    seats = {"a": [0], "b": [1], "c": [2], "d": [3, 4]}
    stacks = seat_stacks(env, seats, dict.fromkeys(seats, NetConfig()))
    assert [(stack.names, stack.seats, stack.view) for stack in stacks] == [
        (("a", "b"), ((0,), (1,)), (4,)),
        (("c",), ((2,),), (6,)),
        (("d",), ((3, 4),), (4,)),
    ]


def test_policies_of_different_networks_or_actions_do_not() -> None:
    env = Room([4, 4, 4], [FOUR, FOUR, Discrete(3)])
    kinds = {"a": NetConfig(), "b": NetConfig(hidden=[8]), "c": NetConfig()}
    assert [stack.names for stack in seat_stacks(env, {"a": [0], "b": [1], "c": [2]}, kinds)] == [
        ("a",),
        ("b",),
        ("c",),
    ]


def test_a_policy_cannot_play_seats_of_different_kinds() -> None:
    env = Room([4, 6], [FOUR] * 2)
    with pytest.raises(ValueError, match="policy both plays seat0, seat1, which differ in what they see or may do"):
        seat_stacks(env, {"both": [0, 1]}, {"both": NetConfig()})


@given(st.permutations(range(6)), st.sampled_from([1, 2, 3, 6]), st.integers(0, 2))
@settings(max_examples=30)
def test_rows_of_a_stack_are_the_seats_of_its_members(order: list[int], members: int, lead: int) -> None:
    each = 6 // members
    seats = tuple(tuple(order[p * each : (p + 1) * each]) for p in range(members))
    seating = Seating(tuple("abcdef"[:members]), seats, 6, (2,), FOUR)
    array = np.random.default_rng(0).normal(size=(*(5, 3)[:lead], 6, 2)).astype(np.float32)
    taken = seating.take(array, lead)
    for p, own in enumerate(seats):
        for s, seat in enumerate(own):
            np.testing.assert_array_equal(taken[p, ..., s, :], array[..., seat, :])
    if lead == 1:
        put = np.zeros_like(array)
        put[:, seating.flat] = seating.put(taken)
        np.testing.assert_array_equal(put, array)


def test_padding_is_cut_off_and_a_seat_is_told_its_number() -> None:
    seating = Seating(("a",), ((2, 0),), 3, (2,), FOUR, seat_id=True)
    obs = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    assert seating.inputs == (5,)
    assert seating.observe(obs, 1)[0, 0].tolist() == [[8, 9, 0, 0, 1], [0, 1, 1, 0, 0]]


def test_only_who_plays_several_seats_is_told_which() -> None:
    class Told(NetConfig):
        seat_id: bool = True

    env = Room([4, 4, 4], [FOUR] * 3)
    stacks = seat_stacks(env, {"a": [0], "b": [1, 2]}, dict.fromkeys("ab", Told()))
    assert [stack.seat_id for stack in stacks] == [False, True]


# ---- how they act


@pytest.mark.parametrize("space", [FOUR, MultiDiscrete((2, 3)), Continuous((-1.0, 0.0), (1.0, 4.0))])
@pytest.mark.parametrize("memory", [0, 5])
def test_what_the_sampler_says_of_an_action_is_what_the_trainer_finds(space: Space, memory: int) -> None:
    env = Room([4, 4, 4, 4], [space] * 4)
    made = player(env, {"a": [2, 0], "b": [3, 1]}, NetConfig(hidden=[8], memory=memory))
    frame, kept = env.reset(np.array([1])), made.empty(3)
    if memory:
        kept = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
    actions, logp, _ = made.act(frame, kept, FRESH)
    assert logp is not None and logp.shape == (3, 4) and made.seats == [2, 0, 3, 1]
    views = made.seating.observe(frame.obs, 1).flatten(1, 2)[:, None]
    out, _ = made.net.unroll(views, kept)
    legal = None if frame.legal is None else made.seating.take(frame.legal, 1).flatten(1, 2)[:, None]
    full = torch.zeros(3, 4, *actions.shape[2:])
    full[:, made.seats] = torch.from_numpy(actions).float()
    taken = made.seating.take(full, 1).flatten(1, 2)[:, None]
    taken = taken if isinstance(space, Continuous) else taken.long()
    scored, _ = head_for(space).score(out, taken, legal)
    shown = made.seating.take(torch.from_numpy(logp[:, [1, 3, 0, 2]]), 1).flatten(1, 2)[:, None]
    torch.testing.assert_close(scored, shown, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [0, 5])
def test_a_policy_plays_the_same_in_any_company(memory: int) -> None:
    env, config = Room([4, 4, 4], [FOUR] * 3), NetConfig(hidden=[8], memory=memory)
    best = greedy(head_for(FOUR))
    frame = env.reset(np.array([3]))
    both = player(env, {"a": [2], "b": [0]}, config, best)
    together, _, memories = both.act(frame, both.empty(3), FRESH)
    for column, (name, seat) in enumerate((("a", 2), ("b", 0))):
        one = player(env, {name: [seat]}, config, best)
        alone, _, kept = one.act(frame, one.empty(3), FRESH)
        np.testing.assert_array_equal(together[:, column], alone[:, 0])
        if memory:
            assert memories is not None and kept is not None
            torch.testing.assert_close(memories[column], kept[0])


def test_nothing_illegal_is_played() -> None:
    env = Room([4, 4, 5], [FOUR, FOUR, Discrete(2)])
    seats = [player(env, {"a": [0, 1]}, NetConfig()), player(env, {"c": [2]}, NetConfig())]
    best = [player(env, {"a": [0, 1]}, NetConfig(), greedy(head_for(FOUR)))]
    for seed in range(20):
        frame = env.reset(np.array([seed]))
        for made in [*seats, *best, Uniform(env, [2, 0])]:
            made.begin(seed)
            actions, _, _ = made.act(frame, made.empty(3), FRESH)
            assert np.take_along_axis(frame.legal[:, made.seats], actions[..., None], 2).all()


def test_memory_is_emptied_where_a_game_begins() -> None:
    env = Room([4, 4], [FOUR] * 2)
    made = player(env, {"a": [0, 1]}, NetConfig(hidden=[8], memory=5), greedy(head_for(FOUR)))
    frame, empty = env.reset(np.array([0])), made.empty(3)
    assert empty is not None
    full = torch.randn(empty.shape, generator=torch.Generator().manual_seed(0))
    _, _, mixed = made.act(frame, full, np.array([False, True, False]))
    _, _, begun = made.act(frame, empty, FRESH)
    _, _, gone_on = made.act(frame, full, FRESH)
    assert mixed is not None and begun is not None and gone_on is not None
    rows = {0: gone_on, 1: begun, 2: gone_on}  # two seats a game
    for game, expected in rows.items():
        columns = slice(2 * game, 2 * game + 2)
        torch.testing.assert_close(mixed[:, columns], expected[:, columns])
    assert not torch.allclose(begun, gone_on)


def test_views_are_normalised_before_the_network_sees_them() -> None:
    env = Room([4, 4], [FOUR] * 2)
    plain = player(env, {"a": [0, 1]}, NetConfig())
    norm = RunningNorm(1, 4)
    rows = torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1
    norm.see(rows, torch.ones(1, 50))
    scaled = NetPlayer(plain.seating, plain.net, plain.choose, [7], norm.normalise)
    scaled.begin(0)
    frame = env.reset(np.array([0]))
    _, logp, _ = scaled.act(frame, None, FRESH)
    frame.obs[:] = norm.normalise(torch.from_numpy(frame.obs.reshape(1, 6, 4))).view(3, 2, 4)
    plain.begin(0)
    _, expected, _ = plain.act(frame, None, FRESH)
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-6)
    assert scaled.names == ["a@7"] and plain.names == ["a@0"]


def test_a_script_plays_its_seats_in_order() -> None:
    env = Room([4, 4, 4], [FOUR] * 3)
    actions, logp, memory = Scripted(env, [2, 0], lambda env, seat: np.full(env.games, seat, np.int32)).act(
        env.reset(np.array([0])), None, FRESH
    )
    assert actions.tolist() == [[2, 0]] * 3 and logp is None and memory is None
