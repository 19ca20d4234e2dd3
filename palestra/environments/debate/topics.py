"""Debate topics: the shipped file, a user's JSONL file, or synthetic topics of a few tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from palestra.core.config import StrictModel
from palestra.environments.debate.arguments import SIDES, Fact, Side, Topic
from palestra.environments.debate.judges import DebateMode
from palestra.envs.support.splits import MAX_DRAWS, Split, first_of_split, split_of_text

TOPICS_FILE = Path(__file__).parent / "data" / "debate_topics.jsonl"
FACT_TOKENS = tuple(
    f"r{number}" for number in range(16)
)  # facts of synthetic topics; the topics themselves are c0 to c15
DEFAULT_FACTS = 3  # per side of a synthetic topic
MAX_FACTS = 7  # per side of a synthetic topic: both sides must fit into the 16 tokens
Text = Annotated[str, Field(min_length=1, max_length=2000)]


class TopicEntry(StrictModel):
    """One line of a topics file: the motion, the evidence of each side and, if known, the correct side.

    {"topic": "The bridge was shut in May.", "pro": ["The toll book ends on 30 April."], "con": ["..."], "truth": "pro"}
    """

    topic: Text
    """The motion, 1 to 2,000 characters."""
    pro: Annotated[list[Text], Field(min_length=1, max_length=50)]
    """Facts for the motion, 1 to 50 texts."""
    con: Annotated[list[Text], Field(min_length=1, max_length=50)]
    """Facts against the motion, 1 to 50 texts."""
    truth: Side | None = None
    """The correct side, "pro" or "con"; required by `mode: truth`."""

    def canonical_text(self) -> str:
        """Returns a canonical text of the topic, independent of the order of its facts; it determines the split."""
        return json.dumps([self.topic, sorted(self.pro), sorted(self.con)])


def draw_file_topic(path: Path | None, seed: int, split: Split | Literal["all"], mode: DebateMode) -> Topic:
    """Returns the topic that `seed` draws from those of `split`; its facts are shuffled, then numbered P1, ..., C1, ...

    `path` None reads the shipped file. Raises ValueError if the file cannot be read, holds an invalid line, or has no
    topic of this split and mode.
    """
    path = path or TOPICS_FILE
    lines = _lines(path, _version(path), split, mode)
    rng = random.Random(f"topic {seed}")
    line = rng.choice(lines)
    facts: list[Fact] = []
    for side, texts in zip(SIDES, (line.pro, line.con), strict=True):
        shuffled = rng.sample(texts, len(texts))
        facts += [Fact(f"{side[0].upper()}{i}", text, side) for i, text in enumerate(shuffled, start=1)]
    return Topic(line.topic, tuple(facts), line.truth)


def _version(path: Path) -> tuple[int, int]:
    """Returns modification time and size, which invalidate the cache of `_lines`."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read the topics {path}: {error.strerror}; give a JSONL file that is there") from error
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=32)
def _lines(
    path: Path, version: tuple[int, int], split: Split | Literal["all"], mode: DebateMode
) -> Sequence[TopicEntry]:
    """Returns the topics of a split that can be used in `mode`."""
    topics = [line for line in _read(path) if mode == "competitive" or line.truth]
    if not topics:
        raise ValueError(f'{path} has no topic with a "truth", which mode: truth needs: add "truth": "pro" or "con"')
    topics = [line for line in topics if split in ("all", split_of_text(line.canonical_text()))]
    if not topics:
        raise ValueError(
            f'{path} has no topic of split "{split}": a topic belongs to one split by a hash of its content. '
            "Add topics, or set split: all to draw from the whole file"
        )
    return tuple(topics)


def _read(path: Path) -> list[TopicEntry]:
    lines = [(i, text) for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.strip()]
    if not lines:
        raise ValueError(f"{path} holds no topics: give one JSON object a line, with topic, pro and con")
    return [_parse_topic(path, number, text) for number, text in lines]


def _parse_topic(path: Path, number: int, text: str) -> TopicEntry:
    try:
        return TopicEntry.model_validate_json(text)
    except ValueError as error:
        raise ValueError(
            f"{path}, line {number}: {error}. A topic is one JSON object with topic (text), pro and con (lists of "
            "texts) and, if known, truth (pro or con)"
        ) from None


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def draw_synthetic_topic(seed: int, split: Split | Literal["all"], mode: DebateMode, facts: int) -> Topic:
    """Returns a synthetic topic, whose facts are single tokens.

    In mode competitive each side has `facts` facts. In mode truth the correct side has 2 to `facts`, the other at least
    one less. The split depends on the two sets of tokens only, not on their order or on which side has which. Raises
    ValueError if `MAX_DRAWS` draws give no topic of the split.
    """
    rng = random.Random(f"drill {seed}")
    truth, sides = first_of_split(
        (_dealt(rng, mode, facts) for _ in range(MAX_DRAWS)),
        split,
        lambda dealt: split_of_text(f"drill {sorted(map(sorted, dealt[1]))}"),
        f'no drill of split "{split}" with facts: {facts} in {MAX_DRAWS} draws: there are too few; give more facts',
    )
    drawn = tuple(Fact(token, token, side) for side, tokens in zip(SIDES, sides, strict=True) for token in tokens)
    return Topic(f"c{rng.randrange(16)}", drawn, truth if mode == "truth" else None)


def _dealt(rng: random.Random, mode: DebateMode, facts: int) -> tuple[Side, tuple[list[str], list[str]]]:
    """Returns the correct side, and the tokens of pro and con."""
    truth: Side = rng.choice(SIDES)
    most = least = facts
    if mode == "truth":
        most = rng.randint(2, facts)
        least = rng.randint(1, most - 1)
    tokens = rng.sample(FACT_TOKENS, most + least)
    if truth == "pro":
        return truth, (tokens[:most], tokens[most:])
    return truth, (tokens[most:], tokens[:most])
