"""Language agents as a population: tables equal their play, and responses beat their opponents."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.core.config import validate
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
from palestra.populations.workers.lm_oracle import LanguageOracle, LanguageWorker, _adapter
from palestra.text.policies.word_probabilities import word_probabilities

VOCABULARY = {"T": "0", "J": "1", "Q": "2", "K": "3", "A": "4", "pass": "up", "bet": "down"}
TREE: dict[str, Any] = {
    "type": "language",
    "env": {"type": "text_kuhn", "vocabulary": VOCABULARY},
    "policy": {"rank": 4, "lr": 3e-3, "sampling": {"max_tokens": 2}, "batch_size": 64},
    "algorithm": {"type": "grpo", "branch_at": "root", "group_size": 4, "scale": "none", "flat_groups": "skip"},
    "steps": 6,
    "episodes": 16,
    "imitation_steps": 20,
}
SEATS = ("player_0", "player_1")


def worker(sides: Sides = Sides.of(SEATS), **changes: Any) -> LanguageWorker:
    return LanguageWorker(validate(LanguageOracle, TREE | changes), sides, seed=3)


@pytest.fixture(scope="module")
def taught_worker() -> LanguageWorker:
    """A worker that has imitated the words once."""
    return worker()


@pytest.fixture(scope="module")
def response(taught_worker: LanguageWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Player 0's response to a uniformly random player."""
    out = tmp_path_factory.mktemp("members") / "bold"
    out.mkdir()
    return out, train(
        taught_worker, "bold", out, player="player_0", opponents=Opponents({"player_1": {"uniform": 1.0}})
    )


def test_a_side_of_two_seats_is_played_by_one_adapter(tmp_path: Path) -> None:
    """In Kuhn poker of three, two seats against one."""
    pairs = worker(
        Sides.of(("solo", "pair", "pair")),
        env={"type": "text_kuhn", "players": 3, "vocabulary": VOCABULARY},
        steps=1,
        imitation_steps=0,
    )
    opponents = Opponents({"solo": {"uniform": 1.0}})
    result = train(pairs, "both", tmp_path, player="pair", opponents=opponents)
    assert list(result.opponents) == ["uniform"] and result.mean_return is not None
    mixed, random = play(pairs, 8, ("uniform", "both"), ("uniform", "uniform"), members={"both": tmp_path})
    assert mixed.games == 8
    assert random.mean[0] == pytest.approx(-2 * random.mean[1]) != 0  # a side's result is the mean of its seats'
    with pytest.raises(ValueError, match="names 3 members, and the game has 2 seats"):
        play(pairs, 1, ("uniform", "both", "both"), members={"both": tmp_path})  # type: ignore[arg-type]


def test_kv_cache_has_the_budget_of_the_config() -> None:
    small = worker(kv_cache_gib=0.25)
    sampler: Any = small.engines.shared_engine(small.config.policy)[1]
    assert sampler.batch.memory.limit == 2**28


def train(
    worker: LanguageWorker, name: str, out: Path, members: dict[str, Path] | None = None, **fields: Any
) -> TrainResult:
    out.mkdir(exist_ok=True)
    task = TrainTask(f"train/{name}", members=tuple(members or ()), output_member=name, **fields)
    result = worker.run_task(task, members or {}, out)
    assert isinstance(result, TrainResult)
    return result


def play(worker: LanguageWorker, games: int, *cells: tuple[str, str], members: dict[str, Path]) -> list[PayoffCell]:
    task = PlayTask("play/0", cells=cells, games_per_cell=games, members=tuple(members))
    result = worker.run_task(task, members, None)
    assert isinstance(result, PlayResult)
    return list(result.payoffs)


def assess(worker: LanguageWorker, strategies: dict[str, dict[str, float]], members: dict[str, Path]) -> AssessResult:
    result = worker.run_task(AssessTask("assess/0", iteration=0, strategies=strategies), members, None)
    assert isinstance(result, AssessResult)
    return result


def value(worker: LanguageWorker, members: dict[str, Path], *names: str) -> list[float]:
    """The payoffs of members against each other, from their tables."""
    strategies = {seat: {name: 1.0} for seat, name in zip(SEATS, names, strict=True)}
    return list(assess(worker, strategies, members).values)


def test_uniform_play_has_the_known_nash_conv(taught_worker: LanguageWorker) -> None:
    strategies = {seat: {"uniform": 1.0} for seat in SEATS}
    assessment = assess(taught_worker, strategies, {})
    assert assessment.nash_conv == pytest.approx(11 / 12) and assessment.exploitability == pytest.approx(11 / 24)


def test_trained_response_beats_uniform_play(taught_worker: LanguageWorker, response: Any, check_score: Any) -> None:
    out, stats = response
    check_score(value(taught_worker, {"bold": out}, "bold", "uniform")[0])  # uniform play: 0.125, at best 0.5
    met = stats.opponents["uniform"]
    assert met.games == 2 * 16 * 4 and met.mean_return == stats.mean_return
    assert met.wins + met.draws < met.games


def test_sampled_games_match_exact_values(taught_worker: LanguageWorker, response: Any) -> None:
    """Means of 600 games are within four standard errors of the exact ones, and no answer is not a word."""
    out, _ = response
    members = {"bold": out}
    cells = (("bold", "uniform"), ("uniform", "uniform"))
    for names, cell in zip(cells, play(taught_worker, 600, *cells, members=members), strict=True):
        exact = value(taught_worker, members, *names)
        error = np.sqrt(cell.m2[0]) / 600
        assert abs(cell.mean[0] - exact[0]) < 4 * error
        assert cell.games == 600 and sum(cell.wins) + cell.draws == 600
        assert cell.mean[0] == pytest.approx(-cell.mean[1], abs=0.02)


def test_exact_payoffs_need_no_games(response: Any) -> None:
    out, _ = response
    reader = worker(payoffs="exact")
    (cell,) = play(reader, 10, ("bold", "uniform"), members={"bold": out})
    assert cell.exact and cell.mean == pytest.approx(tuple(value(reader, {"bold": out}, "bold", "uniform")))


def test_greedy_members_are_deterministic_tables(response: Any) -> None:
    """The table of a greedy member has zeros and ones, and its games follow the table."""
    out, _ = response
    greedy = worker(greedy=True)
    assert greedy.action_reader is not None
    table = greedy.action_reader.policy("bold", greedy._member("bold", {"bold": out}))
    own = greedy.action_reader.tree.player_rows(0)
    assert (table[own].max(1) == 1).all()
    (cell,) = play(greedy, 400, ("bold", "uniform"), members={"bold": out})
    assert abs(cell.mean[0] - value(greedy, {"bold": out}, "bold", "uniform")[0]) < 4 * np.sqrt(cell.m2[0]) / 400


@pytest.mark.slow
def test_responses_are_reproducible_from_task_name_and_seed(taught_worker: LanguageWorker, tmp_path: Path) -> None:
    """The same task in two workers gives equal files; another name does not."""
    weights = []
    for number, name in enumerate(("one", "one", "two")):
        out = tmp_path / str(number)
        opponents = Opponents({"player_0": {"uniform": 1.0}})
        train(taught_worker if number else worker(), name, out, player="player_1", opponents=opponents, train_steps=1)
        weights.append((out / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.slow
def test_imitation_has_its_own_learning_rate(tmp_path: Path, check_score: Any) -> None:
    """Responses with a learning rate of 0 still answer with the words by imitation; the base does not."""
    still = worker(policy=TREE["policy"] | {"lr": 0.0}, imitation_lr=3e-3)
    train(still, "taught", tmp_path, player="player_0", opponents=Opponents({"player_1": {"uniform": 1.0}}))
    reader = still.action_reader
    assert reader is not None
    taught: Any = still._member("taught", {"taught": tmp_path})
    check_score(word_probabilities(taught, reader.queries, reader.words).sum(1).min())


def test_one_population_plays_every_seat(response: Any, tmp_path: Path) -> None:
    """A learner starts from a member, and plays members and itself, at both seats in turn."""
    out, _ = response
    everyone = worker(Sides.of(SEATS).with_owner("agent"))
    order = {"player": "agent", "opponents": Opponents({"agent": {"bold": 1.0}}), "self_play": 0.5, "train_steps": 5}
    stats = train(everyone, "agent-1", tmp_path, {"bold": out}, start="bold", **order)
    games = {name: met.games for name, met in stats.opponents.items()}
    assert set(games) == {"bold", "itself"} and sum(games.values()) == 16 * 4
    (cell,) = play(everyone, 40, ("bold", "uniform"), members={"bold": out})
    assert cell.games == 40


@pytest.mark.slow
def test_imitation_ignores_the_warm_up() -> None:
    weights = []
    for ratio in (0.0, 0.5):
        taught = asyncio.run(worker(policy=TREE["policy"] | {"warmup_ratio": ratio}, imitation_steps=2)._teach())
        weights.append(_adapter(taught).parameters())
    assert all(map(torch.equal, *weights))
    new = _adapter(worker()._new("words", worker().config.policy)).parameters()
    assert not all(map(torch.equal, weights[0], new))


def test_joint_lineups_are_sampled_together(tmp_path: Path) -> None:
    trio = worker(
        Sides.of(("player_0", "player_1", "player_2")),
        env={"type": "text_kuhn", "players": 3, "vocabulary": VOCABULARY},
        imitation_steps=0,
    )
    opponents = Opponents(joint=(Lineup({"player_1": "uniform", "player_2": "uniform"}, 1.0),))
    stats = train(trio, "x", tmp_path, player="player_0", opponents=opponents, train_steps=1)
    assert stats.opponents["uniform"].games == 2 * 16 * 4


def test_incompatible_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="has no rules"):
        worker(env={"type": "plan_path"}, payoffs="exact")
    plain = worker(env={"type": "plan_path"})
    with pytest.raises(ValueError, match="needs the rules"):
        assess(plain, {}, {})
