"""Tasks of reasoning-gym (extra `reasoning`): problems generated from a seed and graded by the task's own scorer."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from palestra.environments.math import evaluated_tasks, grader_client
from palestra.environments.math.grader_process import import_reasoning_gym
from palestra.environments.math.grading import CORRECT, UNREADABLE, AnswerGrade, grade_from_result
from palestra.environments.math.problem import Problem, draw_problem
from palestra.envs.support.splits import Split

ENTRIES_PER_TASK = 20_000  # per task, generated on demand; some tasks do not support more
MAX_REASONING_CHARS = 10_000  # characters of an answer; boards and lists are longer than numbers
# These iterate over sets of strings, so their entries depend on PYTHONHASHSEED (reasoning-gym 0.1.25).
HASH_DEPENDENT_TASKS = {"isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"}


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def reasoning_problem(seed: int, tasks: tuple[str, ...], split: Split) -> Problem:
    """Returns the problem of `split` for `seed`; the task is drawn uniformly from `tasks`."""

    def propose(rng: random.Random) -> Problem:
        task = rng.choice(tasks)
        index = rng.randrange(ENTRIES_PER_TASK)
        entry = _entry(task, index)
        # some tasks store no answer
        question = str(entry["question"])
        answer = str(entry["answer"] or "")
        key = f"reasoning {task} {question}"
        return Problem(question, answer, question, f"print({answer!r})", key, reasoning_entry=(task, index))

    return draw_problem(seed, propose, split, f"reasoning: {', '.join(tasks)}")


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises ValueError if the tasks cannot be played.

    That is, if reasoning-gym is missing or lacks one of the names; if a task generates different problems from the same
    seed in another process; or if its scorer evaluates text.
    """
    datasets = _package().factory.DATASETS
    known = datasets.keys() - {"composite"}  # a mixture of tasks, not a task
    if unknown := [task for task in tasks if task not in known]:
        raise ValueError(f"reasoning: no task {', '.join(unknown)} in reasoning-gym; it has {', '.join(sorted(known))}")
    if not tasks:
        raise ValueError("reasoning: names no task; give at least one, such as [chain_sum]")
    if (unsteady := HASH_DEPENDENT_TASKS & set(tasks)) and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"reasoning: the problems of {', '.join(sorted(unsteady))} depend on Python's random hashes, so that no "
            "run could be repeated: set PYTHONHASHSEED=0 in the environment, or leave them out"
        )
    for task in tasks:
        if why := evaluated_tasks.refusal_reason(task, datasets[task][0]):
            raise ValueError(why)


async def grade_reasoning(answer: str | None, problem: Problem, cpu_limit_s: float) -> AnswerGrade:
    """Returns the grade by the task's scorer, in [0, 1], computed within `cpu_limit_s` of CPU time.

    Scorers run in a confined process. No answer is ever evaluated: tasks whose own scorers would do so are scored by
    `evaluated_tasks`.
    """
    assert problem.reasoning_entry
    task, index = problem.reasoning_entry
    if not answer or len(answer) > MAX_REASONING_CHARS:
        return UNREADABLE
    if answer == problem.answer:
        return CORRECT
    if task in evaluated_tasks.DIRECT_SCORERS:
        return evaluated_tasks.DIRECT_SCORERS[task](answer, _entry(task, index))
    request = {"task": task, "index": index, "size": ENTRIES_PER_TASK, "question": problem.question, "answer": answer}
    return grade_from_result(await grader_client.grade("reasoning", request, cpu_limit_s))


@lru_cache(maxsize=4096)
def _entry(task: str, index: int) -> Any:
    return _dataset(task)[index]


@cache
def _dataset(task: str) -> Any:
    return _package().create_dataset(task, seed=0, size=ENTRIES_PER_TASK)


def _package() -> Any:
    try:
        return import_reasoning_gym()
    except ImportError as error:
        raise ValueError(f"reasoning: needs reasoning-gym ({error}): pip install 'palestra[reasoning]'") from error
