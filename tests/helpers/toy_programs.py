"""Runs programs in the sandbox, for tests of programming problems."""

import asyncio

from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.test_runner import ProgramSpec, ProgramTest, ProgramTestResults, ProgramTestRunner
from palestra.sandbox import ResourceLimits

LIMITS = ResourceLimits(wall=20, cpu=20)


def try_program(
    lab: ProgramTestRunner, code: ProgramSpec, *cases: ProgramTest | str, limits: ResourceLimits = LIMITS
) -> ProgramTestResults:
    """The results of a program; a plain text is an input without an expected output."""
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
                case
                for case, trial in zip(cases, try_program(lab, code, *cases).results, strict=True)
                if not trial.passed
            ]
    return wrong
