"""Gymnasium's envs equal Gymnasium's own, and its spaces are converted to palestra's."""

from collections import Counter
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.mortal_games import Trio

from palestra.envs.adapters.gymnasium import (
    GymnasiumEnv,
    GymnasiumGame,
    action_decoder,
    gymnasium_space,
    obs_encoder,
    split_action_mask,
)
from palestra.envs.batch.sync_vector import SyncVectorEnv, episode_seed
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete
from palestra.envs.vector_check import check_vector_env, random_actions


@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"max_episode_steps": 50}),
        ("Taxi-v4", {"max_episode_steps": 40}),
        ("FrozenLake-v1", {"is_slippery": True}),
    ],
)
@pytest.mark.few(2)
def test_envs_pass_the_vector_env_check(id: str, options: dict[str, Any]) -> None:
    check_vector_env(lambda games: GymnasiumEnv(games, id=id, options=options), steps=120)


def test_cart_pole_equals_gymnasium() -> None:
    """Two games from seeds 3 and 4, each beside an env of Gymnasium; the next game's seed follows from the first's."""
    env, seeds = GymnasiumEnv(2), [3, 4]
    theirs = [gymnasium.make("CartPole-v1") for _ in seeds]
    frame, rng, played = env.reset(np.array(seeds)), np.random.default_rng(0), [0, 0]
    assert env.seats == ("agent",) and env.observation_shapes == ((4,),) and env.action_spaces == (Discrete(2),)
    assert frame.obs[:, 0].tolist() == [
        one.reset(seed=seed)[0].tolist() for one, seed in zip(theirs, seeds, strict=True)
    ]
    for _ in range(100):
        actions = rng.integers(0, 2, (2, 1), dtype=np.int32)
        frame = env.step(actions)
        for b, one in enumerate(theirs):
            seen, reward, terminated, truncated, _ = one.step(int(actions[b, 0]))
            assert (frame.rewards[b, 0], frame.terminated[b], frame.truncated[b]) == (reward, terminated, truncated)
            if terminated or truncated:
                assert frame.final_obs[b, 0].tolist() == seen.tolist()
                played[b] += 1
                seen = one.reset(seed=episode_seed(seeds[b], played[b]))[0]
            assert frame.obs[b, 0].tolist() == seen.tolist()
    assert min(played) > 1


def test_pendulum_clips_actions_to_its_bounds() -> None:
    """A torque of 9 is clipped to the bound of 2; rewards and observations equal Gymnasium's to the precision of
    float32."""
    env, theirs = GymnasiumEnv(1, id="Pendulum-v1"), gymnasium.make("Pendulum-v1")
    assert env.action_spaces == (Continuous((-2.0,), (2.0,)),)
    env.reset(np.array([7]))
    theirs.reset(seed=7)
    for number in range(200):
        frame = env.step(np.array([[[9.0]]], np.float32))
        seen, reward, *_ = theirs.step(np.array([2.0], np.float32))
        assert frame.rewards[0, 0] == np.float32(reward)
        assert frame.truncated[0] == (number == 199)
        assert np.array_equal(frame.final_obs[0, 0] if number == 199 else frame.obs[0, 0], seen)


def test_actions_of_a_box_of_doubles_are_within_its_bounds() -> None:
    """0.1 in float32, to which actions are clipped, is larger than 0.1 in float64."""
    space = spaces.Box(np.array([-0.1, 0.0]), np.array([0.1, 0.3]), dtype=np.float64)
    for action in ([0.1, 0.3], [-0.1, 0.0]):
        assert space.contains(action_decoder(space, "a seat").decode(np.array(action, np.float32)))


def test_taxi_has_an_action_mask() -> None:
    env, theirs = GymnasiumEnv(1, id="Taxi-v4"), gymnasium.make("Taxi-v4")
    for seed in range(5):
        frame = env.reset(np.array([seed]))
        seen, info = theirs.reset(seed=seed)
        assert (
            frame.action_mask is not None
            and frame.action_mask[0, 0].tolist() == info["action_mask"].astype(bool).tolist()
        )
        assert frame.obs[0, 0].argmax() == seen and frame.obs[0, 0].sum() == 1


class Masked(gymnasium.Env[Any, Any]):
    """An env of any action space that returns a mask of legal actions."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, actions: spaces.Space[Any]) -> None:
        self.action_space = actions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {"action_mask": np.array([1, 0], np.int8)}


@pytest.mark.parametrize(
    "actions", [spaces.MultiDiscrete([2, 2]), spaces.Box(0, 1, (2,)), spaces.Tuple([spaces.Discrete(2)] * 2)]
)
def test_unsupported_action_masks_are_refused(actions: Any) -> None:
    env = Masked(actions)
    if isinstance(actions, spaces.Tuple):
        env.observation_space = spaces.Tuple([Masked.observation_space] * 2)
    with pytest.raises(ValueError, match="gives an action_mask, which is only used for one Discrete action of a seat"):
        GymnasiumGame(lambda: env)
    assert GymnasiumGame(lambda: Masked(spaces.Discrete(2))).spec.has_action_mask


class MaskedShop(gymnasium.Env[Any, Any]):
    """Each seat may sell (0), and buy (1) while it has less than 2; 2 is never legal. A mask is part of each
    observation; a game has 3 steps, and `taken` holds all actions."""

    def __init__(self, seats: int = 0) -> None:
        stock, mask = spaces.Box(0, 9, (1,), np.float32), spaces.Box(0, 1, (3,), np.int8)
        self.seats, self.taken = seats, list[Any]()
        seen, act = spaces.Dict({"action_mask": mask, "stock": stock}), spaces.Discrete(3)
        self.observation_space = spaces.Tuple([seen] * seats) if seats else seen
        self.action_space = spaces.Tuple([act] * seats) if seats else act

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.stocks = 0, list(range(max(1, self.seats)))
        return self.seen(), {}

    def seen(self) -> Any:
        each = tuple(
            {"stock": np.array([n], np.float32), "action_mask": np.array([1, n < 2, 0], np.int8)} for n in self.stocks
        )
        return each if self.seats else each[0]

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        self.time += 1
        self.stocks = [n + 1 for n in self.stocks]
        return self.seen(), 0.0, self.time == 3, False, {}


def test_action_mask_in_the_observation_is_applied() -> None:
    shop = MaskedShop()
    env = SyncVectorEnv(lambda: GymnasiumGame(lambda: shop), 1)
    frame = env.reset(np.array([0]))
    assert env.observation_shapes == ((1,),) and frame.action_mask is not None
    for time in range(3):
        assert frame.obs[0, 0].tolist() == [time] and frame.action_mask[0, 0].tolist() == [True, time < 2, False]
        frame = env.step(np.array([[2 if time == 0 else 1]], np.int32))
    assert shop.taken == [0, 1, 0] and frame.terminated[0]


def test_each_seat_may_have_an_action_mask_in_its_observation() -> None:
    def make(games: int) -> SyncVectorEnv:
        return SyncVectorEnv(partial(GymnasiumGame, partial(MaskedShop, 2)), games)

    check_vector_env(make, steps=20)
    frame = make(1).reset(np.array([0]))
    assert frame.action_mask is not None and frame.action_mask[0].tolist() == [[True, True, False]] * 2
    assert frame.obs[0].tolist() == [[0], [1]]


def test_observations_of_another_shape_are_refused() -> None:
    encode = obs_encoder(spaces.Box(0, 9, (2, 3)), "").encode
    assert encode(np.arange(6).reshape(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"has the shape \[3, 2\], and its space says \[2, 3\]"):
        encode(np.arange(6).reshape(3, 2))


def test_observation_beside_an_action_mask_may_have_several_parts() -> None:
    mask, numbers = spaces.Box(0, 1, (2,), np.int8), spaces.Box(0, 1, (3,), np.float32)
    assert split_action_mask(numbers) == (numbers, False)
    assert split_action_mask(spaces.Dict({"action_mask": mask, "observation": numbers})) == (numbers, True)
    rest, is_masked = split_action_mask(spaces.Dict({"action_mask": mask, "a": numbers, "b": spaces.Discrete(2)}))
    assert is_masked and obs_encoder(rest, "").shape == (5,)
    both, _ = split_action_mask(spaces.Dict({"action_mask": mask, "observation": numbers, "goal": numbers}))
    assert obs_encoder(both, "").shape == (6,)
    with pytest.raises(ValueError, match=r"x sees .* which has no part"):
        obs_encoder(split_action_mask(spaces.Dict({"action_mask": mask}))[0], "x")


class LosesMask(Masked):
    """Gives no mask after the reset; ends after 2 steps, or with `ends` after the first."""

    def __init__(self, ends: bool) -> None:
        super().__init__(spaces.Discrete(2))
        self.ends = ends

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, self.ends, False, {}


def test_missing_action_mask_is_reported() -> None:
    """At the end of a game no mask is needed."""
    env = SyncVectorEnv(partial(GymnasiumGame, partial(LosesMask, True)), 1)
    env.reset(np.array([0]))
    frame = env.step(np.zeros((1, 1), np.int32))
    assert frame.terminated[0] and frame.action_mask is not None and frame.action_mask.tolist() == [[[True, False]]]
    game = GymnasiumGame(partial(LosesMask, False))
    game.reset(0)
    with pytest.raises(ValueError, match="gave an action_mask in the info of its first reset and gives none now"):
        game.step(np.zeros(1, np.int32))


class GainsMask(Masked):
    """Gives a mask after the first step only."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {"action_mask": np.array([1, 0], np.int8)}


def test_action_mask_that_comes_after_the_reset_is_refused() -> None:
    """It was ignored, so that illegal actions were played."""
    game = GymnasiumGame(partial(GainsMask, spaces.Discrete(2)))
    game.reset(0)
    with pytest.raises(ValueError, match="in the info of a step and gave none in that of its first reset"):
        game.step(np.zeros(1, np.int32))


class Switches(gymnasium.Env[Any, Any]):
    """Takes integers, and records them."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(np.array([-1, 5]), np.array([1, 6]), dtype=np.int64)

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.taken.append(tuple(action.tolist()))
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_box_of_integers_is_played_as_choices() -> None:
    """Uniform play draws all six equally often."""
    switches = Switches()
    env = SyncVectorEnv(lambda: GymnasiumGame(lambda: switches), 1)
    assert env.action_spaces == (MultiDiscrete((3, 2)),)
    rng, frame = np.random.default_rng(0), env.reset(np.array([0]))
    for _ in range(600):
        frame = env.step(random_actions(env, frame, rng))
    counts = Counter(switches.taken)
    assert set(counts) == {(a, b) for a in (-1, 0, 1) for b in (5, 6)} and min(counts.values()) > 60


class Bargain(gymnasium.Env[Any, Any]):
    """Two seats, with tuples of everything: each seat is paid the other's choice."""

    observation_space = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)])
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3, start=5)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.seen(), {"is_success": False}

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2), int(self.np_random.integers(3))

    def step(self, action: Any) -> Any:
        return self.seen(), [float(action[1]), float(action[0])], action[1] == 7, False, {"is_success": action[0] == 1}


def test_tuple_action_space_makes_seats() -> None:
    def make(games: int) -> SyncVectorEnv:
        return SyncVectorEnv(partial(GymnasiumGame, Bargain), games)

    check_vector_env(make)
    env = make(1)
    assert env.seats == ("agent_0", "agent_1") and env.action_spaces == (Discrete(2), Discrete(3))
    assert env.reset(np.array([0])).obs[0, 1].sum() == 1  # one-hot, as long as the longest observation
    frame = env.step(np.array([[1, 1]]))
    assert frame.rewards.tolist() == [[6, 1]] and not frame.done[0]
    frame = env.step(np.array([[1, 2]]))
    assert frame.rewards.tolist() == [[7, 1]] and frame.terminated[0]
    assert frame.success is not None and frame.success[0]


class Goal(gymnasium.Env[Any, Any]):
    """One step, with success by action 1, which only the info of the step tells, as in most robotics envs."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 1), {}

    def step(self, action: Any) -> Any:
        return self.np_random.uniform(-1, 1, 1), 0.0, True, False, {"is_success": action == 1}


def test_success_is_reported_if_only_infos_of_steps_have_it() -> None:
    env = SyncVectorEnv(lambda: GymnasiumGame(Goal), 2)
    env.reset(np.array([3, 4]))
    frame = env.step(np.array([[0], [1]]))
    assert frame.success is not None and frame.success.tolist() == [False, True]
    first = env.reset(np.array([3, 4])).obs[:, 0, 0].tolist()
    assert first == [np.float32(Goal().reset(seed=n)[0][0]) for n in (3, 4)]  # no trace of the step that was tried


class SeparateEnds(gymnasium.Env[Any, Any]):
    """Two seats; the first terminates after two steps, the second is truncated after three. Both are paid 1 in every
    step."""

    observation_space = spaces.Tuple([spaces.Discrete(4), spaces.Discrete(4)])
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time = 0
        return (0, 0), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return (self.time, self.time), (1.0, 1.0), (self.time == 2, False), (False, self.time == 3), {}


def test_seats_terminate_separately() -> None:
    env = SyncVectorEnv(partial(GymnasiumGame, SeparateEnds), 1)
    shown = [env.reset(np.array([0])).copy()] + [env.step(np.zeros((1, 2), np.int32)).copy() for _ in range(4)]
    assert [frame.agent_mask[0].tolist() for frame in shown] == [[True, True]] * 2 + [[False, True]] + [
        [True, True]
    ] * 2
    assert [frame.rewards[0].tolist() for frame in shown] == [[0, 0], [1, 1], [1, 1], [0, 1], [1, 1]]
    assert [frame.truncated[0] for frame in shown] == [False, False, False, True, False]
    assert not any(frame.terminated[0] for frame in shown)


def test_seats_terminate_or_truncate_separately() -> None:
    """Of three seats the first terminates and the second is truncated in the first step, the third at the end. The env
    then marks the first as truncated too, but it has terminated. Seats that left keep their last observations."""
    env = SyncVectorEnv(partial(GymnasiumGame, Trio), 1)
    for _ in range(2):
        env.reset(np.array([0]))
        for time in range(1, 11):
            frame = env.step(np.zeros((1, 3), np.int32))
            assert frame.rewards.tolist() == [[1, 1, 1] if time == 1 else [0, 0, 1]]
            assert frame.seat_terminated is not None and frame.seat_terminated.tolist() == [[True, False, False]]
            assert (frame.terminated[0], frame.truncated[0]) == (False, time == 10)
        assert frame.final_obs[0, :, 0].tolist() == [1, 1, 10]


def test_every_observation_space_is_encoded() -> None:
    square = np.arange(40 * 50, dtype=np.uint8).reshape(40, 50)
    for shape, stored in [((40, 50), (40, 50, 1)), ((40, 50, 3), (40, 50, 3)), ((4, 40, 50), (40, 50, 4))]:
        view = obs_encoder(spaces.Box(0, 255, shape, np.uint8), "")
        assert view.shape == stored and view.is_uint8
    assert np.array_equal(obs_encoder(spaces.Box(0, 255, (40, 50), np.uint8), "").encode(square)[..., 0], square)
    stack = np.stack([square, square + 1])
    assert np.array_equal(obs_encoder(spaces.Box(0, 255, (2, 40, 50), np.uint8), "").encode(stack)[..., 1], square + 1)
    pile = np.stack([np.stack([square, square + 1, square + 2], -1), np.stack([square + 3] * 3, -1)])  # two frames
    view = obs_encoder(spaces.Box(0, 255, pile.shape, np.uint8), "")
    assert view.shape == (40, 50, 6) and view.is_uint8
    assert np.array_equal(view.encode(pile), np.concatenate([pile[0], pile[1]], -1))
    assert np.array_equal(view.encode(pile[None])[0], view.encode(pile))
    memory = obs_encoder(spaces.Box(0, 255, (3,), np.uint8), "")
    assert not memory.is_uint8 and np.allclose(memory.encode(np.array([0, 51, 255], np.uint8)), [0, 0.2, 1])
    for high in (1, 10):  # flags and counts
        numbers = obs_encoder(spaces.Box(0, high, (2,), np.uint8), "")
        assert numbers.encode(np.array([0, high], np.uint8)).tolist() == [0, high]
        mask = obs_encoder(spaces.Box(0, high, (40, 50), np.uint8), "")
        assert not mask.is_uint8 and mask.encode(np.full((40, 50), high, np.uint8)).max() == 1
    board = obs_encoder(spaces.Box(-1, 1, (2, 3)), "")
    assert board.shape == (6,) and board.encode([[1, 2, 3], [4, 5, 6]]).tolist() == [1, 2, 3, 4, 5, 6]
    picks = obs_encoder(spaces.MultiDiscrete([2, 3]), "")
    assert picks.shape == (5,) and picks.encode(np.array([1, 0])).tolist() == [0, 1, 1, 0, 0]
    both = obs_encoder(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-9, 9, (1,))}), "")
    assert both.shape == (3,) and both.encode({"a": 1, "b": np.array([5.0], np.float32)}).tolist() == [0, 1, 5]
    bytes_ = spaces.Tuple([spaces.Box(0, 255, (2,), np.uint8), spaces.Dict({"c": spaces.Discrete(2)})])
    assert obs_encoder(bytes_, "").encode((np.array([255, 51], np.uint8), {"c": 0})).tolist() == pytest.approx(
        [1, 0.2, 1, 0]
    )
    camera = spaces.Box(0, 255, (3, 64, 64), np.uint8)
    inner = spaces.Dict({"camera": camera, "gear": spaces.Discrete(2)})
    seen = obs_encoder(spaces.Dict({"a": spaces.Box(0, 1, (1,)), "b": inner, "c": camera}), "x")
    size = 64 * 64 * 3
    assert seen.shape == (2 * size + 3,) and seen.images == ((64, 64, 3),) * 2 and not seen.is_uint8
    black, white = np.zeros((3, 64, 64), np.uint8), np.full((3, 64, 64), 255, np.uint8)
    row = seen.encode({"a": [0.5], "b": {"camera": black, "gear": 1}, "c": white})
    assert not row[:size].any() and (row[size : 2 * size] == 1).all() and row[2 * size :].tolist() == [0.5, 0, 1]
    with pytest.raises(ValueError, match="a text: small networks read numbers"):
        obs_encoder(spaces.Dict({"hint": spaces.Text(8)}), "x")
    with pytest.raises(ValueError, match="size is not fixed"):
        obs_encoder(spaces.Sequence(spaces.Discrete(2)), "x")


def test_images_of_floats_are_scaled_from_their_bounds() -> None:
    """To [0, 1], as convolutions expect; without bounds they are not scaled."""
    shape = (84, 84, 3)
    pixels = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)
    view = obs_encoder(spaces.Box(0, 255, shape, np.float32), "")
    assert view.shape == shape and not view.is_uint8
    assert np.allclose(view.encode(pixels), pixels / 255, atol=1e-6) and view.encode(pixels).dtype == np.float32
    assert np.allclose(view.encode(np.stack([pixels, pixels]))[1], pixels / 255, atol=1e-6)
    signed = obs_encoder(spaces.Box(-1, 1, (3, 84, 84), np.float64), "")
    assert np.allclose(signed.encode(pixels.transpose(2, 0, 1) / 127.5 - 1), pixels / 255, atol=1e-6)
    depth = obs_encoder(spaces.Box(0, 4000, (40, 40), np.int32), "")
    assert depth.encode(np.full((40, 40), 1000)).tolist() == np.full((40, 40, 1), 0.25).tolist()
    for low, high in ((0, 1), (-np.inf, np.inf), (0, 1e30)):
        assert np.array_equal(obs_encoder(spaces.Box(low, high, shape, np.float32), "").encode(pixels), pixels)


def test_every_action_space_is_decoded() -> None:
    shifted = action_decoder(spaces.Discrete(4, start=-1), "")
    assert shifted.space == Discrete(4) and [shifted.decode(np.int32(a)) for a in (0, 3)] == [-1, 2]
    grid = action_decoder(spaces.MultiDiscrete([[2, 3], [4, 5]]), "")
    assert grid.space == MultiDiscrete((2, 3, 4, 5))
    # longer if another seat has more choices
    assert grid.decode(np.array([1, 2, 3, 4, 9])).tolist() == [[1, 2], [3, 4]]
    switches = action_decoder(spaces.MultiBinary(2), "")
    assert switches.space == MultiDiscrete((2, 2)) and switches.decode(np.array([0, 1])).tolist() == [0, 1]
    box = action_decoder(spaces.Box(np.array([0, -1]), np.array([1, 3]), dtype=np.float64), "")
    assert box.space == Continuous((0.0, -1.0), (1.0, 3.0)) and box.decode(np.array([1, 2, 9])).dtype == np.float64
    integers = action_decoder(spaces.Box(np.array([[0], [200]]), np.array([[2], [203]]), dtype=np.uint8), "")
    assert integers.space == MultiDiscrete((3, 4))
    assert integers.decode(np.array([2, 3], np.int32)).tolist() == [[2], [203]]
    assert integers.decode(np.array([2, 3], np.int32)).dtype == np.uint8
    with pytest.raises(ValueError, match="choices or bounded numbers"):
        action_decoder(spaces.Box(-np.inf, np.inf, (1,)), "x")
    with pytest.raises(ValueError, match=r"x acts in Box.*integers of 21,675 values in all, more than 4,096: wrap"):
        action_decoder(spaces.Box(0, 254, (85,), np.uint8), "x")
    with pytest.raises(ValueError, match="integers of 18,446,744,073,709,551,616 values"):
        action_decoder(spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64), "x")


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete((2, 5)), Continuous((-1.0, 0.0), (1.0, 2.0))])
def test_spaces_convert_to_gymnasium_and_back(space: Any) -> None:
    assert action_decoder(gymnasium_space(space), "").space == space


def test_gymnasium_errors_are_explained() -> None:
    with pytest.raises(ValueError, match=r'cannot make "CartPoll-v1".*CartPole'):
        GymnasiumEnv(1, id="CartPoll-v1")
    with pytest.raises(ValueError, match="wheels"):
        GymnasiumEnv(1, id="CartPole-v1", options={"wheels": 4})
    with pytest.raises(ValueError, match="num_envs: 0 is too small"):
        GymnasiumEnv(0)


@pytest.mark.parametrize("shape", [(40, 36), (2, 40, 36), (40, 36, 3)])
def test_an_image_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    """Also one of as many pixels, such as an image on its side."""
    encoder = obs_encoder(spaces.Box(0, 255, shape, np.uint8), "cam")
    height, width = shape.index(40), shape.index(36)
    image = np.zeros(shape, np.uint8)
    assert encoder.encode(image).shape[:2] == (40, 36)
    with pytest.raises(ValueError, match="an image has 36 x 40 pixels, and its space says 40 x 36: correct"):
        encoder.encode(image.swapaxes(height, width))
