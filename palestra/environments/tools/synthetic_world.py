"""A synthetic world for small models: thousands of places, each with a population drawn anew for every instance.

Nothing in it can be memorised. It is never built: a search computes the number of the place in the query.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from palestra.core.chat import ToolCall
from palestra.environments.tools.tasks import TaskKind, ToolRequirement, ToolTask, calculation, file_content
from palestra.environments.tools.tool_state import SearchHit

SYLLABLES = list(map("".join, product("bdfgklmnprst", "aiou")))
PLACE_NAMES = frozenset(map("".join, product(SYLLABLES, repeat=2)))
SYNTHETIC_TASK_KINDS: tuple[TaskKind, ...] = ("lookup", "compute", "lookup_compute", "files")
# range of populations and operands
MIN_NUMBER = 100
MAX_NUMBER = 999


class SyntheticLibrary:
    """The library of one instance. Equal salts give equal worlds."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        return [SearchHit(name, str(self.population(name))) for name in places_in(query)[:k]]

    def read(self, title: str) -> str | None:
        name = title.strip().lower()
        return f"{name} {self.population(name)}" if name in PLACE_NAMES else None

    def population(self, name: str) -> int:
        """Returns the population of a place, a hash of `salt` and `name` in [`MIN_NUMBER`, `MAX_NUMBER`]."""
        digest = hashlib.blake2b(f"{self.salt} {name}".encode(), digest_size=8).digest()
        return MIN_NUMBER + int.from_bytes(digest, "big") % (MAX_NUMBER - MIN_NUMBER + 1)


def draw_synthetic_task(kind: TaskKind, rng: random.Random) -> ToolTask | None:
    """Draws a task of that kind in a new world; None if the draw is invalid (two equal populations)."""
    if kind == "compute":
        return _compute(rng)
    if kind == "files":
        return _files(rng)
    places = SyntheticLibrary(rng.getrandbits(64))
    one, other = rng.sample(place_names(), 2)
    return _lookup(places, one) if kind == "lookup" else _lookup_compute(places, one, other, rng.choice("+-"))


@lru_cache(maxsize=1)
def place_names() -> list[str]:
    """Returns the names of all places, sorted."""
    return sorted(PLACE_NAMES)


def places_in(query: str) -> list[str]:
    """Returns the names of places in a query, each once, in order."""
    return [word for word in dict.fromkeys(re.findall(r"[a-z]+", query.lower())) if word in PLACE_NAMES]


def _need(places: SyntheticLibrary, name: str) -> ToolRequirement:
    people = str(places.population(name))
    return ToolRequirement((name, people), (ToolCall("search", {"query": name}),), f"{name} {people}")


def _lookup(places: SyntheticLibrary, name: str) -> ToolTask:
    people = str(places.population(name))
    question = f"How many people live in {name}?"
    key = f"drill {name} {people}"
    needs = ((_need(places, name),),)
    return ToolTask("lookup", question, f"{name} people", people, key, needs, library=places)


def _lookup_compute(places: SyntheticLibrary, one: str, other: str, sign: str) -> ToolTask | None:
    high, low = sorted((one, other), key=places.population, reverse=True)
    most = places.population(high)
    least = places.population(low)
    if most == least:
        return None
    answer = most + least if sign == "+" else most - least
    question = {
        "+": f"How many people live in {high} and {low} together?",
        "-": f"How many more people live in {high} than in {low}?",
    }[sign]
    needs = ((_need(places, high), _need(places, low)), (calculation(f"{most} {sign} {least}", str(answer)),))
    key = f"drill {high} {most} {sign} {low} {least}"
    return ToolTask("lookup_compute", question, f"{high} {sign} {low} people", str(answer), key, needs, library=places)


def _compute(rng: random.Random) -> ToolTask:
    one = rng.randint(MIN_NUMBER, MAX_NUMBER)
    other = rng.randint(MIN_NUMBER, MAX_NUMBER)
    expression = f"{one} * {other}"
    key = f"drill {min(one, other)} * {max(one, other)}"
    answer = str(one * other)
    needs = ((calculation(expression, answer),),)
    return ToolTask("compute", f"What is {expression}?", expression, answer, key, needs)


def _files(rng: random.Random) -> ToolTask:
    path = rng.choice("abcdefgh")
    numbers = [rng.randint(MIN_NUMBER, MAX_NUMBER) for _ in range(2)]
    text = " ".join(map(str, numbers))
    answer = str(sum(numbers))
    needs = ((file_content(path, text),), (calculation(" + ".join(map(str, numbers)), answer),))
    question = f"What is the sum of the numbers in the file {path}?"
    key = f"drill {path} {text}"
    return ToolTask("files", question, f"sum {path}", answer, key, needs, {path: text})
