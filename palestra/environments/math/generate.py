"""Generated math problems: five kinds and five difficulties, correct by construction."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from palestra.environments.math.arithmetic import arithmetic_problem, problem_from_tree, sum_problem
from palestra.environments.math.equations import equation_problem, inequality_problem
from palestra.environments.math.expressions import ExpressionTree, evaluate, evaluate_tree
from palestra.environments.math.problem import Problem, ProblemKind, draw_problem
from palestra.environments.math.word_templates import ANIMALS, BOXES, NAMES, THINGS, WARES, WORD_TEMPLATES, WordTemplate
from palestra.envs.support.splits import Split

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
    sentences = [f"Start with {start}."]
    short = f"start {start}"
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
    """Draws definitions: Let a = 12, b = 2 * a + 5. What is b? Each uses the one before it."""
    trees: list[ExpressionTree] = [rng.randint(2, 12)]
    lines = [f"a = {trees[0]}"]
    for step, name in enumerate(VARIABLE_NAMES[1 : steps + 1]):
        factor = rng.randint(2, 5)
        sign = rng.choice("+-")
        if step and rng.random() < 0.6:
            earlier = rng.randrange(step)
            other = trees[earlier]
            term = VARIABLE_NAMES[earlier]
        else:
            other = rng.randint(1, 9)
            term = str(other)
        lines.append(f"{name} = {factor} * {VARIABLE_NAMES[step]} {sign} {term}")
        trees.append((sign, ("*", factor, trees[-1]), other))
    facts = ", ".join(lines)
    last = VARIABLE_NAMES[steps]
    return problem_from_tree(trees[-1], f"Let {facts}. What is {last}?", f"{facts}, {last}", f"multi_step {facts}")


def _recurrence(rng: random.Random, steps: int) -> Problem:
    """Draws a recurrence and asks for the term after `steps` steps."""
    first = rng.randint(1, 20)
    factor = rng.randint(2, 4)
    added = rng.choice((-1, 1)) * rng.randint(1, 20)
    sign = "+" if added > 0 else "-"
    more = {"+": "plus", "-": "minus"}[sign]
    tree: ExpressionTree = first
    for _ in range(steps):
        tree = (sign, ("*", factor, tree), abs(added))
    question = (
        f"The first term of a sequence is {first}. Each further term is {factor} times the one before it, "
        f"{more} {abs(added)}. What is term number {steps + 1}?"
    )
    short = f"first {first} then times {factor} {more} {abs(added)} term {steps + 1}"
    return problem_from_tree(tree, question, short, f"multi_step {short}")


_SLOT = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"[a-z]+")
_DRAWN = re.compile(r"(\w+) (\d+)\.\.(\d+)")
_MADE = re.compile(r"(\w+) = (.+)")


def word_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a word problem of this difficulty. Its key, and so its split, has no names and things."""
    story = rng.choice([story for story in WORD_TEMPLATES if story.difficulty == difficulty])
    return fill_template(story, draw_numbers(story, rng), rng)


def draw_numbers(story: WordTemplate, rng: random.Random) -> dict[str, int]:
    """Draws numbers that satisfy the constraints of a template, including those that are not in its text."""
    while True:
        numbers: dict[str, int] = {}
        if all(_apply_rule(rule, numbers, rng) for rule in story.number_rules):
            return numbers


def _apply_rule(rule: str, numbers: dict[str, int], rng: random.Random) -> bool:
    """Applies one rule to `numbers`: draws or computes a number, or returns whether a condition holds."""
    if drawn := _DRAWN.fullmatch(rule):
        numbers[drawn[1]] = rng.randint(int(drawn[2]), int(drawn[3]))
    elif computed := _MADE.fullmatch(rule):
        numbers[computed[1]] = _integer(computed[2], numbers)
    else:
        return bool(evaluate(rule, numbers))
    return True


def fill_template(story: WordTemplate, numbers: dict[str, int], rng: random.Random) -> Problem:
    """Returns the problem that a template gives with these numbers."""
    name, other, third = rng.sample(NAMES, 3)
    things, boxes, animals, ware = map(rng.choice, (THINGS, BOXES, ANIMALS, WARES))
    words = {"name": name, "other": other, "third": third, "things": things, "boxes": boxes}
    text = story.text.format(**numbers, **words, animals=animals, ware=ware)
    shown = {slot: numbers[slot] for slot in sorted({*_SLOT.findall(story.text)} & numbers.keys())}
    program = _NAME.sub(lambda match: str(numbers[match[0]]), story.answer).replace(" ", "")
    key = f"word {story.name} {' '.join(f'{slot} {number}' for slot, number in shown.items())}"
    return Problem(text, str(_integer(story.answer, numbers)), text.lower(), program, key, needs_computation=True)


def _integer(source: str, numbers: dict[str, int]) -> int:
    worth = evaluate(source, numbers)
    assert isinstance(worth, int), f"{source} is {worth} of {numbers}"
    return worth


PROBLEM_GENERATORS: dict[ProblemKind, Callable[[random.Random, int], Problem]] = {
    "arithmetic": arithmetic_problem,
    "sum": sum_problem,
    "equation": equation_problem,
    "inequality": inequality_problem,
    "word": word_problem,
    "multi_step": multi_step_problem,
}
DEFAULT_KINDS = tuple(kind for kind in PROBLEM_GENERATORS if kind != "sum")  # sums are easier than their difficulty
DIFFICULTIES = range(1, 6)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def generate_problem(seed: int, kinds: tuple[ProblemKind, ...], difficulties: tuple[int, ...], split: Split) -> Problem:
    """Returns the problem of `split` for `seed`; kinds and difficulties are drawn uniformly. Beside `sum`, the kind
    `arithmetic` has no plain sums: the two kinds decide by different keys which split a sum belongs to."""
    what = f"kinds {', '.join(kinds)} at difficulty {', '.join(map(str, difficulties))}"
    return draw_problem(seed, partial(_propose_problem, kinds, difficulties), split, what)


def _propose_problem(kinds: Sequence[ProblemKind], difficulties: Sequence[int], rng: random.Random) -> Problem:
    kind = rng.choice(kinds)
    difficulty = rng.choice(difficulties)
    if kind == "arithmetic" and "sum" in kinds:
        return arithmetic_problem(rng, difficulty, sums=False)
    return PROBLEM_GENERATORS[kind](rng, difficulty)
