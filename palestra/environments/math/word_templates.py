"""Templates of word problems: the text, the formula of the answer, and the constraints on the numbers.

A template in `data/word_templates.txt` begins with a line `difficulty | name | answer | number_rules`: for `a 2..90` a
number is drawn, `t = q * b` is computed (so that divisions leave no remainder), and `a > b` must hold. Only numbers
that occur in the text identify the problem; others only help to generate it. Difficulty 1: one step. 2: two. 3: two or
three, of different kinds. 4: parts, percentages, two unknowns. 5: opposing rates, and inverse problems.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

NAMES, THINGS, BOXES, ANIMALS, WARES = (
    words.split()
    for words in (
        "Ada Ahmed Alice Amara Anna Ben Bruno Carla Chen Clara Daniel Dina Elena Emil Farid Fiona Grace Hana Hugo "
        "Ines Ivan Jamal Julia Kaito Kofi Lena Leo Lucia Malik Maria Mei Milan Nadia Nora Omar Oscar Paula Priya Rosa "
        "Sam Sara Tariq Theo Uma Vera Viktor Wanda Yara Yusuf Zoe",
        "apples balloons beads books bottles bricks buttons candles cards chestnuts coins cookies crayons cups eggs "
        "feathers figs flags flowers keys lemons marbles melons mugs nails nuts olives oranges pears pebbles pencils "
        "plates plums postcards potatoes ribbons screws shells spoons stamps stickers tiles tomatoes tulips walnuts",
        "bags barrels baskets boxes bowls buckets cartons chests crates drawers jars sacks trays tubs",
        "cows ducks geese goats horses llamas ponies rabbits sheep",
        "bicycle blanket camera carpet chair coat guitar jacket kettle lamp radio suitcase table tent watch",
    )
)


class WordTemplate(NamedTuple):
    """One template of word problems; `answer` is a Python expression of its numbers."""

    difficulty: int
    name: str
    answer: str
    number_rules: tuple[str, ...]
    text: str


def _story(paragraph: str) -> WordTemplate:
    head, *lines = paragraph.split("\n")
    difficulty, name, answer, numbers = head.split(" | ")
    return WordTemplate(int(difficulty), name, answer, tuple(numbers.split(", ")), " ".join(lines))


TEMPLATES_FILE = Path(__file__).parent / "data" / "word_templates.txt"
WORD_TEMPLATES = tuple(map(_story, TEMPLATES_FILE.read_text(encoding="utf-8").strip().split("\n\n")))
