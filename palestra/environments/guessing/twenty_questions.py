"""Twenty questions env: identify a secret thing by yes-or-no questions about its attributes.

A table lists the attributes of each thing, so every answer can be verified.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from palestra.core.types import Seat
from palestra.environments.guessing.env import AnswerSource, GuessingGame, Secret
from palestra.envs.support.answers import answer_words
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split

TABLE_FILE = Path(__file__).parent / "data" / "things.json"


class AttributeQuestion(NamedTuple):
    """A question: does the thing have attribute `word`, or with `is_guess`, is it the thing `word`?"""

    word: str
    is_guess: bool


class AttributeTable(NamedTuple):
    """The question text of each attribute, and the attributes of each thing."""

    attributes: dict[str, str]
    things: dict[str, frozenset[str]]


@cache
def read_table(file: Path) -> AttributeTable:
    """Reads a table from JSON: {"attributes": {"flies": "Can it fly?", ...}, "things": {"owl": ["flies"], ...}}.

    Raises ValueError if the file is malformed, a thing has an unlisted attribute, a name is not a single lower-case
    word, or a name is used twice.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        table = AttributeTable(dict(raw["attributes"]), {thing: frozenset(has) for thing, has in raw["things"].items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        form = '{"attributes": {"flies": "Can it fly?"}, "things": {"owl": ["flies"]}}'
        raise ValueError(f"{file}: {error!r}; give a JSON file of the form {form}") from error
    for thing, has in table.things.items():
        if unknown := sorted(has - table.attributes.keys()):
            raise ValueError(
                f'{file}: "{thing}" has {unknown}, but "attributes" holds no such: add a question for each'
            )
    names = [*table.attributes, *table.things]
    if bad := sorted({name for name in names if answer_words(name) != [name] or names.count(name) > 1}):
        raise ValueError(f"{file}: {bad} must be single words in lower case, each an attribute or a thing, not both")
    return table


class TwentyQuestions(GuessingGame):
    """Name the secret thing within `max_questions` questions; a wrong name counts as a question answered with no.

    The shipped table has 91 things and 43 attributes; `things: 30` uses the first 30; `file` is another table (see
    `read_table`). The asker's prompt lists the things and the attributes, the answerer observes the secret thing and
    its attributes.
    """

    name: ClassVar[str] = "twenty_questions"
    asker = "asker"
    compact_name = "things"
    valid_answers = ("yes", "no")

    def __init__(
        self,
        *,
        max_questions: int = 20,
        things: int | None = None,
        file: Path | None = None,
        split: Split = "train",
        answers: AnswerSource = "rules",
        corrected: bool = True,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        check_range("max_questions", max_questions, 1, 1000)
        self.table = read_table(Path(file or TABLE_FILE))
        names = list(self.table.things)
        check_range("things", len(names) if things is None else things, 2, len(names))
        self._questions = {_plain(question): key for key, question in self.table.attributes.items()}
        super().__init__(names[:things], max_questions, split, answers, corrected, reward, rendering)

    def canonical_text(self, secret: Secret) -> str:
        return f"twenty_questions {secret}"

    def parse_question(self, answer: Any) -> AttributeQuestion | None:
        """Parses "flies", "ask flies" or the question text; "is owl", "owl" or "is it an owl"."""
        words = _plain(answer)
        if words in self._questions:
            return AttributeQuestion(self._questions[words], is_guess=False)
        word = next(reversed(words), "")
        if word in self.table.attributes and words[:-1] in ((), ("ask",)):
            return AttributeQuestion(word, is_guess=False)
        before = ((), ("is",), ("is", "it"), ("is", "it", "a"), ("is", "it", "an"), ("is", "it", "the"))
        if word in self.secrets and words[:-1] in before:
            return AttributeQuestion(word, is_guess=True)
        return None

    def true_answer(self, secret: Secret, asked: AttributeQuestion) -> str:
        if asked.is_guess:
            return "right" if asked.word == secret else "no"
        return "yes" if asked.word in self.table.things[str(secret)] else "no"

    def best_question(self, possible: Sequence[Secret], rng: random.Random) -> AttributeQuestion:
        """Returns the attribute that splits `possible` most evenly, or a name if that is as good; ties at random."""
        has = [self.table.things[str(secret)] for secret in possible]
        larger = {}
        for attribute in self.table.attributes:
            yes = sum(attribute in attributes for attributes in has)
            if 0 < yes < len(has):
                larger[attribute] = max(yes, len(has) - yes)
        least = min(larger.values(), default=len(has))
        if least >= len(has) - 1:
            return AttributeQuestion(str(rng.choice(possible)), is_guess=True)
        return AttributeQuestion(
            rng.choice([attribute for attribute, most in larger.items() if most == least]), is_guess=False
        )

    def format_question(self, asked: AttributeQuestion) -> str:
        return f"is {asked.word}" if asked.is_guess else asked.word

    def quote_question(self, asked: AttributeQuestion) -> str:
        return f"Is it the {asked.word}?" if asked.is_guess else self.table.attributes[asked.word]

    def compact_context(self, seat: Seat) -> str:
        if seat == self.asker:
            return ""
        return f"secret {self.secret} has {' '.join(self._true()) or 'none'}"

    def full_context(self, seat: Seat) -> str:
        if seat == self.asker:
            return ""
        true = " ".join(self.table.attributes[attribute] for attribute in self._true()) or "none"
        return f"The secret thing is: {self.secret}. The answer is yes to these questions, and no to all others: {true}"

    def _true(self) -> list[str]:
        """Returns the secret's attributes, in the table's order."""
        return [attribute for attribute in self.table.attributes if attribute in self.table.things[str(self.secret)]]

    def role_prompt(self, seat: Seat) -> str:
        rules = "One thinks of a thing; the other finds it out by yes-or-no questions about its attributes."
        if seat == "answerer":
            return (
                f"{rules} You know the thing. Answer each question truthfully. End your answer with #### and one word: "
                "yes or no."
            )
        attributes = "\n".join(f"{key}: {question}" for key, question in self.table.attributes.items())
        return (
            f"{rules} You ask. You win by naming the thing within {self.questions} questions; naming a wrong one costs "
            f"a question.\nIt is one of: {', '.join(map(str, self.secrets))}.\nYou can ask:\n{attributes}\nThink "
            f"briefly if you need to, then end your answer with #### and the word of a question, for example: #### "
            f"{next(iter(self.table.attributes))}\nor with #### is and the thing that you name, for example: #### is "
            f"{self.secrets[0]}"
        )


def _plain(question: Any) -> tuple[str, ...]:
    """Returns the words of a question without punctuation."""
    return tuple(filter(None, (word.strip("?.!:\"'*`") for word in answer_words(question))))
