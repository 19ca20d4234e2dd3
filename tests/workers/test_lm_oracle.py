"""Language agents as a population: what they play is what is read off them, and responses respond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.config import validate
from palestra.populations.tasks import Task
from palestra.workers.lm_oracle import LanguageOracle, LanguageWorker

VOCABULARY = {"J": "1", "Q": "2", "K": "3", "pass": "no", "bet": "yes"}
TREE: dict[str, Any] = {
    "type": "language",
    "env": {"type": "text_kuhn", "vocabulary": VOCABULARY},
    "policy": {"rank": 4, "lr": 3e-3, "sampling": {"max_tokens": 2}, "batch_size": 64},
    "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4, "scale": "none"},
    "steps": 6,
    "episodes": 16,
    "imitation_steps": 20,
}
SEATS = ("player_0", "player_1")


def worker(players: tuple[str, ...] = SEATS, **changes: Any) -> LanguageWorker:
    return LanguageWorker(validate(LanguageOracle, TREE | changes), players, seed=3)


@pytest.fixture(scope="module")
def shared() -> LanguageWorker:
    """Has been taught the words once."""
    return worker()


@pytest.fixture(scope="module")
def response(shared: LanguageWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Player 0's response to a player that moves at random."""
    out = tmp_path_factory.mktemp("members") / "bold"
    out.mkdir()
    order = {"player": "player_0", "opponents": {"player_1": {"uniform": 1.0}}}
    return out, shared.run_task(Task("train/bold", "train", order, output_member="bold"), {}, out)


def value(worker: LanguageWorker, members: dict[str, Path], *names: str) -> list[float]:
    """What members win from each other, read off them."""
    strategies = {seat: {name: 1.0} for seat, name in zip(SEATS, names, strict=True)}
    result: list[float] = worker.run_task(Task("assess", "assess", {"strategies": strategies}), members, None)["values"]
    return result


def test_uniform_play_has_the_known_nash_conv(shared: LanguageWorker) -> None:
    strategies = {seat: {"uniform": 1.0} for seat in SEATS}
    told = shared.run_task(Task("assess/0", "assess", {"strategies": strategies}), {}, None)
    assert told["nash_conv"] == pytest.approx(11 / 12) and told["exploitability"] == pytest.approx(11 / 24)


def test_a_response_wins_more_than_uniform_play(shared: LanguageWorker, response: Any) -> None:
    out, told = response
    assert value(shared, {"bold": out}, "bold", "uniform")[0] > 0.3  # uniform play: 0.125, at best 0.5
    line = told["against"]["random"]
    assert line["games"] == 2 * 16 * 4 and line["return"] == told["return"]
    assert line["wins"] + line["draws"] < line["games"]


def test_games_played_say_what_is_read(shared: LanguageWorker, response: Any) -> None:
    """Means of 600 games are within four standard errors of the exact ones, and nobody says what is no word."""
    out, _ = response
    order = {"cells": [["bold", "uniform"], ["uniform", "uniform"]], "games": 600}
    cells = shared.run_task(Task("play/0", "play", order, ("bold",)), {"bold": out}, None)["cells"]
    for cell in cells:
        exact = value(shared, {"bold": out}, *cell["members"])
        error = np.sqrt(cell["m2"][0]) / 600
        assert abs(cell["mean"][0] - exact[0]) < 4 * error
        assert cell["games"] == 600 and sum(cell["wins"]) + cell["draws"] == 600
        assert cell["mean"][0] == pytest.approx(-cell["mean"][1], abs=0.02)


def test_exact_payoffs_are_read_without_a_game(response: Any) -> None:
    out, _ = response
    reader = worker(payoffs="exact")
    order = {"cells": [["bold", "uniform"]], "games": 10}
    (cell,) = reader.run_task(Task("play/0", "play", order, ("bold",)), {"bold": out}, None)["cells"]
    assert cell["exact"] and cell["mean"] == pytest.approx(value(reader, {"bold": out}, "bold", "uniform"))


def test_best_members_play_one_word_at_each_information_state(response: Any) -> None:
    """What is read off a member that no longer draws is a table of zeros and ones, and its games go by it."""
    out, _ = response
    greedy = worker(greedy=True)
    assert greedy.action_reader is not None
    table = greedy.action_reader.policy("bold", greedy._member("bold", {"bold": out}))
    own = greedy.action_reader.tree.player_rows(0)
    assert (table[own].max(1) == 1).all()
    order = {"cells": [["bold", "uniform"]], "games": 400}
    (cell,) = greedy.run_task(Task("play/0", "play", order, ("bold",)), {"bold": out}, None)["cells"]
    assert abs(cell["mean"][0] - value(greedy, {"bold": out}, "bold", "uniform")[0]) < 4 * np.sqrt(cell["m2"][0]) / 400


def test_a_response_follows_from_its_name_and_its_opponents(shared: LanguageWorker, tmp_path: Path) -> None:
    """Twice the same task in two workers gives equal files; another name does not."""
    weights = []
    for number, name in enumerate(("one", "one", "two")):
        out = tmp_path / str(number)
        out.mkdir()
        order = {"player": "player_1", "opponents": {"player_0": {"uniform": 1.0}}, "steps": 1}
        who = shared if number else worker()
        who.run_task(Task(f"train/{name}", "train", order, output_member=name), {}, out)
        weights.append((out / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_one_population_plays_every_seat(response: Any, tmp_path: Path) -> None:
    """A learner goes on from a member, against members and itself, at both seats in turn."""
    out, _ = response
    everyone = worker(("agent",))
    order = {"player": "agent", "opponents": {"agent": {"bold": 1.0}}, "self_play": 0.5, "start": "bold", "steps": 5}
    told = everyone.run_task(Task("train/agent-1", "train", order, ("bold",), "agent-1"), {"bold": out}, tmp_path)
    games = {name: line["games"] for name, line in told["against"].items()}
    assert set(games) == {"bold", "itself"} and sum(games.values()) == 16 * 4
    order = {"cells": [["bold", "uniform"]], "games": 40}
    (cell,) = everyone.run_task(Task("play/0", "play", order), {"bold": out}, None)["cells"]
    assert cell["members"] == ["bold", "uniform"] and cell["games"] == 40


def test_a_joint_meta_strategy_is_drawn_as_a_whole(tmp_path: Path) -> None:
    trio = worker(("player_0", "player_1", "player_2"), env={"type": "text_kuhn", "players": 3}, imitation_steps=0)
    order = {"player": "player_0", "joint": [[{"player_1": "uniform", "player_2": "uniform"}, 1.0]], "steps": 1}
    told = trio.run_task(Task("train/x", "train", order, output_member="x"), {}, tmp_path)
    assert told["against"]["random"]["games"] == 2 * 16 * 4


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="has no rules"):
        worker(env={"type": "plan_path"}, payoffs="exact")
    plain = worker(env={"type": "plan_path"})
    with pytest.raises(ValueError, match="needs the rules"):
        plain.run_task(Task("assess/0", "assess", {"strategies": {}}), {}, None)
