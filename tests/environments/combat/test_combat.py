"""Combat has SMAC's interface and StarCraft's numbers, and can be won by skilled play."""

import hashlib
from typing import Any, get_args

import numpy as np
import pytest

from palestra.environments.combat.env import Combat
from palestra.environments.combat.maps import FULL_HEALTH, FULL_SHIELD, MAPS, RELOAD, TYPE_BIT, CombatMap
from palestra.environments.combat.start import COOLDOWN, HEALTH, SHIELD, X, Y
from palestra.envs.adapters.pettingzoo.export import to_parallel
from palestra.envs.vector_base import Discrete
from palestra.envs.vector_check import check_vector_env, random_actions

STOP, EAST, ATTACK = 1, 4, 6


@pytest.mark.parametrize(
    ("name", "view", "state", "actions"),
    [
        ("3m", 30, 48, 9),
        ("8m", 80, 168, 14),
        ("8m_vs_9m", 85, 179, 15),
        ("10m_vs_11m", 105, 243, 17),
        ("27m_vs_30m", 285, 1170, 36),
        ("2s3z", 80, 120, 11),
        ("3s5z", 128, 216, 14),
        ("3s_vs_3z", 36, 54, 9),
        ("3s_vs_5z", 48, 68, 11),
    ],
)
def test_sizes_equal_smac(name: CombatMap, view: int, state: int, actions: int) -> None:
    env = Combat(1, map=name)
    assert (
        env.observation_shapes[0] == (view,) and env.state_size == state and env.action_spaces[0] == Discrete(actions)
    )


def test_every_map_option_exists() -> None:
    assert get_args(CombatMap) == tuple(MAPS)


@pytest.mark.parametrize("name", ["3m", "2s3z", "3s_vs_4z"])
def test_env_passes_the_vector_env_check(name: CombatMap) -> None:
    check_vector_env(lambda games: Combat(games, map=name), num_envs=4, steps=130)


DIGESTS = {  # computed by the version before random battles had options
    "3m": "2af51bf940fed58e",
    "2s3z": "885428000d895696",
    "3s5z": "205b698383219545",
    "3s_vs_4z": "333b1ea849ff040f",
    "10m_vs_11m": "ed9d8c7f0864e190",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_default_battles_equal_recorded_digests(name: CombatMap) -> None:
    """Digests of every array in 150 steps of eight games with random legal actions."""
    env, found, rng = Combat(8, map=name), hashlib.sha256(), np.random.default_rng(0)
    frame = env.reset(np.arange(8))
    mask = frame.action_mask
    assert mask is not None
    for _ in range(150):
        seen = (frame.obs, frame.state, mask, frame.agent_mask, frame.rewards, frame.terminated, frame.truncated)
        for array in (*seen, frame.final_obs, frame.final_state):
            assert array is not None
            found.update(array.tobytes())
        frame = env.step((rng.random(mask.shape) * mask).argmax(-1).astype(np.int32))
    assert found.hexdigest()[:16] == DIGESTS[name]


def stats(env: Combat, b: int, u: int) -> np.ndarray:
    """The attributes of the unit's type."""
    row: np.ndarray = env.params.stats_KF[env.internal_state["types"][b, u]]
    return row


def shield_and_type(env: Combat, b: int, u: int, shields: bool) -> list[float]:
    full = stats(env, b, u)[FULL_SHIELD]
    left = [env.internal_state["units"][b, u, SHIELD] / max(full, 1)] * shields
    return left + [float(stats(env, b, u)[TYPE_BIT] == bit) for bit in range(env.params.num_type_bits)]


def direction(env: Combat, b: int, n: int) -> list[float]:
    """The direction (x, y) in which the ally looks, if it has a cone of sight."""
    by_move = {2: [0.0, 1.0], 3: [0.0, -1.0], 4: [1.0, 0.0], 5: [-1.0, 0.0]}
    return by_move[env.internal_state["facing"][b, n]] if env.params.has_cone else []


def view_of(env: Combat, b: int, n: int) -> list[float]:
    """The observation of seat n by SMAC's definition, computed from the units."""
    units, rules, allies = env.internal_state["units"][b], env.params, len(env.seats)
    mine = units[n]
    if mine[HEALTH] <= 0:
        return [0.0] * env.observation_shapes[n][0]

    def body(u: int, shields: bool) -> list[float]:
        return [units[u, HEALTH] / stats(env, b, u)[FULL_HEALTH], *shield_and_type(env, b, u, shields)]

    view = [float(0 <= mine[Y] + 1 < 32), float(mine[Y] - 1 >= 0), float(mine[X] + 1 < 32), float(mine[X] - 1 >= 0)]
    for u in [*range(allies, len(units)), *(m for m in range(allies) if m != n)]:
        shields = rules.allies_have_shields if u < allies else rules.enemies_have_shields
        off = units[u, [X, Y]] - mine[[X, Y]]
        far = float(np.hypot(*off))
        angle = np.dot(off, direction(env, b, n)) >= far * np.sqrt(0.5) if env.params.has_cone else True
        if far < 9 and units[u, HEALTH] > 0 and angle:
            view += [float(u < allies or far <= 6), far / 9, *(off / 9), *body(u, shields)]
        else:
            view += [0.0] * (5 + shields + rules.num_type_bits)
    return view + body(n, rules.allies_have_shields) + direction(env, b, n)


def state_of(env: Combat, b: int) -> list[float]:
    units, rules, allies = env.internal_state["units"][b], env.params, len(env.seats)
    state: list[float] = []
    for u, unit in enumerate(units):
        shields = rules.allies_have_shields if u < allies else rules.enemies_have_shields
        cooldown = [unit[COOLDOWN] / stats(env, b, u)[RELOAD]] if u < allies else []
        one = [unit[HEALTH] / stats(env, b, u)[FULL_HEALTH], *cooldown, (unit[X] - 16) / 32, (unit[Y] - 16) / 32]
        one += shield_and_type(env, b, u, shields) + (direction(env, b, u) if u < allies else [])
        state += one if unit[HEALTH] > 0 else [0.0] * len(one)
    last = np.zeros((allies, ATTACK + len(units) - allies))
    for n, action in enumerate(env.internal_state["last"][b]):
        if action >= 0:
            last[n, action] = 1
    return state + last.ravel().tolist()


ALL_TYPES = {"marine": 1.0, "stalker": 1.0, "zealot": 1.0}
RANDOM: dict[str, Any] = {"map": "2s3z", "type_weights": ALL_TYPES, "enemies": 6, "start": "surround_and_reflect"}


@pytest.mark.parametrize(
    "options", [{"map": "3m"}, {"map": "2s3z"}, {"map": "3s_vs_4z"}, RANDOM, RANDOM | {"sight": "cone"}]
)
def test_observations_state_and_masks_equal_smac(options: dict[str, Any]) -> None:
    env, rng, seen = Combat(3, **options), np.random.default_rng(0), 0.0  # seen: the first enemy, within 6
    frame = env.reset(np.arange(3))
    for _ in range(60):
        assert frame.action_mask is not None and frame.state is not None
        for b in range(3):
            view_NV = np.array([view_of(env, b, n) for n in range(len(env.seats))])
            assert np.allclose(frame.obs[b], view_NV, atol=1e-6)
            assert np.allclose(frame.state[b], state_of(env, b), atol=1e-6)
            alive = env.internal_state["units"][b, : len(env.seats), HEALTH] > 0
            assert np.array_equal(frame.agent_mask[b], alive)
            seen += view_NV[:, 4].sum()
            assert np.array_equal(frame.action_mask[b, :, 0], ~alive) and np.array_equal(
                frame.action_mask[b, :, 1], alive
            )
            assert np.array_equal(frame.action_mask[b, :, 2:6], view_NV[:, :4] > 0)
        fights = np.stack([env.scripted_actions("focus", n) for n in range(len(env.seats))], axis=1)
        frame = env.step(np.where(rng.random(fights.shape) < 0.8, fights, random_actions(env, frame, rng)))
    assert seen > 0


def field(name: CombatMap, places: list[tuple[float, float]], **options: Any) -> Combat:
    """One game whose units stand at these places, allies first."""
    env = Combat(1, map=name, **options)
    env.reset(np.array([0]))
    env.internal_state["units"][0, :, [X, Y]] = np.array(places).T
    env.step(np.full((1, len(env.seats)), STOP))  # updates action mask and observations for the new places
    return env


def test_marine_shoots_every_1_7_steps_and_kills_in_eight_shots() -> None:
    env = field("3m", [(1, 1), (1, 30), (10, 16), (15, 16), (30, 1), (30, 30)])
    units = env.internal_state["units"][0]
    units[:, HEALTH], units[:, COOLDOWN] = 45, 0
    units[3:, COOLDOWN] = 1e9  # enemies do not shoot back
    rewards, healths = [], []
    for _ in range(12):
        rewards.append(float(env.step(np.array([[STOP, STOP, ATTACK]])).rewards[0, 0]))
        healths.append(units[3, HEALTH])
    # Shots at 0, 13.7, 27.3, 41.0, 54.7, 68.3, 82.0, 95.6 loops, 8 loops to a step.
    assert healths == [39, 33, 33, 27, 27, 21, 15, 15, 9, 9, 3, 0]
    assert np.allclose(np.array(rewards) * 365 / 20, [6, 6, 0, 6, 0, 6, 6, 0, 6, 0, 6, 3 + 10])
    assert env.internal_state["target"][0, 0] == 2


@pytest.mark.parametrize(
    ("shooter", "victim", "shield", "loss"),
    [
        (0, 5, 80, (18, 0)),  # stalker at stalker: 13, and 5 more against armoured units
        (0, 5, 0, (0, 17)),  # less 1 of armour
        (0, 7, 50, (13, 0)),
        (0, 7, 0, (0, 12)),
        (2, 5, 80, (16, 0)),  # zealot: two hits of 8, each less 1 of armour
        (2, 7, 0, (0, 14)),
        (2, 7, 4, (4, 10)),  # the first hit meets the shield: 8 - 4 - 1; the second takes 8 - 1
        (0, 7, 12.75, (12.75, 0.5)),  # a quarter of a point is left, and armour leaves at least a half
    ],
)
def test_shields_absorb_damage_first_and_armour_reduces_the_rest(
    shooter: int, victim: int, shield: float, loss: tuple[float, float]
) -> None:
    places = [(1.0, 2.0 * u) for u in range(5)] + [(30.0, 2.0 * u) for u in range(5)]
    places[victim] = (places[shooter][0] + 1, places[shooter][1])
    env = field("2s3z", places)
    unit = env.internal_state["units"][0, victim]
    env.internal_state["units"][0, :, COOLDOWN] = [0 if u == shooter else 1e9 for u in range(10)]
    unit[SHIELD], health = shield, unit[HEALTH]
    actions = np.full((1, 5), STOP)
    actions[0, shooter] = ATTACK + victim - 5
    frame = env.step(actions)
    assert (shield - unit[SHIELD], health - unit[HEALTH]) == loss and unit[SHIELD] >= 0
    most = 2 * 160 + 3 * 150 + 5 * 10 + 200
    assert np.allclose(frame.rewards[0], sum(loss) * 20 / most)


def test_units_move_at_their_speed_and_stay_inside() -> None:
    env = field("2s3z", [(2, 5), (31.5, 6), (2, 7), (2, 8), (2, 9), *[(20, 28)] * 5])
    before = env.internal_state["units"][0].copy()
    env.step(np.array([[EAST, EAST, EAST, 3, 5]]))
    moved = env.internal_state["units"][0, :5, [X, Y]].T - before[:5, [X, Y]]
    stalker, zealot = 4.13 * 8 / 22.4, 3.15 * 8 / 22.4
    # The second would leave the field: it stops.
    expected = np.array([(stalker, 0.0), (0.0, 0.0), (zealot, 0.0), (0.0, -zealot), (-zealot, 0.0)])
    assert np.allclose(moved, expected)


def test_attack_out_of_range_moves_into_range() -> None:
    env = field("3m", [(10, 16), (1, 1), (1, 2), (15.9, 16), (31, 30), (31, 31)])
    env.internal_state["units"][0, 3, [X, Y]] = 15.9, 16
    env.internal_state["units"][0, 0, [X, Y]] = 10, 16
    env.internal_state["units"][0, 3, HEALTH] = 45
    env.internal_state["units"][0, 3, COOLDOWN] = 1e9
    env.vector_step.action_mask[:] = True  # type: ignore[index]
    env.step(np.array([[ATTACK, STOP, STOP]]))
    gap = env.internal_state["units"][0, 3, X] - env.internal_state["units"][0, 0, X]
    assert (
        gap == pytest.approx(5.6) and env.internal_state["units"][0, 3, HEALTH] == 45
    )  # before that both moved 0.15 closer, to 5.75


def test_enemies_keep_their_target_while_it_is_in_range() -> None:
    env = field("3m", [(16, 16), (1, 1), (1, 2), (20, 16), (31, 30), (31, 31)])
    assert env.internal_state["target"][0, 0] == 0
    env.internal_state["units"][0, 1, [X, Y]] = 19, 16  # nearer now
    env.step(np.full((1, 3), STOP))
    assert env.internal_state["target"][0, 0] == 0
    env.internal_state["units"][0, 0, [X, Y]] = 1, 3
    env.step(np.full((1, 3), STOP))
    assert env.internal_state["target"][0, 0] == 1


def test_dying_units_still_shoot_and_a_draw_is_not_success() -> None:
    env = field("3m", [(10, 16), (10, 17), (10, 18), (14, 16), (14, 17), (14, 18)])
    env.internal_state["units"][0, :, COOLDOWN] = 0
    env.internal_state["units"][0, :, HEALTH] = [6, 0, 0, 6, 0, 0]
    frame = env.step(np.array([[ATTACK, 0, 0]]))
    assert frame.terminated[0] and frame.success is not None and not frame.success[0]
    assert np.allclose(frame.rewards[0], 16 * 20 / 365)


def test_dead_units_do_not_act() -> None:
    env = field("3m", [(10, 16), (10, 17), (10, 18), (14, 16), (14, 17), (14, 18)])
    env.internal_state["units"][0, :, COOLDOWN] = [1e9, 1e9, 1e9, 0, 0, 0]
    env.internal_state["units"][0, 1, HEALTH] = 1
    env.internal_state["target"][0] = 1
    frame = env.step(np.full((1, 3), STOP))
    assert frame.agent_mask[0].tolist() == [True, False, True] and frame.action_mask is not None
    assert frame.action_mask[0, 1].tolist() == [True] + [False] * 8 and not frame.obs[0, 1].any()
    place = env.internal_state["units"][0, 1, [X, Y]].copy()
    frame = env.step(np.array([[99, EAST, -1]]))  # out of range: stop
    assert np.array_equal(env.internal_state["units"][0, 1, [X, Y]], place)
    assert env.internal_state["last"][0].tolist() == [STOP, 0, STOP]


def test_battle_is_truncated_at_the_step_limit() -> None:
    env = Combat(2, max_steps=3)
    frame = env.reset(np.arange(2))
    for step in range(3):
        frame = env.step(np.full((2, 3), STOP))
        assert frame.truncated.all() == (step == 2)
    assert not frame.terminated.any() and frame.success is not None and not frame.success.any()
    assert Combat(1).params.max_steps == 60 and Combat(1, map="2s3z").params.max_steps == 120


def test_dead_seats_are_truncated_with_the_living() -> None:
    """They continue to be rewarded: the team's return counts for them too."""
    env = Combat(1, max_steps=2)
    theirs = to_parallel(lambda games: env)
    theirs.reset(seed=0)
    env.internal_state["units"][0, 1, HEALTH] = 0
    theirs.step({})
    _, _, terminated, truncated, _ = theirs.step({})
    assert (
        env.vector_step.truncated[0] and not env.vector_step.terminated[0] and env.vector_step.seat_terminated is None
    )
    assert not any(terminated.values()) and all(truncated.values())


def play_battles(env: Combat, scripted: bool) -> tuple[float, np.ndarray]:
    """The share of the first battles that are won, and the return of each."""
    rng, B = np.random.default_rng(0), env.num_envs
    frame, open_B, won_B, earned_B = env.reset(np.arange(B)), np.ones(B, bool), np.zeros(B, bool), np.zeros(B)
    while open_B.any():
        actions = random_actions(env, frame, rng)
        if scripted:
            actions = np.stack([env.scripted_actions("focus", n) for n in range(len(env.seats))], axis=1)
        frame = env.step(actions)
        assert frame.success is not None and (frame.rewards == frame.rewards[:, :1]).all()
        earned_B += frame.rewards[:, 0] * open_B
        won_B |= open_B & frame.success
        open_B &= ~frame.done
    return float(won_B.mean()), earned_B


@pytest.mark.parametrize("name", ["3m", "8m", "2s3z", "3s5z"])
def test_focus_fire_script_wins_and_random_play_does_not(name: CombatMap) -> None:
    won, earned_B = play_battles(Combat(100, map=name), scripted=True)
    assert won >= 0.8 and earned_B.max() == pytest.approx(20)
    won, earned_B = play_battles(Combat(100, map=name), scripted=False)
    assert won < 0.05 and 0 < earned_B.mean() < 10


def kiting_actions(env: Combat) -> np.ndarray:
    """Actions of stalkers that shoot if they can and otherwise walk away from zealots, off the border."""
    units, actions = (
        env.internal_state["units"],
        np.stack([env.scripted_actions("focus", n) for n in range(len(env.seats))], axis=1),
    )
    action_mask = env.vector_step.action_mask
    assert action_mask is not None
    for b, n in np.argwhere(env.vector_step.agent_mask & (units[:, : len(env.seats), COOLDOWN] >= 8)):
        alive = units[b, len(env.seats) :, HEALTH] > 0
        foes = units[b, len(env.seats) :][alive][:, [X, Y]]
        to = units[b, n, [X, Y]] + 1.475 * np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])
        gaps = np.hypot(*(foes[:, None] - to).T).min(axis=1)
        room = np.minimum(to, 32 - to).min(axis=1)
        if np.hypot(*(foes - units[b, n, [X, Y]]).T).min() < 7:
            actions[b, n] = 2 + np.argmax(np.where(action_mask[b, n, 2:6], gaps + 0.05 * room, -np.inf))
    return actions.astype(np.int32)


def test_kiting_stalkers_beat_zealots() -> None:
    assert play_battles(Combat(20, map="3s_vs_3z"), scripted=True)[0] == 0
    env = Combat(8, map="3s_vs_3z")
    frame, won_B = env.reset(np.arange(8)), np.zeros(8, bool)
    for _ in range(100):
        frame = env.step(kiting_actions(env))
        assert frame.success is not None and not (frame.terminated & ~frame.success).any()
        won_B |= frame.success
    assert won_B.all()


@pytest.mark.parametrize("sight", ["circle", "cone"])
def test_random_battles_pass_the_vector_env_check(sight: Any) -> None:
    check_vector_env(lambda games: Combat(games, **RANDOM, sight=sight), num_envs=4, steps=230)


def battle_starts(env: Combat) -> tuple[np.ndarray, np.ndarray]:
    """Types [B, U] and positions [B, U, 2] at the start of one battle for each copy."""
    env.reset(np.arange(env.num_envs))
    return env.internal_state["types"].copy(), env.internal_state["units"][:, :, [X, Y]].copy()


def test_types_are_drawn_by_their_weights_and_enemies_have_the_same() -> None:
    weights = {"marine": 1.0, "stalker": 3.0, "zealot": 0.0}
    env = Combat(4000, type_weights=weights, allies=5, enemies=7)
    types, _ = battle_starts(env)
    assert np.array_equal(types[:, :5], types[:, 5:10])
    shares = [(types[:, units] == "szm".index("s")).mean() for units in (slice(0, 5), slice(10, 12))]
    assert shares == pytest.approx([0.75, 0.75], abs=0.02) and not (types == "szm".index("z")).any()
    assert env.params.num_type_bits == 2 and env.params.max_steps == 200
    full = np.where(types == 0, 160.0, 45.0)
    assert np.array_equal(env.internal_state["units"][:, :, [HEALTH, SHIELD]].sum(2), full)
    assert np.array_equal(env.internal_state["max_return"], full[:, 5:].sum(1) + 7 * 10 + 200)


def test_reflected_armies_are_mirror_images() -> None:
    _, places = battle_starts(Combat(2000, type_weights=ALL_TYPES, allies=3, enemies=4, start="reflect"))
    allies, mirrored, extra = places[:, :3], places[:, 3:6], places[:, 6]
    assert np.allclose(allies[..., 0] + mirrored[..., 0], 32) and np.array_equal(allies[..., 1], mirrored[..., 1])
    assert allies[..., 0].max() < 15 < 17 < extra[:, 0].min() and allies[..., 0].mean() == pytest.approx(7.5, abs=0.2)
    assert allies[..., 1].std() == pytest.approx(32 / np.sqrt(12), abs=0.2)


def test_surrounded_allies_stand_in_the_middle_of_one_to_four_groups() -> None:
    _, places = battle_starts(Combat(2000, type_weights=ALL_TYPES, allies=5, enemies=20, start="surround"))
    assert np.abs(places[:, :5] - 16).max() <= 1
    off = places[:, 5:] - 16
    assert np.abs(np.abs(off[..., 0]) - np.abs(off[..., 1])).max() <= 2 and np.abs(off).max() <= 16
    corners = (off[..., 0] > 0) * 2 + (off[..., 1] > 0)
    groups = np.array([len(set(row)) for row in corners[np.abs(off).min(axis=(1, 2)) > 1]])
    assert set(groups) == {1, 2, 3, 4}  # positions of groups off the middle, at most one per corner


def test_either_start_is_drawn_half_of_the_time() -> None:
    _, places = battle_starts(Combat(2000, type_weights=ALL_TYPES, start="surround_and_reflect"))
    reflected = np.isclose(places[:, 0, 0] + places[:, 3, 0], 32) & (places[:, 0, 1] == places[:, 3, 1])
    assert reflected.mean() == pytest.approx(0.5, abs=0.04)


def test_units_with_a_cone_see_and_attack_in_their_last_direction() -> None:
    env = field("3m", [(10, 16), (1, 1), (1, 30), (15, 16), (5, 16), (10, 21)], sight="cone")
    env.internal_state["units"][0, 3:, COOLDOWN] = 1e9
    assert env.vector_step.action_mask is not None
    for move, targets in ((4, [True, False, False]), (5, [False, True, False]), (2, [False, False, True])):
        env.internal_state["units"][0, :, [X, Y]] = np.array([(10, 16), (1, 1), (1, 30), (15, 16), (5, 16), (10, 21)]).T
        env.internal_state["target"][0] = 0
        frame = env.step(np.array([[move, STOP, STOP]]))
        assert frame.action_mask is not None and frame.action_mask[0, 0, ATTACK:].tolist() == targets
        seen = frame.obs[0, 0, 4:19].reshape(3, 5).any(axis=1)
        assert seen.tolist() == targets
        frame = env.step(np.array([[STOP, STOP, STOP]]))  # a unit that stops keeps its direction
        assert frame.action_mask is not None and frame.action_mask[0, 0, ATTACK:].tolist() == targets


def test_random_battles_are_won_by_focus_fire_more_often_than_at_random() -> None:
    env = Combat(200, **RANDOM | {"enemies": 5})
    won, earned_B = play_battles(env, scripted=True)
    assert won > 0.4 and earned_B.max() == pytest.approx(20)
    assert play_battles(env, scripted=False)[0] < 0.05


def test_unknown_options_and_scripts_are_refused() -> None:
    with pytest.raises(ValueError, match='map: there is no "4m"; use one of 3m, 8m'):
        Combat(map="4m")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_steps: 0 is too small"):
        Combat(max_steps=0)
    with pytest.raises(ValueError, match="num_envs: 0 is too small"):
        Combat(0)
    with pytest.raises(ValueError, match="allies: 5 units have no types; set type_weights"):
        Combat(allies=5)
    with pytest.raises(ValueError, match="enemies: 0 is too small"):
        Combat(type_weights=ALL_TYPES, enemies=0)
    with pytest.raises(ValueError, match='there is no unit "colossus"; use marine, stalker, zealot'):
        Combat(type_weights={"colossus": 1})
    with pytest.raises(ValueError, match="are not weights"):
        Combat(type_weights={"marine": 0})
    with pytest.raises(ValueError, match='start: there is no "circle"; use one of columns'):
        Combat(start="circle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='sight: there is no "fog"; use circle or cone'):
        Combat(sight="fog")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='no scripted player "rush"; it has: focus'):
        Combat(1).scripted_actions("rush", 0)
