"""Code generation env: a coder writes a program while a tester writes a test, simultaneously and unseen by each other.
The episode ends when the program passes the test; otherwise both see the result and try again.

Follows the code workflow of Stronger-MAS (arXiv 2510.11062). The end of the episode depends only on the two answers;
hidden tests only determine rewards. Rewards are differences between turns and sum to the score of the last program and
the last test, so extra turns earn nothing by themselves.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from palestra.core.types import Seat, Step
from palestra.environments.code.answers import (
    read_program,
    read_test,
    write_arguments,
    write_program,
    write_test,
)
from palestra.environments.code.files import BUILT_IN_PROGRAMS, load_programs
from palestra.environments.code.harness import encode_value
from palestra.environments.code.programs import (
    PROGRAM_DIFFICULTIES,
    ProgramProblem,
    SplitOrAll,
    draw_program,
    select_problems,
)
from palestra.environments.code.prompts import ROLE_PROMPTS, CodeTurn, compact_observation, full_observation
from palestra.environments.code.results import NO_VALUE, encodings_equal, outputs_equal, parse_literal, words_equal
from palestra.environments.code.synthetic_programs import SyntheticProgram, draw_synthetic_program, synthetic_problem
from palestra.environments.code.test_runner import (
    ProgramTest,
    ProgramTestResult,
    ProgramTestResults,
    ProgramTestRunner,
)
from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, Terms, terms_gained, terms_info, total_rewards
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.sandbox import ResourceLimits, open_sandbox

PASS_RATE_REWARD = 1.0  # coder's reward, times the share of hidden tests passed
# coder's penalties: does not compile, first test does not run
NO_COMPILE_PENALTY = 0.05
NO_RUN_PENALTY = 0.05
CORRECT_TEST_REWARD = 1.0  # tester's reward for a test that the reference passes
INVALID_TEST_PENALTY = 0.1  # tester's penalty for a test that cannot be read
SOLVED_REWARD = 1.0  # team reward, with `reward: outcome`
SYNTHETIC_SOURCE = "drills"
DEFAULT_DIFFICULTIES = {SYNTHETIC_SOURCE: (1, 2, 3)}  # by source; all difficulties for the others
MIB = 2**20

CodeTeam = Literal["coder_tester", "single"]
SEATS: dict[CodeTeam, tuple[Seat, ...]] = {"coder_tester": ("coder", "tester"), "single": ("coder",)}


class TurnResult(NamedTuple):
    """Result of one turn: `pass_rate` of hidden tests passed, the `scores` of the seats by terms,
    each at most 1, `agreed` if the program passes the tester's test, the `turn` as shown to both."""

    pass_rate: float
    scores: dict[Seat, Terms]
    agreed: bool
    turn: CodeTurn


class CoderTester(Env):
    """Coder and tester on one programming problem, or a coder alone.

    `source` selects the problems: "own" (64 shipped problems), "drills" (synthetic expressions for small models) or a
    file. Only the first `max_tests` hidden tests of a problem count; a program has `time_limit_s` seconds of wall and
    CPU time for all of them and `memory_mib` MiB. Programs run in a sandbox; without one the env does not start, unless
    `unsafe`. `difficulty` lists the wanted difficulties, from 1 to 5.

    With `team: single` the episode ends once the program passes the examples, at once if there are none.

    Info: `passed` is the share of hidden tests passed, `agreed` is true if the episode ended by agreement. Raises
    ValueError if an option is out of range, or if no problem matches.
    """

    name: ClassVar[str] = "code"
    replaces_state = True

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        source: str = "own",
        split: SplitOrAll = "train",
        difficulty: list[int] | None = None,
        team: CodeTeam = "coder_tester",
        max_turns: int = 4,
        max_tests: int = 20,
        time_limit_s: float = 5.0,
        memory_mib: int = 256,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
        unsafe: bool = False,
    ) -> None:
        check_range("max_turns", max_turns, 1, 100)
        check_range("max_tests", max_tests, 1, 10_000)
        check_range("time_limit_s", time_limit_s, 0.1, 600)
        check_range("memory_mib", memory_mib, 32, 2**20)
        self.seats = SEATS[team]
        self.team = team
        self.turns = max_turns
        self.tests = max_tests
        self.source = source
        self.split = split
        self.reward = reward
        self.rendering = rendering
        self.difficulties = _grades(difficulty, source)
        self.limits = ResourceLimits(wall=time_limit_s, cpu=time_limit_s, memory=memory_mib * MIB, disk=64 * MIB)
        self.test_runner = _lab(unsafe)
        self._problems = _load_problems(source, split, tuple(self.difficulties))
        self.roles = {seat: self._role(seat) for seat in self.seats}
        self._over = True

    # ---- env interface

    def instance_of(self, seed: int) -> int | str:
        """Returns what identifies a problem of a file; of a generated one, its seed."""
        if self.source == SYNTHETIC_SOURCE:
            return seed
        return draw_program(self._problems, seed).split_key

    def reset(self, seed: int) -> Step:
        self.drill: SyntheticProgram | None = None
        if self.source == SYNTHETIC_SOURCE:
            self.drill = draw_synthetic_program(seed, self.split, self.difficulties)
            self.problem = synthetic_problem(self.drill)
        else:
            self.problem = draw_program(self._problems, seed)
        self._turns: tuple[CodeTurn, ...] = ()
        self._judged = TurnResult(0.0, {seat: {} for seat in self.seats}, False, CodeTurn(None, None, None))
        self._over = False
        return Step(self._observations())

    async def step(self, actions: dict[Seat, Any]) -> Step:
        if self._over or actions.keys() != set(self.seats):
            raise ValueError(f"reset(seed), then answer for {', '.join(self.seats)} until no seat is observed")
        before = self._judged
        source = read_program(actions["coder"], self.problem.kind)
        test = None
        if self.team == "single":
            now = await self._alone(source)
        else:
            test = read_test(actions["tester"], self.problem)
            now = await self._both(source, test)
        self._judged = now
        self._turns = (*self._turns, now.turn)
        success = now.pass_rate == 1.0
        self._over = now.agreed or len(self._turns) >= self.turns
        flaws = {"coder": source is None or now.turn.compile_error is not None, "tester": test is None}
        terms = {seat: self._own(seat, before, now) for seat in self.seats}
        return Step(
            self._observations(),
            rewards=total_rewards(terms),
            team_reward=self._team_reward(before, now),
            truncated=self._over and not now.agreed and not success,
            info={
                "success": success,
                "turn": len(self._turns),
                "invalid": {seat: flaws[seat] for seat in self.seats},
                "passed": now.pass_rate,
                "agreed": now.agreed,
            }
            | terms_info(terms),
        )

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the reference solution, or a test that it passes. Raises ValueError if the problem has none."""
        fenced = self.rendering == "full"
        problem = self.problem
        if seat == "tester":
            return write_test(self._correct_test(rng), problem, fenced=fenced)
        if problem.reference is None:
            raise ValueError(f'problem "{problem.id}" has no reference solution, so it has no expert')
        if problem.kind == "expression" and fenced:
            return f"#### {problem.reference}"
        return write_program(problem.reference, fenced=fenced)

    def _correct_test(self, rng: random.Random) -> ProgramTest:
        """Returns a test with its correct expected value."""
        if self.drill:
            xs = [rng.randrange(10) for _ in range(rng.randint(2, 3))]
            return ProgramTest(f"({xs!r},)", repr(self.drill.run(xs)))
        cases = [case for case in self.problem.tests if case.expected_output and not is_test_shown(self.problem, case)]
        if not cases:
            raise ValueError(
                f'the tests of problem "{self.problem.id}" name no values that its question does not show, so there is '
                "no expert at them"
            )
        return rng.choice(sorted(cases, key=lambda case: len(case.input_text))[:3])

    # ---- one turn

    async def _both(self, source: str | None, test: ProgramTest | None) -> TurnResult:
        """Returns the result of one turn of coder and tester."""
        copied = test is not None and is_test_shown(self.problem, test)
        checked_test = test
        if copied:
            checked_test = None
        (hidden, trial), right = await asyncio.gather(self._run_tests(source, test), self._by_reference(checked_test))
        share, coder = self._marks(hidden)
        agreed = trial is not None and trial.passed
        if right is None:  # without a reference, a program that passes all hidden tests replaces it
            right = agreed and share == 1.0
        tester = {FORM_TERM: 0.0, "correct": CORRECT_TEST_REWARD * right}
        if test is None:
            tester[FORM_TERM] = -INVALID_TEST_PENALTY
        turn = CodeTurn(source, test, trial, hidden.compile_error, copied)
        return TurnResult(share, {"coder": coder, "tester": tester}, agreed, turn)

    async def _run_tests(
        self, source: str | None, test: ProgramTest | None
    ) -> tuple[ProgramTestResults, ProgramTestResult | None]:
        """Returns the results on the hidden tests, and on the tester's test.

        The two run separately, so a program that hangs on one does not fail the other; expressions are fast and run
        together.
        """
        hidden = self._hidden_tests()
        if test is None:
            return await self._on(source, hidden), None
        if self.problem.kind == "expression":
            results = own = await self._on(source, (*hidden, test))
        else:
            results, own = await asyncio.gather(self._on(source, hidden), self._on(source, (test,)))
        return results, next(reversed(own.results), None)

    async def _alone(self, source: str | None) -> TurnResult:
        """Returns the result of one turn of a coder alone, which is tested on the examples."""
        examples = self.problem.examples
        hidden, shown = await asyncio.gather(self._on(source, self._hidden_tests()), self._on(source, examples))
        share, coder = self._marks(hidden)
        trials = zip(examples, shown.results, strict=False)
        failed = [(case, trial) for case, trial in trials if not trial.passed]
        case, trial = next(iter(failed), (None, None))
        agreed = not examples or bool(shown.results and not failed)
        turn = CodeTurn(source, case, trial, hidden.compile_error)
        return TurnResult(share, {"coder": coder}, agreed, turn)

    def _hidden_tests(self) -> tuple[ProgramTest, ...]:
        return self.problem.tests[: self.tests]

    async def _on(self, source: str | None, cases: tuple[ProgramTest, ...]) -> ProgramTestResults:
        """Returns the results of a program on `cases`; none without a program."""
        if source is None or not cases:
            return ProgramTestResults(())
        code = self.problem.program_from(source, self.problem.kind_for_test(cases[0]))
        return await self.test_runner.run_tests(code, cases, self.limits)

    async def _by_reference(self, test: ProgramTest | None) -> bool | None:
        """True if the reference passes `test`; None without a reference."""
        if test is None:
            return False
        if self.drill:
            result = self.drill.run_checked(parse_literal(test.input_text)[0])
            return result is not None and bool(result == parse_literal(test.expected_output))
        if self.problem.reference is None:
            return None
        tried = await self._on(self.problem.reference, (test,))
        return tried.results[0].passed

    def _marks(self, hidden: ProgramTestResults) -> tuple[float, Terms]:
        """Returns the share of hidden tests passed, and the coder's score by terms."""
        if not hidden.results or hidden.compile_error is not None:
            return 0.0, {FORM_TERM: -NO_COMPILE_PENALTY - NO_RUN_PENALTY, "passed": 0.0}
        # for expressions the tester's result follows the hidden ones
        passed = [trial.passed for trial in hidden.results[: len(self._hidden_tests())]]
        share = sum(passed) / len(passed)
        terms = {FORM_TERM: 0.0, "passed": PASS_RATE_REWARD * share}
        if not hidden.results[0].completed:
            terms[FORM_TERM] = -NO_RUN_PENALTY
        return share, terms

    def _own(self, seat: Seat, before: TurnResult, now: TurnResult) -> Terms:
        if self.reward == "outcome":
            return {}
        return terms_gained(now.scores[seat], before.scores[seat])

    def _team_reward(self, before: TurnResult, now: TurnResult) -> float:
        if self.reward == "outcome":
            return SOLVED_REWARD * (self._over and now.pass_rate == 1.0)
        return now.pass_rate - before.pass_rate

    def _role(self, seat: Seat) -> str:
        if self.rendering == "compact":
            return f"code {seat}"
        if self.team == "single":
            return ROLE_PROMPTS["alone"]
        return ROLE_PROMPTS[seat]

    def _observations(self) -> dict[Seat, str]:
        if self._over:
            return {}
        if self.rendering == "compact":
            return dict.fromkeys(self.seats, compact_observation(self.problem, self._turns))
        alone = self.team == "single"
        return {seat: full_observation(self.problem, seat, self._turns, self.turns, alone=alone) for seat in self.seats}


@cache
def _lab(unsafe: bool) -> ProgramTestRunner:
    return ProgramTestRunner(open_sandbox(unsafe))


def _grades(wanted: list[int] | None, source: str) -> list[int]:
    if wanted is None:
        return list(DEFAULT_DIFFICULTIES.get(source, PROGRAM_DIFFICULTIES))
    grades = sorted(set(wanted))
    if not grades or not set(grades) <= set(PROGRAM_DIFFICULTIES):
        raise ValueError(f"difficulty: {wanted} are not all from 1 to 5: give a list such as [1, 2]")
    return grades


@cache
def _load_problems(source: str, split: SplitOrAll, grades: tuple[int, ...]) -> tuple[ProgramProblem, ...]:
    """Returns the problems of a source in a split; () if it is generated. Raises ValueError for none."""
    if source == SYNTHETIC_SOURCE:
        return ()
    path = Path(source)
    if source == "own":
        path = BUILT_IN_PROGRAMS
    if not path.exists():
        raise ValueError(f'source: "{source}" is neither "own" nor "drills" nor a file: give the path of one')
    return select_problems(load_programs(path), split, grades, str(source))


# ---- tests that repeat an input shown in the question: they require no understanding and earn no reward


MAX_CLOSING_BRACKETS = 20  # closing brackets tried as the end of a call


def is_test_shown(problem: ProgramProblem, test: ProgramTest) -> bool:
    """True if the input of `test` occurs in an example or in the question.

    Numbers may be written differently (2.0, 02), floats may differ in the seventh digit, lists may be tuples. In the
    question's text, calls of the function and verbatim lines of an input are found; inputs given in words ("for n = 3")
    are not. An example's input with words appended counts as shown if the expected output is the example's.
    """
    if problem.kind == "stdin":
        return any(_repeats(test, example) for example in problem.examples) or _stands_in(
            test.input_text, problem.question
        )
    tree = _tree(test.input_text)
    examples = (_tree(case.input_text) for case in problem.examples)
    return any(encodings_equal(tree, shown) for shown in (*examples, *_calls(problem.question, problem.entry)))


def _repeats(test: ProgramTest, example: ProgramTest) -> bool:
    words = _words(test.input_text)
    shown = _words(example.input_text)
    same = all(map(words_equal, words, shown)) and len(words) >= len(shown)
    return same and (len(words) == len(shown) or outputs_equal(example.expected_output, test.expected_output))


def _words(text: str) -> list[str]:
    return [re.sub(r"^\+?0*(?=[0-9])", "", word) for word in text.split()]


def _stands_in(input_text: str, question: str) -> bool:
    inner = _lines(input_text)
    return inner != "\n\n" and inner in _lines(question)


def _lines(text: str) -> str:
    """Returns the non-empty lines with single blanks, each between two line ends."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return "\n".join(["", *lines, ""])


def _tree(arguments: str) -> Any:
    value = parse_literal(arguments)
    if value is NO_VALUE:
        return NO_VALUE
    return json.loads(encode_value(value))


@lru_cache(maxsize=256)
def _calls(question: str, entry: str) -> tuple[Any, ...]:
    """Returns the arguments of all calls of `entry` with literal values in the question."""
    calls: list[Any] = []
    if not entry:
        return ()
    for call in re.finditer(rf"\b{re.escape(entry)}\s*\(", question):
        rest = question[call.end() : call.end() + 1000]
        for end in [match.start() for match in re.finditer(r"\)", rest)][:MAX_CLOSING_BRACKETS]:
            tree = _tree(write_arguments(rest[:end]))
            if tree is not NO_VALUE:
                calls.append(tree)
                break
    return tuple(calls)
