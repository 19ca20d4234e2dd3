"""Base class of guessing games, and the number guessing game.

One seat asks, the rules or a second seat answer, and every question has one true answer. The dense reward of a question
is its information gain over the remaining secrets.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.reward_terms import form_or, terms_info
from palestra.envs.support.answers import answer_words, mark_answer
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split, split_of_text

FOUND_REWARD = 1.0  # team reward for finding the secret
INVALID_PENALTY = 0.1  # subtracted from the seat's reward for an unreadable answer
LIE_PENALTY = 0.5  # subtracted from the answerer's reward for a false answer
AnswerSource = Literal["rules", "seat"]
Secret = int | str


class AnsweredQuestion(NamedTuple):
    """A parsed question, and the answer shown to the asker."""

    question: Any
    answer: str


class GuessingGame(Env):
    """The asker must find a secret within `questions` questions; a correct guess ends the game.

    With `answers: seat` a second seat, the answerer, observes the secret and answers every question except the correct
    guess. A false answer is flagged (`info["lie"]`) and costs the answerer 0.5; the asker sees the true answer instead
    if `corrected`, else the false one. An unreadable answer is replaced by the true one.

    Dense rewards: a question pays the asker its information gain under the true answer, as a share of the initial
    entropy (at most 1 in total); finding the secret pays the team 1. An unreadable answer costs its seat 0.1, and the
    asker one question. With `reward: outcome` only the team is paid, and only for the secret.

    Raises ValueError if no secret belongs to `split`.
    """

    replaces_state = True
    asker: ClassVar[Seat]
    compact_name: ClassVar[str]  # the game's name in compact role prompts
    valid_answers: ClassVar[tuple[str, str]]  # of the answerer
    question_noun: ClassVar[str] = "Questions"

    def __init__(
        self,
        secrets: Sequence[Secret],
        questions: int,
        split: Split,
        answers: AnswerSource,
        corrected: bool,
        reward: RewardMode,
        rendering: Rendering,
    ) -> None:
        if not corrected and answers == "rules":
            raise ValueError("corrected is about false answers, and answers: rules are true: set answers: seat")
        self.secrets = tuple(secrets)
        self.questions = questions
        self.answers = answers
        self.corrected = corrected
        self.reward = reward
        self.drawn = [secret for secret in secrets if split_of_text(self.canonical_text(secret)) == split]
        if not self.drawn:
            raise ValueError(f'of {len(self.secrets)} secrets none is in split "{split}": give more to guess among')
        self.seats = {"rules": (self.asker,), "seat": (self.asker, "answerer")}[answers]
        self.is_compact = rendering == "compact"
        self.roles = {seat: f"{self.compact_name} {seat}" for seat in self.seats}
        if not self.is_compact:
            self.roles = {seat: self.role_prompt(seat) for seat in self.seats}
        self._acting: Seat | None = None

    # ---- implemented by each game

    @abstractmethod
    def canonical_text(self, secret: Secret) -> str:
        """Returns the instance as text, equal for equal secrets among equal candidates; it determines the split."""

    @abstractmethod
    def parse_question(self, answer: Any) -> Any | None:
        """Parses an answer into a question or guess; None if it is unreadable."""

    @abstractmethod
    def true_answer(self, secret: Secret, asked: Any) -> str:
        """Returns the true answer to `asked`; "right" for a correct guess."""

    @abstractmethod
    def best_question(self, possible: Sequence[Secret], rng: random.Random) -> Any:
        """Returns a good question when the secrets in `possible` (at least one) remain."""

    @abstractmethod
    def format_question(self, asked: Any) -> str:
        """Returns the question in the form that `parse_question` parses."""

    def quote_question(self, asked: Any) -> str:
        """Returns the question as quoted in the full rendering."""
        return self.format_question(asked)

    @abstractmethod
    def compact_context(self, seat: Seat) -> str:
        """Returns the seat's compact context, without questions and answers."""

    @abstractmethod
    def full_context(self, seat: Seat) -> str:
        """Returns the seat's context in the full rendering; "" if the role prompt suffices."""

    @abstractmethod
    def role_prompt(self, seat: Seat) -> str:
        """Returns the seat's role prompt in the full rendering: the rules."""

    # ---- env interface

    def instance_of(self, seed: int) -> str:
        """Returns the secret among its candidates."""
        return self.canonical_text(self._draw(seed))

    def reset(self, seed: int) -> Step:
        self.secret = self._draw(seed)
        self.history: tuple[AnsweredQuestion, ...] = ()
        self.candidates = self.secrets  # consistent with the true answers
        self.pending_question: Any = None  # the question waiting for an answer
        self._acting = self.asker
        self._count = 0
        return self._step({}, {})

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._acting, actions)
        if seat == self.asker:
            return self._ask(actions[seat])
        return self._answer(actions[seat])

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the best question given the answers seen by the asker; the answerer's is the true answer."""
        if seat == "answerer":
            reply = self.true_answer(self.secret, self.pending_question)
        else:
            possible = self.secrets
            for asked, answer in self.history:
                possible = tuple(secret for secret in possible if self.true_answer(secret, asked) == answer)
            # after a lie no secret may be left
            reply = self.format_question(self.best_question(possible or self.secrets, rng))
        return mark_answer(reply, is_compact=self.is_compact)

    def _draw(self, seed: int) -> Secret:
        return random.Random(seed).choice(self.drawn)

    # ---- one answer

    def _ask(self, answer: Any) -> Step:
        asked = self.parse_question(answer)
        self._count += 1
        if asked is None:
            return self._step({self.asker: -INVALID_PENALTY}, {self.asker: True})
        truth = self.true_answer(self.secret, asked)
        before = self.candidates
        self.candidates = tuple(secret for secret in before if self.true_answer(secret, asked) == truth)
        gain = math.log(len(before) / len(self.candidates)) / math.log(len(self.secrets))
        if self.answers == "seat" and truth != "right":
            self.pending_question = asked
            self._acting = "answerer"
        else:
            self.history = (*self.history, AnsweredQuestion(asked, truth))
        return self._step({self.asker: gain}, {self.asker: False})

    def _answer(self, answer: Any) -> Step:
        asked = self.pending_question
        reply = " ".join(answer_words(answer))
        truth = self.true_answer(self.secret, asked)
        readable = reply in self.valid_answers
        lied = readable and reply != truth
        shown = truth
        if lied and not self.corrected:
            shown = reply
        self.history = (*self.history, AnsweredQuestion(asked, shown))
        self.pending_question = None
        self._acting = self.asker
        reward = 0.0
        if lied:
            reward = -LIE_PENALTY
        elif not readable:
            reward = -INVALID_PENALTY
        return self._step({"answerer": reward}, {"answerer": not readable}, {"lie": lied})

    # ---- observations

    def _step(self, rewards: dict[Seat, float], invalid: dict[Seat, bool], more: Mapping[str, Any] = {}) -> Step:
        success = bool(self.history) and self.true_answer(self.secret, self.history[-1].question) == "right"
        is_over = success or (self._count == self.questions and self.pending_question is None)
        info: dict[str, Any] = {"success": success, "asked": self._count, "invalid": invalid, **more}
        if self.reward == "outcome":
            rewards = dict.fromkeys(rewards, 0.0)
        else:
            names = {self.asker: "information", "answerer": "truth"}
            info |= terms_info({s: form_or(names[s], reward, is_invalid=invalid[s]) for s, reward in rewards.items()})
        if is_over:
            self._acting = None
            return Step({}, rewards, FOUND_REWARD * success, truncated=not success, info=info)
        assert self._acting is not None
        return Step({self._acting: self._observation(self._acting)}, rewards, info=info)

    def _observation(self, seat: Seat) -> str:
        left = self.questions - self._count
        if self.is_compact:
            heard = " ".join(f"{self.format_question(asked)} {answer}" for asked, answer in self.history)
            texts = [self.compact_context(seat), heard]
            if self.pending_question is not None:
                texts.append(f"asked {self.format_question(self.pending_question)}")
            return " ".join(filter(None, [*texts, f"left {left}"]))
        heard = "".join(f"\n{self.quote_question(asked)} {answer}" for asked, answer in self.history)
        lines = [self.full_context(seat), f"Asked and answered so far:{heard or ' nothing'}"]
        if self.pending_question is not None:
            lines.append(f"Now you are asked: {self.quote_question(self.pending_question)}")
        return "\n".join([text for text in [*lines, f"{self.question_noun} left: {left}."] if text])


class GuessNumber(GuessingGame):
    """Guess a number from `low` to `high` within `max_guesses` guesses (default: the worst case of binary search)."""

    name: ClassVar[str] = "guess_number"
    asker = "guesser"
    compact_name = "number"
    valid_answers = ("higher", "lower")
    question_noun = "Guesses"

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 100,
        max_guesses: int | None = None,
        split: Split = "train",
        answers: AnswerSource = "rules",
        corrected: bool = True,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        check_range("high", high, low + 1, low + 9999)
        self.low = low
        self.high = high
        most = (high - low + 1).bit_length() if max_guesses is None else max_guesses
        check_range("max_guesses", most, 1, 1000)
        super().__init__(range(low, high + 1), most, split, answers, corrected, reward, rendering)

    def canonical_text(self, secret: Secret) -> str:
        return f"guess_number {self.low} {self.high} {secret}"

    def parse_question(self, answer: Any) -> int | None:
        words = answer_words(answer)
        if len(words) != 1:
            return None
        digits = words[0].removeprefix("-").removesuffix(".")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
            return None
        number = int(words[0].removesuffix("."))
        if not self.low <= number <= self.high:
            return None
        return number

    def true_answer(self, secret: Secret, asked: Any) -> str:
        if secret == asked:
            return "right"
        return "higher" if secret > asked else "lower"

    def best_question(self, possible: Sequence[Secret], rng: random.Random) -> int:
        """Returns the median; of two, one at random."""
        middle = (len(possible) - 1) // 2
        if len(possible) % 2 == 0:
            middle += rng.randrange(2)
        return int(possible[middle])

    def format_question(self, asked: Any) -> str:
        return str(asked)

    def compact_context(self, seat: Seat) -> str:
        if seat == "answerer":
            return f"secret {self.secret}"
        return f"range {self.low} {self.high}"

    def full_context(self, seat: Seat) -> str:
        if seat == "answerer":
            return f"The secret number is {self.secret}."
        return ""

    def quote_question(self, asked: Any) -> str:
        return f"{asked}:"

    def role_prompt(self, seat: Seat) -> str:
        rules = f"One thinks of a whole number from {self.low} to {self.high}; the other guesses it."
        if seat == "answerer":
            return (
                f"{rules} You know the number. Say truthfully whether it is higher or lower than each guess. End your "
                "answer with #### and one word: higher or lower."
            )
        return (
            f"{rules} You have {self.questions} guesses and are told after each whether the number is higher or lower. "
            "Think briefly if you need to, then end your answer with #### and your guess, for example: #### 12"
        )
