"""Tasks of reasoning-gym (extra `reasoning`): problems made from a seed, judged by the task's own scorer."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
import random
import re
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from palestra.envs.problems import workers
from palestra.envs.problems.judging import EMPTY, RIGHT, WRONG, Verdict, verdict_of
from palestra.envs.problems.problem import Problem, draw_problem
from palestra.envs.problems.verify_worker import reasoning_gym
from palestra.envs.text.splits import Split

ENTRIES = 20_000  # of a task; each is made when it is asked for, but some tasks refuse to have more
LARGEST = 10_000  # characters of an answer: boards and lists are longer than numbers
# These go through sets of texts: with another seed of Python's hashes an entry is another one (reasoning-gym 0.1.25).
UNSTEADY = {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note"}
UNSTEADY |= {"word_ladder"}
_RUN = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_SAFE = "sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt abs Abs sec csc cot".split()  # noqa: SIM905
_CALL = re.compile(rf"(?:\b(?!(?:{'|'.join(_SAFE)})\b)\w+|[\])}}'\"])\s*\(|__|\.\s*[A-Za-z_]|\blambda\b|@|:=")


@lru_cache(maxsize=16_384)  # tree search resets the same seed again and again
def reasoning_problem(seed: int, tasks: tuple[str, ...], split: Split) -> Problem:
    """The problem of `split` that `seed` names among those of `tasks`, all alike."""

    def propose(rng: random.Random) -> Problem:
        return _problem(rng.choice(tasks), rng.randrange(ENTRIES))

    return draw_problem(seed, propose, split, f"reasoning: {', '.join(tasks)}")


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises ValueError where reasoning-gym is missing, has no task of one of these names, or has one that would make
    other problems of the same seed in another process."""
    known = _package().factory.DATASETS.keys() - {"composite"}  # which is no task but a mixture of them
    if unknown := [task for task in tasks if task not in known]:
        raise ValueError(f"reasoning: no task {', '.join(unknown)} in reasoning-gym; it has {', '.join(sorted(known))}")
    if not tasks:
        raise ValueError("reasoning: names no task; give at least one, such as [chain_sum]")
    if (unsteady := UNSTEADY & set(tasks)) and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"reasoning: the problems of {', '.join(sorted(unsteady))} depend on Python's random hashes, so that no "
            "run could be repeated: set PYTHONHASHSEED=0 in the environment, or leave them out"
        )


async def judge_entry(answer: str | None, problem: Problem, seconds: float) -> Verdict:
    """What the task's own scorer says, in [0, 1], in a process of its own and within so many seconds.

    Some scorers hand answers to `eval`. For those an answer that could do anything but be worked out is wrong unseen.
    """
    assert problem.entry
    task, entry = problem.entry
    if not answer or len(answer) > LARGEST:
        return EMPTY
    if answer == problem.answer:
        return RIGHT
    if _evaluates(task) and _CALL.search(answer):
        return WRONG
    return verdict_of(await workers.REASONING.ask({"task": task, "entry": entry, "answer": answer}, seconds))


def _problem(task: str, index: int) -> Problem:
    entry = _dataset(task)[index]
    question, answer = str(entry["question"]), str(entry["answer"])
    key = f"reasoning {task} {question}"
    pickled = base64.b64encode(pickle.dumps(entry)).decode()
    return Problem(question, answer, question, f"print({answer!r})", key, entry=(task, pickled))


@cache
def _dataset(task: str) -> Any:
    return _package().create_dataset(task, seed=0, size=ENTRIES)


@cache
def _evaluates(task: str) -> bool:
    """Whether a task's scorer stands in a file that hands text to Python to work out."""
    return bool(_RUN.search(inspect.getsource(sys.modules[type(_dataset(task)).__module__])))


def _package() -> Any:
    try:
        return reasoning_gym()
    except ImportError as error:
        raise ValueError(f"reasoning: needs reasoning-gym ({error}): pip install 'palestra[reasoning]'") from error
