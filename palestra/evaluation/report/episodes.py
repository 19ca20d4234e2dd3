"""Episodes as HTML: each joint step by seat with observation, answer, reward and advantage, and the siblings that were
tried."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from palestra.core.chat import with_thought
from palestra.core.types import Episode, Node, Seat
from palestra.evaluation.report.html import details, escape_text, text_block
from palestra.text.rollouts.metrics import episode_return
from palestra.text.rollouts.transcript import new_text

MAX_STEPS = 120  # joint steps shown of a trajectory
MAX_SIBLINGS = 16  # siblings shown of a step
MAX_BRANCHES = 4  # further trajectories shown of an episode


def pick_samples(episodes: Sequence[Episode], count: int, seed: int) -> list[tuple[str, Episode]]:
    """Returns at most `count` labelled episodes: the best, the worst, a failed one, and others at random."""
    sound = sorted((e for e in episodes if e.error is None), key=episode_return, reverse=True)
    failed = [e for e in episodes if e.error is not None]
    samples = [("the best", episode) for episode in sound[:1]]
    if len(sound) > 1:
        samples.append(("the worst", sound[-1]))
    if failed:
        samples.append(("one that failed", failed[0]))
    rest = sound[1:-1]
    drawn = random.Random(seed).sample(rest, min(len(rest), max(0, count - len(samples))))
    return [*samples, *(("drawn at random", episode) for episode in drawn)][:count]


def episode_html(episode: Episode, label: str = "") -> str:
    """Returns an episode as an HTML article; all texts are escaped."""
    lines = [episode.trajectory(leaf) for leaf in episode.leaves() if leaf.chosen]
    lines = lines or [[node for node in episode.nodes if node.chosen]]
    seen: dict[Seat, Any] = {}
    blocks = [_turn(episode, node, seen) for node in lines[0][:MAX_STEPS]]
    if len(lines[0]) > MAX_STEPS:
        blocks.append(f"<p class=soft>{len(lines[0]) - MAX_STEPS} further steps</p>")
    shown = {node.id for node in lines[0]}
    for line in lines[1 : 1 + MAX_BRANCHES]:
        new = [node for node in line if node.id not in shown]
        shown |= {node.id for node in new}
        inside = "".join(_turn(episode, node, {}) for node in new[:MAX_STEPS])
        if new:
            blocks.append(details(f"another trajectory, from step {new[0].depth} on", inside))
    if episode.error is not None:
        blocks.append(f'<p class="bad">failed: {escape_text(episode.error)}</p>')
    return f"<article>{_head(episode, label, lines)}{''.join(blocks)}</article>"


def _head(episode: Episode, label: str, lines: list[list[Node]]) -> str:
    seats = ", ".join(f"{escape_text(seat)}: {escape_text(policy)}" for seat, policy in episode.seats.items())
    outcome = [f"success of {escape_text(seat)}" for seat, own in episode.seat_success.items() if own >= 0.5]
    if episode.success == 1:
        outcome.insert(0, "success")
    elif episode.success is not None:
        outcome.insert(0, f"{episode.success:.0%} success")
    outcome.append(f"return {episode_return(episode):.3g}")
    if len(lines) > 1:
        outcome.append(f"{len(lines)} trajectories")
    facts = f"{', '.join(outcome)} · {len(episode.nodes)} joint steps tried · {seats}"
    title = ": ".join(escape_text(part) for part in (label, episode.env) if part)
    return f"<h3>{title}, instance {episode.seed}</h3><p class=soft>{facts}</p>"


def _turn(episode: Episode, node: Node, seen: dict[Seat, Any]) -> str:
    """Returns the HTML of a joint step: the answers of its seats, rewards, and the siblings that were tried."""
    blocks = [_seat(node, seat, seen) for seat in node.answers]
    if node.team_reward:
        blocks.append(f"<p class=soft>team {_signed_html(node.team_reward)}</p>")
    others = [other for other in episode.children(node.parent) if other is not node and not other.chosen]
    if others:
        rows = "".join(f"<li>{_sibling_html(other)}</li>" for other in others[:MAX_SIBLINGS])
        left = ""
        if len(others) > MAX_SIBLINGS:
            left = f"<p class=soft>{len(others) - MAX_SIBLINGS} more</p>"
        blocks.append(details(f"{len(others)} sibling{'s' * (len(others) > 1)}", f"<ul>{rows}</ul>{left}"))
    if node.done:
        end = "the end, cut off" if node.truncated else "the end"
        info = json.dumps(node.info, default=str, ensure_ascii=False)
        blocks.append(f"<p class=soft>{end}: {escape_text(info, 600)}</p>")
    return f'<div class="turn">{"".join(blocks)}</div>'


def _seat(node: Node, seat: Seat, seen: dict[Seat, Any]) -> str:
    answer = node.answers[seat]
    shown = ""
    if seat in node.observations:
        shown = new_text(node.observations[seat], seen.get(seat))
    seen[seat] = node.observations.get(seat)
    notes = " · ".join(_notes(node, seat))
    head = f'<span class="who">{escape_text(seat)}</span> <span class="soft">step {node.depth} · {notes}</span>'
    if len(shown) > 400:
        head += details("what it saw", text_block(shown))
    elif shown:
        head += text_block(shown)
    return f"<div>{head}{text_block(with_thought(answer.text, answer.thought), 'said')}</div>"


def _notes(node: Node, seat: Seat) -> Iterator[str]:
    answer = node.answers[seat]
    yield escape_text(answer.policy)
    if seat in node.rewards:
        yield f"reward {_signed_html(node.rewards[seat])}"
    if seat in node.advantages:
        yield f"advantage {_signed_html(node.advantages[seat])}"
    if len(answer.token_ids):
        yield f"{len(answer.token_ids)} tokens"
    if node.is_invalid(seat):
        yield '<span class="bad">invalid</span>'
    if answer.stop_reason == "length":
        yield '<span class="bad">cut off</span>'


def _sibling_html(node: Node) -> str:
    """Returns the HTML of a sibling, as one list item."""
    rewards = "; ".join(
        f"{escape_text(seat)}: <q>{escape_text(answer.text, 200)}</q> {' · '.join(_notes(node, seat))}"
        for seat, answer in node.answers.items()
    )
    if node.team_reward:
        rewards += f" · team {_signed_html(node.team_reward)}"
    return rewards


def _signed_html(value: float) -> str:
    kind = "soft"
    if value > 0:
        kind = "good"
    elif value < 0:
        kind = "bad"
    return f'<span class="{kind}">{value:+.3g}</span>'
