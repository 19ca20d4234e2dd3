"""Conversations as token ids: prompts, the text between an answer and the next one, and answers to imitate.

One rule holds for all of them: prompt and answer together are what the base's own chat template makes of the finished
conversation. Sampled tokens are never tokenised again: a later prompt begins with the exact tokens of the earlier
prompt and answer, and goes on with what the template writes between that answer and the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from palestra.core.chat import (
    Chat,
    Json,
    parse_assistant_message,
    part_thought,
    render_message,
    to_template_message,
    with_reasoning,
    with_system,
)
from palestra.core.types import Answer
from palestra.engine.conversation.answers import AnswerForm, ReadAnswer, after_prompt, find_answer_form
from palestra.engine.conversation.rendering import ASKED, FIRST_KEY, TEXT_MARK, THOUGHT_MARK, Renderer, TemplateRefusal
from palestra.engine.forward.tree_attention import common_prefix

HistoryThoughts = Literal["template", "keep"]
NO_TOKENS = np.zeros(0, np.int32)
TAIL_TOKENS = 16  # tokens at a prompt's end that show whether it has begun a thought


class ChatEncoder:
    """Encodes conversations as token ids with the tokenizer's chat template (or as plain text if it has none), and
    parts sampled answers. Up to `cache_size` prompts are cached.

    `history_thoughts` says what becomes of the thoughts of earlier turns where the template would drop them: "template"
    drops them too, "keep" keeps the tokens as they were sampled.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: dict[str, Any] | None = None,
        *,
        history_thoughts: HistoryThoughts = "template",
        cache_size: int = 65536,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options or {}
        self.history_thoughts = history_thoughts
        self.renderer = Renderer(tokenizer, options)
        self._special_ids = {*self.renderer.special, tokenizer.eos_token_id}
        self._prompt = lru_cache(maxsize=cache_size)(self._encode_prompt)
        self._next = lru_cache(maxsize=cache_size)(self._encode_next)
        self._choices = lru_cache(maxsize=cache_size)(self._encode_choices)

    def with_cache(self, size: int) -> ChatEncoder:
        """Returns an encoder with the same settings that caches `size` prompts."""
        return ChatEncoder(self.tokenizer, self.options, history_thoughts=self.history_thoughts, cache_size=size)

    @cached_property
    def form(self) -> AnswerForm:
        return find_answer_form(self.renderer)

    @property
    def drops_thoughts(self) -> bool:
        """True if later prompts may have an earlier answer in another form, without its thought."""
        return self.history_thoughts == "template" and self.form.rewrites_answers

    def check_template(self) -> None:
        """Raises ValueError if the chat template does not take one message of a user without tools. It does not write
        what its form is found by then, and would refuse the first prompt."""
        try:
            self.renderer.render([ASKED])
        except ValueError as error:
            raise ValueError(
                f"{error} (a template that takes nothing but conversations with tools, such as tool_use, cannot be "
                "used alone): set chat_template to another of the base's own by name, or to a .jinja file"
            ) from None

    # ---- prompts

    def encode_conversation(self, conversation: Chat, system: str | None = None) -> np.ndarray:
        """Returns the prompt [P] int32 for the next message of a conversation; `system` replaces its system message.
        Raises ValueError if the chat template does not take it."""
        messages = with_system(conversation.messages, system)
        return self._prompt(_cache_key(messages), _cache_key(conversation.tools))

    def encode_shared(self, conversation: Chat, system: str | None = None) -> np.ndarray:
        """Returns the tokens [P] int32 with which every prompt begins that has the same first `num_shared` messages as
        `conversation`; no tokens if `num_shared` is 0."""
        if not (shared := conversation.messages[: conversation.num_shared]):
            return NO_TOKENS
        one, other = (
            self.encode_conversation(Chat((*shared, {"role": "user", "content": text}), conversation.tools), system)
            for text in ("a", "b")
        )
        return one[: common_prefix(one, other)]

    def encode_next_turn(self, earlier: Chat, answer: Answer, new: Sequence[Json]) -> np.ndarray:
        """Returns the prompt [P] int32 of a later turn: `earlier` is the conversation to which `answer` was given, and
        `new` are the messages since. The answer's end appears once, whether or not it was sampled."""
        message: Json = {"role": "assistant", "content": answer.text}
        if self.renderer.form.has_calls:
            message = parse_assistant_message(answer.text)
        if answer.thought:
            message["reasoning_content"] = answer.thought
        keys = _cache_key(earlier.messages), _cache_key(earlier.tools), _cache_key([message]), _cache_key(new)
        between, whole = self._next(*keys)
        joined = self._join_turns(answer.prompt_ids, answer.token_ids, between)
        if whole is None or self.tokenizer.decode(joined, skip_special_tokens=False) == whole:
            return joined
        return self.encode_text(whole)

    def _join_turns(self, earlier: np.ndarray, answer: np.ndarray, between: np.ndarray) -> np.ndarray:
        """Returns an earlier prompt, an answer, and what follows, with the special tokens that end the answer once."""
        for sampled in (answer, answer[:-1]):
            if not len(sampled) or (last := int(sampled[-1])) not in self._special_ids:
                break
            ends = self._leading_special_ids(between)
            if last in ends:
                return np.concatenate([earlier, sampled, between[ends[last] + 1 :]])
        else:
            sampled = answer[:-1]
        return np.concatenate([earlier, sampled, self._without_repeated_end(sampled, between)])

    def _without_repeated_end(self, answer: np.ndarray, between: np.ndarray) -> np.ndarray:
        """Returns what follows an answer, without the white space that ends both it and each turn of a template that
        has no special token for that."""
        if not (end := self.form.blank_end):
            return between
        text = self.tokenizer.decode(answer[-TAIL_TOKENS:], skip_special_tokens=False)
        repeated = next((end[:n] for n in range(len(end), 0, -1) if text.endswith(end[:n])), "")
        if not repeated:
            return between
        return self.encode_text(self.tokenizer.decode(between, skip_special_tokens=False).removeprefix(repeated))

    def _leading_special_ids(self, ids: np.ndarray) -> dict[int, int]:
        """Returns the special tokens with which `ids` begins, after white space, and their indices."""
        found: dict[int, int] = {}
        for i, token in enumerate(ids.tolist()):
            if token in self._special_ids:
                found.setdefault(token, i)
            elif found or self.tokenizer.decode([token]).strip():
                break
        return found

    def _encode_prompt(self, messages: str, tools: str) -> np.ndarray:
        asked = json.loads(messages)
        offered = json.loads(tools)
        text = self.renderer.render(asked, offered)
        self._check_shown([message for message in asked if message["role"] != "assistant"], text)
        if offered and self.form.calls is None:
            raise ValueError(
                f"this conversation offers {len(offered)} tools, and no call of a tool can be read in the form of the "
                "base's chat template: it writes none, or in an unknown form (palestra info --base shows what it "
                "writes). Take another base, or set chat_template"
            )
        if self.renderer.has_template:
            return self.encode_text(text)
        return self.encode_raw(text)

    def _encode_next(self, earlier: str, tools: str, message: str, new: str) -> tuple[np.ndarray, str | None]:
        """Returns the tokens between an answer and the next one; and the text of the whole new prompt where the
        template writes the answer differently once it is an earlier turn (without its thought), else None."""
        before, offered, answers, added = map(json.loads, (earlier, tools, message, new))
        if not self.renderer.has_template:
            lines = (f"\n{message['content']}" for message in map(to_template_message, added))
            return self.encode_text("".join(lines)), None
        marked = self._mark_answer(answers[0])
        is_kept = True
        start, _, between = self.renderer.render([*before, marked, *added], offered).partition(TEXT_MARK)
        if "tool_calls" in marked or self.drops_thoughts:
            finished = self.renderer.render([*before, marked], offered, generate=False)
            same, _, end = self.renderer.without_specials(finished).partition(TEXT_MARK)
            is_kept = start == same and between.startswith(end.rstrip())
            if "tool_calls" in marked:
                between = between.removeprefix(end)
        self._check_shown(added, between)
        if self.drops_thoughts and not (is_kept and self._follows_prompt(before, offered, answers[0], start)):
            return self.encode_text(between), self.renderer.render([*before, *answers, *added], offered)
        return self.encode_text(between), None

    def _follows_prompt(self, before: list[Json], tools: list[Json], answer: Json, start: str) -> bool:
        """Returns whether `start`, what the template writes before an answer's content, begins with the prompt to which
        it was given, and has its thought."""
        thought = self.renderer.harmless(answer.get("reasoning_content", ""))
        return thought in start and start.startswith(self.renderer.render(before, tools))

    def _mark_answer(self, answer: Json) -> Json:
        """Returns an answer with a mark in place of its content, or of its last call's arguments."""
        thought = answer.get("reasoning_content", "") if self.renderer.form.thought_key else ""
        said = {"role": "assistant", "content": TEXT_MARK, "reasoning_content": thought}
        calls = answer.get("tool_calls")
        if not calls or not self.renderer.form.has_calls:
            return said
        last = calls[-1]
        marked = {**last, "function": {**last["function"], "arguments": {FIRST_KEY: TEXT_MARK}}}
        kept = [*calls[:-1], marked] if self.renderer.form.has_many_calls else [marked]
        return said | {"content": "", "tool_calls": kept}

    def _check_shown(self, messages: Sequence[Json], text: str) -> None:
        for message in messages:
            said = self.renderer.harmless(to_template_message(message)["content"]).strip()
            spelled = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
            if not any(each in text for each in spelled):
                raise TemplateRefusal(
                    f"the chat template of the base leaves out a message of role {message['role']} ({said[:60]!r}): "
                    "take a base whose template shows it, or give chat_template"
                )

    # ---- answers

    def read(self, ids: np.ndarray, prompt_ids: np.ndarray, tools: Sequence[Json] = ()) -> ReadAnswer:
        """Parts a sampled answer [T] to a prompt [P]: its text for envs, without end tokens, and its thought."""
        return self.form.read(self.decode(ids), tools, forced=self._begins_thought(prompt_ids))

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of an answer's tokens. Special tokens are left out, but for those with a meaning in it:
        marks of thoughts, calls and channels."""
        tokens = ids.tolist()
        if tokens and tokens[-1] in self._end_ids:
            tokens.pop()
        kept = [token for token in tokens if token not in self._silent_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    @cached_property
    def _end_ids(self) -> set[int]:
        spelled = {self.form.end, self.form.call_end} - {""}
        return {number for number, token in self.renderer.special.items() if token in spelled}

    @cached_property
    def _silent_ids(self) -> set[int | None]:
        thought = self.form.thought  # the end of a thought may be that of an answer too
        ends = {self.form.end, self.form.call_end} - ({thought.open, thought.close} if thought else set())
        marked = {number for number, token in self.renderer.special.items() if token in self.form.marks}
        return self._special_ids - {number for number in marked if self.renderer.special[number] not in ends}

    def missing_thought_end(self, ids: np.ndarray, prompt_ids: np.ndarray) -> np.ndarray:
        """Returns the tokens [F] int32 with which the template ends the thought of an unfinished answer [T] to a prompt
        [P]; none if that is no longer in its thought."""
        if self.form.is_thinking(self.decode(ids), forced=self._begins_thought(prompt_ids)):
            return self.thought_end_ids
        return NO_TOKENS

    @cached_property
    def thought_end_ids(self) -> np.ndarray:
        """The tokens [F] int32 with which the template ends a thought; none if it shows no thoughts."""
        if self.form.thought is None:
            return NO_TOKENS
        return self.encode_text(self.form.thought.ending)

    def check_thinking_budget(self, budget: int | None, max_tokens: int) -> None:
        """Raises ValueError for a budget of thoughts that the chat template does not show, or that leaves no token of
        `max_tokens` to the answer."""
        if budget is None:
            return
        if self.form.thought is None:
            raise ValueError(
                f"sampling.thinking_token_budget: {budget} ends thoughts, and the base's chat template shows none: "
                "leave it out, or take a base that thinks (palestra info --base shows it)"
            )
        ending = len(self.thought_end_ids)
        if budget + ending >= max_tokens:
            raise ValueError(
                f"sampling.thinking_token_budget: {budget} and the {ending} tokens that end a thought leave no token "
                f"of max_tokens: {max_tokens} to the answer: set max_tokens to {budget + ending + 1} or more"
            )

    def _begins_thought(self, prompt_ids: np.ndarray) -> bool:
        if self.form.thought is None:
            return False
        return self._is_forced(self.tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False))

    def part_demonstration(self, text: str, thought: str = "", *, ends: bool = True) -> ReadAnswer:
        """Returns an answer to imitate with its thought apart from its text, if the chat template shows thoughts.
        Raises ValueError for two different thoughts, and for one that does not end although the answer `ends`."""
        begins = text.lstrip().startswith("<think>")
        if self.form.thought is None or (thought and not begins):
            return ReadAnswer(text, thought)
        if begins and ends and "</think>" not in text:
            raise ValueError("an answer to imitate begins a thought that does not end: write </think> after it")
        inline, rest = part_thought(text)
        if thought and inline != thought.strip():
            raise ValueError("an answer to imitate has two different thoughts, beside its text and in it: leave one")
        return ReadAnswer(rest, thought or inline)

    def encode_answer(self, conversation: Chat, text: str, thought: str = "", *, ends: bool = True) -> np.ndarray:
        """Returns an answer to a conversation as token ids [T] int32, as the template writes it in the finished
        conversation: with the thought, with calls in the template's form, and with its end token if it `ends`. The text
        may spell that end itself. Raises ValueError if the answer would not be read as this text and thought."""
        told = text.rstrip()
        if self.form.end and told.endswith(self.form.end):
            text = told.removesuffix(self.form.end)
        answer = self.part_demonstration(text, thought, ends=ends)
        if not self.renderer.has_template and not answer.thought:
            return self.encode_text(self.renderer.harmless(answer.text) + (self.form.end if ends else ""))
        prompt = self.renderer.render(conversation.messages, conversation.tools)
        body, end = self._answer_text(conversation, answer, prompt)
        if not ends and answer.thought and not answer.text:  # it was cut in its thought, whose end is not written
            written = self.renderer.harmless(answer.thought).strip()
            body = body[: body.rindex(written) + len(written)]
        ids = self.encode_text(body + (end if ends else ""))
        self._check_read(ids, answer, conversation.tools, forced=self._is_forced(prompt))
        return ids

    def encode_choices(self, conversation: Chat, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns some answers to a conversation as `encode_answer` does, each as a tuple."""
        return self._choices(_cache_key(conversation.messages), _cache_key(conversation.tools), tuple(texts))

    def _encode_choices(self, messages: str, tools: str, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        conversation = Chat(tuple(json.loads(messages)), json.loads(tools))
        return tuple(tuple(self.encode_answer(conversation, text).tolist()) for text in texts)

    def _check_read(self, ids: np.ndarray, answer: ReadAnswer, tools: Sequence[Json], *, forced: bool) -> None:
        read = self.form.read(self.decode(ids), tools, forced=forced)
        wanted = self.renderer.harmless(parse_assistant_message(answer.text)["content"])
        content = parse_assistant_message(read.text)["content"]
        if content.split() != wanted.split() or read.thought.split() != self.renderer.harmless(answer.thought).split():
            raise ValueError(
                f"an answer to imitate is read as the text {content[:60]!r} after the thought {read.thought[:60]!r} in "
                f"the form of the base's chat template, not as {wanted[:60]!r} after {answer.thought[:60]!r}: leave "
                "out marks of thoughts within texts, and texts beside calls if the template writes none"
            )

    def _is_forced(self, prompt: str) -> bool:
        """Returns whether a prompt has begun a thought."""
        return self.form.thought is not None and prompt.rstrip().endswith(self.form.thought.open)

    def _answer_text(self, conversation: Chat, answer: ReadAnswer, prompt: str) -> tuple[str, str]:
        """Returns the text of an answer after `prompt`, without its end token, and that token."""
        form = self.form
        message: Json = {"role": "assistant", "content": answer.text}
        parsed = parse_assistant_message(answer.text)
        is_known = form.calls is not None and (form.has_common_calls or conversation.tools)
        if is_known and "tool_calls" in parsed and answer.text == render_message(parsed):
            message = parsed
        end = form.call_end if "tool_calls" in message else form.end
        body = self._render_answer(conversation, message, answer.thought, prompt)
        text = self.renderer.without_specials(body)
        if end and end in body[len(text) :]:
            text = body[: body.index(end, len(text))]
        return text, end

    def _render_answer(self, conversation: Chat, message: Json, thought: str, prompt: str) -> str:
        """Returns what the template writes after `prompt` as the answer `message` with a thought."""

        def render(thought: str) -> str:
            finished = [*conversation.messages, with_reasoning(message, thought)]
            return self.renderer.render(finished, conversation.tools, generate=False)

        marks = self.form.thought
        forced = self._is_forced(prompt)
        whole = render(thought)
        if marks is None or not (thought or forced):
            return after_prompt(prompt, whole)
        marked = render(THOUGHT_MARK)
        is_shown = THOUGHT_MARK in marked
        if whole.startswith(prompt) and (is_shown or not thought):
            return whole[len(prompt) :]
        if not forced and prompt.rstrip().endswith(marks.close):
            raise ValueError(
                "an answer to imitate has a thought, and the base's chat template ends the thought before the answer "
                "begins: set the option of chat_template_kwargs that lets it think (enable_thinking: true), or leave "
                "the thought out"
            )
        # the template does not write this answer after its own prompt: the thought that the prompt begins is ended
        thought = self.renderer.harmless(thought)
        if marked.startswith(prompt) and is_shown:
            return marked[len(prompt) :].replace(THOUGHT_MARK, thought)
        content = after_prompt(prompt, render(""))
        thinking = f"{thought}\n{marks.close}\n\n{content.lstrip()}"
        if forced:
            return thinking
        return f"{marks.open}\n{thinking}"

    # ---- text

    def encode_text(self, text: str) -> np.ndarray:
        """Returns rendered text as token ids [T] int32."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def encode_raw(self, text: str) -> np.ndarray:
        """Returns text without a template as token ids [T] int32, after what the tokenizer puts before a text (the
        beginning-of-text token of most bases)."""
        return np.concatenate([self._text_start, self.encode_text(text)])

    @cached_property
    def _text_start(self) -> np.ndarray:
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        plain = self.tokenizer.encode("a", add_special_tokens=False)
        before = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain or i == len(whole))
        return np.array(whole[:before] if before < len(whole) else [], np.int32)

    def cut_results(self, messages: Sequence[Json], limit: int | None) -> list[Json]:
        """Returns the messages with the results of tools cut after their first `limit` tokens (None: no cut), with a
        mark at the end of each cut result."""
        if not limit:
            return list(messages)
        return [self._cut_result(message, limit) for message in messages]

    def _cut_result(self, message: Json, limit: int) -> Json:
        if message["role"] != "tool":
            return message
        ids = self.tokenizer.encode(to_template_message(message)["content"], add_special_tokens=False)
        if len(ids) <= limit:
            return message
        mark = f"[cut off: the first {limit} of {len(ids)} tokens]"
        return message | {"content": f"{self.tokenizer.decode(ids[:limit])}\n{mark}"}


def _cache_key(messages: Sequence[Any]) -> str:
    return json.dumps(list(messages))
