"""Questions about facts in documents: one fact, one via another document, or the sum or difference of two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from palestra.core.chat import ToolCall
from palestra.environments.tools.library import Document
from palestra.environments.tools.tasks import ToolRequirement, ToolTask, calculation, parse_number

TWO_HOP_SHARE = 0.25  # share of lookups that are two-hop questions


class QuestionTemplates(NamedTuple):
    """Templates for questions on a fact of {a}, its difference to {b}, and the sum of both; "" if meaningless."""

    single: str
    difference: str = ""
    total: str = ""


QUESTION_TEMPLATES = {
    "inhabitants": QuestionTemplates(
        "How many inhabitants has {a}?",
        "How many more inhabitants has {a} than {b}?",
        "How many inhabitants have {a} and {b} together?",
    ),
    "founded": QuestionTemplates("In which year was {a} founded?", "How many years after {b} was {a} founded?"),
    "mayor": QuestionTemplates("Who is the mayor of {a}?"),
    "born": QuestionTemplates("In which year was {a} born?", "How many years after {b} was {a} born?"),
    "birthplace": QuestionTemplates("In which town was {a} born?"),
    "works": QuestionTemplates(
        "How many works of {a} are known?",
        "How many more works of {a} than of {b} are known?",
        "How many works of {a} and {b} are known in all?",
    ),
    "price": QuestionTemplates(
        "What is the price of the {a}, in crowns?",
        "How many crowns more than the {b} does the {a} cost?",
        "What do the {a} and the {b} cost together, in crowns?",
    ),
    "weight": QuestionTemplates(
        "What does the {a} weigh, in grams?",
        "By how many grams is the {a} heavier than the {b}?",
        "What do the {a} and the {b} weigh together, in grams?",
    ),
    "maker": QuestionTemplates("Which workshop makes the {a}?"),
    "length": QuestionTemplates(
        "How long is the {a}, in kilometres?",
        "By how many kilometres is the {a} longer than the {b}?",
        "How long are the {a} and the {b} together, in kilometres?",
    ),
    "mouth": QuestionTemplates("Near which town does the {a} reach the sea?"),
    "ferries": QuestionTemplates(
        "How many ferries cross the {a}?",
        "How many more ferries cross the {a} than the {b}?",
        "How many ferries cross the {a} and the {b}, taken together?",
    ),
    "height": QuestionTemplates("How high is {a}, in metres?", "By how many metres is {a} higher than {b}?"),
    "climbed": QuestionTemplates(
        "In which year was {a} first climbed?", "How many years after {b} was {a} first climbed?"
    ),
    "climber": QuestionTemplates("Who first climbed {a}?"),
    "visitors": QuestionTemplates(
        "How many visitors did the {a} draw last year?",
        "How many more visitors than the {b} did the {a} draw last year?",
        "How many visitors did the {a} and the {b} draw last year, taken together?",
    ),
    "host": QuestionTemplates("In which town is the {a} held?"),
    "first": QuestionTemplates(
        "In which year was the {a} first held?", "How many years after the {b} was the {a} first held?"
    ),
    "span": QuestionTemplates(
        "How long is {a}, in metres?",
        "By how many metres is {a} longer than {b}?",
        "How long are {a} and {b} together, in metres?",
    ),
    "architect": QuestionTemplates("Who drew the plans of {a}?"),
    "opened": QuestionTemplates("In which year was {a} opened?", "How many years after {b} was {a} opened?"),
}
DEFAULT_TEMPLATES = QuestionTemplates(
    "What is the {fact} of {a}?",
    "By how much is the {fact} of {a} greater than that of {b}?",
    "What is the sum of the {fact} of {a} and that of {b}?",
)


class DocumentFact(NamedTuple):
    """One fact: the document's title, the fact's name and its value."""

    title: str
    name: str
    value: str

    @property
    def requirement(self) -> ToolRequirement:
        """The requirement that a tool shows this fact."""
        search = ToolCall("search", {"query": f"{self.title} {self.name}"})
        read = ToolCall("read_document", {"title": self.title})
        return ToolRequirement((self.title, self.value), (search, read), f"{self.title}: {self.name} {self.value}")


class FactQuestions:
    """Generates tasks from the facts of documents. Raises ValueError if they state none."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.facts = [DocumentFact(d.title, name, value) for d in documents for name, value in d.facts.items()]
        self.numeric_facts: dict[str, list[DocumentFact]] = {}
        for fact in self.facts:
            if parse_number(fact.value) is not None:
                self.numeric_facts.setdefault(fact.name, []).append(fact)
        self.comparable_names = sorted(name for name, facts in self.numeric_facts.items() if len(facts) > 1)
        if not self.facts:
            raise ValueError(
                "these documents state no facts to ask about: give tasks of your own (tasks: path), or documents as "
                '.jsonl with "facts": {"height": "1,204"} in each line'
            )
        self.by_title_and_name = {(fact.title, fact.name): fact for fact in self.facts}
        self.two_hop_pairs = [
            (f, on)
            for f in self.facts
            for name in self.numeric_facts
            if (on := self.by_title_and_name.get((f.value, name)))
        ]

    def lookup(self, rng: random.Random) -> ToolTask:
        """Draws a question for one fact, with probability `TWO_HOP_SHARE` via another document."""
        if self.two_hop_pairs and rng.random() < TWO_HOP_SHARE:
            return self._by_way(*rng.choice(self.two_hop_pairs))
        fact = rng.choice(self.facts)
        question = _phrases(fact.name).single.format(a=fact.title, fact=fact.name)
        short = f"{fact.title.lower()} {fact.name}"
        return ToolTask(
            "lookup", question, short, fact.value, f"lookup {fact.title} {fact.name}", ((fact.requirement,),)
        )

    def _by_way(self, first: DocumentFact, then: DocumentFact) -> ToolTask:
        """Returns a two-hop question, such as the population of the town in which a person was born."""
        find = _phrases(first.name).single.format(a=first.title, fact=first.name)
        answer = _phrases(then.name).single.format(a="that one", fact=then.name)
        question = f"First find out this: {find} Then answer this: {answer}"
        short = f"{first.title.lower()} {first.name} {then.name}"
        key = f"lookup {first.title} {first.name} {then.name}"
        return ToolTask("lookup", question, short, then.value, key, ((first.requirement,), (then.requirement,)))

    def lookup_compute(self, rng: random.Random) -> ToolTask | None:
        """Draws a question for the difference or sum of two facts; None if they are equal."""
        one, other = rng.sample(self.numeric_facts[rng.choice(self.comparable_names)], 2)
        phrases = _phrases(one.name)
        values = [parse_number(fact.value) or 0 for fact in (one, other)]
        if values[0] == values[1]:
            return None
        high, low = (one, other) if values[0] > values[1] else (other, one)
        sign = "-"
        total = abs(values[0] - values[1])
        asked = phrases.difference
        if phrases.total and rng.random() < 0.5:
            sign = "+"
            total = sum(values)
            asked = phrases.total
        question = asked.format(a=high.title, b=low.title, fact=one.name)
        short = f"{high.title.lower()} {sign} {low.title.lower()} {one.name}"
        expression = f"{high.value} {sign} {low.value}".replace(",", "")
        work = calculation(expression, str(total))
        key = f"{high.title} {sign} {low.title} {one.name}"
        return ToolTask(
            "lookup_compute", question, short, str(total), key, ((high.requirement, low.requirement), (work,))
        )


def _phrases(name: str) -> QuestionTemplates:
    return QUESTION_TEMPLATES.get(name, DEFAULT_TEMPLATES)
