"""Plan-Path against cases worked by hand."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.envs import check_env, make_env
from palestra.envs.text.grid import plan_path
from palestra.envs.text.grid.grid import distances
from palestra.envs.text.grid.plan_path import PlanPath, make_path_layout


def game(monkeypatch, size, walls, start, goal, **options) -> PlanPath:
    """An env whose every instance is the given board; cells are (row, column)."""
    cells = [row * size + column for row, column in walls]
    layout = make_path_layout(size, tuple(cells), start[0] * size + start[1], goal[0] * size + goal[1])
    monkeypatch.setattr(plan_path, "_instance", lambda *_: layout)
    return PlanPath(size=size, **options)


# . # G        start (2, 0), goal (0, 2), wall (0, 1)
# . . .
# @ . .
def corner(monkeypatch, **options) -> PlanPath:
    return game(monkeypatch, 3, [(0, 1)], (2, 0), (0, 2), **options)


def test_turn_by_hand(monkeypatch):
    env = corner(monkeypatch)
    step = env.reset(0)
    assert step.observations == {"planner": "size 3 you r2 c0 goal r0 c2 walls r0 c1"}
    step = env.step({"planner": "r1 c0 r1 c2"})
    # Distance 4 at first; the plan ends at (1, 2), distance 1: three quarters closed.
    assert step.rewards == {"planner": pytest.approx(3 / 4)}
    assert step.team_reward == 0
    assert step.observations == {"executor": "size 3 you r2 c0 goal r0 c2 walls r0 c1 plan r1 c0 r1 c2"}
    step = env.step({"executor": "up up up right"})
    # To (0, 0), distance 2; the third "up" leaves the board and the last step meets the wall: 2 of 4 are illegal.
    # The first of two waypoints was passed, and then the second came no nearer: half of the plan was followed.
    assert step.rewards == {"executor": pytest.approx(0.5 / 2 - 0.1 * 2 / 4)}
    assert step.team_reward == pytest.approx(2 / 4)
    assert step.info == {
        "success": False,
        "turn": 1,
        "invalid": True,
        "why_invalid": "moves that are not possible, and were skipped: 2 of 4",
        "reward_terms": {"executor": {"form": pytest.approx(-0.05), "plan": pytest.approx(0.25)}},
    }
    assert step.observations == {"planner": "size 3 you r0 c0 goal r0 c2 walls r0 c1"}


def test_progress_reward_is_potential_based_and_goal_pays_one(monkeypatch):
    env = corner(monkeypatch, team="single", max_turns=2)
    env.reset(0)
    assert env.step({"agent": "right"}).team_reward == pytest.approx(1 / 4)
    assert env.fork().step({"agent": "left"}).team_reward == pytest.approx(-1 / 4)
    last = env.step({"agent": "up right up left"})  # the goal is reached on the third move: the fourth is not made
    assert last.team_reward == pytest.approx(3 / 4 + 1)
    assert last.done and not last.truncated
    assert last.info == {
        "success": True,
        "turn": 2,
        "invalid": False,
        "steps": 4,
        "reward_terms": {"agent": {"form": 0.0}},
    }


def test_plan_stops_at_its_first_invalid_segment(monkeypatch):
    env = corner(monkeypatch)
    env.reset(0)
    blocked = env.fork().step({"planner": "r0 c0 r0 c2"}).rewards["planner"]  # stops at (0, 0), distance 2
    assert blocked == pytest.approx(2 / 4)
    crooked = env.fork().step({"planner": "r1 c1 r1 c2"}).rewards["planner"]  # (1, 1) is not in line: no step
    assert crooked == 0
    solving = env.fork().step({"planner": "r2 c2 r0 c2"}).rewards["planner"]
    assert solving == pytest.approx(1 + 1)


def test_outcome_reward_pays_success_only(monkeypatch):
    env = corner(monkeypatch, reward="outcome")
    env.reset(0)
    assert env.fork().step({"planner": "r2 c2"}).rewards == {"planner": 0.0}
    assert env.step({"planner": "r2 c2 r0 c2"}).rewards == {"planner": 1.0}
    assert env.fork().step({"executor": "up"}).team_reward == 0.0
    step = env.step({"executor": "right right up up"})
    assert (step.team_reward, step.rewards) == (1.0, {"executor": 0.0})


@pytest.mark.parametrize("answer", ["", "go up", "up " * 7, "r1 c1", "upp", None, 3])
def test_unreadable_answer_changes_no_state(monkeypatch, answer):
    env = corner(monkeypatch, team="alternating")
    env.reset(0)
    step = env.step({"first": answer})
    assert step.rewards == {"first": -0.1}
    assert step.info["invalid"]
    assert step.observations == {"second": "size 3 you r2 c0 goal r0 c2 walls r0 c1"}


@pytest.mark.parametrize("answer", ["up, RIGHT", "I go up then right.\n#### up right", "#### left #### Up,right"])
def test_readable_spellings_of_up_right(monkeypatch, answer):
    env = corner(monkeypatch, team="alternating")
    env.reset(0)
    assert env.step({"first": answer}).observations == {"second": "size 3 you r1 c1 goal r0 c2 walls r0 c1"}


@pytest.mark.parametrize("answer", ["r1", "r3 c0", "c1 r1", "r1 c1 r1 c1 r1 c1 r1 c1", "r-1 c0", "r٣ c1"])
def test_an_unreadable_plan_is_shown_as_none(monkeypatch, answer):
    env = corner(monkeypatch)
    env.reset(0)
    step = env.step({"planner": answer})
    assert step.observations["executor"].endswith(" plan none")
    assert step.rewards == {"planner": -0.1}


def test_running_out_of_turns_is_truncation(monkeypatch):
    env = corner(monkeypatch, team="single", max_turns=1)
    env.reset(0)
    step = env.step({"agent": "up"})
    assert step.done and step.truncated
    with pytest.raises(ValueError, match="over"):
        env.step({"agent": "up"})


def test_action_of_the_wrong_seat_is_refused(monkeypatch):
    env = corner(monkeypatch)
    env.reset(0)
    with pytest.raises(ValueError, match="it is the turn of planner"):
        env.step({"executor": "up"})


def test_full_rendering_of_board_and_instructions(monkeypatch):
    env = corner(monkeypatch, rendering="ascii")
    step = env.reset(0)
    assert step.observations["planner"].startswith("#####\n#.#G#\n#...#\n#@..#\n#####\nYou are at row 2, column 0;")
    assert "####" in env.roles["planner"] and "####" in env.roles["executor"]
    step = env.step({"planner": "Go round. #### r2 c2 r0 c2"})
    assert "Go round. #### r2 c2 r0 c2" in step.observations["executor"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(4, 9), split=st.sampled_from(["base", "train", "dev", "test"]))
def test_every_instance_is_solvable_and_named_by_its_seed(seed, size, split):
    layout = PlanPath(size=size, split=split).make_layout(seed)
    assert layout.start != layout.goal
    assert layout.goal in distances(layout.grid, layout.start)
    plan_path._instance.cache_clear()
    assert PlanPath(size=size, split=split).make_layout(seed).cell_groups == layout.cell_groups


@pytest.mark.parametrize("team", ["planner_executor", "alternating", "single"])
@pytest.mark.parametrize("rendering", ["compact", "ascii"])
@pytest.mark.parametrize("reward", ["dense", "outcome"])
def test_env_passes_the_env_check(team, rendering, reward):
    check_env(lambda: make_env("plan_path", size=4, team=team, rendering=rendering, reward=reward))


@pytest.mark.parametrize("team", ["planner_executor", "single"])
def test_expert_walks_a_shortest_path_in_straight_lines(team):
    for seed in range(50):
        env = PlanPath(size=8, team=team, max_turns=12)
        step = env.reset(seed)
        shortest = env.instance.goal_distances[env.state]
        while not step.done:
            (seat,) = step.observations
            step = env.step({seat: env.expert(seat, Random(seed))})
            assert not step.info["invalid"]
        assert step.info["success"] and step.info["steps"] == shortest
