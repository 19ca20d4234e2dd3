"""Solvers of palestra and of OpenSpiel at equal CPU time, on Leduc poker and liar's dice.

    python -m results.populations.parts.solvers leduc_poker liars_dice/CFR+   the rows whose names begin so

Every policy is a table by OpenSpiel's information states, and its exploitability is OpenSpiel's own. Seconds are CPU
seconds of one core from nothing to the policy: enumeration of the game counts, measuring does not, and neither does
what a solver does after its last second to give its policy (deep CFR and ESCHER then fit their average policy).
palestra's networks count from their first logged step, since compilers run before it. OpenSpiel's solvers have the
settings of its examples. Deep CFR and ESCHER also need dm-tree (`pip install dm-tree`).

R-NaD is not in OpenSpiel 2.0.2. Its MMD holds a matrix of all pairs of sequences, which in liar's dice has 600 million
entries.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyspiel
import torch
from open_spiel.python.algorithms import mmd_dilated
from open_spiel.python.policy import python_policy_to_pyspiel_policy
from rich.console import Console
from rich.table import Table

import palestra as pl
from palestra.core.config import validate
from palestra.envs.rules_by_env import rules_for_env
from palestra.evaluation.game_policy import policy_table
from palestra.evaluation.target import find_target
from palestra.populations.plans.solvers import Nash
from palestra.populations.tabular.best_response import best_response_values
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, expected_returns
from palestra.runs.loop import Callback
from palestra.vector.build.build import policy_by_seat
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorConfig
from results.populations.parts.double_oracle import DoubleOracleIterate, XFPSolver, psro, xdo
from results.populations.parts.keeping import kept
from results.populations.parts.learned import stages_of

TARGETS: dict[str, float] = {}
MAX_NODES = 2_000_000  # liar's dice with seven faces has 1.6 million nodes, too many for the exact solvers by default
TABULAR_SECONDS = {"leduc_poker": (1, 10), "liars_dice": (10,), "liars_dice_7": (20,)}
NET_SECONDS = 30
SEEDS = range(3)
SIMULATIONS = 10_000  # of a search
UCT_C = 20.0  # exploration of a search: the largest difference of returns is 26
SEARCH = "OpenSpiel, ISMCTS"
MIXTURES = (10, 40)  # iterations of exact PSRO
MMD_STEPSIZE = 20.0  # the best of 0.1, 0.5, 2, 5 and 20 after six seconds
DEEP_CFR_TRAVERSALS = 375
NET = {"hidden": [64, 64], "lr": 1e-3}
NFSP = {
    "type": "nfsp",
    "rollout_length": 16,
    "gradient_steps": 8,
    "batch_size": 256,
    "average_updates": 8,
    "buffer_size": 200_000,
    "reservoir_size": 1_000_000,
}
PPO = {
    "type": "ppo",
    "rollout_length": 16,
    "epochs": 4,
    "minibatches": 4,
    "normalize_advantages": False,
    "value_norm": False,
    "entropy_coef": 0.1,
    "gamma": 1.0,
}
console = Console(width=120)
Steps = Iterator[Callable[[], Any]]  # each step solves a little more; the function then returns OpenSpiel's policy


@dataclass(frozen=True)
class Game:
    """A game in palestra and in OpenSpiel."""

    env: str
    options: Mapping[str, int]
    spiel_name: str

    def build_tree(self) -> GameTree:
        """Returns the game's tree, enumerated anew."""
        rules = rules_for_env(self.env, **self.options)
        assert rules is not None
        return build_game_tree(rules, max_nodes=MAX_NODES)

    @cached_property
    def tree(self) -> GameTree:
        return self.build_tree()

    @cached_property
    def spiel(self) -> Any:
        return pyspiel.load_game(self.spiel_name)

    @cached_property
    def example_states(self) -> list[Any]:
        """One of OpenSpiel's states for each information state of the tree, found by its tensor."""
        rows = {tensor.tobytes(): row for row, tensor in enumerate(self.tree.info_state_tensors)}
        assert len(rows) == len(self.tree.info_state_tensors)
        examples: dict[int, Any] = {}
        states = [self.spiel.new_initial_state()]
        while states:
            state = states.pop()
            if state.is_player_node():
                row = rows[np.array(state.information_state_tensor(), np.float32).tobytes()]
                examples.setdefault(row, state)
            states += [state.child(action) for action in state.legal_actions()]
        return [examples[row] for row in range(len(rows))]

    @cached_property
    def info_states(self) -> list[str]:
        """OpenSpiel's names of the tree's information states."""
        return [state.information_state_string() for state in self.example_states]

    def spiel_policy(self, policy: np.ndarray) -> Any:
        """Returns a policy [I, A] of the tree as OpenSpiel's."""
        rows = zip(self.info_states, self.tree.action_mask, policy, strict=True)
        return pyspiel.TabularPolicy(
            {name: [(int(a), float(row[a])) for a in np.flatnonzero(legal)] for name, legal, row in rows}
        )

    def net_policy(self, scores: torch.Tensor) -> Any:
        """Returns the policy of a network of OpenSpiel, from its unnormalised probabilities [I, A]."""
        legal = np.where(self.tree.action_mask, scores.double().numpy(), 0)
        return self.spiel_policy(legal / legal.sum(1, keepdims=True))


GAMES = {
    "leduc_poker": Game("leduc_poker", {}, "leduc_poker"),
    "liars_dice": Game("liars_dice", {}, "liars_dice"),
    "liars_dice_7": Game("liars_dice", {"faces": 7}, "liars_dice(dice_sides=7)"),
}


# ---- palestra's solvers


def solve_by_iterations(make: Callable[[GameTree], Any], game: Game, seed: int) -> Steps:
    solver = make(game.build_tree())
    while True:
        solver.run(1)
        yield lambda: game.spiel_policy(solver.average_policy())


def solve_by_responses(iterate: Callable[[GameTree], Iterator[DoubleOracleIterate]], game: Game, seed: int) -> Steps:
    for stage in iterate(game.build_tree()):
        yield partial(game.spiel_policy, stage.policy)


# ---- OpenSpiel's solvers


def spiel_cfr_plus(game: Game, seed: int) -> Steps:
    solver = pyspiel.CFRPlusSolver(game.spiel)
    while True:
        solver.evaluate_and_update_policy()
        yield solver.average_policy


def external_sampling(game: Game, seed: int) -> Steps:
    solver = pyspiel.ExternalSamplingMCCFRSolver(game.spiel, seed=seed)
    while True:
        for _ in range(100):
            solver.run_iteration()
        yield solver.average_policy


def outcome_sampling(game: Game, seed: int) -> Steps:
    solver = pyspiel.OutcomeSamplingMCCFRSolver(game.spiel, seed=seed)
    while True:
        for _ in range(100):
            solver.run_iteration()
        yield solver.average_policy


def mirror_descent(game: Game, seed: int) -> Steps:
    solver = mmd_dilated.MMDDilatedEnt(game.spiel, alpha=0, stepsize=MMD_STEPSIZE)
    while True:
        solver.update_sequences()
        yield lambda: python_policy_to_pyspiel_policy(solver.get_avg_policies())


def deep_cfr_steps(game: Game, seed: int) -> Steps:
    """Deep CFR as `DeepCFRSolver.solve` runs it, but for a number of seconds; a step is an iteration."""
    from open_spiel.python.pytorch import deep_cfr

    solver = deep_cfr.DeepCFRSolver(
        game.spiel,
        policy_network_layers=(64,),
        advantage_network_layers=(64,),
        num_traversals=DEEP_CFR_TRAVERSALS,
        learning_rate=1e-3,
        batch_size_advantage=256,
        batch_size_strategy=256,
        policy_network_train_steps=2500,
        advantage_network_train_steps=375,
        seed=seed,
    )
    while True:
        for player in (0, 1):
            for _ in range(DEEP_CFR_TRAVERSALS):
                solver._traverse_game_tree(solver._root_node, player)
            solver._reinitialize_advantage_network(player)
            solver._learn_advantage_network(player)
        solver._iteration += 1
        yield lambda: _deep_cfr_policy(solver, game)


def _deep_cfr_policy(solver: Any, game: Game) -> Any:
    solver._learn_strategy_network()
    with torch.no_grad():
        return game.net_policy(solver._policy_network(torch.from_numpy(game.tree.info_state_tensors)))


def escher_steps(game: Game, seed: int) -> Steps:
    """ESCHER as `escher.train` runs it, but for a number of seconds; a step is an iteration."""
    from open_spiel.python.pytorch import deep_cfr, escher

    deep_cfr.set_seed(seed)
    agent = escher.Agent(game.spiel, escher.Config())
    config = escher.TrainConfig(game.spiel)
    while True:
        escher._train_regret(config, agent)
        agent.t += 1
        yield lambda: _escher_policy(escher._train_avg_policy, agent, game)


def _escher_policy(fit: Callable[[Any], None], agent: Any, game: Game) -> Any:
    fit(agent)
    with torch.no_grad():
        return game.net_policy(torch.softmax(agent.avg_policy_net(torch.from_numpy(game.tree.info_state_tensors)), 1))


SOLVERS: dict[str, tuple[Callable[[Game, int], Steps], bool]] = {  # name: steps, and whether they are random
    "CFR+": (partial(solve_by_iterations, partial(CFRSolver, plus=True)), False),
    "CFR": (partial(solve_by_iterations, CFRSolver), False),
    "XDO": (partial(solve_by_responses, xdo), False),
    "fictitious play": (partial(solve_by_iterations, XFPSolver), False),
    "PSRO": (partial(solve_by_responses, lambda tree: psro(tree, Nash().solve)), False),
    "OpenSpiel, CFR+": (spiel_cfr_plus, False),
    "OpenSpiel, external sampling": (external_sampling, True),
    "OpenSpiel, outcome sampling": (outcome_sampling, True),
    "OpenSpiel, MMD": (mirror_descent, False),
}
SPIEL_NETS: dict[str, Callable[[Game, int], Steps]] = {
    "OpenSpiel, deep CFR": deep_cfr_steps,
    "OpenSpiel, ESCHER": escher_steps,
}


def curve(steps: Steps, game: Game, marks: Sequence[float]) -> list[dict[str, float]]:
    """Returns a point for each mark of CPU seconds: the first policy after it."""
    points: list[dict[str, float]] = []
    spent = 0.0
    for count, (seconds, policy_of) in enumerate(timed_steps(steps), 1):
        spent += seconds
        if spent < marks[len(points)]:
            continue
        start = time.process_time()
        policy = policy_of()
        after = time.process_time() - start
        gap = pyspiel.exploitability(game.spiel, policy)
        points.append({"cpu_s": spent, "policy_cpu_s": after, "steps": count, "exploitability": gap})
        if len(points) == len(marks):
            break
    return points


def timed_steps(steps: Steps) -> Iterator[tuple[float, Callable[[], Any]]]:
    """Yields the steps, each with its CPU seconds."""
    while True:
        start = time.process_time()
        policy_of = next(steps)
        yield time.process_time() - start, policy_of


# ---- palestra's networks


class StopsAfter(Callback):
    """Ends a run after so many CPU seconds, counted from its first step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start: float | None = None
        self.cpu_s = 0.0

    def on_step(self, step: int, metrics: Any) -> None:
        now = time.process_time()
        if self.start is None:
            self.start = now
        self.cpu_s = now - self.start
        if self.cpu_s >= self.seconds:
            self.stop()


def train_nets(algorithm: Mapping[str, Any], net: Mapping[str, Any], game: Game, seed: int) -> list[dict[str, float]]:
    """Returns the point of networks of palestra, one for each player."""
    stops = StopsAfter(NET_SECONDS)
    config = {
        "env": {"type": game.env, "num_envs": 128, **game.options},
        "policies": {seat: {"type": "net", **net} for seat in ("player_0", "player_1")},
        "algorithm": algorithm,
        "env_steps": 1_000_000_000,
        "log_every": 20_000,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as root:
        run = pl.train(config, root=root, callbacks=[stops])
        policy = policy_of_run(str(run.path), game)
    gap = pyspiel.exploitability(game.spiel, game.spiel_policy(policy))
    return [{"cpu_s": stops.cpu_s, "policy_cpu_s": 0.0, "exploitability": gap}]


def policy_of_run(path: str, game: Game) -> np.ndarray:
    """Returns the policy [I, A] that a run's networks play in the game's tree."""
    target = find_target(path)
    config = validate(VectorConfig, target.tree)
    env = make_vector_env(config.env, 1)
    try:
        return policy_table(target, env, game.tree, policy_by_seat(config, env), greedy=False)
    finally:
        env.close()


PALESTRA_NETS = {  # the settings of the configs leduc_nfsp and kuhn_ppo; networks of one size
    "NFSP": partial(train_nets, NFSP, NET | {"activation": "relu", "max_grad_norm": 10}),
    "PPO, self-play": partial(train_nets, PPO, NET),
}


# ---- responses by search


def search_responses(game: Game, seed: int) -> list[dict[str, float]]:
    """Returns what OpenSpiel's information-set tree search gains against the mixtures of exact PSRO after some
    iterations, summed over both players, beside what an exact best response gains.

    The search does not know the mixture: it assumes that both players search. So its play, the action with most visits
    of a search in every information state, is one policy against all mixtures.
    """
    rollouts = pyspiel.RandomRolloutEvaluator(1, seed)
    final = pyspiel.ISMCTSFinalPolicyType.MAX_VISIT_COUNT
    searcher = pyspiel.ISMCTSBot(seed, rollouts, UCT_C, SIMULATIONS, -1, final)
    start = time.process_time()
    found = np.zeros(game.tree.action_mask.shape)
    for row, state in zip(found, game.example_states, strict=True):
        for action, probability in searcher.get_policy(state):
            row[action] = probability
    spent = time.process_time() - start
    points = []
    for stage, mixture in stages_of(game.tree, MIXTURES).items():
        values = [expected_returns(game.tree, with_player(game.tree, seat, found, mixture))[seat] for seat in (0, 1)]
        exact = best_response_values(game.tree, mixture)
        points.append({"cpu_s": spent, "stage": stage, "gain": float(sum(values)), "exact_gain": float(exact.sum())})
    return points


def with_player(tree: GameTree, player: int, policy: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the policy [I, A] with a player's rows of `policy` and the others' rows of `others`."""
    joined = others.copy()
    joined[tree.player_rows(player)] = policy[tree.player_rows(player)]
    return joined


LEDUC_ONLY = (
    "CFR",
    "XDO",
    "fictitious play",
    "PSRO",
    "OpenSpiel, MMD",
)  # slower than CFR+ there, or too large in liar's dice

NET_SEEDS = {"NFSP": 1, "PPO, self-play": 2, "OpenSpiel, deep CFR": 2, "OpenSpiel, ESCHER": 1}

# ---- rows


def row_names() -> list[str]:
    """Returns the names of all rows: game/solver, and the seed (0 for those that are not random)."""
    names = []
    for game in ("leduc_poker", "liars_dice"):
        for solver, (_, is_random) in SOLVERS.items():
            if game == "leduc_poker" or solver not in LEDUC_ONLY:
                names += [f"{game}/{solver}/{seed}" for seed in (SEEDS if is_random else [0])]
    names.append("liars_dice_7/CFR+/0")
    names += [f"liars_dice_7/OpenSpiel, external sampling/{seed}" for seed in SEEDS]
    for solver, seeds in NET_SEEDS.items():
        names += [f"leduc_poker/{solver}/{seed}" for seed in range(seeds)]
    return [*names, *(f"leduc_poker/{SEARCH}/{seed}" for seed in SEEDS)]


def measure(name: str) -> list[dict[str, float]]:
    """Measures a row."""
    torch.set_num_threads(1)
    game_name, solver, seed = name.split("/")
    game = GAMES[game_name]
    if solver == SEARCH:
        return search_responses(game, int(seed))
    if solver in PALESTRA_NETS:
        return PALESTRA_NETS[solver](game, int(seed))
    if solver in SPIEL_NETS:
        return curve(SPIEL_NETS[solver](game, int(seed)), game, [NET_SECONDS])
    return curve(SOLVERS[solver][0](game, int(seed)), game, TABULAR_SECONDS[game_name])


def seconds_of(name: str) -> Sequence[int]:
    """Returns the CPU seconds at which a row has points."""
    game, solver, _ = name.split("/")
    return TABULAR_SECONDS[game] if solver in SOLVERS else (NET_SECONDS,)


def show(points: Mapping[str, list[dict[str, float]]], game: str) -> None:
    """Prints the table of a game: the exploitability at each number of seconds, of several seeds the mean, the least
    and the largest."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, row in points.items():
        if name.startswith(f"{game}/"):
            by_mark = found.setdefault(name.split("/")[1], {})
            for mark, point in zip(seconds_of(name), row, strict=True):
                by_mark.setdefault(mark, []).append(point["exploitability"])
    marks = sorted({mark for by_mark in found.values() for mark in by_mark})
    table = Table(f"{game}: exploitability after", *(f"{mark} s" for mark in marks), title_justify="left")
    for solver, by_mark in found.items():
        table.add_row(solver, *(_shown(by_mark.get(mark, [])) for mark in marks))
    console.print(table)


def _shown(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.3g}" for value in values)
    return f"{np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def show_responses(rows: Sequence[list[dict[str, float]]]) -> None:
    """Prints what searches gain, a row for each mixture."""
    table = Table("gain over the mixture of exact PSRO", "exact response", SEARCH, "CPU s", title_justify="left")
    for points in zip(*rows, strict=True):
        gains = _shown([point["gain"] for point in points])
        seconds = np.mean([point["cpu_s"] for point in points])
        first = points[0]
        table.add_row(f"after {first['stage']:g} iterations", f"{first['exact_gain']:.3g}", gains, f"{seconds:.0f}")
    console.print(table)


def figures(quick: bool = False) -> dict[str, float]:
    """All figures; prints the tables. A figure is the exploitability of CFR+, or the lowest of OpenSpiel's solvers,
    at the end of their rows."""
    names = row_names()
    if quick:
        names = [name for name in names if name.startswith(("leduc_poker/CFR+", "leduc_poker/OpenSpiel, external"))]
    points = {name: kept(f"solvers/{name}", partial(measure, name)) for name in names}
    searches = [points.pop(name) for name in names if SEARCH in name]
    found: dict[str, float] = {}
    for game in dict.fromkeys(name.split("/")[0] for name in points):
        show(points, game)
        last = {name: row[-1]["exploitability"] for name, row in points.items() if name.startswith(f"{game}/")}
        found[f"{game}_cfr_plus"] = last[f"{game}/CFR+/0"]
        found[f"{game}_best_of_openspiel"] = min(gap for name, gap in last.items() if "OpenSpiel" in name)
    if searches:
        show_responses(searches)
    return found


if __name__ == "__main__":
    for wanted in [name for name in row_names() if name.startswith(tuple(sys.argv[1:]))]:
        print(wanted, kept(f"solvers/{wanted}", partial(measure, wanted)), flush=True)
