"""Trying programs in the sandbox, for the tests of programming problems."""

from __future__ import annotations

import asyncio

from palestra.envs.problems.programs import ProgramProblem
from palestra.envs.problems.trials import Case, Code, Lab, Trials
from palestra.sandbox import Limits

LIMITS = Limits(wall=20, cpu=20)


def tried(lab: Lab, code: Code, *cases: Case | str, limits: Limits = LIMITS) -> Trials:
    """The results of a program; a text is an input of which nothing is expected."""
    return asyncio.run(lab.tries(code, tuple(Case(one) if isinstance(one, str) else one for one in cases), limits))


def failures(lab: Lab, problem: ProgramProblem) -> list[Case]:
    """The tests and examples of a problem that its reference fails."""
    assert problem.reference is not None
    wrong = []
    for cases in (problem.examples, problem.tests):
        if cases:
            code = problem.code(problem.reference, problem.kind_of(cases[0]))
            wrong += [
                case for case, trial in zip(cases, tried(lab, code, *cases).trials, strict=True) if not trial.right
            ]
    return wrong
