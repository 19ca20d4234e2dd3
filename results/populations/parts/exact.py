"""PSRO, anytime PSRO and XDO with exact best responses, and the solvers they use, compared with references.

References: OpenSpiel's psro_v2 with an exact oracle and payoffs from 1,000 games per cell (one seed, release 2.0.2);
OpenSpiel's CFR, CFR+ and XFP; the runs that the authors of XDO published (github.com/indylab/tabular_xdo). PSRO with
Nash is sensitive to noise, since the last digits of the payoffs decide which of many best responses is added. Besides
exact payoffs there are therefore three seeds with the noise of 1,000 games: normal numbers of the exact variance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from rich.console import Console
from rich.table import Table

from palestra.envs.rules_by_env import rules_for_env
from palestra.populations.plans.solvers import Nash, Uniform
from palestra.populations.tabular.best_response import best_response, nash_conv
from palestra.populations.tabular.cfr import CFRSolver
from palestra.populations.tabular.game_tree import GameTree, build_game_tree, uniform_policy
from results.populations.parts.double_oracle import (
    MemberPolicies,
    MetaSolverFn,
    TabularSolver,
    XFPSolver,
    anytime_psro,
    payoffs_from_end_probs,
    psro,
    xdo,
)

# NashConv, except for XDO_LEDUC: exploitability, as published.
PSRO_NASH = {
    "kuhn_poker": {1: 0.833, 2: 0.397, 3: 0.218, 4: 0.099, 5: 0.080, 7: 0.036, 10: 0.016, 15: 0.013, 20: 0.0084},
    "leduc_poker": {1: 6.83, 2: 7.33, 5: 4.90, 10: 3.16, 15: 2.19, 20: 1.62, 25: 1.40, 30: 0.92, 35: 0.65, 38: 0.80},
}
PSRO_UNIFORM = {
    "kuhn_poker": {1: 0.625, 5: 0.264, 10: 0.167, 20: 0.099, 30: 0.089},
    "leduc_poker": {1: 5.21, 5: 3.39, 10: 2.35, 20: 1.55, 30: 1.09, 38: 0.91},
}
XDO_LEDUC = [3.39, 2.92, 2.46, 1.76, 0.92, 0.42, 0.25, 0.090, 0.047, 0.030, 0.019, 0.015, 0.008, 0.004, 0.002, 0.001]
SOLVERS: dict[str, tuple[Callable[[GameTree], TabularSolver], dict[int, float]]] = {
    "CFR": (CFRSolver, {10: 1.777, 100: 0.1914, 1000: 0.0236}),
    "CFR+": (lambda tree: CFRSolver(tree, plus=True), {10: 1.221, 100: 0.0268, 1000: 0.00051}),
    "fictitious play": (XFPSolver, {10: 2.348, 50: 0.796, 100: 0.500}),
}
TARGETS = {
    "kuhn_nash_10": 0.016,
    "leduc_nash_10": 3.2,
    "leduc_nash_20": 1.6,
    "xdo_leduc_exploitability_8": 0.09,
    "xdo_leduc_exploitability_16": 0.001,
    "leduc_tree_cpu_s": 1.5,
    "leduc_nash_conv_cpu_ms": 5.0,
    "leduc_cfr_plus_1000_cpu_s": 10.0,
}
Curve = dict[int, float]
console = Console(width=120)


def tree(env_type: str) -> GameTree:
    rules = rules_for_env(env_type)
    assert rules is not None
    return build_game_tree(rules)


def curve(stages: Iterator[float], last: int) -> Curve:
    return dict(enumerate(islice(stages, last + 1)))


def psro_curve(game: GameTree, solve: MetaSolverFn, last: int) -> Curve:
    return curve((stage.nash_conv for stage in psro(game, solve)), last)


def noisy_psro(game: GameTree, seed: int, last: int, games: int = 1000) -> Iterator[float]:
    """Yields the NashConv of PSRO with Nash at each iteration; each payoff is estimated once, with the noise of so many
    games."""
    draws = np.random.default_rng(seed).normal(size=(last + 1, last + 1)) / np.sqrt(games)
    members, squared = MemberPolicies(game, uniform_policy(game)), replace(game, returns=game.returns**2)
    while True:
        mean, square = (
            members.payoffs()[0],
            payoffs_from_end_probs(squared, [np.array(rows) for rows in members.end_probs])[0],
        )
        rows, columns = mean.shape
        seen = mean + draws[:rows, :columns] * np.sqrt(np.maximum(square - mean**2, 0))
        stage = members.build_iterate(Nash().solve([seen, -seen]))
        yield stage.nash_conv
        for player in (0, 1):
            members.add_policy(player, best_response(game, stage.policy, player)[0])


def solver_curve(solver: TabularSolver, game: GameTree, marks: Sequence[int]) -> Curve:
    found, done = {}, 0
    for mark in marks:
        solver.run(mark - done)
        found[mark], done = nash_conv(game, solver.average_policy()), mark
    return found


def timed(work: Callable[[], object], times: int = 1) -> float:
    """The CPU seconds of the fastest of `times` calls."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def table(title: str, marks: Sequence[int], rows: Sequence[tuple[str, Curve]]) -> Table:
    made = Table("", *map(str, marks), title=title, title_justify="left")
    for name, found in rows:
        made.add_row(name, *(f"{found[mark]:.3g}" if mark in found else "" for mark in marks))
    return made


def psro_tables(env_type: str, last: int, seeds: int) -> dict[str, Curve]:
    """Prints PSRO's curves on a game; returns those of PSRO with Nash and of anytime PSRO."""
    game = tree(env_type)
    nash, even = psro_curve(game, Nash().solve, last), psro_curve(game, Uniform().solve, last)
    anytime = curve((stage.nash_conv for stage in anytime_psro(game)), min(last, 20))
    noisy = [curve(noisy_psro(game, seed, last), last) for seed in range(seeds)]
    rows = [("Nash, exact payoffs", nash)]
    rows += [(f"Nash, noise of 1,000 games, seed {seed}", found) for seed, found in enumerate(noisy)]
    rows += [
        ("Nash, OpenSpiel", PSRO_NASH[env_type]),
        ("uniform", even),
        ("uniform, OpenSpiel", PSRO_UNIFORM[env_type]),
    ]
    rows += [("anytime", anytime)]
    marks = [mark for mark in (0, *PSRO_NASH[env_type]) if mark <= last]
    console.print(table(f"PSRO on {env_type}: NashConv by iteration", marks, rows))
    return {"nash": nash, "anytime": anytime}


def xdo_table(game: GameTree, last: int = 16) -> Curve:
    """Prints and returns XDO's curve on Leduc poker, in exploitability."""
    found = curve((stage.nash_conv / 2 for stage in xdo(game)), last)
    rows = [("XDO", found), ("XDO, its authors", dict(enumerate(XDO_LEDUC, 1)))]
    console.print(table("XDO on leduc_poker: exploitability by iteration", (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16), rows))
    return found


def solver_table(game: GameTree, most: int) -> None:
    rows, marks = [], [mark for mark in (10, 50, 100, 1000) if mark <= most]
    for name, (make, known) in SOLVERS.items():
        rows += [(name, solver_curve(make(game), game, marks)), (f"{name}, OpenSpiel", known)]
    console.print(table("Solvers on leduc_poker: NashConv by iteration", marks, rows))


def figures(quick: bool = False) -> dict[str, float]:
    """All figures; prints the tables. Only the noise is random: exact runs give the same result every time."""
    kuhn = psro_tables("kuhn_poker", 10 if quick else 20, 1 if quick else 3)
    leduc = psro_tables("leduc_poker", 20 if quick else 38, 1 if quick else 3)
    game = tree("leduc_poker")
    half = xdo_table(game)
    solver_table(game, 100 if quick else 1000)
    return {
        "kuhn_nash_10": kuhn["nash"][10],
        "leduc_nash_10": leduc["nash"][10],
        "leduc_nash_20": leduc["nash"][20],
        "leduc_anytime_20": leduc["anytime"][20],
        "xdo_leduc_exploitability_8": half[8],
        "xdo_leduc_exploitability_16": half[16],
        "leduc_tree_cpu_s": timed(lambda: tree("leduc_poker"), 3),
        "leduc_nash_conv_cpu_ms": 1e3 * timed(lambda: nash_conv(game, uniform_policy(game)), 20),
        "leduc_cfr_plus_1000_cpu_s": timed(lambda: CFRSolver(game, plus=True).run(1000)),
    }
