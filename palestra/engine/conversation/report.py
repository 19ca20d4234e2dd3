"""Compares a base's conversations with its chat template, for `palestra info --base` and the notes at a start.

Each probe is a small conversation. It passes through the code that encodes prompts and reads answers in training, and
the tokens are compared with the text that the template itself makes of the finished conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from palestra.core.chat import Chat, Json, parse_assistant_message, render_message, with_reasoning
from palestra.core.types import Answer
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.conversation.rendering import Renderer

Verdict = Literal["equal", "differs", "refused", "none"]
ASK: Json = {"role": "user", "content": "hello"}
MORE: Json = {"role": "user", "content": "and more?"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds a number to a text.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "a number"},
                "text": {"type": "string", "description": "a text"},
            },
            "required": ["number", "text"],
        },
    },
}
THOUGHT = "two and two"


@dataclass(frozen=True)
class Finding:
    """One probe: whether the tokens are the template's, and what there is to say about it."""

    probe: str
    verdict: Verdict
    note: str = ""


class _Absent(Exception):
    """The template has no such thing."""


class _Different(Exception):
    """Tokens are not the template's."""


def check_conversations(tokenizer: Any, options: dict[str, Any] | None = None) -> list[Finding]:
    """Returns the findings of all probes for a tokenizer's chat template with its `options`."""
    encoder = ChatEncoder(tokenizer, options)
    if not encoder.renderer.has_template:
        start = tokenizer.convert_ids_to_tokens(encoder.encode_raw("")) or ["nothing"]
        note = f"there is no chat template: messages are plain lines of text, after {' '.join(start)}"
        return [Finding("chat template", "differs", note)]
    probes: dict[str, Callable[[ChatEncoder], str]] = {
        "system role": _system,
        "second turn": lambda found: _turn(found, "four"),
        "an answer that was cut": lambda found: _turn(found, "four", ends=False),
        "special tokens in a text": _special_tokens,
        "thought": lambda found: _turn(found, "four", thought=THOUGHT),
        "call and its result": lambda found: _turn(found, _calls(1)),
        "thought and call": lambda found: _turn(found, _calls(1), thought=THOUGHT),
        "two calls": lambda found: _turn(found, _calls(2)),
    }
    return [_find(name, probe, encoder) for name, probe in probes.items()]


def conversation_notes(base: str, tokenizer: Any, options: dict[str, Any] | None = None) -> list[str]:
    """Returns a line on where a base's conversations differ from its chat template; no line if they do nowhere."""
    found = [finding for finding in check_conversations(tokenizer, options) if finding.verdict == "differs"]
    if not found:
        return []
    told = "; ".join(finding.note for finding in found)
    return [f"conversations of {base}: {told} (palestra info --base {base} shows all of it)"]


def _find(name: str, probe: Callable[[ChatEncoder], str], encoder: ChatEncoder) -> Finding:
    try:
        note = probe(encoder)
    except _Absent as absent:
        return Finding(name, "none", str(absent))
    except _Different as different:
        return Finding(name, "differs", str(different))
    except ValueError as refused:
        return Finding(name, "refused", str(refused))
    return Finding(name, "equal", note)


def _system(encoder: ChatEncoder) -> str:
    system: Json = {"role": "system", "content": "be brief"}
    text = encoder.tokenizer.decode(encoder.encode_conversation(Chat((system, ASK))))
    if system["content"] not in text:
        raise _Different("the system message is left out by the chat template")
    if not encoder.renderer.form.has_system:
        raise _Different("the chat template has no system role, and its text begins the first user message")
    return ""


def _special_tokens(encoder: ChatEncoder) -> str:
    special = {number for number, token in encoder.renderer.special.items() if len(token) > 1}
    spelled = " ".join(encoder.renderer.special[number] for number in sorted(special))
    counts = [
        int(np.isin(encoder.encode_conversation(Chat(({"role": "user", "content": text},))), sorted(special)).sum())
        for text in ("hello", f"hello {spelled}")
    ]
    if counts[0] != counts[1]:
        raise _Different(f"a text can spell {counts[1] - counts[0]} special tokens")
    return "broken by a space"


def _calls(count: int) -> Json:
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": "add", "arguments": {"number": 7 + i, "text": "x y"}},
        }
        for i in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _turn(encoder: ChatEncoder, answer: str | Json, *, thought: str = "", ends: bool = True) -> str:
    """Compares an answer as it is imitated and the prompt after it with the template's text. Returns a note; raises
    `_Different` or ValueError."""
    message: Json = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
    calls: list[Json] = message.get("tool_calls", [])
    _refuse_unknown(encoder, thought, calls)
    chat = Chat((ASK,), (TOOL,) if calls else ())
    said = render_message(message)
    whole = with_reasoning(message, thought)
    prompt = encoder.encode_conversation(chat)
    ids = encoder.encode_answer(chat, said, thought, ends=ends)
    read = encoder.read(ids, prompt, chat.tools)
    if parse_assistant_message(read.text) != parse_assistant_message(said) or read.thought != thought:
        raise ValueError(f"{encoder.tokenizer.decode(ids)!r} is read as {read}")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]
    sampled = Answer(read.text, "", prompt, ids, thought=read.thought)
    following = encoder.encode_next_turn(chat, sampled, results or [MORE])
    _compare(encoder, following, encoder.renderer.render([ASK, whole, *(results or [MORE])], chat.tools), "prompt")
    finished = encoder.renderer.render([ASK, whole], chat.tools, generate=False)
    if ends:
        _compare_answer(encoder, np.concatenate([prompt, ids]), finished, thought)
    if not encoder.form.rewrites_answers or encoder.renderer.harmless(thought) in encoder.tokenizer.decode(following):
        return ""
    return "not in later prompts, as the template drops it (history_thoughts: keep)"


def _refuse_unknown(encoder: ChatEncoder, thought: str, calls: list[Json]) -> None:
    """Raises ValueError for what the template cannot write, and `_Absent` for a thought."""
    renderer: Renderer = encoder.renderer
    if thought and encoder.form.thought is None:
        raise _Absent("the chat template shows no thoughts: what is in a text stays there")
    if calls and not renderer.shows_tools:
        raise ValueError("the chat template does not show tools")
    if calls and encoder.form.calls is None:
        raise ValueError("the chat template writes no calls of tools that can be read")
    if len(calls) > 1 and not renderer.form.has_many_calls:
        raise ValueError("the chat template takes one call an answer")


def _compare(encoder: ChatEncoder, ids: np.ndarray, wanted: str, what: str) -> None:
    if (found := encoder.tokenizer.decode(ids)) != wanted:
        raise _Different(f"the {what} {found[-60:]!r} is {wanted[-60:]!r} in the chat template")


def _compare_answer(encoder: ChatEncoder, ids: np.ndarray, finished: str, thought: str) -> None:
    """Raises `_Different` if prompt and answer are not the finished conversation, up to what follows the answer."""
    found = encoder.tokenizer.decode(ids)
    rest = finished.removeprefix(encoder.renderer.without_specials(found))
    if (
        not finished.startswith(encoder.renderer.without_specials(found))
        or encoder.renderer.without_specials(rest).strip()
    ):
        if thought:
            raise _Different("thoughts of answers to imitate are written, and the chat template leaves them out")
        prompt = encoder.tokenizer.decode(encoder.encode_conversation(Chat((ASK,))))
        raise _Different(
            f"prompts end with {prompt.rstrip()[-24:]!r}, which the chat template leaves out of the finished "
            "conversation; answers to imitate follow the prompt (and end the thought that it begins)"
        )
