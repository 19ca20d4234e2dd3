"""Trying programs in the sandbox, for the tests of programming problems."""

from __future__ import annotations

import asyncio

from palestra.envs.problems.programs import Case, ProgramProblem
from palestra.envs.problems.trials import Code, Lab, Trials
from palestra.sandbox import Limits

LIMITS = Limits(wall=20, cpu=20)


def tried(lab: Lab, code: Code, *givens: str, limits: Limits = LIMITS) -> Trials:
    return asyncio.run(lab.tries(code, givens, limits))


def failures(lab: Lab, problem: ProgramProblem) -> list[Case]:
    """The tests and examples of a problem that its reference fails."""
    assert problem.reference is not None
    wrong = []
    for cases in (problem.examples, problem.tests):
        if cases:
            code = problem.code(problem.reference, problem.kind_of(cases[0]))
            trials = tried(lab, code, *(case.given for case in cases)).trials
            wrong += [case for case, trial in zip(cases, trials, strict=True) if not problem.passes(trial, case)]
    return wrong
