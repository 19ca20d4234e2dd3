"""A language model as a policy: the chat template converts an observation to tokens, the sampler generates the answer.

Nothing is tokenised twice. A policy with a history builds a later turn's prompt from the exact token ids of the earlier
prompt and answer, and appends only the tokens of the new observation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from palestra.core.chat import Chat, Json, messages_after, with_system
from palestra.core.failures import ContextLengthExceeded
from palestra.core.types import Answer, Message
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.answers import ReadAnswer
from palestra.engine.conversation.encoder import NO_TOKENS, ChatEncoder
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.policies.base import Query, chat_messages, observation_text, samples_on_cpu
from palestra.text.policies.context import ContextConfig
from palestra.text.policies.thinking_budget import first_part, join_parts, second_part

HistoryMode = Literal["none", "conversation"]


class SamplerProtocol(Protocol):
    """Protocol of a sampler, in this process (engine/sampling/sampler.py) or on a server.

    `engine` is the base in this process (None: it is elsewhere); `has_requests` is True if this process has answers to
    continue.
    """

    @property
    def engine(self) -> Engine | None:
        return None

    @property
    def has_requests(self) -> bool:
        return False

    async def sample(self, request: Request) -> list[Completion]: ...
    def clear_cache(self) -> None: ...

    def replace_adapter(self, old: Snapshot, new: Snapshot, *, recompute: bool) -> int:
        """Has running answers continue with the adapter `new`; returns their number. Servers, which do this by
        themselves, need nothing here."""
        return 0


@dataclass
class _Prefix:
    """A prefix of prompts that a sampler computes, and the number of calls that use it."""

    computed: asyncio.Future[list[Completion]]
    num_users: int = 0


@dataclass(eq=False, repr=False)
class LanguagePolicy:
    """Samples answers from one snapshot of an adapter, or from the bare base (None)."""

    name: str
    sampler: SamplerProtocol
    encoder: ChatEncoder
    sampling: SamplingConfig
    adapter: Snapshot | None = None
    _: KW_ONLY
    system: str | None = None
    history: HistoryMode = "none"
    context: ContextConfig = field(default_factory=ContextConfig)
    _prefixes: dict[bytes, _Prefix] = field(default_factory=dict, init=False)

    @property
    def samples_on_cpu(self) -> bool:
        """True if this process computes the answers, on a CPU."""
        engine = self.sampler.engine
        return engine is not None and engine.device.type == "cpu"

    async def act(self, query: Query, newest: Callable[[], LanguagePolicy] | None = None) -> list[Answer]:
        """Returns `query.n` answers, each with its token ids and log-probabilities.

        `newest` returns the policy that plays at the time of the call (None: this one): weights may change while the
        conversation is rewritten, and while a prefix is computed.
        """
        newest = newest or (lambda: self)
        prompt_ids = await self._fitting_prompt(query)
        seen = query.observation
        shared_ids = NO_TOKENS
        if isinstance(seen, Chat) and seen.num_shared:
            shared_ids = self.encoder.encode_shared(self._cut_results(seen), self.system)
        # keys and values of a conversation are kept for its next turn, unless a shared prefix has most of them
        keep = self.history == "conversation" or (isinstance(seen, Chat) and not len(shared_ids))
        async with newest()._cached_prefix(shared_ids):
            current = newest()  # weights may have changed while the prefix was computed
            choices = current.choices(query)
            request = Request(prompt_ids, query.n, current.sampling, current.adapter, query.seed, keep, choices=choices)
            sampled = await current.sample(request, newest)
        return current._answers(prompt_ids, sampled, seen.tools if isinstance(seen, Chat) else ())

    def choices(self, query: Query) -> tuple[tuple[int, ...], ...]:
        """Returns the only answers that may be sampled, as token ids: with `sampling.legal_only` the legal actions,
        each as the chat template writes it and with its end token, else (). Raises ValueError if the env lists
        none."""
        if not self.sampling.legal_only:
            return ()
        if not query.legal_actions:
            raise ValueError(
                f"policy {self.name} has sampling.legal_only: true, and the env lists no legal actions with an "
                "observation: leave it out"
            )
        words = [str(action) for action in query.legal_actions]
        return self.encoder.encode_choices(self._conversation(query), words)

    async def sample(self, request: Request, newest: Callable[[], LanguagePolicy] | None = None) -> list[Completion]:
        """Returns the completions of a request, whose thoughts end within its `thinking_token_budget`; `newest` as in
        `act`. A budget that leaves no token to the answer has no effect."""
        budget = request.sampling.thinking_token_budget
        most = request.sampling.max_tokens
        if budget is None or budget + len(self.encoder.thought_end_ids) >= most:
            return await self.sampler.sample(request)
        begun = await self.sampler.sample(first_part(request))
        rest = (self._finish(request, k, first, newest or (lambda: self)) for k, first in enumerate(begun))
        return list(await asyncio.gather(*rest))

    async def _finish(
        self, request: Request, sibling: int, first: Completion, newest: Callable[[], LanguagePolicy]
    ) -> Completion:
        """Returns the completion that begins with the part `first`, which ends its thought if it has not done so."""
        if first.stop_reason != "length":
            return first
        forced = self.encoder.missing_thought_end(first.token_ids, request.prompt_ids)
        current = newest()
        rest = replace(second_part(request, sibling, first, forced), adapter=current.adapter)
        (second,) = await current.sampler.sample(rest)
        first = replace(first, adapters=first.adapters or ((0, self.name),))
        second = replace(second, adapters=second.adapters or ((0, current.name),))
        return join_parts(len(request.prompt_ids), first, forced, second)

    def _answers(
        self, prompt_ids: np.ndarray, sampled: Sequence[Completion], tools: Sequence[Json] = ()
    ) -> list[Answer]:
        """Returns the sampled completions of a prompt [P] as answers of this policy."""
        answers = []
        for completion in sampled:
            read = self.read(completion, prompt_ids, tools)
            answer = Answer(
                text=read.text,
                thought=read.thought,
                policy=self.name,
                prompt_ids=prompt_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                stop_reason=completion.stop_reason,
                temperature=self.sampling.temperature,
                versions=token_versions(completion, self.name),
                sampling_mask=completion.sampling_mask,
                routed_experts=completion.routed_experts,
            )
            answers.append(answer)
        return answers

    def read(self, sampled: Completion, prompt_ids: np.ndarray, tools: Sequence[Json] = ()) -> ReadAnswer:
        """Returns text and thought of a completion to a prompt [P], without end tokens and stop strings."""
        read = self.encoder.read(sampled.token_ids, prompt_ids, tools)
        return replace(read, text=_cut_at_stop(read.text, self.sampling.stop))

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

    def with_sampling(self, changes: dict[str, Any]) -> LanguagePolicy:
        """Returns this policy with some sampling parameters changed, for example for evaluation. Raises a validation
        error (a ValueError) if they are invalid."""
        return replace(self, sampling=SamplingConfig.model_validate(self.sampling.model_dump() | changes))

    async def _fitting_prompt(self, query: Query) -> np.ndarray:
        """Returns the prompt's token ids [P] int32. A conversation with more than `context.max_tokens` tokens is
        rewritten first. Raises ContextLengthExceeded if it then still has more."""
        ids = self.encode_prompt(query)
        limit = self.context.max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        conversation = self._conversation(query)

        def encode(messages: Sequence[Message]) -> np.ndarray:
            return self.encoder.encode_conversation(Chat(tuple(messages), conversation.tools))

        rewritten = encode(await self.context.rewrite(conversation.messages, lambda messages: len(encode(messages))))
        if len(rewritten) > limit:
            raise ContextLengthExceeded(
                f"a conversation of {len(ids)} tokens was rewritten to {len(rewritten)} by context.compress: "
                f"{self.context.compress}, and context.max_tokens is {limit}: raise it, or shorten the observations"
            )
        return rewritten

    def _conversation(self, query: Query) -> Chat:
        """Returns the conversation that the policy sees: its own system message, and long results of tools cut."""
        seen = query.observation
        if not isinstance(seen, Chat):
            known = query if self.history == "conversation" else replace(query, history=())
            return Chat(tuple(chat_messages(known, self.system, thoughts=True)))
        seen = self._cut_results(_with_thoughts(seen, query.history))
        return seen if self.system is None else replace(seen, messages=tuple(with_system(seen.messages, self.system)))

    def _cut_results(self, seen: Chat) -> Chat:
        messages = self.encoder.cut_results(seen.messages, self.context.max_tool_tokens)
        return replace(seen, messages=tuple(messages))

    def encode_prompt(self, query: Query) -> np.ndarray:
        """Returns the prompt's token ids [P] int32. A conversation that continues one of this seat's earlier answers
        begins with the exact tokens of that answer and its prompt."""
        last, new = self._last_answer(query)
        if last is None:
            return self.encoder.encode_conversation(self._conversation(query))
        seen, answer = query.history[last]
        earlier = self._conversation(replace(query, observation=seen, history=query.history[:last]))
        new = self.encoder.cut_results(new, self.context.max_tool_tokens)
        return self.encoder.encode_next_turn(earlier, answer, new)

    def _last_answer(self, query: Query) -> tuple[int | None, Sequence[Message]]:
        """Returns the index in the history of the answer that the observation continues, and the messages since; None
        if it continues no answer with tokens."""
        seen = query.observation
        if isinstance(seen, Chat):
            for i in reversed(range(len(query.history))):
                before, answer = query.history[i]
                new = messages_after(seen, before, answer.text) if isinstance(before, Chat) else None
                if new and len(answer.token_ids):
                    return i, new
        elif self.history == "conversation" and query.history:
            return len(query.history) - 1, [{"role": "user", "content": observation_text(seen)}]
        return None, ()

    def encode_demonstration(self, query: Query, text: str, stop_reason: str = "stop", thought: str = "") -> Answer:
        """Returns `text` after a `thought` as an answer of this policy with token ids, for imitation; its
        log-probabilities are zero. It is written as the chat template writes it. An answer that was cut at its token
        limit (`stop_reason` "length") gets no end token."""
        conversation = self._conversation(query)
        ends = stop_reason != "length"
        answer = self.encoder.part_demonstration(text, thought, ends=ends)
        ids = self.encoder.encode_answer(conversation, answer.text, answer.thought, ends=ends)
        prompt = self.encode_prompt(query)
        zeros = np.zeros(len(ids), np.float32)
        return Answer(answer.text, self.name, prompt, ids, zeros, stop_reason, thought=answer.thought)


def _with_thoughts(conversation: Chat, history: Sequence[tuple[Any, Answer]]) -> Chat:
    """Returns a conversation in which this seat's earlier answers have their thoughts."""
    if not any(answer.thought for _, answer in history):
        return conversation
    messages = list(conversation.messages)
    for seen, answer in history:
        at = len(seen.messages) if isinstance(seen, Chat) else -1
        if answer.thought and 0 <= at < len(messages) and messages[at]["role"] == "assistant":
            messages[at] = messages[at] | {"reasoning_content": answer.thought}
    return replace(conversation, messages=tuple(messages))


@dataclass(kw_only=True)
class Demonstration(Answer):
    """A teacher's answer with the student's tokens, and the `original` with the teacher's own."""

    original: Answer


class DemonstrationPolicy:
    """Records a teacher's answers with the student's tokens, as demonstrations for SFT. In a conversation the teacher
    reads its own earlier prompts and answers: its tokenizer, template and system prompt may differ. A student whose
    chat template shows no thoughts is shown the teacher's answers without them."""

    def __init__(self, student: LanguagePolicy, teacher: Any) -> None:
        self.name = student.name
        self._student = student
        self._teacher = teacher

    @property
    def samples_on_cpu(self) -> bool:
        """True if this process computes the teacher's answers, on a CPU."""
        return samples_on_cpu(self._teacher)

    async def act(self, query: Query) -> list[Answer]:
        """Returns the teacher's answers, encoded by the student."""
        past = [
            (seen, answer.original if isinstance(answer, Demonstration) else answer) for seen, answer in query.history
        ]
        return [self._encode(query, answer) for answer in await self._teacher.act(replace(query, history=tuple(past)))]

    def _encode(self, query: Query, answer: Answer) -> Demonstration:
        thought = answer.thought if self._student.encoder.form.thought else ""
        taught = self._student.encode_demonstration(query, answer.text, answer.stop_reason, thought)
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


def _cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text
