"""The form of a base's answers: what its chat template writes around thoughts, contents and calls.

All of it is found by rendering probes. An answer that was sampled is parted by the same marks: its thought is for the
model alone, its calls are given to envs in one form whatever the base's own is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.core.chat import TOOL_CALL_PATTERN, Json, ToolCall, render_tool_call
from palestra.engine.conversation.calls import CallReader, CommonCalls, call_readers
from palestra.engine.conversation.rendering import (
    ASKED,
    FIRST_KEY,
    FIRST_VALUE,
    INLINE,
    LAST_KEY,
    LAST_VALUE,
    RESULT_MARK,
    TEXT_MARK,
    THOUGHT_MARK,
    TOOL_NAME,
    Renderer,
    common_start,
    probe_call,
    whole_tags,
)

ANSWERED: Json = {"role": "assistant", "content": TEXT_MARK}
THINKING: Json = ANSWERED | {"reasoning_content": THOUGHT_MARK}
PROBE_ARGUMENTS = {FIRST_KEY: FIRST_VALUE, LAST_KEY: LAST_VALUE}
TAG = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])"


@dataclass(frozen=True)
class ThoughtMarks:
    """Marks of a thought: `open` before it, `close` after it, and the `header` that the template writes next, whether
    text or calls follow. `ending` is all that it writes between a thought and these."""

    open: str
    close: str
    header: str = ""
    ending: str = "\n</think>\n\n"


@dataclass(frozen=True)
class ReadAnswer:
    """An answer that was read: its `text` for envs, with calls as `palestra.core.chat` writes them, and its thought."""

    text: str
    thought: str = ""


@dataclass(frozen=True)
class AnswerForm:
    """Form of a base's answers: the texts that its template writes around thoughts, contents and calls."""

    end: str = ""
    """Special token that ends an answer; empty if there is none."""
    call_end: str = ""
    """Special token that ends an answer with calls."""
    blank_end: str = ""
    """White space that the template writes after an answer, if no special token follows there."""
    thought: ThoughtMarks | None = None
    """Marks of a thought; None if the template shows none."""
    starts: tuple[str, ...] = ()
    """Texts that the template writes before the content of an answer, the longest first."""
    calls: CallReader | None = None
    """Reader of calls; None if the template writes none, or none that can be read."""
    call_text: str = "<tool_call></tool_call>"
    """An example of calls, as the template writes them."""
    rewrites_answers: bool = False
    """An answer is written differently once another turn follows: earlier thoughts are dropped."""

    @property
    def has_common_calls(self) -> bool:
        """True if calls have the form in which envs get them, so that a text need not be rewritten."""
        return isinstance(self.calls, CommonCalls)

    @property
    def marks(self) -> str:
        """All marks that give an answer a meaning, in one text."""
        thought = [self.thought.open, self.thought.close] if self.thought else []
        return " ".join([*thought, *self.starts, self.call_text])

    def read(self, text: str, tools: Sequence[Json], *, forced: bool = False) -> ReadAnswer:
        """Parts an answer's text, without its end token. `tools` are those of the conversation: without any, nothing
        is taken for a call. `forced`: the prompt has begun a thought."""
        thought, text = self._part_thought(text, forced=forced)
        if self.has_common_calls or not tools or self.calls is None:
            return ReadAnswer(text, thought)
        found = self.calls.read(text, tools)
        if not found.calls and not found.unreadable:
            return ReadAnswer(text, thought)
        content = _without(found.content, self.starts)
        calls = [render_tool_call(call.name, call.arguments) for call in found.calls]
        broken = [f"<tool_call>{TOOL_CALL_PATTERN.sub('', each)}</tool_call>" for each in found.unreadable]
        return ReadAnswer("\n".join(part for part in (content, *calls, *broken) if part), thought)

    def is_thinking(self, text: str, *, forced: bool) -> bool:
        """Returns whether an answer's text is a thought without an end; `forced` as in `read`."""
        marks = self.thought
        begins = text.lstrip()
        if marks is None or not (forced or begins.startswith(marks.open)):
            return False
        return marks.close not in begins.removeprefix(marks.open)

    def _part_thought(self, text: str, *, forced: bool) -> tuple[str, str]:
        """Returns the thoughts and the rest of an answer. A thought that does not end is all of it."""
        marks = self.thought
        header = marks.header if marks else ""
        thoughts = list[str]()
        begins = text.lstrip()
        while marks and (forced or begins.startswith(marks.open)):
            thought, _, rest = begins.removeprefix(marks.open).partition(marks.close)
            thoughts.append(thought.strip())
            text = rest.lstrip()
            begins = text.removeprefix(header).lstrip()
            forced = False
        more, content = self._part_channels(_without(text, self.starts))
        return "\n".join(filter(None, (*thoughts, more))), content.removeprefix(header)

    def _part_channels(self, text: str) -> tuple[str, str]:
        """Returns what stands before the last mark of a content (further channels, which are thoughts), and the content
        after it."""
        for start in self.starts:
            before, found, content = text.rpartition(start)
            if found and before.strip() and re.search(TAG, start):
                return re.sub(TAG, " ", before).strip(), content.lstrip("\n")
        return "", text


def _without(text: str, starts: Sequence[str]) -> str:
    """Returns an answer's text without what the template writes before the content: one of `starts`."""
    for start in starts:
        if start.isspace() and text.startswith(start):
            return text.removeprefix(start)
        if text.lstrip().startswith(start):
            return text.lstrip().removeprefix(start).lstrip("\n")
    return text


def answer_text(renderer: Renderer, message: Json, tools: Sequence[Json] = ()) -> str | None:
    """Returns what the template writes after the prompt as the answer `message`; None if it refuses it."""
    try:
        prompt = renderer.render([ASKED], tools)
        whole = renderer.render([ASKED, message], tools, generate=False)
    except ValueError:
        return None
    return after_prompt(prompt, whole)


def after_prompt(prompt: str, whole: str) -> str:
    """Returns what follows the prompt in a finished conversation. Where the template writes the answer's beginning in
    another way than the prompt's end, all from the line or token at which they part."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    same = common_start(prompt, whole)
    return whole[max(same.rfind("\n"), same.rfind(">"), same.rfind("]")) + 1 :]


MAX_FORMS = 256  # that are known at once: clients of a server choose options
_forms: dict[str, AnswerForm] = {}  # by template, options and special tokens: probes take some 50 ms


def find_answer_form(renderer: Renderer) -> AnswerForm:
    """Returns the form of the answers of a renderer's base."""
    tokenizer = renderer.tokenizer
    known = (tokenizer.chat_template, renderer.options, renderer.special, tokenizer.special_tokens_map)
    key = json.dumps(known, default=str)
    if (form := _forms.get(key)) is None:
        form = _find_answer_form(renderer)
        if len(_forms) >= MAX_FORMS:
            _forms.clear()
        _forms[key] = form
    return form


def _find_answer_form(renderer: Renderer) -> AnswerForm:
    eos = str(renderer.tokenizer.eos_token or "")
    if not renderer.has_template:
        return AnswerForm(end=eos, call_end=eos)
    finished = answer_text(renderer, ANSWERED) or ""
    start, marked, tail = finished.partition(TEXT_MARK)
    # after an answer's content when another turn follows
    between = (renderer.attempt([ASKED, ANSWERED, ASKED]) or "").partition(TEXT_MARK)[2]
    end = [eos, *leading_specials(renderer, between)[:1], *leading_specials(renderer, tail)][-1]
    thought, after_thought = _thought_marks(renderer)
    before = {start.strip() if marked else "", after_thought} - {""}
    starts = sorted(before, key=len, reverse=True)
    if start.isspace():
        starts.append(start)
    blank = tail if tail.isspace() else ""
    form = AnswerForm(end, end, blank, thought, tuple(starts), rewrites_answers=_rewrites_answers(renderer))
    texts = _call_texts(renderer, form)
    if (calls := _call_reader(renderer, form, texts, tail)) is None:
        return form
    call_end = _call_end(renderer, texts) or end
    return replace(form, calls=calls, call_end=call_end, call_text=texts[0])


def leading_specials(renderer: Renderer, text: str) -> list[str]:
    """Returns the special tokens with which a text begins after white space, one directly after the other."""
    begins = text.lstrip()
    found = list[str]()
    while token := max(filter(begins.startswith, renderer.special_texts), key=len, default=""):
        begins = begins.removeprefix(token)
        found.append(token)
    return found


def _thought_marks(renderer: Renderer) -> tuple[ThoughtMarks | None, str]:
    """Returns the marks of a thought, and what stands between it and the content."""
    if renderer.form.thought_key is None:
        return None, ""
    called = probe_call(PROBE_ARGUMENTS, thought=THOUGHT_MARK)
    for message, tools in ((THINKING, ()), (called, renderer.probe_tools)):
        before, found, after = (answer_text(renderer, message, tools) or "").partition(THOUGHT_MARK)
        if not found:
            continue
        whole = renderer.render([ASKED, message], tools, generate=False)
        opened = before.strip() or "".join(re.findall(TAG, whole.partition(THOUGHT_MARK)[0])[-1:])
        closed = re.match(rf"\s*({TAG})\s*", after)
        if opened and closed:
            following, marked, _ = after[closed.end() :].partition(TEXT_MARK)
            if not marked:
                return ThoughtMarks(opened, closed[1], "", closed[0]), ""
            header = _header(renderer, after[closed.end() :])
            return ThoughtMarks(opened, closed[1], header, closed[0] + header), following.strip()
    if renderer.form.thought_key == INLINE:
        return ThoughtMarks("<think>", "</think>"), ""
    return None, ""


def _header(renderer: Renderer, after: str) -> str:
    """Returns what the template writes after a thought whether text or calls follow (gpt-oss's next header). `after` is
    what it writes before text."""
    called = probe_call(PROBE_ARGUMENTS, thought=THOUGHT_MARK)
    text = renderer.form.has_calls and answer_text(renderer, called, renderer.probe_tools)
    if not text or THOUGHT_MARK not in text:
        return ""
    other = re.sub(rf"\A\s*{TAG}\s*", "", text.partition(THOUGHT_MARK)[2])
    same = whole_tags(common_start(after, other))
    if after[len(same) :][:1].isalnum() and other[len(same) :][:1].isalnum():  # within a word
        same = re.sub(r"[^\s>]*\Z", "", same)
    return same.strip()


def _rewrites_answers(renderer: Renderer) -> bool:
    """Returns whether the template writes an answer, with or without a thought, in another way once a turn follows."""
    result = {"role": "tool", "tool_call_id": "call_0", "content": RESULT_MARK}
    cases: list[tuple[Json, Json, list[Json]]] = [(ANSWERED, ASKED, [])]
    thought = ""
    if renderer.form.thought_key is not None:
        thought = THOUGHT_MARK
        cases.append((THINKING, ASKED, []))
    if renderer.form.has_calls:
        cases.append((probe_call(PROBE_ARGUMENTS, thought=thought), result, renderer.probe_tools))
    for message, following, tools in cases:
        try:
            prompt = renderer.render([ASKED], tools)
            finished = renderer.render([ASKED, message], tools, generate=False)
            whole = renderer.render([ASKED, message, following], tools)
        except ValueError:
            continue
        is_shown = message.get("reasoning_content", "") in finished
        is_kept = whole.startswith(renderer.without_specials(finished).rstrip())
        if not (is_shown and is_kept and finished.startswith(prompt)):
            return True
    return False


def _call_texts(renderer: Renderer, form: AnswerForm) -> list[str]:
    """Returns what the template writes as one call, and as two if it takes two; nothing if it writes none."""
    if not renderer.form.has_calls:
        return []
    asked = [probe_call(PROBE_ARGUMENTS), probe_call(PROBE_ARGUMENTS, PROBE_ARGUMENTS)]
    texts = [_without(answer_text(renderer, message, renderer.probe_tools) or "", form.starts) for message in asked]
    names = texts[0].count(TOOL_NAME)
    return [text for i, text in enumerate(texts) if names and text.count(TOOL_NAME) == names * (i + 1)]


def _call_reader(renderer: Renderer, form: AnswerForm, texts: Sequence[str], tail: str) -> CallReader | None:
    """Returns the reader of the template's calls; None if there is none that reads them."""
    wanted = [[ToolCall(TOOL_NAME, dict(PROBE_ARGUMENTS))] * (i + 1) for i in range(len(texts))]
    shipped = getattr(renderer.tokenizer, "response_template", None)
    for reader in call_readers(texts, tail, shipped) if texts else ():
        found = [reader.read(without_end(renderer, text), renderer.probe_tools) for text in texts]
        rest = [_without(each.content, form.starts).strip() or each.unreadable for each in found]
        if [each.calls for each in found] == wanted and not any(rest):
            return reader
    return None


def without_end(renderer: Renderer, text: str) -> str:
    """Returns an answer's text without the white space and the last special token that the template writes after
    it."""
    body = text.rstrip()
    if last := max(filter(body.endswith, renderer.special_texts), key=len, default=""):
        return body.removesuffix(last)
    return text


def _call_end(renderer: Renderer, texts: Sequence[str]) -> str:
    """Returns the special token that ends an answer with calls: the last one, if it does not end each call, or the one
    with which their results begin."""
    body = texts[-1].rstrip()
    last = body.removeprefix(without_end(renderer, texts[-1]))
    if last and body.count(last) == 1:
        return last
    call = probe_call(PROBE_ARGUMENTS)
    result = {"role": "tool", "tool_call_id": "call_0", "content": RESULT_MARK}
    try:
        whole = renderer.render([ASKED, call, result], renderer.probe_tools)
        finished = renderer.render([ASKED, call], renderer.probe_tools, generate=False)
    except ValueError:
        return ""
    if whole == finished:
        return ""
    return "".join(leading_specials(renderer, whole.removeprefix(finished.rstrip()))[:1])


def end_tokens(tokenizer: Any) -> set[int]:
    """Returns the ids of the tokens that end an answer: the tokenizer's end-of-text token, and those with which its
    chat template ends texts and calls (Phi-3's `<|end|>`, GLM-4's `<|user|>` and `<|observation|>`, which begin the
    next turn)."""
    form = find_answer_form(Renderer(tokenizer))
    found = {tokenizer.convert_tokens_to_ids(token) for token in {form.end, form.call_end} - {""}}
    found.add(tokenizer.eos_token_id)
    return {token for token in found if token is not None}
