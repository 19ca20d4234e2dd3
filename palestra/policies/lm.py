"""A language model as a policy: the chat template converts an observation to tokens, the sampler generates the answer.

Nothing is tokenised twice. A policy with a history builds a later turn's prompt from the exact token ids of the earlier
prompt and answer, and appends only the tokens of the new observation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from palestra.chat import Chat, goes_on, templated, with_system
from palestra.engine.lora import Snapshot
from palestra.engine.sampler import Request, Sampled, Sampling
from palestra.policies.base import Query, chat
from palestra.types import Answer, Message

MARK = "\x00answer\x00"
Memory = Literal["none", "conversation"]


class Samples(Protocol):
    """Protocol of a sampler, in this process (engine/sampler.py) or on a server."""

    async def sample(self, request: Request) -> list[Sampled]: ...
    def forget(self) -> None: ...


class ChatEncoder:
    """Encodes prompts as token ids [P] int32, with the tokenizer's chat template (or as plain text if it has none).

    In messages, text that spells a special token, such as `<|end|>`, is broken by a space: the output of one agent
    becomes part of another's prompt and must not inject a turn there. Up to `remember` prompts are cached.
    """

    def __init__(self, tokenizer: Any, options: dict[str, Any] | None = None, *, remember: int = 65536) -> None:
        self.tokenizer, self.options = tokenizer, options or {}
        self.special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._first = lru_cache(maxsize=remember)(self._encode_first)
        self._next = lru_cache(maxsize=remember)(self._encode_next)

    def first(self, query: Query, system: str | None) -> np.ndarray:
        """Returns the prompt [P] int32 of a conversation's first turn."""
        return self._first(_frozen(chat(Query(query.role, query.observation), system)), "[]")

    def whole(self, conversation: Chat, system: str | None) -> np.ndarray:
        """Returns the prompt [P] int32 for the next message of a conversation; `system` replaces its system message."""
        messages = conversation.messages if system is None else with_system(conversation.messages, system)
        return self._first(_frozen([templated(m) for m in messages]), _frozen(conversation.tools))

    def next(self, earlier: np.ndarray, answered: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Returns the prompt [P] int32 of a later turn: earlier prompt, sampled answer, and the template's text between
        an answer and the next one, with the new `messages` in it."""
        between, end = self._next(_frozen([templated(m) for m in messages]))
        cut = answered[-1:].tolist() == [end] and len(between) > 0 and between[0] == end
        return np.concatenate([earlier, answered, between[1:] if cut else between])

    def _encode_first(self, messages: str, tools: str) -> np.ndarray:
        return self._ids(self._render(json.loads(messages), json.loads(tools)))

    def _encode_next(self, messages: str) -> tuple[np.ndarray, int | None]:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *json.loads(messages)]
        return self._ids(self._render(turns, []).split(MARK, 1)[1]), self.tokenizer.eos_token_id

    def _render(self, messages: list[Any], tools: list[Any]) -> str:
        messages, tools = self._harmless(messages), self._harmless(tools)
        if self.tokenizer.chat_template is None:
            return "".join(f"{m['content']}\n" for m in messages)
        options = self.options | ({"tools": tools} if tools else {})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

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


class LanguagePolicy:
    """Samples answers from one snapshot of an adapter, or from the bare base (None)."""

    def __init__(
        self,
        name: str,
        sampler: Samples,
        encoder: ChatEncoder,
        sampling: Sampling,
        adapter: Snapshot | None = None,
        *,
        system: str | None = None,
        memory: Memory = "none",
    ) -> None:
        self.name, self.sampler, self.encoder, self.sampling = name, sampler, encoder, sampling
        self.adapter, self.system, self.memory = adapter, system, memory

    async def act(self, query: Query) -> list[Answer]:
        """Returns `query.n` answers, each with its token ids and log-probabilities."""
        prompt_ids = self.prompt(query)
        keep = self.memory == "conversation" or isinstance(query.observation, Chat)
        request = Request(prompt_ids, query.n, self.sampling, self.adapter, query.seed, keep)
        sampled = await self.sampler.sample(request)
        return [
            Answer(
                text=text,
                policy=self.name,
                prompt_ids=prompt_ids,
                token_ids=s.token_ids,
                logprobs=s.logprobs,
                stop=s.stop,
                temperature=self.sampling.temperature,
            )
            for s, text in zip(sampled, self.texts(sampled), strict=True)
        ]

    def texts(self, sampled: Sequence[Sampled]) -> list[str]:
        """Decodes completions to text, without end tokens and stop strings."""
        texts = self.encoder.tokenizer.batch_decode([s.token_ids for s in sampled], skip_special_tokens=True)
        return [_before_stop(text, self.sampling.stop) for text in texts]

    def sampling_with(self, changes: dict[str, Any]) -> LanguagePolicy:
        """Returns this policy with some sampling parameters changed, for example for evaluation. Raises a validation
        error (a ValueError) if they are invalid."""
        sampling = Sampling.model_validate(self.sampling.model_dump() | changes)
        return LanguagePolicy(
            self.name, self.sampler, self.encoder, sampling, self.adapter, system=self.system, memory=self.memory
        )

    def prompt(self, query: Query) -> np.ndarray:
        """Returns the prompt's token ids [P] int32. A conversation that continues one of this seat's earlier answers
        begins with the exact tokens of that answer and its prompt."""
        if isinstance(query.observation, Chat):
            for seen, said in reversed(query.history):
                new = goes_on(query.observation, seen, said.text) if isinstance(seen, Chat) else None
                if new and len(said.token_ids):
                    return self.encoder.next(said.prompt_ids, said.token_ids, new)
            return self.encoder.whole(query.observation, self.system)
        if self.memory == "none" or not query.history:
            return self.encoder.first(query, self.system)
        last = query.history[-1][1]
        asked = {"role": "user", "content": str(query.observation)}
        return self.encoder.next(last.prompt_ids, last.token_ids, [asked])

    def quote(self, query: Query, text: str) -> Answer:
        """Returns `text` as an answer of this policy with token ids, for imitation; its log-probabilities are zero."""
        end = self.encoder.tokenizer.eos_token or ""
        ids = np.array(self.encoder.tokenizer.encode(text + end, add_special_tokens=False), np.int32)
        return Answer(text, self.name, self.prompt(query), ids, np.zeros(len(ids), np.float32))


class TaughtPolicy:
    """Records a teacher's answers with the student's tokens, as demonstrations for SFT."""

    def __init__(self, student: LanguagePolicy, teacher: Any) -> None:
        self.name, self._student, self._teacher = student.name, student, teacher

    async def act(self, query: Query) -> list[Answer]:
        """Returns the teacher's answers, encoded by the student."""
        return [self._student.quote(query, answer.text) for answer in await self._teacher.act(query)]


def _frozen(messages: Sequence[Any]) -> str:
    """Returns a hashable cache key."""
    return json.dumps(list(messages))


def _before_stop(text: str, stops: tuple[str, ...]) -> str:
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text
