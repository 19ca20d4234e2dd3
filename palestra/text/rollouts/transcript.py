"""Readable text of an episode: observations, answers and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from palestra.core.types import Episode, Node
from palestra.envs.reward_terms import REWARD_TERMS_KEY, TEAM_TERMS_KEY

MAX_INLINE_CHARS = 60  # characters of text that stays on the line of its heading


def transcript(episode: Episode) -> str:
    """Returns the chosen steps of an episode as text; in conversations, only the messages that are new to the seat."""
    failure = [f"failed: {episode.error}", episode.traceback or ""] if episode.error else []
    return "\n".join([f"{episode.env}, instance {episode.seed}", *turns(episode), *failure])


def turns(episode: Episode) -> Iterator[str]:
    """Yields the chosen steps of an episode, each as a text; in conversations, only the messages new to the seat."""
    seen: dict[str, Any] = {}
    for node in episode.nodes:
        if node.chosen:
            said = chain.from_iterable(_turn(node, seat, seen) for seat in node.answers)
            yield "\n".join([*said, *_came(node)])


def _turn(node: Node, seat: str, seen: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield _block(f"{seat} sees", new_text(node.observations[seat], seen.get(seat)))
    seen[seat] = node.observations[seat]
    answer = node.answers[seat]
    yield _block(f"{seat} says", answer.text + (" [cut off]" if answer.stop_reason == "length" else ""))


def new_text(shown: Any, before: Any) -> str:
    """Returns an observation as text; for a continued conversation only the messages after the previous observation and
    the seat's own answer."""
    messages = getattr(shown, "messages", None)
    if messages is None:
        return str(shown)
    earlier = len(getattr(before, "messages", ()))
    goes_on = 0 < earlier < len(messages) and messages[:earlier] == before.messages
    return str(type(shown)(messages[earlier + 1 :])) if goes_on else str(shown)


def _came(node: Node) -> Iterator[str]:
    """Yields rewards, unless all are 0, and at the end the env's info without the terms of rewards."""
    paid = {seat: round(value, 3) for seat, value in node.rewards.items() if value}
    team = {"team": round(node.team_reward, 3)} if node.team_reward else {}
    if paid or team:
        yield f"-> {', '.join(f'{who} {value:+g}' for who, value in (team | paid).items())}"
    if node.done:
        info = {key: value for key, value in node.info.items() if key not in (REWARD_TERMS_KEY, TEAM_TERMS_KEY)}
        yield f"the end{', cut off' if node.truncated else ''}: {json.dumps(info, default=str)}"


def _block(head: str, text: str) -> str:
    if "\n" not in text and len(text) <= MAX_INLINE_CHARS + len(head):
        return f"{head}: {text}"
    return f"{head}:\n" + "\n".join(f"    {line}" for line in text.split("\n"))
