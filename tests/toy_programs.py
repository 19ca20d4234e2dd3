"""Trying programs in the sandbox, for the tests of programming problems."""

from __future__ import annotations

import asyncio

from palestra.envs.text.code.programs import ProgramProblem
from palestra.envs.text.code.test_runner import ProgramSpec, ProgramTest, ProgramTestResults, ProgramTestRunner
from palestra.sandbox import ResourceLimits

LIMITS = ResourceLimits(wall=20, cpu=20)


def tried(
    lab: ProgramTestRunner, code: ProgramSpec, *cases: ProgramTest | str, limits: ResourceLimits = LIMITS
) -> ProgramTestResults:
    """The results of a program; a text is an input of which nothing is expected."""
    return asyncio.run(
        lab.run_tests(code, tuple(ProgramTest(one) if isinstance(one, str) else one for one in cases), limits)
    )


def failures(lab: ProgramTestRunner, problem: ProgramProblem) -> list[ProgramTest]:
    """The tests and examples of a problem that its reference fails."""
    assert problem.reference is not None
    wrong = []
    for cases in (problem.examples, problem.tests):
        if cases:
            code = problem.program_from(problem.reference, problem.kind_for_test(cases[0]))
            wrong += [
                case for case, trial in zip(cases, tried(lab, code, *cases).results, strict=True) if not trial.passed
            ]
    return wrong
