"""The exact worker: PSRO's tasks by hand on Kuhn poker."""

from pathlib import Path

import numpy as np
import pytest
from helpers.toy_tasks import LookTask

from palestra.populations.normal_form.equilibria import nash
from palestra.populations.payoffs import PayoffCell
from palestra.populations.population import Sides
from palestra.populations.tasks import (
    AssessResult,
    AssessTask,
    Lineup,
    Opponents,
    PlayResult,
    PlayTask,
    TrainResult,
    TrainTask,
)
from palestra.populations.workers.exact import ExactWorker

SEATS = ("player_0", "player_1")
UNIFORM = {"uniform": 1.0}


def kuhn(sides: Sides = Sides.of(SEATS)) -> ExactWorker:
    return ExactWorker({"type": "kuhn_poker", "players": len(sides.seats)}, sides)


def assess(given: ExactWorker, members: dict[str, Path], **strategies: dict[str, float]) -> float:
    result = given.run_task(AssessTask("assess/1", iteration=1, strategies=strategies), members, None)
    assert isinstance(result, AssessResult)
    return result.nash_conv


def train(
    given: ExactWorker, player: str, opponents: Opponents, out: Path, members: dict[str, Path] | None = None
) -> float | None:
    task = TrainTask(f"train/{out.name}", player=player, opponents=opponents, output_member=out.name)
    result = given.run_task(task, members or {}, out)
    assert isinstance(result, TrainResult)
    return result.mean_return


def play(given: ExactWorker, cells: list[tuple[str, str]], games: int, members: dict[str, Path]) -> list[PayoffCell]:
    result = given.run_task(PlayTask("play", cells=tuple(cells), games_per_cell=games), members, None)
    assert isinstance(result, PlayResult)
    return list(result.payoffs)


def test_cell_without_a_member_for_each_seat_is_refused() -> None:
    with pytest.raises(ValueError, match="uniform, uniform names 2 members, and the game has 3 seats"):
        play(kuhn(Sides.of(("a", "b", "c"))), [("uniform", "uniform")], 1, {})


def test_exact_values_of_uniform_kuhn_poker() -> None:
    """11/12 (OpenSpiel's tests); between uniform players the first one earns 1/8."""
    given = kuhn()
    found = given.run_task(AssessTask("a", iteration=0, strategies=dict.fromkeys(SEATS, UNIFORM)), {}, None)
    assert isinstance(found, AssessResult)
    assert found.nash_conv == pytest.approx(11 / 12)
    assert found.exploitability == pytest.approx(11 / 24)
    assert found.values == pytest.approx((0.125, -0.125))


def test_exact_best_responses_to_uniform_play(tmp_path: Path) -> None:
    """Their gains add up to NashConv: 1/2 and 5/12."""
    given = kuhn()
    for player, other, value in (("player_0", "player_1", 1 / 2), ("player_1", "player_0", 5 / 12)):
        won = train(given, player, Opponents({other: UNIFORM}), tmp_path / player)
        assert won == pytest.approx(value)
        cell = (player, "uniform") if player == "player_0" else ("uniform", player)
        (played,) = play(given, [cell], 5, {player: tmp_path / player})
        assert played.mean[SEATS.index(player)] == pytest.approx(value) and played.exact


def test_double_oracle_tasks_approach_the_equilibrium(tmp_path: Path) -> None:
    given, members = kuhn(), {}
    names: dict[str, list[str]] = {player: ["uniform"] for player in SEATS}
    mixes = dict.fromkeys(SEATS, UNIFORM)
    for iteration in range(10):
        for player, other in (SEATS, SEATS[::-1]):
            name = f"{player}-{iteration}"
            train(given, player, Opponents({other: mixes[other]}), tmp_path / name, members)
            names[player].append(name)
            members[name] = tmp_path / name
        cells = [(a, b) for a in names["player_0"] for b in names["player_1"]]
        table = np.array([cell.mean for cell in play(given, cells, 1, members)]).reshape(
            iteration + 2, iteration + 2, 2
        )
        found = nash([table[..., 0], table[..., 1]])
        mixes = {p: dict(zip(names[p], s.tolist(), strict=True)) for p, s in zip(SEATS, found, strict=True)}
    assert assess(given, members, **mixes) < 0.05


def test_one_population_plays_every_seat(tmp_path: Path) -> None:
    """Against itself a policy earns 0; the best response to uniform play earns (1/2 + 5/12) / 2."""
    given = kuhn(Sides.of(SEATS).with_owner("all"))
    assert train(given, "all", Opponents({"all": UNIFORM}), tmp_path / "a") == pytest.approx(11 / 24)
    cells = [("a", "uniform"), ("a", "a"), ("uniform", "a")]
    first, second, third = play(given, cells, 4, {"a": tmp_path / "a"})
    assert first.mean == pytest.approx((11 / 24, -11 / 24))
    assert second.mean == pytest.approx((0, 0)) and sum(second.wins) + second.draws == pytest.approx(4)
    assert third.mean == pytest.approx((-11 / 24, 11 / 24))
    assert third.wins == pytest.approx(first.wins[::-1])


def test_exact_response_to_correlated_play(tmp_path: Path) -> None:
    """Equal opponents in both line-ups: the response to a joint draw of one policy equals that to the policy itself."""
    given = kuhn(Sides.of(("a", "b", "c")))
    one = Opponents({"b": UNIFORM, "c": UNIFORM})
    both = Opponents(joint=(Lineup({"b": "uniform", "c": "uniform"}, 0.5),) * 2)
    assert train(given, "a", one, tmp_path / "t") == pytest.approx(train(given, "a", both, tmp_path / "t"))


def test_games_without_exact_values_are_refused() -> None:
    with pytest.raises(ValueError, match='env "pong" has no rules here'):
        ExactWorker({"type": "pong"}, Sides.of(SEATS))
    with pytest.raises(ValueError, match="there are train, play, assess and solve"):
        kuhn().run_task(LookTask("t"), {}, None)
