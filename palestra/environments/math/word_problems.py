"""Word problems: templates filled with numbers that satisfy their constraints, and with random names and things."""

from __future__ import annotations

import random
import re

from palestra.environments.math.expressions import evaluate
from palestra.environments.math.problem import Problem
from palestra.environments.math.word_templates import ANIMALS, BOXES, NAMES, THINGS, WARES, WORD_TEMPLATES, WordTemplate

_SLOT = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"[a-z]+")
_DRAWN = re.compile(r"(\w+) (\d+)\.\.(\d+)")
_MADE = re.compile(r"(\w+) = (.+)")


def word_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a word problem of this difficulty. Names and things are not part of its key: problems that differ only in
    them belong to the same split.
    """
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
    elif made := _MADE.fullmatch(rule):
        numbers[made[1]] = _integer(made[2], numbers)
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
    program = _NAME.sub(lambda found: str(numbers[found[0]]), story.answer).replace(" ", "")
    key = f"word {story.name} {' '.join(f'{slot} {number}' for slot, number in shown.items())}"
    return Problem(text, str(_integer(story.answer, numbers)), text.lower(), program, key, needs_computation=True)


def _integer(source: str, numbers: dict[str, int]) -> int:
    worth = evaluate(source, numbers)
    assert isinstance(worth, int), f"{source} is {worth} of {numbers}"
    return worth
