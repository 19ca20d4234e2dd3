"""The tasks of docs/results-games.md: their configs, scores and bars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palestra.core.config import load
from palestra.runs import Checkpoint, list_checkpoints, read_lines

ENVS = Path(".cache/envs")  # virtual environment that `make test-envs` makes
Curve = list[tuple[float, float]]  # joint steps, score


@dataclass(frozen=True)
class Task:
    """A config, the name of its score, the bar (the score must be at least `bar`, with `low` at most) and why it is the
    bar. `curve` reads the scores of a run; the last one counts."""

    name: str
    scored: str
    bar: float
    why: str
    curve: Callable[[Path], Curve]
    low: bool = False
    first: int = 0  # first seed that counts: settings were chosen on those before it
    venv: Path = Path(sys.prefix)  # virtual environment with the env's package

    @property
    def config(self) -> Path:
        return Path(f"configs/games/{self.name}.yaml")

    def reached(self, value: float) -> bool:
        return value <= self.bar if self.low else value >= self.bar


# ---- scores


def env_steps_per_step(run: Path) -> int:
    """Joint steps in one training step of a run."""
    config = load(run / "config.yaml")
    return int(config["algorithm"]["rollout_length"]) * int(config["env"]["num_envs"])


def held_out(key: str, scale: float = 1.0, shift: float = 0.0) -> Callable[[Path], Curve]:
    """A function that reads the curve of a metric in the evaluation `held_out`, as `scale * value + shift`."""

    def curve(run: Path) -> Curve:
        each = env_steps_per_step(run)
        lines = [line for line in read_lines(run / "evals.jsonl") if line["name"] == "held_out"]
        return [((line["step"] + 1) * each, scale * line[key] + shift) for line in lines]

    return curve


def exploitability(run: Path) -> Curve:
    """Curve of exploitability: half the NashConv of two policies in Kuhn poker (as in OpenSpiel) at each checkpoint
    that the run still has."""
    each = env_steps_per_step(run)
    return [((checkpoint.step + 1) * each, exploitability_at(checkpoint)) for checkpoint in list_checkpoints(run)]


def exploitability_at(checkpoint: Checkpoint) -> float:
    """Exploitability at one checkpoint, from the policies' probabilities at every information state."""
    import pyspiel
    import torch
    from open_spiel.python import policy as spiel_policy
    from open_spiel.python.algorithms import exploitability as spiel

    from palestra.envs.vector.kuhn import KuhnPoker
    from palestra.vector.learners.policy_stack import read_policy

    game, env = pyspiel.load_game("kuhn_poker"), KuhnPoker(1)
    players = [read_policy(checkpoint.path / f"player_{seat}", env, [seat]) for seat in (0, 1)]
    table = spiel_policy.TabularPolicy(game)
    for i, state in enumerate(table.states):
        view = torch.tensor(state.information_state_tensor()).view(1, 1, -1)
        with torch.no_grad():
            out = players[state.current_player()].net(view)[0, 0]
        table.action_probability_array[i] = torch.softmax(out, -1).numpy()
    return float(spiel.exploitability(game, table))


# ---- tasks

LBF = "of Papoudakis et al. (2021, table 3, quoted from memory); share of all food, agents drawing their moves"
TWO_STEP = "the best return is 8; Rashid et al. (2018, section 5)"
OLD_SCALE = (
    "in rewards as the env first had them, summed over the team. There every agent also collides with itself, which "
    "costs a team of three 75 in 25 steps, and nothing is halved: six times our mean return, less 75. Uniform play has "
    "-236 on that scale (github.com/uoe-agents/epymarl, issue 29: about -700 / 3)"
)
TASKS = [
    Task("two_step_qmix", "return", 8.0, f"{TWO_STEP}: QMIX gets 8", held_out("return")),
    Task("two_step_vdn", "return", 7.0, f"{TWO_STEP}: VDN gets 7, not 8", held_out("return"), low=True),
    Task(
        "two_step_dqn",
        "return",
        7.0,
        "to an independent learner the other plays at random, and the certain 7 is worth more than the mean of 1 and 8",
        held_out("return"),
        low=True,
    ),
    Task(
        "spread_mappo",
        "team return",
        -133.5,
        f"{OLD_SCALE}. MAPPO has -133.5 in Papoudakis et al. (2021, table 3), 20 million steps, and about -120 in its "
        "authors' code (github.com/marlbenchmark/on-policy, issues 49 and 112), which draws landmarks from a field 0.8 "
        "as wide",
        held_out("return", 6.0, -75.0),
    ),
    Task("combat_vdn", "win rate", 0.8, "the bar set for this project; greedy, map 3m", held_out("success")),
    Task("combat_qmix", "win rate", 0.8, "the bar set for this project; greedy, map 3m", held_out("success")),
    *(
        Task(
            f"smax_{mixer}",
            "win rate",
            0.8,
            "the bar set for this project; greedy, map 3m of JaxMARL's SMAX against its heuristic enemy",
            held_out("success"),
            venv=ENVS,
        )
        for mixer in ("vdn", "qmix")
    ),
    Task("kuhn_ppo", "exploitability", 0.05, "uniform play has 11/24 = 0.458", exploitability, low=True, first=1),
    Task(
        "foraging_mappo",
        "food eaten",
        0.9,
        "share of all food, by level, on 8 x 8 cells, agents drawing their moves; the bar set for this project",
        held_out("return", 2.0),
    ),
    Task(
        "lbf_8x8_coop_mappo",
        "food eaten",
        0.99,
        f"the task 8x8-2p-2f-coop {LBF}. MAPPO has 1.00 there after 20 million steps, QMIX 0.96 after 2",
        held_out("return", 2.0),
    ),
    Task(
        "lbf_15x15_mappo",
        "food eaten",
        0.77,
        f"the task 15x15-3p-5f {LBF}. MAPPO has 0.77 there after 20 million steps, IA2C 0.89, QMIX 0.09 after 2",
        held_out("return", 3.0),
    ),
    Task(
        "overcooked_ppo",
        "return",
        200.0,
        "ten soups of 20 in the 400 steps of a game in cramped_room, cooks drawing their moves; the bar set for this "
        "project",
        held_out("return"),
    ),
    Task(
        "spread_maddpg",
        "team return",
        -141.7,
        f"{OLD_SCALE}. MADDPG has -141.7 in Papoudakis et al. (2021, table 3), with one network for all agents; about "
        "-400 / 3 = -133 in the same issue",
        held_out("return", 6.0, -75.0),
    ),
    Task(
        "pong_ppo",
        "points won",
        0.9,
        "share of the points against the scripted player that follows the ball; games of one point",
        held_out("success"),
    ),
]
