"""Multi-step problems, each step using the previous result: as instructions, definitions, or a recurrence."""

from __future__ import annotations

import random

from palestra.environments.math.arithmetic import problem_from_tree
from palestra.environments.math.expressions import ExpressionTree, evaluate_tree
from palestra.environments.math.problem import Problem

VARIABLE_NAMES = "abcdefgh"
MAX_RESULT = 10**6
STEP_SENTENCES = {"+": "Add {}.", "-": "Take away {}.", "*": "Multiply by {}.", "/": "Divide by {}."}
STEP_WORDS = {"+": "add", "-": "minus", "*": "times", "/": "divide"}
SPECIAL_SENTENCES = {("*", 2): "Double it.", ("*", 3): "Triple it.", ("/", 2): "Halve it."}


def multi_step_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a problem with `difficulty` + 1 steps."""
    kind = rng.choice((_instructions, _instructions, _definitions, _definitions, _recurrence))
    while True:
        problem = kind(rng, difficulty + 1)
        if len(problem.answer) <= len(str(MAX_RESULT)):
            return problem


def _instructions(rng: random.Random, steps: int) -> Problem:
    """Draws instructions: Start with 12. Add 7. Double it. ..."""
    start = rng.randint(1, 50)
    tree: ExpressionTree = start
    sentences, short = [f"Start with {start}."], f"start {start}"
    for _ in range(steps):
        sign, number = _step(rng, int(evaluate_tree(tree)))
        tree = (sign, tree, number)
        sentences.append(SPECIAL_SENTENCES.get((sign, number), STEP_SENTENCES[sign]).format(number))
        short += f" {STEP_WORDS[sign]} {number}"
    return problem_from_tree(tree, f"{' '.join(sentences)} What number do you have?", short, f"multi_step {short}")


def _step(rng: random.Random, now: int) -> tuple[str, int]:
    """Draws a step whose result is a non-negative integer, and not too large."""
    choices = [("+", rng.randint(1, 50)), ("-", rng.randint(1, max(1, min(now, 50))))]
    if now <= 500:
        choices.append(("*", rng.randint(2, 9)))
    if even := [by for by in range(2, 10) if now > by and now % by == 0]:
        choices.append(("/", rng.choice(even)))
    return rng.choice([choice for choice in choices if choice[0] != "-" or now >= choice[1]])


def _definitions(rng: random.Random, steps: int) -> Problem:
    """Draws definitions: Let a = 12, b = 2 * a + 5, c = 3 * b - a. What is c? Each uses the one before it, so none is
    unused.
    """
    trees: list[ExpressionTree] = [rng.randint(2, 12)]
    lines = [f"a = {trees[0]}"]
    for step, name in enumerate(VARIABLE_NAMES[1 : steps + 1]):
        factor, sign = rng.randint(2, 5), rng.choice("+-")
        earlier = rng.randrange(step) if step and rng.random() < 0.6 else None
        other: ExpressionTree = rng.randint(1, 9) if earlier is None else trees[earlier]
        lines.append(
            f"{name} = {factor} * {VARIABLE_NAMES[step]} {sign} {other if earlier is None else VARIABLE_NAMES[earlier]}"
        )
        trees.append((sign, ("*", factor, trees[-1]), other))
    given, last = ", ".join(lines), VARIABLE_NAMES[steps]
    return problem_from_tree(trees[-1], f"Let {given}. What is {last}?", f"{given}, {last}", f"multi_step {given}")


def _recurrence(rng: random.Random, steps: int) -> Problem:
    """Draws a recurrence and asks for the term after `steps` steps."""
    first, factor, added = rng.randint(1, 20), rng.randint(2, 4), rng.choice((-1, 1)) * rng.randint(1, 20)
    tree: ExpressionTree = first
    for _ in range(steps):
        tree = ("+" if added > 0 else "-", ("*", factor, tree), abs(added))
    more = "plus" if added > 0 else "minus"
    question = (
        f"The first term of a sequence is {first}. Each further term is {factor} times the one before it, "
        f"{more} {abs(added)}. What is term number {steps + 1}?"
    )
    short = f"first {first} then times {factor} {more} {abs(added)} term {steps + 1}"
    return problem_from_tree(tree, question, short, f"multi_step {short}")
