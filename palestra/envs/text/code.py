"""Code generation env: a coder writes a program while a tester writes a test, simultaneously and unseen by each other.
The episode ends when the program passes the test; otherwise both see the result and try again.

Follows the code workflow of Stronger-MAS (arXiv 2510.11062). The end of the episode depends only on the two answers;
hidden tests only determine rewards. Rewards are differences between turns and sum to the score of the last program and
the last test, so extra turns earn nothing by themselves.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from palestra.envs.base import Env
from palestra.envs.problems.program_drills import Drill, draw_drill, drill_problem
from palestra.envs.problems.program_examples import shows
from palestra.envs.problems.program_files import OWN, load_programs
from palestra.envs.problems.program_results import value_of
from palestra.envs.problems.programs import GRADES, Part, ProgramProblem, choose, draw
from palestra.envs.problems.trials import Case, Lab, Trials
from palestra.envs.text.code_answers import read_program, read_test, write_program, write_test
from palestra.envs.text.code_prompts import ROLES, Turn, compact, full
from palestra.envs.text.grids import within
from palestra.envs.text.options import Rendering, Reward
from palestra.sandbox import Limits, open_sandbox
from palestra.types import Seat, Step

BUILT, SMOKE, PASSED = 0.1, 0.1, 0.8  # coder: compiles, first test runs, times the share of tests passed
VALID, RIGHT = 0.2, 0.8  # tester: test can be parsed and is not copied, reference passes it
SOLVED = 1.0  # team reward, with `reward: outcome`
DRILLS = "drills"
EASY = (1, 2, 3)  # default difficulties of `source: drills`
MIB = 2**20

Team = Literal["coder_tester", "single"]
SEATS: dict[Team, tuple[Seat, ...]] = {"coder_tester": ("coder", "tester"), "single": ("coder",)}


class Judged(NamedTuple):
    """Result of one turn: `share` of hidden tests passed, scores of `coder` and `tester` in [0, 1], `agreed` if the
    program passes the tester's test, and the `turn` as shown to both."""

    share: float
    coder: float
    tester: float
    agreed: bool
    turn: Turn


class CoderTester(Env):
    """Coder and tester on one programming problem, or a coder alone.

    `source` selects the problems: "own" (64 shipped problems), "drills" (synthetic expressions for small models) or a
    file. Only the first `tests` hidden tests of a problem count; a program has `seconds` of wall and CPU time for all
    of them and `memory` MiB. Programs run in a sandbox; without one the env does not start, unless `unsafe`.
    `difficulty` lists the wanted difficulties, from 1 to 5.

    With `team: single` the episode ends once the program passes the examples, at once if there are none.

    Info: `passed` is the share of hidden tests passed, `agreed` is true if the episode ended by agreement. Raises
    ValueError if an option is out of range, or if no problem matches.
    """

    name: ClassVar[str] = "code"
    replaces_state = True

    def __init__(
        self,
        *,
        source: str = "own",
        split: Part = "train",
        difficulty: list[int] | None = None,
        team: Team = "coder_tester",
        turns: int = 4,
        tests: int = 20,
        seconds: float = 5.0,
        memory: int = 256,
        reward: Reward = "dense",
        rendering: Rendering = "full",
        unsafe: bool = False,
    ) -> None:
        within("turns", turns, 1, 100)
        within("tests", tests, 1, 10_000)
        within("seconds", seconds, 0.1, 600)
        within("memory", memory, 32, 2**20)
        self.seats, self.team, self.turns, self.tests = SEATS[team], team, turns, tests
        self.source, self.split, self.reward, self.rendering = source, split, reward, rendering
        self.grades = _grades(difficulty, EASY if source == DRILLS else GRADES)
        self.limits = Limits(wall=seconds, cpu=seconds, memory=memory * MIB, disk=64 * MIB)
        self.lab = _lab(unsafe)
        self._problems = () if source == DRILLS else _chosen(source, split, tuple(self.grades))
        self.roles = {seat: self._role(seat) for seat in self.seats}
        self._over = True

    # ---- env interface

    def reset(self, seed: int) -> Step:
        self.drill: Drill | None = draw_drill(seed, self.split, self.grades) if self.source == DRILLS else None
        self.problem = drill_problem(self.drill) if self.drill else draw(self._problems, seed)
        self._turns: tuple[Turn, ...] = ()
        self._judged = Judged(0.0, 0.0, 0.0, False, Turn(None, None, None))
        self._over = False
        return Step(self._observations())

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if self._over or actions.keys() != set(self.seats):
            raise ValueError(f"reset(seed), then answer for {', '.join(self.seats)} until no seat is observed")
        before, source = self._judged, read_program(actions["coder"])
        test = read_test(actions["tester"], self.problem) if self.team == "coder_tester" else None
        now = await (self._alone(source) if self.team == "single" else self._both(source, test))
        self._judged, self._turns = now, (*self._turns, now.turn)
        success = now.share == 1.0
        self._over = now.agreed or len(self._turns) >= self.turns
        flaws = {"coder": source is None or now.turn.flaw is not None, "tester": test is None}
        return Step(
            {} if self._over else self._observations(),
            rewards={seat: self._own(seat, before, now) for seat in self.seats},
            team_reward=self._shared(before, now),
            truncated=self._over and not now.agreed and not success,
            info={
                "success": success,
                "turn": len(self._turns),
                "invalid": {seat: flaws[seat] for seat in self.seats},
                "passed": now.share,
                "agreed": now.agreed,
            },
        )

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the reference solution, or a test that it passes. Raises ValueError if the problem has none."""
        fenced, problem = self.rendering == "full", self.problem
        if seat == "tester":
            return write_test(self._known(rng), problem, fenced=fenced)
        if problem.reference is None:
            raise ValueError(f'problem "{problem.id}" has no reference solution, so there is no expert at it')
        if problem.kind == "expression" and fenced:
            return f"#### {problem.reference}"
        return write_program(problem.reference, fenced=fenced)

    def _known(self, rng: random.Random) -> Case:
        """Returns a test with its correct expected value."""
        if self.drill:
            xs = [rng.randrange(10) for _ in range(rng.randint(2, 3))]
            return Case(f"({xs!r},)", repr(self.drill.of(xs)))
        cases = [case for case in self.problem.tests if case.expected and not shows(self.problem, case)]
        if not cases:
            raise ValueError(
                f'the tests of problem "{self.problem.id}" name no values that its question does not show, so there is '
                "no expert at them"
            )
        return rng.choice(sorted(cases, key=lambda case: len(case.given))[:3])

    # ---- one turn

    async def _both(self, source: str | None, test: Case | None) -> Judged:
        """Returns the result of one turn of coder and tester."""
        copied = test is not None and shows(self.problem, test)
        own = None if copied else test
        (hidden, told), right = await asyncio.gather(self._tried(source, test), self._by_reference(own))
        share, worth = self._marks(source, hidden)
        trial = told.trials[-1] if told and told.trials else None
        agreed = bool(test and trial and trial.right)
        if right is None:  # without a reference, a program that passes all hidden tests replaces it
            right = agreed and share == 1.0
        tester = VALID * (own is not None) + RIGHT * right
        flaw = hidden.flaw if hidden else None
        return Judged(share, worth, tester, agreed, Turn(source, test, trial, flaw, copied))

    async def _tried(self, source: str | None, test: Case | None) -> tuple[Trials | None, Trials | None]:
        """Returns the results on the hidden tests, and on the tester's test (last entry of the second).

        The two run separately, so a program that hangs on one does not fail the other; expressions are fast and run
        together.
        """
        hidden, own = self._hidden(), (test,) if test else ()
        if self.problem.kind == "expression":
            tried = await self._on(source, (*hidden, *own))
            return tried, tried if own else None
        both = await asyncio.gather(self._on(source, hidden), self._on(source, own))
        return both[0], both[1]

    async def _alone(self, source: str | None) -> Judged:
        """Returns the result of one turn of a coder alone, which is tested on the examples."""
        examples = self.problem.examples
        hidden, shown = await asyncio.gather(self._on(source, self._hidden()), self._on(source, examples))
        share, worth = self._marks(source, hidden)
        trials = shown.trials if shown else ()
        failed = [(case, trial) for case, trial in zip(examples, trials, strict=False) if not trial.right]
        case, trial = failed[0] if failed else (None, None)
        agreed = not examples or bool(trials and not failed)
        return Judged(share, worth, 0.0, agreed, Turn(source, case, trial, hidden.flaw if hidden else None))

    def _hidden(self) -> tuple[Case, ...]:
        return self.problem.tests[: self.tests]

    async def _on(self, source: str | None, cases: tuple[Case, ...]) -> Trials | None:
        """Returns the results of a program on `cases`; None without a program or without cases."""
        if source is None or not cases:
            return None
        code = self.problem.code(source, self.problem.kind_of(cases[0]))
        return await self.lab.tries(code, cases, self.limits)

    async def _by_reference(self, test: Case | None) -> bool | None:
        """True if the reference passes `test`; None without a reference."""
        if test is None:
            return False
        if self.drill:
            return self.drill.gives(value_of(test.given)[0]) == value_of(test.expected)
        tried = await self._on(self.problem.reference, (test,))
        return tried.trials[0].right if tried else None

    def _marks(self, source: str | None, hidden: Trials | None) -> tuple[float, float]:
        """Returns the share of hidden tests passed, and the coder's score in [0, 1]."""
        if source is None or hidden is None or hidden.flaw is not None:
            return 0.0, 0.0
        passed = [
            trial.right for trial in hidden.trials[: len(self._hidden())]
        ]  # for expressions the tester's result follows the hidden ones
        share = sum(passed) / len(passed)
        return share, BUILT + SMOKE * hidden.trials[0].ok + PASSED * share

    def _own(self, seat: Seat, before: Judged, now: Judged) -> float:
        if self.reward == "outcome":
            return 0.0
        return now.coder - before.coder if seat == "coder" else now.tester - before.tester

    def _shared(self, before: Judged, now: Judged) -> float:
        if self.reward == "outcome":
            return SOLVED * (self._over and now.share == 1.0)
        return now.share - before.share

    def _role(self, seat: Seat) -> str:
        if self.rendering == "compact":
            return f"code {seat}"
        return ROLES["alone" if self.team == "single" else seat]

    def _observations(self) -> dict[Seat, str]:
        if self.rendering == "compact":
            return dict.fromkeys(self.seats, compact(self.problem, self._turns))
        alone = self.team == "single"
        return {seat: full(self.problem, seat, self._turns, self.turns, alone=alone) for seat in self.seats}


@cache
def _lab(unsafe: bool) -> Lab:
    return Lab(open_sandbox(unsafe))


def _grades(wanted: list[int] | None, default: tuple[int, ...]) -> list[int]:
    grades = list(default) if wanted is None else sorted(set(wanted))
    if not grades or not set(grades) <= set(GRADES):
        raise ValueError(f"difficulty: {wanted} are not all from 1 to 5: give a list such as [1, 2]")
    return grades


@cache
def _chosen(source: str, split: Part, grades: tuple[int, ...]) -> tuple[ProgramProblem, ...]:
    """Returns the problems of a source in a split. Raises ValueError if the file does not exist or has none."""
    path = OWN if source == "own" else Path(source)
    if not path.exists():
        raise ValueError(f'source: "{source}" is neither "own" nor "drills" nor a file: give the path of one')
    return choose(load_programs(path), split, grades, str(source))
