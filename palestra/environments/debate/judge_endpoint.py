"""Debate judge behind an OpenAI-compatible endpoint, asked once per debate in both side orders.

Verdicts are cached in memory for the life of the process and, with `cache`, on disk, by SHA-256 of model, request body
and questions. Equal debates therefore get equal verdicts, which envs must guarantee and endpoints do not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from palestra.core.http.chat_client import Endpoint, RetryingClient, endpoint_error, open_client, quote_masked
from palestra.core.types import Message

RETRY_PROMPT = (
    'That could not be read. Answer with one JSON object and nothing else, for example {"scores": {"A": 6, "B": 4}} or '
    '{"winner": "A"}.'
)
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*)\n\s*```\s*\Z", re.DOTALL)
_asking: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()  # by event loop and question digest


class EndpointJudge(Endpoint):
    """Config of a judge endpoint. Answers are sampled at temperature 0, unless `body` sets another temperature."""

    type: Literal["endpoint"] = "endpoint"
    """Always "endpoint"."""
    cache: Path | None = None
    """SQLite file that stores verdicts across runs. Default: verdicts are kept in memory only."""
    swap: bool = True
    """Asks twice, with each side listed first once, and takes the mean, which removes position bias."""

    def check(self) -> None:
        """Raises ValueError if no debate could be judged: httpx or the key is missing, or the cache is not writable."""
        super().check()
        if self.cache:
            open_cache(self.cache)


async def score_debate(judge: EndpointJudge, questions: Sequence[list[Message]]) -> ScorePair:
    """Returns the scores of pro and con in [0, 1], averaged over `questions`: the first lists pro as A, the second con.

    Raises EndpointError if the endpoint returns no verdict within the judge's limits.
    """
    questions = questions if judge.swap else questions[:1]
    key = _digest(judge, questions)
    lock = _asking.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())
    faults: list[str] = []
    try:
        async with asyncio.timeout(judge.limit), lock:  # concurrent episodes with the same debate share one verdict
            scores = await find_verdict(judge.cache, key)
            if scores is None:
                scores = await store_verdict(judge.cache, key, judge.model, await _mean(judge, questions, faults))
            return scores
    except TimeoutError:
        raise endpoint_error(judge, f"gave no verdict within limit: {judge.limit:g} seconds", faults) from None


async def _mean(judge: EndpointJudge, questions: Sequence[list[Message]], faults: list[str]) -> ScorePair:
    """Asks all questions concurrently and returns the mean scores of pro and con."""
    async with open_client(judge, faults) as line:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(_verdict(line, question)) for question in questions]
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
    pairs = [scores if i == 0 else scores[::-1] for i, scores in enumerate(task.result() for task in asked)]
    return sum(p for p, _ in pairs) / len(pairs), sum(c for _, c in pairs) / len(pairs)


def _digest(judge: EndpointJudge, questions: Sequence[list[Message]]) -> str:
    asked = [judge.model, judge.body, list(questions)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


# ---- one verdict


async def _verdict(line: RetryingClient, question: list[Message]) -> ScorePair:
    """Returns the scores of A and B for one question; an unreadable answer is retried once."""
    reply = await _reply(line, question)
    scores = read_scores(reply)
    if scores is None:
        line.errors.append(f"answered {quote_masked(line.endpoint, reply)}")
        again = [{"role": "assistant", "content": reply}, {"role": "user", "content": RETRY_PROMPT}]
        reply = await _reply(line, [*question, *again])
        scores = read_scores(reply)
    if scores is None:
        raise endpoint_error(
            line.endpoint, f"gave no verdict that can be read, twice: {quote_masked(line.endpoint, reply)}", []
        )
    return scores


async def _reply(line: RetryingClient, messages: Sequence[Message]) -> str:
    return str((await line.complete(messages, temperature=0)).get("content") or "")


def read_scores(reply: str) -> ScorePair | None:
    """Returns the scores of A and B in [0, 1]; None unless the reply is a JSON object with a winner or scores 0 to 10.

    A leading <think> block and a code fence are ignored. A winner and scores must agree if both are given.
    """
    text = _THINKING.sub("", reply)
    fenced = _FENCE.match(text)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not found.keys() & {"winner", "scores"}:
        return None
    named = {"A": (1.0, 0.0), "B": (0.0, 1.0), "draw": (0.5, 0.5)}.get(str(found.get("winner")))
    if "scores" not in found:
        return named
    scores = _parse_scores(found["scores"])
    if scores and "winner" in found and (not named or _order(named) != _order(scores)):
        return None
    return scores


def _parse_scores(scores: Any) -> ScorePair | None:
    if not isinstance(scores, dict) or scores.keys() != {"A", "B"}:
        return None
    numbers = [scores["A"], scores["B"]]
    if not all(type(n) in (int, float) and 0 <= n <= 10 for n in numbers):
        return None
    return numbers[0] / 10, numbers[1] / 10


def _order(scores: ScorePair) -> int:
    return (scores[0] > scores[1]) - (scores[0] < scores[1])


ScorePair = tuple[float, float]
MAX_MEMORY_ENTRIES = 100_000  # maximum verdicts in memory; the oldest are dropped first
LOCK_TIMEOUT_S = 30.0  # seconds to wait for another process to finish writing
_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, pro REAL, con REAL) WITHOUT ROWID"
# ---- cache of verdicts
#
# In memory for the life of the process and, with a path, in an SQLite file. The file has one row per question: `key`
# (SHA-256 of model, request body and question), `model`, scores `pro` and `con`. Rows are only added and the first
# verdict for a key is final, so several processes may share the file.

_memory: dict[str, ScorePair] = {}


def open_cache(path: Path) -> None:
    """Creates the file, and its folder, if they do not exist. Raises ValueError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    _on_disk(path, lambda database: None)


async def find_verdict(path: Path | None, key: str) -> ScorePair | None:
    """Returns the verdict for `key`, None if there is none. Raises ValueError if the file cannot be read."""
    if key not in _memory and path:
        row = await asyncio.to_thread(_on_disk, path, lambda database: _row(database, key))
        if row:
            _keep(key, row)
    return _memory.get(key)


async def store_verdict(path: Path | None, key: str, model: str, scores: ScorePair) -> ScorePair:
    """Stores a verdict and returns the final one, which may be an earlier one of another process.

    Raises ValueError if the file cannot be written.
    """

    def add(database: sqlite3.Connection) -> ScorePair | None:
        database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", (key, model, *scores))
        database.commit()
        return _row(database, key)

    standing = await asyncio.to_thread(_on_disk, path, add) if path else scores
    return _keep(key, standing or scores)


def _row(database: sqlite3.Connection, key: str) -> ScorePair | None:
    found: ScorePair | None = database.execute("SELECT pro, con FROM verdicts WHERE key = ?", (key,)).fetchone()
    return found


def _keep(key: str, scores: ScorePair) -> ScorePair:
    while len(_memory) >= MAX_MEMORY_ENTRIES:
        del _memory[next(iter(_memory))]
    return _memory.setdefault(key, scores)


def _on_disk(path: Path, use: Callable[[sqlite3.Connection], ScorePair | None]) -> ScorePair | None:
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)) as database:
            database.execute(_TABLE)
            return use(database)
    except sqlite3.Error as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot keep verdicts in {path}: {error}; name another file as judge.cache, or remove that one")
