"""A language model as a policy: the chat template converts an observation to tokens, the sampler generates the answer.

Nothing is tokenised twice. A policy with a history builds a later turn's prompt from the exact token ids of the earlier
prompt and answer, and appends only the tokens of the new observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from palestra.core.chat import (
    ANSWER_MARKER,
    Chat,
    messages_after,
    template_turn_end,
    to_template_message,
    turn_end_index,
    with_system,
    with_template_calls,
)
from palestra.core.failures import ContextLengthExceeded
from palestra.core.types import Answer, Message
from palestra.engine.forward.tree_attention import common_prefix
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.policies.base import Query, chat_messages
from palestra.text.policies.context import ContextConfig

NO_TOKENS = np.zeros(0, np.int32)
HistoryMode = Literal["none", "conversation"]


class SamplerProtocol(Protocol):
    """Protocol of a sampler, in this process (engine/sampling/sampler.py) or on a server."""

    async def sample(self, request: Request) -> list[Completion]: ...
    def clear_cache(self) -> None: ...


class ChatEncoder:
    """Encodes prompts as token ids [P] int32, with the tokenizer's chat template (or as plain text if it has none).

    In messages, text that spells a special token, such as `<|end|>`, is broken by a space: the output of one agent
    becomes part of another's prompt and must not inject a turn there. Up to `cache_size` prompts are cached.
    """

    def __init__(self, tokenizer: Any, options: dict[str, Any] | None = None, *, cache_size: int = 65536) -> None:
        self.tokenizer, self.options = tokenizer, options or {}
        special = {number: str(t) for number, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special, self._special_ids = list(special.values()), {*special, tokenizer.eos_token_id}
        self._first = lru_cache(maxsize=cache_size)(self._encode_first)
        self._next = lru_cache(maxsize=cache_size)(self._encode_next)

    def encode_first_turn(self, query: Query, system: str | None) -> np.ndarray:
        """Returns the prompt [P] int32 of a conversation's first turn."""
        return self._first(_cache_key(chat_messages(Query(query.role, query.observation), system)), "[]")

    def encode_conversation(self, conversation: Chat, system: str | None) -> np.ndarray:
        """Returns the prompt [P] int32 for the next message of a conversation; `system` replaces its system message."""
        messages = conversation.messages if system is None else with_system(conversation.messages, system)
        return self._first(_cache_key([to_template_message(m) for m in messages]), _cache_key(conversation.tools))

    def encode_shared(self, conversation: Chat, system: str | None) -> np.ndarray:
        """Returns the tokens [P] int32 with which every prompt begins that has the same first `num_shared` messages as
        `conversation`; no tokens if `num_shared` is 0."""
        shared = conversation.messages[: conversation.num_shared]
        if not shared:
            return NO_TOKENS
        one, other = (
            self.encode_conversation(Chat((*shared, {"role": "user", "content": text}), conversation.tools), system)
            for text in ("a", "b")
        )
        return one[: common_prefix(one, other)]

    def encode_next_turn(self, earlier: np.ndarray, answer: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Returns the prompt [P] int32 of a later turn: earlier prompt, sampled answer, and the template's text between
        an answer and the next one, which contains the new `messages`. The template's end of an answer appears once,
        whether or not the answer contains it."""
        between, end = self._next(_cache_key([to_template_message(m) for m in messages]))
        last = int(answer[-1]) if len(answer) else None
        if end is not None and last == between[end]:
            return np.concatenate([earlier, answer, between[end + 1 :]])
        if end is not None and last in self._special_ids:
            answer = answer[:-1]  # the answer ended with a different end token than the template's
        return np.concatenate([earlier, answer, between])

    def encode_answer(self, text: str, *, ends: bool = True) -> np.ndarray:
        """Returns an answer's text as token ids [T] int32, with the template's end token if it `ends`. The text may
        spell that end itself; elsewhere in the text the end token is broken by a space, since an answer ends there."""
        end = self.turn_end
        if len(end) > 1:
            told = text.rstrip()
            text = told.removesuffix(end) if told.endswith(end) else text
            text = text.replace(end, f"{end[0]} {end[1:]}")
        return self._ids(text + (end if ends else ""))

    def cut_results(self, messages: Sequence[Message], limit: int | None) -> list[Message]:
        """Returns the messages with the results of tools cut after their first `limit` tokens (None: no cut), with a
        mark at the end of each cut result."""
        return [self._cut(m, limit) if limit and m["role"] == "tool" else m for m in messages]

    def _cut(self, message: Message, limit: int) -> Message:
        ids = self.tokenizer.encode(to_template_message(message)["content"], add_special_tokens=False)
        if len(ids) <= limit:
            return message
        mark = f"[cut off: the first {limit} of {len(ids)} tokens]"
        return message | {"content": f"{self.tokenizer.decode(ids[:limit])}\n{mark}"}

    @cached_property
    def turn_end(self) -> str:
        """The text with which the template ends an answer; empty if there is none."""
        end = template_turn_end(self.tokenizer)
        return "" if end is None else str(self.tokenizer.convert_ids_to_tokens(end))

    def _encode_first(self, messages: str, tools: str) -> np.ndarray:
        return self._ids(self._render(json.loads(messages), json.loads(tools)))

    def _encode_next(self, messages: str) -> tuple[np.ndarray, int | None]:
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ANSWER_MARKER},
            *json.loads(messages),
        ]
        between = self._ids(self._render(turns, []).split(ANSWER_MARKER, 1)[1])
        return between, turn_end_index(self.tokenizer, between.tolist())

    @cached_property
    def _shows_tools(self) -> bool:
        """True if a prompt depends on the tools; False if the tokenizer's chat template ignores them."""
        if self.tokenizer.chat_template is None:
            return False
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        return len({self._templated([{"role": "user", "content": "?"}], tools) for tools in ([], [tool])}) == 2

    def _render(self, messages: list[Any], tools: list[Any]) -> str:
        messages, tools = self._harmless(messages), self._harmless(tools)
        if tools and not self._shows_tools:
            raise ValueError(
                f"this conversation offers {len(tools)} tools, and the chat template of the base does not show tools "
                "to the model: take a base whose template does (such as Qwen/Qwen3-0.6B), or describe them in messages"
            )
        if self.tokenizer.chat_template is None:
            return "".join(f"{m['content']}\n" for m in messages)
        return self._templated(messages, tools)

    def _templated(self, messages: list[Any], tools: list[Any]) -> str:
        options = self.options | ({"tools": tools} if tools else {})
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return text

    def _harmless(self, value: Any) -> Any:
        if isinstance(value, str):
            for token in self.special:
                if len(token) > 1:
                    value = value.replace(token, f"{token[0]} {token[1:]}")
            return value
        if isinstance(value, list):
            return [self._harmless(each) for each in value]
        return {key: self._harmless(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)


@dataclass
class _Prefix:
    """A prefix of prompts that a sampler computes, and the number of calls that use it."""

    computed: asyncio.Future[list[Completion]]
    num_users: int = 0


class LanguagePolicy:
    """Samples answers from one snapshot of an adapter, or from the bare base (None)."""

    def __init__(
        self,
        name: str,
        sampler: SamplerProtocol,
        encoder: ChatEncoder,
        sampling: SamplingConfig,
        adapter: Snapshot | None = None,
        *,
        system: str | None = None,
        history: HistoryMode = "none",
        context: ContextConfig | None = None,
    ) -> None:
        self.name, self.sampler, self.encoder, self.sampling = name, sampler, encoder, sampling
        self.adapter, self.system, self.history = adapter, system, history
        self.context = context or ContextConfig()
        self._prefixes: dict[bytes, _Prefix] = {}

    async def act(self, query: Query, newest: Callable[[], LanguagePolicy] | None = None) -> list[Answer]:
        """Returns `query.n` answers, each with its token ids and log-probabilities.

        `newest` returns the policy that plays at the time of the call (None: this one): weights may change while the
        conversation is rewritten, and while a prefix is computed.
        """
        newest = newest or (lambda: self)
        prompt_ids, seen = await self._fitting_prompt(query), query.observation
        shared_ids = NO_TOKENS
        if isinstance(seen, Chat) and seen.num_shared:
            shared_ids = self.encoder.encode_shared(self._cut_results(seen), self.system)
        # keys and values of a conversation are kept for its next turn, unless a shared prefix has most of them
        keep = self.history == "conversation" or (isinstance(seen, Chat) and not len(shared_ids))
        async with newest()._cached_prefix(shared_ids):
            current = newest()  # weights may have changed while the prefix was computed
            request = Request(prompt_ids, query.n, current.sampling, current.adapter, query.seed, keep)
            sampled = await current.sampler.sample(request)
        return current._answers(prompt_ids, sampled)

    def _answers(self, prompt_ids: np.ndarray, sampled: Sequence[Completion]) -> list[Answer]:
        """Returns the sampled completions of a prompt [P] as answers of this policy."""
        return [
            Answer(
                text=text,
                policy=self.name,
                prompt_ids=prompt_ids,
                token_ids=s.token_ids,
                logprobs=s.logprobs,
                stop_reason=s.stop_reason,
                temperature=self.sampling.temperature,
                versions=token_versions(s, self.name),
                sampling_mask=s.sampling_mask,
                routed_experts=s.routed_experts,
            )
            for s, text in zip(sampled, self.decode_completions(sampled), strict=True)
        ]

    @contextlib.asynccontextmanager
    async def _cached_prefix(self, ids: np.ndarray) -> AsyncIterator[None]:
        """Context in which the sampler has the keys and values of the prefix `ids` [P]. They are computed once for all
        calls that are in the context at the same time."""
        if not len(ids):
            yield
            return
        key = ids.tobytes()
        if key not in self._prefixes:
            request = Request(ids, 1, SamplingConfig(max_tokens=1), self.adapter, keep_kv=True)
            self._prefixes[key] = _Prefix(asyncio.ensure_future(self.sampler.sample(request)))
        prefix = self._prefixes[key]
        prefix.num_users += 1
        try:
            await asyncio.shield(prefix.computed)  # one caller that is cancelled does not cancel the others
            yield
        finally:
            prefix.num_users -= 1
            if not prefix.num_users:
                del self._prefixes[key]

    def decode_completions(self, sampled: Sequence[Completion]) -> list[str]:
        """Decodes completions to text, without end tokens and stop strings."""
        texts = self.encoder.tokenizer.batch_decode([s.token_ids for s in sampled], skip_special_tokens=True)
        return [_cut_at_stop(text, self.sampling.stop) for text in texts]

    def with_sampling(self, changes: dict[str, Any]) -> LanguagePolicy:
        """Returns this policy with some sampling parameters changed, for example for evaluation. Raises a validation
        error (a ValueError) if they are invalid."""
        sampling = SamplingConfig.model_validate(self.sampling.model_dump() | changes)
        return LanguagePolicy(
            self.name,
            self.sampler,
            self.encoder,
            sampling,
            self.adapter,
            system=self.system,
            history=self.history,
            context=self.context,
        )

    async def _fitting_prompt(self, query: Query) -> np.ndarray:
        """Returns the prompt's token ids [P] int32. A conversation with more than `context.max_tokens` tokens is
        rewritten first. Raises ContextLengthExceeded if it then still has more."""
        ids, limit = self.encode_prompt(query), self.context.max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        seen = query.observation
        if isinstance(seen, Chat):
            whole, tools = self._cut_results(seen).messages, seen.tools
            messages = with_system(whole, self.system) if self.system is not None else whole
        else:
            earlier = query if self.history == "conversation" else replace(query, history=())
            messages, tools = chat_messages(earlier, self.system), ()

        def encoded(messages: Sequence[Message]) -> np.ndarray:
            return self.encoder.encode_conversation(Chat(tuple(messages), tools), None)

        rewritten = encoded(await self.context.rewrite(messages, lambda part: len(encoded(part))))
        if len(rewritten) > limit:
            raise ContextLengthExceeded(
                f"a conversation of {len(ids)} tokens was rewritten to {len(rewritten)} by context.compress: "
                f"{self.context.compress}, and context.max_tokens is {limit}: raise it, or shorten the observations"
            )
        return rewritten

    def _cut_results(self, seen: Chat) -> Chat:
        messages = self.encoder.cut_results(seen.messages, self.context.max_tool_tokens)
        return replace(seen, messages=tuple(messages))

    def encode_prompt(self, query: Query) -> np.ndarray:
        """Returns the prompt's token ids [P] int32. A conversation that continues one of this seat's earlier answers
        begins with the exact tokens of that answer and its prompt."""
        if isinstance(query.observation, Chat):
            for seen, answer in reversed(query.history):
                new = messages_after(query.observation, seen, answer.text) if isinstance(seen, Chat) else None
                if new and len(answer.token_ids):
                    new = tuple(self.encoder.cut_results(new, self.context.max_tool_tokens))
                    return self.encoder.encode_next_turn(answer.prompt_ids, answer.token_ids, new)
            return self.encoder.encode_conversation(self._cut_results(query.observation), self.system)
        if self.history == "none" or not query.history:
            return self.encoder.encode_first_turn(query, self.system)
        last = query.history[-1][1]
        asked = {"role": "user", "content": str(query.observation)}
        return self.encoder.encode_next_turn(last.prompt_ids, last.token_ids, [asked])

    def encode_demonstration(self, query: Query, text: str, stop_reason: str = "stop") -> Answer:
        """Returns `text` as an answer of this policy with token ids, for imitation; its log-probabilities are zero.
        Tool calls are written as the chat template writes them. An answer that was cut at its token limit
        (`stop_reason` "length") gets no end token."""
        encoder = self.encoder
        text = with_template_calls(text, encoder.tokenizer, encoder.turn_end, encoder.options)
        ids = encoder.encode_answer(text, ends=stop_reason != "length")
        return Answer(text, self.name, self.encode_prompt(query), ids, np.zeros(len(ids), np.float32), stop_reason)


@dataclass(kw_only=True)
class Demonstration(Answer):
    """A teacher's answer with the student's tokens, and the `original` with the teacher's own."""

    original: Answer


class DemonstrationPolicy:
    """Records a teacher's answers with the student's tokens, as demonstrations for SFT. In a conversation the teacher
    reads its own earlier prompts and answers: its tokenizer, template and system prompt may differ."""

    def __init__(self, student: LanguagePolicy, teacher: Any) -> None:
        self.name, self._student, self._teacher = student.name, student, teacher

    async def act(self, query: Query) -> list[Answer]:
        """Returns the teacher's answers, encoded by the student."""
        own = [
            (seen, answer.original if isinstance(answer, Demonstration) else answer) for seen, answer in query.history
        ]
        return [self._encode(query, answer) for answer in await self._teacher.act(replace(query, history=tuple(own)))]

    def _encode(self, query: Query, answer: Answer) -> Demonstration:
        taught = self._student.encode_demonstration(query, answer.text, answer.stop_reason)
        return Demonstration(**vars(taught), original=answer)


def token_versions(sampled: Completion, name: str) -> np.ndarray:
    """Returns the version of the policy that sampled each token [T] int32; empty if all tokens have the version in
    `name`."""
    if all(adapter == name for _, adapter in sampled.adapters) or "@" not in name:
        return NO_TOKENS
    starts, names = zip(*sampled.adapters, strict=True)
    if any(adapter.split("@", 1)[0] != name.split("@", 1)[0] for adapter in names):
        return NO_TOKENS  # a snapshot under another name is never replaced during an answer
    versions = np.array([int(adapter.split("@", 1)[1]) for adapter in names], np.int32)
    return versions.repeat(np.diff([*starts, len(sampled.token_ids)]))


def _cache_key(messages: Sequence[Any]) -> str:
    """Returns a hashable cache key."""
    return json.dumps(list(messages))


def _cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text
