"""Sokoban and its solver against cases worked by hand."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.envs import check_env, make_env
from palestra.envs.text.grid import sokoban
from palestra.envs.text.grid.grid import make_grid
from palestra.envs.text.grid.sokoban import Sokoban, make_sokoban_layout
from palestra.envs.text.grid.sokoban_solver import box_goal_distance, live_cells, push, solve


def game(monkeypatch, drawing: str, **options) -> Sokoban:
    """An env whose every instance is the drawn board: '@' player, '#' wall, 'o' goal, digits boxes."""
    rows = drawing.split()
    cells = {(r, c): glyph for r, row in enumerate(rows) for c, glyph in enumerate(row)}
    where = lambda glyphs: tuple(r * len(rows) + c for (r, c), glyph in cells.items() if glyph in glyphs)  # noqa: E731
    boxes = tuple(where(str(n))[0] for n in range(1, 5) if where(str(n)))
    layout = make_sokoban_layout(len(rows), where("#"), where("o"), boxes, where("@")[0])
    monkeypatch.setattr(sokoban, "_instance", lambda *_: layout)
    return Sokoban(size=len(rows), boxes=len(boxes), walls=0, **options)


ROOM = "o... .1.. ...@ ...#"


def test_turn_by_hand(monkeypatch):
    env = game(monkeypatch, ROOM)
    step = env.reset(0)
    assert step.observations == {"planner": "size 4 you r2 c3 box r1 c1 goal r0 c0 walls r3 c3"}
    step = env.step({"planner": "left"})
    assert step.rewards == {"planner": pytest.approx(1 / 2)}  # one of two cells closed
    assert step.observations == {"executor": "size 4 you r2 c3 box r1 c1 goal r0 c0 walls r3 c3 plan left"}
    step = env.step({"executor": "down up left left"})  # "down" meets the wall; then to (1, 3), (1, 2), and a push
    assert step.team_reward == pytest.approx(1 / 2)
    assert step.rewards == {"executor": pytest.approx(0.5 - 0.1 / 4)}  # one of four illegal, the plan followed
    assert step.observations == {"planner": "size 4 you r1 c1 box r1 c0 goal r0 c0 walls r3 c3"}
    env.step({"planner": "up"})
    step = env.step({"executor": "down down left left up up"})  # round by (3, 0), once into the border, and the push
    assert step.done and step.info == {
        "success": True,
        "turn": 2,
        "invalid": True,
        "why_invalid": "moves that are not possible, and were skipped: 1 of 6",
        "steps": 8,
        "reward_terms": {"executor": {"form": pytest.approx(-0.1 / 6), "plan": 0.5}},
    }
    assert step.rewards == {"executor": pytest.approx(0.5 - 0.1 / 6)}
    assert step.team_reward == pytest.approx(1 / 2 + 1)


def test_plan_stops_at_its_first_impossible_push(monkeypatch):
    env = game(monkeypatch, ROOM)
    env.reset(0)

    def reward(plan):
        return env.fork().step({"planner": plan}).rewards["planner"]

    assert reward("left up") == pytest.approx(1 + 1)
    assert reward("left left up") == pytest.approx(1 / 2)  # the second "left" meets the border
    assert reward("right") == pytest.approx(-1 / 2)
    assert reward("left up left") == reward("left up")  # solved before the impossible push
    assert reward("") == reward("left left left left") == reward("r1 c1") == -0.1


@pytest.mark.parametrize(
    ("plan", "moves", "share"),
    [
        # the first push is made; then the cell from which to push, below (1, 0), is as far as before
        ("left up", "up left left", 1 / 2),
        ("left up", "up left left down", (1 + (2 - 1) / 3) / 2),  # one of the two steps to that cell
        ("left", "up", (2 - 1) / 3),  # one of the two steps to the cell at (1, 2)
        ("left", "down", 0),
        ("left", "left down", 0),  # away and back: no nearer than at the start
        ("down", "up left left", 0),  # pushed the box in another direction
        # two of the three pushes are possible, from (1, 0), and "up" leads away from it
        ("right right right", "up", 0),
    ],
)
def test_executor_reward_is_the_share_of_the_plan_followed(monkeypatch, plan, moves, share):
    env = game(monkeypatch, ROOM)
    env.reset(0)
    env.step({"planner": plan})
    step = env.step({"executor": moves})
    assert step.rewards["executor"] == pytest.approx(0.5 * share - 0.1 * step.info["invalid"] / len(moves.split()))


def test_push_needs_a_path_behind_the_box():
    board = make_grid(3, walls=[1, 4])  # the wall in column 1 leaves only row 2 open
    assert push(board, (0, (3,)), 0, 3) is None  # pushing right: no cell left of column 0
    assert push(board, (8, (7,)), 0, 2) == (7, (6,))
    assert push(board, (0, (7,)), 0, 2) is None  # the box itself blocks the way to its right side


def test_outcome_reward_pays_success_only(monkeypatch):
    env = game(monkeypatch, ROOM, reward="outcome")
    env.reset(0)
    assert env.fork().step({"planner": "left"}).rewards == {"planner": 0.0}
    assert env.step({"planner": "left up"}).rewards == {"planner": 1.0}
    step = env.step({"executor": "up left left down left up"})
    assert (step.team_reward, step.rewards, step.info["success"]) == (1.0, {"executor": 0.0}, True)


def test_deadlock_does_not_end_the_game(monkeypatch):
    env = game(monkeypatch, "..1@ .... .o.. ....", team="single", max_turns=2)
    env.reset(0)
    assert not env.step({"agent": "left left"}).done
    assert env.step({"agent": "left"}).truncated


def test_plans_name_the_boxes(monkeypatch):
    env = game(monkeypatch, "o1@. .... ..2. ..o.")
    step = env.reset(0)
    assert step.observations["planner"] == "size 4 you r0 c2 box r0 c1 r2 c2 goal r0 c0 r3 c2"
    assert env.fork().step({"planner": "left"}).info["invalid"]
    assert env.fork().step({"planner": "3 left"}).info["invalid"]
    step = env.step({"planner": "1 left, 2 down"})
    assert step.rewards == {"planner": pytest.approx(1 + 1)}
    assert step.observations["executor"].endswith("plan 1 left 2 down")


def test_full_rendering_of_the_board(monkeypatch):
    env = game(monkeypatch, "o1@ ... ...", rendering="ascii")
    seen = env.reset(0).observations["planner"]
    assert seen.startswith("#####\n#o1@#\n#...#\n#...#\n#####\nYou are at row 0, column 2; box 1 is at row 0,")


def test_distance_gives_each_box_its_own_goal():
    # Boxes at (0, 0), (0, 1), goals at (0, 2), (2, 1) on a 3x3 board: 2 + 2 straight, 1 + 3 crossed.
    assert box_goal_distance(3, (0, 1), (2, 7)) == 4
    assert box_goal_distance(3, (0, 1), (1, 2)) == 2  # the sum is two either way


@pytest.mark.parametrize(
    ("drawing", "pushes"),
    [
        ("o1@ ... ...", 1),
        ("1.. .@. ..o", None),  # a box in a corner
        ("..o .1. @..", 2),
        (".1. @.. .o.", None),  # along the border a box stays on it
        ("....o .1... .#... .#... @....", 4),
        ("o1@. .... ..2. ..o.", 2),
    ],
)
def test_solver_known_answers(monkeypatch, drawing, pushes):
    env = game(monkeypatch, drawing)
    env.reset(0)
    found = solve(env.instance.grid, env.state, env.instance.goals)
    assert (found if found is None else len(found)) == pushes


def test_live_cells_by_hand():
    # Goal in the middle of the top row of a 3x3 board: the bottom row and the corners are dead. A box in the middle
    # row's ends can only be pushed up or down along its column, which holds no goal.
    assert live_cells(make_grid(3), [1]) == {1, 4}
    assert live_cells(make_grid(3), [4]) == {4}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(4, 6),
    boxes=st.integers(1, 2),
    split=st.sampled_from(["base", "train", "dev", "test"]),
)
def test_solver_solves_every_instance(seed, size, boxes, split):
    env = Sokoban(size=size, boxes=boxes, split=split)
    env.reset(seed)
    pushes = solve(env.instance.grid, env.state, env.instance.goals)
    assert pushes
    assert env.is_solved(env.milestones(env.state, tuple(pushes))[-1])


@pytest.mark.parametrize("team", ["planner_executor", "alternating", "single"])
@pytest.mark.parametrize("rendering", ["compact", "ascii"])
@pytest.mark.parametrize("boxes", [1, 2])
def test_env_passes_the_env_check(team, rendering, boxes):
    check_env(lambda: make_env("sokoban", size=5, boxes=boxes, team=team, rendering=rendering))


def moves_by_forward_search(env: Sokoban) -> int:
    """The fewest moves from the env's state to a solution, by breadth-first play."""
    far = {env.state: 0}
    queue = deque([env.state])
    while queue:
        state = queue.popleft()
        if env.is_solved(state):
            return far[state]
        for after in (env.move(state, direction) for direction in range(4)):
            if after is not None and after not in far:
                far[after] = far[state] + 1
                queue.append(after)
    raise AssertionError("no solution")


@pytest.mark.parametrize("seed", range(20))
def test_path_shaping_counts_the_fewest_moves(seed):
    env = Sokoban(size=6, walls=4, shaping="path")
    env.reset(seed)
    assert env.potential(env.state) == moves_by_forward_search(env)


def test_path_shaping_by_hand(monkeypatch):
    env = game(monkeypatch, "#o.. .1.. ...@ ....", shaping="path")
    env.reset(0)
    assert env.potential(env.state) == 3  # left, left, up: the last pushes the box onto the goal
    assert env.step({"planner": "left"}).rewards == {"planner": -1}  # along the border it can never go right again
    assert env.step({"executor": "left"}).team_reward == pytest.approx(1 / 3)
    env.step({"planner": "up"})
    assert env.step({"executor": "left up"}).team_reward == pytest.approx(2 / 3 + 1)


def test_path_shaping_is_of_one_box():
    with pytest.raises(ValueError, match=r"moves of one box, but boxes is 2: use shaping: manhattan"):
        Sokoban(boxes=2, shaping="path")


@pytest.mark.parametrize(("boxes", "bar"), [(1, 0.97), (2, 0.6)])
def test_expert_solves_by_plans_that_it_carries_out(boxes, bar):
    wins = []
    for seed in range(100):
        env = Sokoban(size=6, walls=3, boxes=boxes)
        step = env.reset(seed)
        while not step.done:
            (seat,) = step.observations
            step = env.step({seat: env.expert(seat, Random(seed))})
            assert not step.info["invalid"]
        wins.append(step.info["success"])
    assert sum(wins) / len(wins) >= bar  # the rest takes more moves than four turns have


def test_expert_that_carries_out_a_plan_searches_no_solution():
    class Searched(Sokoban):
        searches = 0

        def solution(self, state):
            self.searches += 1
            return super().solution(state)

    env = Searched()
    env.reset(3)
    env.step({"planner": env.expert("planner", Random(0))})
    assert env.searches == 1
    env.expert("executor", Random(0))
    assert env.searches == 1


@pytest.mark.parametrize("team", ["alternating", "single"])
def test_expert_of_other_teams_says_words_in_the_ascii_rendering(team):
    env = Sokoban(team=team, rendering="ascii")
    step = env.reset(1)
    while not step.done:
        (seat,) = step.observations
        step = env.step({seat: env.expert(seat, Random(0))})
    assert step.info["success"]
