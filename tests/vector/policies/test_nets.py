"""Networks at seats: assignment, inputs, and agreement of sampling and training."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv, VectorStep, empty_step
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.layers import Net, NetConfig, make_generators
from palestra.vector.nets.normalise import RunningNorm
from palestra.vector.nets.seat_mapping import SeatMapping, group_into_stacks
from palestra.vector.policies.base import ScriptedVectorPolicy, UniformVectorPolicy
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy, greedy_selector


class RandomObservations(VectorEnv):
    """Seats observe random numbers; an observation starts with its seat's number. No game ends."""

    name = "room"

    def __init__(self, views: list[int], actions: list[Space], games: int = 3) -> None:
        self.num_envs, self.seats = games, tuple(f"seat{i}" for i in range(len(views)))
        self.observation_shapes, self.action_spaces = tuple((v,) for v in views), tuple(actions)
        masks = max(a.n for a in actions if isinstance(a, Discrete)) if isinstance(actions[0], Discrete) else None
        self.vector_step = empty_step(games, len(views), (max(views),), num_actions=masks)

    def reset(self, seeds: np.ndarray) -> VectorStep:
        frame, rng = self.vector_step, np.random.default_rng(int(seeds[0]))
        for n, (width,) in enumerate(self.observation_shapes):
            frame.obs[:, n, :width] = rng.normal(size=(self.num_envs, width))
            frame.obs[:, n, 0] = n
            if frame.action_mask is not None:
                size = self.action_spaces[n].n  # type: ignore[union-attr]
                frame.action_mask[:, n] = np.arange(frame.action_mask.shape[2]) < size
                frame.action_mask[:, n, :size] &= rng.random((self.num_envs, size)) < 0.7
                frame.action_mask[:, n, 0] = True
        return frame

    def step(self, actions: np.ndarray) -> VectorStep:
        return self.vector_step


FOUR = Discrete(4)
FRESH = np.zeros(3, bool)


def player(
    env: RandomObservations, seats: dict[str, list[int]], config: NetConfig, choose: ActionSelector | None = None
) -> NetVectorPolicy:
    """Policies that fit in one stack; the weights of a name are always the same."""
    (seating,) = group_into_stacks(env, seats, dict.fromkeys(seats, config))
    head = make_head(seating.action_space)
    seeds = [int.from_bytes(name.encode(), "big") for name in seating.names]
    net = Net(seating.input_shape, head.outputs, config, make_generators(seeds))
    made = NetVectorPolicy(seating, net, choose or head.sample)
    made.reset_rng(0)
    return made


# ---- assignment to seats


def test_policies_of_equal_shape_share_a_stack() -> None:
    env = RandomObservations([4, 4, 6, 4, 4], [FOUR] * 5)
    seats = {"a": [0], "b": [1], "c": [2], "d": [3, 4]}
    stacks = group_into_stacks(env, seats, dict.fromkeys(seats, NetConfig()))
    assert [(stack.names, stack.seats, stack.observation_shape) for stack in stacks] == [
        (("a", "b"), ((0,), (1,)), (4,)),
        (("c",), ((2,),), (6,)),
        (("d",), ((3, 4),), (4,)),
    ]


def test_policies_of_different_shape_do_not_share_a_stack() -> None:
    env = RandomObservations([4, 4, 4], [FOUR, FOUR, Discrete(3)])
    kinds = {"a": NetConfig(), "b": NetConfig(hidden=[8]), "c": NetConfig()}
    assert [stack.names for stack in group_into_stacks(env, {"a": [0], "b": [1], "c": [2]}, kinds)] == [
        ("a",),
        ("b",),
        ("c",),
    ]


def test_policy_cannot_play_seats_of_different_spaces() -> None:
    env = RandomObservations([4, 6], [FOUR] * 2)
    with pytest.raises(
        ValueError, match="policy both plays seat0, seat1, which differ in observation shape or action space"
    ):
        group_into_stacks(env, {"both": [0, 1]}, {"both": NetConfig()})


@given(st.permutations(range(6)), st.sampled_from([1, 2, 3, 6]), st.integers(0, 2))
@settings(max_examples=30)
def test_stack_rows_map_to_member_seats(order: list[int], members: int, lead: int) -> None:
    each = 6 // members
    seats = tuple(tuple(order[p * each : (p + 1) * each]) for p in range(members))
    seating = SeatMapping(tuple("abcdef"[:members]), seats, 6, (2,), FOUR)
    array = np.random.default_rng(0).normal(size=(*(5, 3)[:lead], 6, 2)).astype(np.float32)
    taken = seating.select_seats(array, lead)
    for p, own in enumerate(seats):
        for s, seat in enumerate(own):
            np.testing.assert_array_equal(taken[p, ..., s, :], array[..., seat, :])
    if lead == 1:
        put = np.zeros_like(array)
        put[:, seating.all_seats] = seating.in_seat_order(taken)
        np.testing.assert_array_equal(put, array)


def test_inputs_have_no_padding_and_a_seat_one_hot() -> None:
    seating = SeatMapping(("a",), ((2, 0),), 3, (2,), FOUR, seat_id=True)
    obs = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    assert seating.input_shape == (5,)
    assert seating.network_inputs(obs, 1)[0, 0].tolist() == [[8, 9, 0, 0, 1], [0, 1, 1, 0, 0]]


def test_seat_one_hot_is_for_policies_of_several_seats() -> None:
    class CustomNetConfig(NetConfig):
        seat_one_hot: bool = True

    env = RandomObservations([4, 4, 4], [FOUR] * 3)
    stacks = group_into_stacks(env, {"a": [0], "b": [1, 2]}, dict.fromkeys("ab", CustomNetConfig()))
    assert [stack.seat_id for stack in stacks] == [False, True]


# ---- acting


@pytest.mark.parametrize("space", [FOUR, MultiDiscrete((2, 3)), Continuous((-1.0, 0.0), (1.0, 4.0))])
@pytest.mark.parametrize("memory", [0, 5])
def test_sampled_logprobs_equal_the_trainers(space: Space, memory: int) -> None:
    env = RandomObservations([4, 4, 4, 4], [space] * 4)
    made = player(env, {"a": [2, 0], "b": [3, 1]}, NetConfig(hidden=[8], gru_units=memory))
    frame, kept = env.reset(np.array([1])), made.initial_state(3)
    if memory:
        kept = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
    actions, logp, _ = made.act(frame, kept, FRESH)
    assert logp is not None and logp.shape == (3, 4) and made.seats == [2, 0, 3, 1]
    views = made.seat_mapping.network_inputs(frame.obs, 1).flatten(1, 2)[:, None]
    out, _ = made.net.unroll(views, kept)
    action_mask = (
        None
        if frame.action_mask is None
        else made.seat_mapping.select_seats(frame.action_mask, 1).flatten(1, 2)[:, None]
    )
    full = torch.zeros(3, 4, *actions.shape[2:])
    full[:, made.seats] = torch.from_numpy(actions).float()
    taken = made.seat_mapping.select_seats(full, 1).flatten(1, 2)[:, None]
    taken = taken if isinstance(space, Continuous) else taken.long()
    scored, _ = make_head(space).evaluate_actions(out, taken, action_mask)
    shown = made.seat_mapping.select_seats(torch.from_numpy(logp[:, [1, 3, 0, 2]]), 1).flatten(1, 2)[:, None]
    torch.testing.assert_close(scored, shown, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", [0, 5])
def test_policy_outputs_do_not_depend_on_the_stack(memory: int) -> None:
    env, config = RandomObservations([4, 4, 4], [FOUR] * 3), NetConfig(hidden=[8], gru_units=memory)
    best = greedy_selector(make_head(FOUR))
    frame = env.reset(np.array([3]))
    both = player(env, {"a": [2], "b": [0]}, config, best)
    together, _, memories = both.act(frame, both.initial_state(3), FRESH)
    for column, (name, seat) in enumerate((("a", 2), ("b", 0))):
        one = player(env, {name: [seat]}, config, best)
        alone, _, kept = one.act(frame, one.initial_state(3), FRESH)
        np.testing.assert_array_equal(together[:, column], alone[:, 0])
        if memory:
            assert memories is not None and kept is not None
            torch.testing.assert_close(memories[column], kept[0])


def test_only_legal_actions_are_played() -> None:
    env = RandomObservations([4, 4, 5], [FOUR, FOUR, Discrete(2)])
    seats = [player(env, {"a": [0, 1]}, NetConfig()), player(env, {"c": [2]}, NetConfig())]
    best = [player(env, {"a": [0, 1]}, NetConfig(), greedy_selector(make_head(FOUR)))]
    for seed in range(20):
        frame = env.reset(np.array([seed]))
        for made in [*seats, *best, UniformVectorPolicy(env, [2, 0])]:
            made.reset_rng(seed)
            actions, _, _ = made.act(frame, made.initial_state(3), FRESH)
            assert np.take_along_axis(frame.action_mask[:, made.seats], actions[..., None], 2).all()


def test_recurrent_state_is_reset_at_episode_start() -> None:
    env = RandomObservations([4, 4], [FOUR] * 2)
    made = player(env, {"a": [0, 1]}, NetConfig(hidden=[8], gru_units=5), greedy_selector(make_head(FOUR)))
    frame, empty = env.reset(np.array([0])), made.initial_state(3)
    assert empty is not None
    full = torch.randn(empty.shape, generator=torch.Generator().manual_seed(0))
    _, _, mixed = made.act(frame, full, np.array([False, True, False]))
    _, _, begun = made.act(frame, empty, FRESH)
    _, _, gone_on = made.act(frame, full, FRESH)
    assert mixed is not None and begun is not None and gone_on is not None
    rows = {0: gone_on, 1: begun, 2: gone_on}  # two seats in each game
    for game, expected in rows.items():
        columns = slice(2 * game, 2 * game + 2)
        torch.testing.assert_close(mixed[:, columns], expected[:, columns])
    assert not torch.allclose(begun, gone_on)


def test_observations_are_normalised() -> None:
    env = RandomObservations([4, 4], [FOUR] * 2)
    plain = player(env, {"a": [0, 1]}, NetConfig())
    norm = RunningNorm(1, 4)
    rows = torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1
    norm.update(rows, torch.ones(1, 50))
    scaled = NetVectorPolicy(plain.seat_mapping, plain.net, plain.selector, [7], norm)
    scaled.reset_rng(0)
    frame = env.reset(np.array([0]))
    _, logp, _ = scaled.act(frame, None, FRESH)
    frame.obs[:] = norm.normalise(torch.from_numpy(frame.obs.reshape(1, 6, 4))).view(3, 2, 4)
    plain.reset_rng(0)
    _, expected, _ = plain.act(frame, None, FRESH)
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-6)
    assert scaled.names == ["a@7"] and plain.names == ["a@0"]


def test_script_actions_are_in_seat_order() -> None:
    env = RandomObservations([4, 4, 4], [FOUR] * 3)
    actions, logp, memory = ScriptedVectorPolicy(
        env, [2, 0], lambda env, seat: np.full(env.num_envs, seat, np.int32)
    ).act(env.reset(np.array([0])), None, FRESH)
    assert actions.tolist() == [[2, 0]] * 3 and logp is None and memory is None
