"""Questions about facts in documents: one fact, one via another document, or the sum or difference of two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from palestra.chat import Call
from palestra.envs.tooling.library import Document
from palestra.envs.tooling.tasks import Need, Task, number

BY_WAY = 0.25  # share of lookups that are two-hop questions


class Phrases(NamedTuple):
    """Templates for questions on a fact of {a}, its difference to {b}, and the sum of both; "" if meaningless."""

    one: str
    more: str = ""
    both: str = ""


PHRASES = {
    "inhabitants": Phrases(
        "How many inhabitants has {a}?",
        "How many more inhabitants has {a} than {b}?",
        "How many inhabitants have {a} and {b} together?",
    ),
    "founded": Phrases("In which year was {a} founded?", "How many years after {b} was {a} founded?"),
    "mayor": Phrases("Who is the mayor of {a}?"),
    "born": Phrases("In which year was {a} born?", "How many years after {b} was {a} born?"),
    "birthplace": Phrases("In which town was {a} born?"),
    "works": Phrases(
        "How many works of {a} are known?",
        "How many more works of {a} than of {b} are known?",
        "How many works of {a} and {b} are known in all?",
    ),
    "price": Phrases(
        "What is the price of the {a}, in crowns?",
        "How many crowns more than the {b} does the {a} cost?",
        "What do the {a} and the {b} cost together, in crowns?",
    ),
    "weight": Phrases(
        "What does the {a} weigh, in grams?",
        "By how many grams is the {a} heavier than the {b}?",
        "What do the {a} and the {b} weigh together, in grams?",
    ),
    "maker": Phrases("Which workshop makes the {a}?"),
    "length": Phrases(
        "How long is the {a}, in kilometres?",
        "By how many kilometres is the {a} longer than the {b}?",
        "How long are the {a} and the {b} together, in kilometres?",
    ),
    "mouth": Phrases("Near which town does the {a} reach the sea?"),
    "ferries": Phrases(
        "How many ferries cross the {a}?",
        "How many more ferries cross the {a} than the {b}?",
        "How many ferries cross the {a} and the {b}, taken together?",
    ),
    "height": Phrases("How high is {a}, in metres?", "By how many metres is {a} higher than {b}?"),
    "climbed": Phrases("In which year was {a} first climbed?", "How many years after {b} was {a} first climbed?"),
    "climber": Phrases("Who first climbed {a}?"),
    "visitors": Phrases(
        "How many visitors did the {a} draw last year?",
        "How many more visitors than the {b} did the {a} draw last year?",
        "How many visitors did the {a} and the {b} draw last year, taken together?",
    ),
    "host": Phrases("In which town is the {a} held?"),
    "first": Phrases("In which year was the {a} first held?", "How many years after the {b} was the {a} first held?"),
    "span": Phrases(
        "How long is {a}, in metres?",
        "By how many metres is {a} longer than {b}?",
        "How long are {a} and {b} together, in metres?",
    ),
    "architect": Phrases("Who drew the plans of {a}?"),
    "opened": Phrases("In which year was {a} opened?", "How many years after {b} was {a} opened?"),
}
ANY = Phrases(
    "What is the {fact} of {a}?",
    "By how much is the {fact} of {a} greater than that of {b}?",
    "What is the sum of the {fact} of {a} and that of {b}?",
)


class Fact(NamedTuple):
    """One fact: the document's title, the fact's name and its value."""

    title: str
    name: str
    value: str

    @property
    def need(self) -> Need:
        """The requirement that a tool shows this fact."""
        search = Call("search", {"query": f"{self.title} {self.name}"})
        read = Call("read_document", {"title": self.title})
        return Need((self.title, self.value), (search, read), f"{self.title}: {self.name} {self.value}")


class FactQuestions:
    """Generates tasks from the facts of documents. Raises ValueError if they state none."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.facts = [Fact(d.title, name, value) for d in documents for name, value in d.facts.items()]
        self.numbers: dict[str, list[Fact]] = {}
        for fact in self.facts:
            if number(fact.value) is not None:
                self.numbers.setdefault(fact.name, []).append(fact)
        self.comparable = sorted(name for name, facts in self.numbers.items() if len(facts) > 1)
        if not self.facts:
            raise ValueError(
                "these documents state no facts to ask about: give tasks of your own (tasks: path), or documents as "
                '.jsonl with "facts": {"height": "1,204"} in each line'
            )
        self.of = {(fact.title, fact.name): fact for fact in self.facts}
        self.ways = [(f, on) for f in self.facts for name in self.numbers if (on := self.of.get((f.value, name)))]

    def lookup(self, rng: random.Random) -> Task:
        """Draws a question for one fact, with probability `BY_WAY` via another document."""
        if self.ways and rng.random() < BY_WAY:
            return self._by_way(*rng.choice(self.ways))
        fact = rng.choice(self.facts)
        question = _phrases(fact.name).one.format(a=fact.title, fact=fact.name)
        short = f"{fact.title.lower()} {fact.name}"
        return Task("lookup", question, short, fact.value, f"lookup {fact.title} {fact.name}", ((fact.need,),))

    def _by_way(self, first: Fact, then: Fact) -> Task:
        """Returns a two-hop question, such as the population of the town in which a person was born."""
        find = _phrases(first.name).one.format(a=first.title, fact=first.name)
        answer = _phrases(then.name).one.format(a="that one", fact=then.name)
        question = f"First find out this: {find} Then answer this: {answer}"
        short = f"{first.title.lower()} {first.name} {then.name}"
        key = f"lookup {first.title} {first.name} {then.name}"
        return Task("lookup", question, short, then.value, key, ((first.need,), (then.need,)))

    def lookup_compute(self, rng: random.Random) -> Task | None:
        """Draws a question for the difference or sum of two facts; None if they are equal."""
        one, other = rng.sample(self.numbers[rng.choice(self.comparable)], 2)
        phrases = _phrases(one.name)
        values = [number(fact.value) or 0 for fact in (one, other)]
        if values[0] == values[1]:
            return None
        high, low = (one, other) if values[0] > values[1] else (other, one)
        is_sum = bool(phrases.both) and rng.random() < 0.5
        sign, total = ("+", sum(values)) if is_sum else ("-", abs(values[0] - values[1]))
        asked = phrases.both if is_sum else phrases.more
        question = asked.format(a=high.title, b=low.title, fact=one.name)
        short = f"{high.title.lower()} {sign} {low.title.lower()} {one.name}"
        expression = f"{high.value} {sign} {low.value}".replace(",", "")
        work = Need((str(total),), (Call("calculator", {"expression": expression}),))
        key = f"{high.title} {sign} {low.title} {one.name}"
        return Task("lookup_compute", question, short, str(total), key, ((high.need, low.need), (work,)))


def _phrases(name: str) -> Phrases:
    return PHRASES.get(name, ANY)
