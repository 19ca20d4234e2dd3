"""The exact worker: PSRO's tasks by hand on Kuhn poker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from palestra.populations.normal_form.equilibria import nash
from palestra.populations.tasks import Task
from palestra.workers.exact import ExactWorker, seats_by_player

SEATS = ("player_0", "player_1")
UNIFORM = {"uniform": 1.0}


def kuhn(players: tuple[str, ...] = SEATS) -> ExactWorker:
    return ExactWorker({"type": "kuhn_poker", "players": max(2, len(players))}, players)


def assess(given: ExactWorker, members: dict[str, Path], **strategies: dict[str, float]) -> float:
    task = Task("assess/1", "assess", {"strategies": strategies})
    return float(given.run_task(task, members, None)["nash_conv"])


def test_uniform_play_of_kuhn_poker() -> None:
    """11/12 (OpenSpiel's tests); the first player wins 1/8 of uniform play by uniform play."""
    given = kuhn()
    found = given.run_task(Task("a", "assess", {"strategies": dict.fromkeys(SEATS, UNIFORM)}), {}, None)
    assert found["nash_conv"] == pytest.approx(11 / 12)
    assert found["exploitability"] == pytest.approx(11 / 24)
    assert found["values"] == pytest.approx([0.125, -0.125])


def test_best_responses_to_uniform_play(tmp_path: Path) -> None:
    """They win what NashConv says: 1/2 and 5/12."""
    given = kuhn()
    for player, other, value in (("player_0", "player_1", 1 / 2), ("player_1", "player_0", 5 / 12)):
        order = {"player": player, "opponents": {other: UNIFORM}}
        result = given.run_task(Task(f"train/{player}", "train", order, output_member=player), {}, tmp_path / player)
        assert result["return"] == pytest.approx(value)
        cell = [player, "uniform"] if player == "player_0" else ["uniform", player]
        played = given.run_task(Task("p", "play", {"cells": [cell], "games": 5}), {player: tmp_path / player}, None)[
            "cells"
        ]
        assert played[0]["mean"][SEATS.index(player)] == pytest.approx(value)


def test_double_oracle_by_its_tasks_nears_the_equilibrium(tmp_path: Path) -> None:
    given, members = kuhn(), {}
    names: dict[str, list[str]] = {player: ["uniform"] for player in SEATS}
    mixes = dict.fromkeys(SEATS, UNIFORM)
    for iteration in range(10):
        for player, other in (SEATS, SEATS[::-1]):
            name = f"{player}-{iteration}"
            order = {"player": player, "opponents": {other: mixes[other]}}
            given.run_task(Task(f"train/{name}", "train", order, output_member=name), members, tmp_path / name)
            names[player].append(name)
            members[name] = tmp_path / name
        cells = [[a, b] for a in names["player_0"] for b in names["player_1"]]
        played = given.run_task(Task(f"play/{iteration}", "play", {"cells": cells, "games": 1}), members, None)["cells"]
        table = np.array([cell["mean"] for cell in played]).reshape(iteration + 2, iteration + 2, 2)
        found = nash([table[..., 0], table[..., 1]])
        mixes = {p: dict(zip(names[p], s.tolist(), strict=True)) for p, s in zip(SEATS, found, strict=True)}
    assert assess(given, members, **mixes) < 0.05


def test_one_population_plays_every_seat(tmp_path: Path) -> None:
    """Against itself a policy wins nothing; the best response to uniform play wins (1/2 + 5/12) / 2."""
    given = kuhn(("all",))
    order = {"player": "all", "opponents": {"all": UNIFORM}}
    result = given.run_task(Task("train/a", "train", order, output_member="a"), {}, tmp_path / "a")
    assert result["return"] == pytest.approx(11 / 24)
    members = {"a": tmp_path / "a"}
    cells = [["a", "uniform"], ["a", "a"], ["uniform", "a"]]
    first, second, third = given.run_task(Task("p", "play", {"cells": cells, "games": 4}), members, None)["cells"]
    assert first["mean"] == pytest.approx([11 / 24, -11 / 24])
    assert second["mean"] == pytest.approx([0, 0]) and sum(second["wins"]) + second["draws"] == pytest.approx(4)
    assert third["mean"] == pytest.approx([-11 / 24, 11 / 24])
    assert third["wins"] == pytest.approx(first["wins"][::-1])


def test_answers_to_play_that_is_correlated(tmp_path: Path) -> None:
    """Alike in both line-ups: the answer to a joint draw of one policy is that to the policy itself."""
    given = kuhn(("a", "b", "c"))
    one = {"player": "a", "opponents": {"b": UNIFORM, "c": UNIFORM}}
    both = {"player": "a", "joint": [[{"b": "uniform", "c": "uniform"}, 0.5]] * 2}
    values = [
        given.run_task(Task("t", "train", order, output_member="t"), {}, tmp_path)["return"] for order in (one, both)
    ]
    assert values[0] == pytest.approx(values[1])


def test_what_cannot_be_exact() -> None:
    with pytest.raises(ValueError, match='env "pong" has no rules here'):
        ExactWorker({"type": "pong"}, SEATS)
    with pytest.raises(ValueError, match="there are train, play, assess and solve"):
        kuhn().run_task(Task("t", "rate"), {}, None)
    assert seats_by_player(("all",), 3) == {"all": [0, 1, 2]}
