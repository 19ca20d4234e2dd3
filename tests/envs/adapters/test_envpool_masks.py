"""Action masks and nested observations of EnvPool's envs, with a stand-in for the package."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces


class Pool:
    """A pool of games that return one number and a mask, or `shown(games)`, and take an action of `action_space`."""

    def __init__(self, games: int, action_space: spaces.Space[Any], mask: Any, shown: Any) -> None:
        self.games = games
        self.action_space, self.config, self.sent = action_space, SimpleNamespace(get=lambda name, default: default), []
        self.seen = {"number": np.zeros((games, 1), np.float32)} if shown is None else shown(games)
        if mask is not None:
            self.seen["action_mask"] = np.broadcast_to(np.asarray(mask, bool), (games, *np.shape(mask)))

    def reset(self, rows: Any = None) -> Any:
        return self.seen, {}

    def send(self, actions: np.ndarray) -> None:
        self.sent.append(actions.copy())

    def recv(self) -> Any:
        return self.seen, np.zeros(self.games, np.float32), *np.zeros((2, self.games), bool), {}

    def close(self) -> None:
        pass


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes an EnvPoolEnv of 2 games of a given action space and mask."""
    package: Any = ModuleType("envpool")
    monkeypatch.setitem(sys.modules, "envpool", package)
    monkeypatch.delitem(sys.modules, "palestra.envs.adapters.envpool", raising=False)
    from palestra.envs.adapters.envpool import EnvPoolEnv

    def made(action_space: spaces.Space[Any], mask: Any, shown: Any = None) -> EnvPoolEnv:
        package.make_gymnasium = lambda id, num_envs, env_seed: Pool(num_envs, action_space, mask, shown)
        return EnvPoolEnv(2, id="Toy-v0")

    yield made
    sys.modules.pop("palestra.envs.adapters.envpool")


@pytest.mark.parametrize(
    ("action_space", "mask"),
    [
        (spaces.Box(0, np.array([3, 9]), (2,), np.int32), np.ones((4, 10))),  # Tetris: rotation and column
        (spaces.Box(0, 9, (2,), np.int32), np.ones((10, 10))),  # Minesweeper: row and column
        (spaces.Box(0, 8, (3,), np.int32), np.ones((9, 9, 9))),  # Sudoku
        (spaces.MultiDiscrete([2, 3]), np.ones(5)),
        (spaces.Box(-1, 1, (2,), np.float32), np.ones(2)),
        (spaces.Discrete(3), np.ones(4)),
        (spaces.Box(0, 2, (2,), np.int32), np.ones((2, 4))),
    ],
)
def test_masks_that_fit_no_seat_are_refused(make: Any, action_space: Any, mask: Any) -> None:
    with pytest.raises(ValueError, match=r'"Toy-v0" has an action_mask \[.*used for one integer of each seat'):
        make(action_space, mask)


def test_masks_of_seats_are_applied(make: Any) -> None:
    env = make(spaces.Box(1, 3, (2,), np.int32), [[1, 0, 1], [0, 0, 1]])  # integers of two agents, starting at 1
    frame = env.reset(np.arange(2))
    assert env.seats == ("agent_0", "agent_1") and [space.n for space in env.action_spaces] == [3, 3]
    assert frame.action_mask is not None and frame.action_mask[1].tolist() == [
        [True, False, True],
        [False] * 2 + [True],
    ]
    env.step(np.array([[0, 1], [2, 2]], np.int32))
    assert env.pools[0][0].sent[0].tolist() == [[1, 3], [3, 3]]
    single = make(spaces.Discrete(3), [1, 0, 1]).reset(np.arange(2))
    assert single.action_mask.tolist() == [[[True, False, True]]] * 2


def test_env_without_masks(make: Any) -> None:
    assert make(spaces.Discrete(3), None).reset(np.arange(2)).action_mask is None


def parts(games: int) -> dict[str, Any]:
    """A dictionary with a dictionary and a tuple; game b has the numbers 10 b + 0, 1, 2, ..."""
    place = 10 * np.arange(games, dtype=np.float64)[:, None]
    return {"start": (place + 3, place.astype(np.int32) + 4), "goal": {"y": place[:, 0] + 2, "x": place + np.arange(2)}}


@pytest.mark.parametrize("whole", [True, False])
def test_nested_observations_are_one_row(make: Any, whole: bool) -> None:
    env = make(spaces.Discrete(3), None, parts if whole else lambda games: parts(games)["start"])
    expected = np.arange(5) if whole else np.arange(3, 5)
    assert env.observation_shapes == ((len(expected),),)
    assert env.reset(np.arange(2)).obs.tolist() == [[expected.tolist()], [(10 + expected).tolist()]]
    assert env.step(np.zeros((2, 1), np.int32)).obs.tolist() == [[expected.tolist()], [(10 + expected).tolist()]]


def test_mask_within_a_part_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r'"Toy-v0" has the action_mask hand\.action_mask within a part'):
        make(spaces.Discrete(3), None, lambda games: {"hand": {"action_mask": np.ones((games, 3), bool)}})
