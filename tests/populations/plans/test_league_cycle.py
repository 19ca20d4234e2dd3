"""The league in a cyclic game, with the real scheduler; exact gradients of mixed strategies in place of networks."""

from functools import cache
from pathlib import Path

import numpy as np

from palestra.core.files import read_arrays, write_arrays
from palestra.core.seeding import derive_seed
from palestra.parallel.inline import InlineBackend
from palestra.populations.payoffs import PayoffCell
from palestra.populations.plans.league import League, LeagueConfig
from palestra.populations.population import Member, Population
from palestra.populations.scheduler import run_plan
from palestra.populations.tasks import OpponentResult, PlayResult, PlayTask, TrainResult
from palestra.runs import Run

BEATS = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # rock, paper, scissors: the row player's payoffs


class GradientTrainer:
    """Trains a strategy softmax(logits) by the gradient of its payoff plus a small entropy bonus."""

    def __init__(self, seed=0, steps=20, rate=0.5, entropy=0.01):
        self.seed, self.steps, self.rate, self.entropy = seed, steps, rate, entropy

    def run_task(self, task, members, out):
        if isinstance(task, PlayTask):
            return PlayResult(tuple(self.cell(names, task.games_per_cell, members) for names in task.cells))
        logits = np.random.default_rng(derive_seed(self.seed, task.name)).normal(size=3)
        if task.start:
            logits = read(members[task.start])
        mix = task.opponents.mixes["player"]
        theirs = sum((p * strategy(name, members) for name, p in mix.items()), np.zeros(3))
        for _ in range(self.steps):
            own = softmax(logits)
            met = task.self_play * own + (1 - task.self_play) * theirs
            worth = BEATS @ met - self.entropy * np.log(own)
            logits = logits + self.rate * own * (worth - own @ worth)
        write_arrays(out / "logits.safetensors", {"logits": logits})
        against = {name: self.tally(softmax(logits), strategy(name, members), int(1000 * p)) for name, p in mix.items()}
        return TrainResult(env_steps=task.env_steps, mean_return=0.0, opponents=against)

    def tally(self, own, other, games):
        return OpponentResult(games, 0.0, 1.0, games * own @ (BEATS > 0) @ other, games * own @ other)

    def cell(self, names, games, members):
        tally = self.tally(strategy(names[0], members), strategy(names[1], members), games)
        mean = 2 * tally.points / games - 1
        wins = (tally.wins, games - tally.wins - tally.draws)
        return PayoffCell(games, (mean, -mean), (0.0, 0.0), wins, tally.draws)


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@cache
def read(folder):
    return read_arrays(folder / "logits.safetensors")["logits"]


def strategy(name, members):
    return np.full(3, 1 / 3) if name == "uniform" else softmax(read(members[name]))


def plan_of(seed=0, **config):
    population = Population(("player",))
    population.add(Member("uniform", ""))
    return League(
        LeagueConfig(**{"games_per_cell": 10, "slices": 48, "league_exploiters": 1, **config}), population, seed=seed
    )


def worst(own, others):
    """The lowest win rate against any of these, counting a draw as 1/2."""
    return min(0.5 + own @ BEATS @ other / 2 for other in others)


def final_worst(folder: Path, seed, **config):
    """The win rate of the last main agent against its worst opponent among all frozen members, itself included."""
    plan, worker, members = plan_of(seed, **config), GradientTrainer(seed), {}
    waiting = list(plan.initial_tasks())
    while waiting:
        task = waiting.pop(0)
        result = worker.run_task(task, members, folder / task.output_member)
        members[task.output_member] = folder / task.output_member
        waiting += plan.on_result(task, result)
    history = [strategy(name, members) for name in plan.logic.history("player").names]
    return worst(strategy(plan.learners["main_0"].frozen_copies[-1], members), history)


def test_league_does_not_cycle_where_self_play_does(tmp_path, check_score):
    alone = {
        "main_exploiters": 0,
        "league_exploiters": 0,
        "pfsp_share": 0.0,
        "verification_share": 0.0,
        "explore_share": 0.0,
    }
    league = [final_worst(tmp_path / f"league {seed}", seed) for seed in range(6)]
    check_score(np.mean(league), "league")
    self_play = [final_worst(tmp_path / f"self {seed}", seed, **alone) for seed in range(6)]
    check_score(np.mean(self_play), "self-play")


def train(folder: Path, stop=lambda: False, resumed=False):
    """A run of a small league by the real scheduler, and its members' strategies."""
    plan, backend = plan_of(slices=5, league_exploiters=0, min_slices=1, max_slices=2), InlineBackend(GradientTrainer)
    with Run.open(folder) if resumed else Run.create(folder.parent, "", folder.name) as run:
        run_plan(plan, backend, run, stop=stop)
    backend.close()
    known = {member.name: folder / member.weights for member in plan.population if member.weights}
    return {
        name: strategy(name, known)
        for name in plan.logic.history("player").names
        if name == "uniform" or known[name].exists()
    }


def test_league_resume_after_stop_is_bit_identical(tmp_path):
    members = train(tmp_path / "whole")
    looks = iter(range(1000))
    train(tmp_path / "parts", stop=lambda: next(looks) > 6)
    again = train(tmp_path / "parts", resumed=True)
    assert list(again) == list(members) and all(np.array_equal(again[name], members[name]) for name in members)
    for name in ("tasks.jsonl", "metrics.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(members) > 6
