"""Does a league forget? The last main agent's win rate against the member worst for it, compared with self-play.

    python results/populations/parts/league.py            about six CPU minutes
    python results/populations/parts/league.py --seed 1   one seed, as JSON

The game is rock, paper, scissors, lizard, Spock: five actions on a circle, each of which beats two and is beaten by the
other two. Self-play cycles through them. Both have the same networks, PPO, and env steps of the main agent. Win rates
count a draw as half and are computed exactly from the networks' probabilities. "Any strategy" means the pure
strategies, whether or not a member plays them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from palestra.core.config import dump, validate
from palestra.populations.build.build import PopulationConfig, build_population, run_population
from palestra.populations.population import Member
from palestra.populations.scheduler import PlanCallback
from palestra.runs import Run
from palestra.vector.build.envs import make_vector_env
from palestra.vector.learners.policy_stack import read_frozen_member

ACTIONS = 5
SLICES = 60
PLAN = {
    "type": "league",
    "league_exploiters": 1,
    "env_steps": 5_120,
    "min_slices": 1,
    "max_slices": 2,
    "games_per_cell": 0,
}
SELF_PLAY = {"main_exploiters": 0, "league_exploiters": 0, "priority": 0.0, "verify": 0.0, "explore": 0.0}
TARGETS = {"league_worst_case": 0.45}
AT_LEAST = {"league_worst_case"}
console = Console(width=120)


def circle(actions: int = ACTIONS) -> np.ndarray:
    """Payoffs [A, A] of the row's action against the column's: an action beats those at odd distances behind it."""
    ahead = (np.arange(actions)[:, None] - np.arange(actions)[None, :]) % actions
    return np.where(ahead == 0, 0, np.where(ahead % 2, 1, -1))


def config(seed: int, slices: int, **plan: Any) -> PopulationConfig:
    """The config of a league, or with SELF_PLAY of a main agent alone."""
    wins = circle()
    tree = {
        "name": "league",
        "seed": seed,
        "env": {"type": "matrix", "payoff": np.stack([wins, -wins], -1).tolist(), "num_envs": 512},
        "population": PLAN | {"slices": slices} | plan,
        "oracle": {
            "type": "net",
            "policy": {"hidden": [32], "lr": 1e-3},
            "algorithm": {
                "type": "ppo",
                "rollout_length": 1,
                "epochs": 2,
                "minibatches": 1,
                "entropy_coef": 0.02,
                "gamma": 1.0,
                "value_norm": False,
            },
        },
        "backend": {"type": "inline"},
    }
    return validate(PopulationConfig, tree)


def strategies(made: PopulationConfig) -> tuple[str, dict[str, np.ndarray]]:
    """Trains; returns the name of the last main agent and the mixed strategy [A] of every frozen member."""
    setup = build_population(made)
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(made)) as run:
        run_population(setup, run, PlanCallback())
        members = list(setup.plan.population)
        mains = [member.name for member in members if member.info.get("role") == "main"]
        return mains[-1], {member.name: strategy(made, run.path, member) for member in members}


def strategy(made: PopulationConfig, path: Path, member: Member) -> np.ndarray:
    """A member's action probabilities [A]; in a game of one round, the observation is all zeros."""
    env = make_vector_env(made.env, 1)
    if not member.weights:
        return np.full(ACTIONS, 1 / ACTIONS)
    player, _ = read_frozen_member(path / member.weights, env, [0])
    with torch.no_grad():
        return (
            torch.softmax(player.net(torch.zeros(1, 1, *env.observation_shapes[0])), -1)
            .numpy()
            .reshape(-1)
            .astype(float)
        )


def worst(own: np.ndarray, others: dict[str, np.ndarray]) -> tuple[float, str]:
    """The lowest win rate against any of `others`, and that opponent's name."""
    rates = {name: 0.5 + float(own @ circle() @ other) / 2 for name, other in others.items()}
    name = min(rates, key=lambda name: rates[name])
    return rates[name], name


def one_seed(seed: int, slices: int) -> dict[str, float]:
    """Lowest win rates of the league's last main agent and of self-play's last agent, and the league's size."""
    last, league = strategies(config(seed, slices))
    final, selves = strategies(config(seed, slices, **SELF_PLAY))
    pure = dict(zip("01234", np.eye(ACTIONS), strict=True))
    return {
        "league": worst(league[last], league)[0],
        "self-play": worst(selves[final], selves)[0],
        "self-play among the league": worst(selves[final], league)[0],
        "league, any strategy": worst(league[last], pure)[0],
        "self-play, any strategy": worst(selves[final], pure)[0],
        "members": float(len(league)),
    }


def figures(quick: bool = False) -> dict[str, float]:
    """Means over seeds of the lowest win rate against all frozen members of the run."""
    return summary([one_seed(seed, SLICES // 4 if quick else SLICES) for seed in range(1 if quick else 3)])


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """The figures from the results of each seed; prints the table."""
    shown = Table("lowest win rate against", *(f"seed {seed}" for seed in range(len(rows))), "mean")
    for key in rows[0]:
        shown.add_row(key, *(f"{row[key]:.3f}" for row in rows), f"{np.mean([row[key] for row in rows]):.3f}")
    console.print(shown)
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return {"league_worst_case": mean["league"], "self_play_worst_case": mean["self-play"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    seed = parser.parse_args().seed
    print(json.dumps(figures() if seed is None else one_seed(seed, SLICES)))
