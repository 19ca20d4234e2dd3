"""Overcooked is JaxMARL's game: equal states and actions give the numbers recorded from that package.

overcooked_jaxmarl_0.2.0.npz has its games; overcooked_jaxmarl.py writes them. peers/test_overcooked.py plays more if
the package is installed.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments.overcooked.overcooked_games import LAYOUTS, RECORDED, Recording, read_recordings, replay

import palestra as pl
from palestra.environments.overcooked.env import AMBER, Overcooked
from palestra.environments.overcooked.rules import (
    DOWN,
    INTERACT,
    LEFT,
    NOTHING,
    NUM_CHANNELS,
    ONION,
    PLATE,
    RIGHT,
    SOUP,
    STAY,
    TIME_LEFT,
    UP,
    URGENT,
)
from palestra.envs.batch.canvas import GREEN, RED
from palestra.envs.vector_base import VectorStep
from palestra.envs.vector_check import check_vector_env

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return read_recordings(RECORDED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(2)
def test_games_equal_the_jaxmarl_package(layout: str, recordings: dict[str, Recording]) -> None:
    assert recordings[layout].actions.shape == (100, 16, 2)
    replay(LAYOUTS[layout], recordings[layout])


def test_recorded_games_cover_all_events(recordings: dict[str, Recording]) -> None:
    happened: Counter[str] = sum((replay(LAYOUTS[name], one) for name, one in recordings.items()), Counter())
    few = {name: count for name, count in happened.items() if count < 5}
    assert len(happened) == 8 and not few


@pytest.mark.parametrize("layout", LAYOUTS.values())
def test_env_passes_the_vector_env_check(layout: Any) -> None:
    check_vector_env(lambda games: Overcooked(games, layout=layout, max_steps=60), num_envs=4, steps=130)


def test_random_starts_pass_the_vector_env_check() -> None:
    check_vector_env(
        lambda games: Overcooked(games, random_start=True, shaped_reward=1.0, shaped_steps=90, max_steps=30),
        num_envs=4,
        steps=100,
    )


def env_with(cooks: list[list[int]], *, onions: int = 0, cooking: int = 0, **options: Any) -> Overcooked:
    """A game with these cooks, each (cell, direction, held item), and these pots."""
    env = Overcooked(1, **options)
    env.reset(np.array([0]))
    env.internal_state["cooks"][0] = cooks
    env.internal_state["onions"][0], env.internal_state["cooking"][0] = onions, cooking
    return env


def channel(frame: VectorStep, seat: int, cell: int, number: int) -> float:
    return float(frame.obs[0, seat, cell * NUM_CHANNELS + number])


def test_soup_is_cooked_and_served_as_worked_by_hand() -> None:
    """cramped_room: onions left of cell 6, the pot above cell 7, plates below cell 11, the serving counter below 13.
    Three onions of 6 steps each; the third starts the pot, whose soup can be taken 20 steps later."""
    onion = [LEFT, INTERACT, RIGHT, UP, INTERACT, LEFT]
    plate = [DOWN, LEFT, DOWN, INTERACT, RIGHT, UP, UP]
    serve = [DOWN, RIGHT, DOWN, INTERACT]
    env = Overcooked(1, shaped_reward=1.0)
    env.reset(np.array([0]))

    def rewards_of(actions: list[int]) -> list[float]:
        rewards = []
        for action in actions:
            frame = env.step(np.array([[action, STAY]]))
            own, other = frame.rewards[0].tolist()
            # deliveries are paid to both, shaped rewards to the seat that earns them
            assert other == (own if own == 20 else 0)
            rewards.append(own)
        return rewards

    assert env.internal_state["cooks"][0, :, 0].tolist() == [6, 8]
    assert rewards_of(2 * onion) == 2 * [0, 0, 0, 0, 3, 0]
    assert rewards_of(onion[:-1]) == [0, 0, 0, 0, 3]
    assert channel(env.vector_step, 0, 2, TIME_LEFT) == channel(env.vector_step, 1, 2, TIME_LEFT) == 19
    assert rewards_of(plate) == [0, 0, 0, 3, 0, 0, 0]
    assert channel(env.vector_step, 0, 2, TIME_LEFT) == 12
    assert rewards_of([INTERACT] * 13) == [0] * 12 + [5]  # 12 steps too early
    assert rewards_of(serve) == [0, 0, 0, 20]
    assert env.internal_state["cooks"][0, 0].tolist() == [13, DOWN, NOTHING]
    assert env.internal_state["onions"][0, 0] == 0 and env.internal_state["steps"][0] == 41


def test_plate_is_rewarded_while_a_pot_needs_one() -> None:
    """Cell 11 has the plates below it, cell 12 a counter; cramped_room has one pot."""
    at_plates, beside = [11, DOWN, NOTHING], [12, DOWN, NOTHING]
    for onions, other, reward in ((0, beside, 0), (1, beside, 3), (1, [12, DOWN, PLATE], 0), (3, [12, DOWN, SOUP], 3)):
        env = env_with([at_plates, other], onions=onions, shaped_reward=1.0)
        assert env.step(np.array([[INTERACT, STAY]])).rewards[0].tolist() == [reward, 0]
        assert env.internal_state["cooks"][0, 0, 2] == PLATE
    env = env_with([at_plates, beside], onions=1, shaped_reward=1.0)
    env.internal_state["counters"][0, 4] = PLATE  # a plate on a counter is enough
    assert not env.step(np.array([[INTERACT, STAY]])).rewards.any()


def test_first_seat_acts_before_the_second() -> None:
    """forced_coordination: the cooks stand on both sides of the counter at cell 12."""
    env = env_with([[11, RIGHT, ONION], [13, LEFT, NOTHING]], layout="forced_coordination")
    env.step(np.array([[INTERACT, INTERACT]]))
    assert (
        env.internal_state["cooks"][0, :, 2].tolist() == [NOTHING, ONION] and not env.internal_state["counters"].any()
    )
    env = env_with([[11, RIGHT, NOTHING], [13, LEFT, ONION]], layout="forced_coordination")
    env.step(np.array([[INTERACT, INTERACT]]))
    assert env.internal_state["cooks"][0, :, 2].tolist() == [NOTHING, NOTHING]
    assert env.internal_state["counters"][0, 12] == ONION
    env = env_with([[11, RIGHT, ONION], [13, LEFT, PLATE]], layout="forced_coordination")
    env.step(np.array([[INTERACT, INTERACT]]))  # no room for the second cook's item
    assert env.internal_state["cooks"][0, :, 2].tolist() == [NOTHING, PLATE]


@pytest.mark.parametrize(
    ("before", "actions", "after"),
    [
        ((6, 8), (RIGHT, LEFT), (6, 8)),  # the same cell
        ((6, 7), (RIGHT, LEFT), (6, 7)),  # each other's cell
        ((6, 7), (RIGHT, STAY), (6, 7)),  # the cell is occupied
        ((6, 7), (RIGHT, UP), (6, 7)),  # the occupant cannot leave: the pot is above
        ((6, 7), (RIGHT, RIGHT), (7, 8)),  # the occupant leaves
        ((6, 7), (DOWN, DOWN), (11, 12)),
        ((6, 7), (-1, 99), (6, 7)),  # not actions
    ],
)
def test_cooks_do_not_share_or_swap_cells(
    before: tuple[int, int], actions: tuple[int, int], after: tuple[int, int]
) -> None:
    env = env_with([[before[0], UP, NOTHING], [before[1], UP, NOTHING]])
    env.step(np.array([actions]))
    assert tuple(env.internal_state["cooks"][0, :, 0]) == after
    turned = [action if 0 <= action < STAY else UP for action in actions]
    assert env.internal_state["cooks"][0, :, 1].tolist() == turned  # also if the way is blocked


def test_game_is_truncated_at_the_step_limit_and_urgent_before() -> None:
    env = Overcooked(2, max_steps=60)
    frame = env.reset(np.arange(2))
    for step in range(1, 61):
        frame = env.step(np.full((2, 2), STAY))
        shown = frame.final_obs if step == 60 else frame.obs
        urgent = shown.reshape(2, 2, -1, NUM_CHANNELS)[..., URGENT]
        assert (urgent == (step > 20)).all() and frame.truncated.all() == (step == 60) and not frame.terminated.any()
    assert not frame.obs.reshape(2, 2, -1, NUM_CHANNELS)[..., URGENT].any()


def test_weight_of_shaped_rewards_falls_over_episodes() -> None:
    """An onion put into a pot pays 3 at first, 2.25 after a quarter of the steps, and 0 at the end."""
    env = env_with([[7, UP, ONION], [8, UP, NOTHING]], max_steps=6, shaped_reward=1.0, shaped_steps=8)
    rewards = []
    for _ in range(10):
        env.internal_state["cooks"][0, 0] = [7, UP, ONION]
        env.internal_state["onions"][0] = 0
        rewards.append(float(env.step(np.array([[INTERACT, STAY]])).rewards[0, 0]))
    assert rewards == [3 * max(0, 1 - step / 8) for step in range(10)]
    env.reset(np.array([0]))
    assert env.internal_state["played"][0] == 0


def test_random_starts_are_uniform() -> None:
    """Over 2,000 games, held items, directions, cells and the 24 states of the pot are uniform."""
    env = Overcooked(2000, random_start=True)
    env.reset(np.arange(2000))
    cooks, onions, cooking = (env.internal_state[name] for name in ("cooks", "onions", "cooking"))
    for part, kinds in ((0, env.kitchen.floor_F.tolist()), (1, range(4)), (2, range(4))):
        counts = np.array([(cooks[:, :, part] == kind).sum() for kind in kinds])
        expected = 4000 / len(kinds)
        assert counts.sum() == 4000 and (np.abs(counts - expected) < 5 * expected**0.5).all()
    assert (cooks[:, 0, 0] != cooks[:, 1, 0]).all()
    states = Counter(zip(onions[:, 0].tolist(), cooking[:, 0].tolist(), strict=True))
    assert set(states) == {(n, 0) for n in range(4)} | {(3, left) for left in range(1, 21)}
    assert max(abs(count - 2000 / 24) for count in states.values()) < 5 * (2000 / 24) ** 0.5


def test_kitchen_is_drawn() -> None:
    """Cells of cramped_room are 48 pixels wide, in the middle of a square: its first row lies 24 pixels down."""
    env = env_with([[6, LEFT, ONION], [13, DOWN, SOUP]], onions=3)
    picture = env.render(0)

    def colour(cell: int) -> tuple[int, ...]:
        row, column = divmod(cell, 5)
        return tuple(picture[24 + 48 * row + 24, 48 * column + 24])

    assert picture.shape == (240, 240, 3)
    assert colour(6) == AMBER == colour(5) and colour(13) == RED == colour(2) and colour(18) == GREEN
    assert tuple(picture[24 + 48 + 24, 48 + 24 + 14]) == env.seat_colours[0]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # a minute on an idle machine
def test_shipped_config_learns_to_serve(tmp_path: Path) -> None:
    """Random play serves a soup in 20 to 30 games; the threshold is ten soups per game, without shaped rewards."""
    run = pl.train("configs/games/overcooked_ppo.yaml", seed=1, root=tmp_path)
    first, *_, last = run.evals["return"].tolist()
    assert first < 5 and last >= 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs: 0 is too small"),
        ({"layout": "ring"}, 'there is no "ring"; use one of cramped_room, asymmetric_advantages'),
        ({"max_steps": 0}, "max_steps: 0 is too small"),
        ({"shaped_reward": -1.0}, "a weight of -1.0 would punish progress"),
        ({"shaped_steps": 0}, "shaped_steps: 0 is too small"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Overcooked(**options)
