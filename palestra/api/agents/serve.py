"""Serves trained agents through OpenAI-compatible chat completions; agents with the same base share one copy of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from palestra.api.agents.trained_agent import TrainedAgent, load_policy
from palestra.core.chat import Chat, Json, to_template_message, with_system
from palestra.core.config import validate
from palestra.core.http.calls import ANY_KEY, ChatCall, ChatReply
from palestra.core.http.chat_server import ChatSession
from palestra.core.http.completions import DRAIN_TIMEOUT_S, HTTP_LIMITS, ChatServer
from palestra.core.http.server import FORCED_EXIT_DELAY_S, on_stop
from palestra.engine.bases.model import Engine
from palestra.engine.sampling.request import Request, max_chars_per_token, max_positions
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.build.engines import Engines
from palestra.text.policies.lm import LanguagePolicy

# An answer that is one of the legal actions has no other end.
AMONG_CHOICES = {
    "legal_only": True,
    "stop": (),
    "stop_token_ids": (),
    "stop_at_eos": True,
    "thinking_token_budget": None,
}
MAX_REQUESTS = 512  # concurrent requests
CACHED_CHATS = 256  # conversations whose tokens are cached
MAX_CACHED_CHARS = 2**16  # longest conversation, in characters, whose tokens are cached
COUNT_CHUNK_CHARS = 2**16  # characters tokenised at once when counting
CHARS_PER_TOKEN = 8  # conversations with more characters per token of the context are first counted chunk by chunk
# Raised by chat templates for unexpected messages.
TEMPLATE_ERRORS = (TemplateError, TypeError, AttributeError, LookupError, RecursionError)
TOKENIZER_THREAD = ThreadPoolExecutor(1, "tokens")  # one thread: tokenisers are not thread-safe


def load_agents(agents: Sequence[TrainedAgent], device: str) -> dict[str, ServedAgent]:
    """Returns the loaded agents by name. Raises ValueError for equal names, or a network."""
    names = [agent.name for agent in agents]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two agents are called {twice}: serve them at two ports")
    engines = Engines(device, max_num_seqs=64)
    return {agent.name: ServedAgent(agent, engines) for agent in agents}


def serve_agents(
    agents: dict[str, ServedAgent],
    host: str,
    port: int,
    api_key: str | None,
    print_line: Callable[[str], None],
    hosts: Sequence[str] = (),
) -> None:
    """Answers requests with `api_key` (None: any) until a stop signal, then those in progress.
    `hosts` are allowed host names on loopback. Raises ValueError if the address is taken."""
    server = ChatServer(host, port, hosts=hosts, limits=replace(HTTP_LIMITS, max_requests=MAX_REQUESTS))
    asyncio.run(_serve(agents, server, api_key, print_line))


async def _serve(
    agents: dict[str, ServedAgent], server: ChatServer, key: str | None, say: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    on_stop(lambda: loop.call_soon_threadsafe(over.set), DRAIN_TIMEOUT_S + FORCED_EXIT_DELAY_S)

    def deliver(asked: ChatCall) -> None:  # runs on the server's thread; policies run on this one
        answering = asyncio.run_coroutine_threadsafe(_answer(agents[asked.model], asked), loop)

        def stop_if_cancelled(answer: Future[str | ChatReply]) -> None:
            if answer.cancelled():
                answering.cancel()

        asked.answer.add_done_callback(stop_if_cancelled)

    ChatSession(list(agents), deliver, server=server, key=key or ANY_KEY)
    say(f"{', '.join(served.agent.versioned_name for served in agents.values())} at {server.url}")
    if legal := [name for name, served in agents.items() if served.is_legal_only]:
        say(f"{', '.join(legal)} chose among legal actions in training, which a request does not list: check answers")
    await over.wait()
    await asyncio.to_thread(server.close)


async def _answer(agent: ServedAgent, asked: ChatCall) -> None:
    """Sets the answer of a call, or the exception."""
    try:
        asked.answer.set_result(await agent.answer(asked))
    except Exception as error:
        if not asked.answer.done():
            asked.answer.set_exception(error)


class ServedAgent:
    """Serves one agent, with the settings it was trained with unless the request overrides them."""

    def __init__(self, agent: TrainedAgent, engines: Engines) -> None:
        self.agent = agent
        trained = load_policy(agent, engines)
        self.is_legal_only = trained.sampling.legal_only
        self.policy = trained.with_sampling({"legal_only": False})  # a conversation does not list legal actions
        encoder = self.policy.encoder
        assert isinstance(self.policy.sampler, Sampler)  # agents are sampled in this process only
        self.context_limit = ContextLimit(encoder.tokenizer, self.policy.sampler.engine)
        self.caching_encoder = encoder.with_cache(CACHED_CHATS)
        self.plain_encoder = encoder.with_cache(0)

    async def answer(self, asked: ChatCall, legal_actions: Sequence[str] = ()) -> ChatReply:
        """Samples one completion, one of the `legal_actions` if there are any. Raises ValueError for invalid sampling
        settings and for a conversation that is too long."""
        policy = self._as_asked(asked.sampling)
        seed = asked.sampling.get("seed", secrets.randbits(63))
        if not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, not {str(seed)[:80]!r}")
        prompt_ids = await self._fitting_prompt(asked.chat)
        choices: tuple[tuple[int, ...], ...] = ()
        if legal_actions:
            policy = policy.with_sampling(AMONG_CHOICES)
            choices = policy.encoder.encode_choices(self._with_role(asked.chat), legal_actions)
        request = Request(prompt_ids, 1, policy.sampling, policy.adapter, seed, keep_kv=True, choices=choices)
        (sampled,) = await policy.sample(request)
        read = policy.read(sampled, prompt_ids, asked.chat.tools)
        counts = (len(prompt_ids), len(sampled.token_ids))
        return ChatReply(read.text, sampled.stop_reason == "length", counts, read.thought)

    async def _fitting_prompt(self, chat: Chat) -> np.ndarray:
        """Returns the prompt tokens [P] of a conversation, rewritten if it exceeds the policy's `context.max_tokens`.
        Raises ValueError if it is too long or the chat template fails."""
        loop = asyncio.get_running_loop()
        context = self.policy.context
        chat, ids = await loop.run_in_executor(TOKENIZER_THREAD, self._encode_call, chat)
        limit = context.max_tokens
        if limit is None or len(ids) <= limit:
            return ids

        def count_tokens(messages: Sequence[Json]) -> int:
            return len(TOKENIZER_THREAD.submit(self._encode, Chat(tuple(messages), chat.tools)).result())

        # on a thread and an event loop of its own: a user's function may compute or wait for long
        messages = await asyncio.to_thread(lambda: asyncio.run(context.rewrite(chat.messages, count_tokens)))
        rewritten = await loop.run_in_executor(TOKENIZER_THREAD, self._encode, Chat(tuple(messages), chat.tools))
        if len(rewritten) > limit:
            raise ValueError(
                f"a conversation of {len(ids):,} tokens was rewritten to {len(rewritten):,}, and the agent's budget "
                f"is {limit:,} (context.max_tokens): shorten its first messages or its last turn"
            )
        return rewritten

    def _encode_call(self, chat: Chat) -> tuple[Chat, np.ndarray]:
        """Returns the conversation as the policy sees it, with its system message and long results of tools cut, and
        its tokens [P]."""
        with _template_errors():
            self.context_limit.check(chat)
            messages: Sequence[Json] = self._with_role(chat).messages
            if self.policy.system is not None:
                messages = with_system(messages, self.policy.system)
            cut = self.plain_encoder.cut_results(messages, self.policy.context.max_tool_tokens)
            seen = Chat(tuple(cut), chat.tools)
        return seen, self._encode(seen)

    def _encode(self, chat: Chat) -> np.ndarray:
        """Returns the prompt tokens [P] of a conversation. Raises ValueError if it is too long or the chat template
        fails."""
        with _template_errors():
            if self.context_limit.check(chat) > MAX_CACHED_CHARS:
                return self.plain_encoder.encode_conversation(chat)
            return self.caching_encoder.encode_conversation(chat)

    def _with_role(self, chat: Chat) -> Chat:
        """Returns the conversation with the agent's role as system message, if it has none."""
        if chat.messages[0].get("role") == "system" or not self.agent.role:
            return chat
        return Chat(tuple(with_system(chat.messages, self.agent.role)), chat.tools)

    def _as_asked(self, settings: dict[str, Any]) -> LanguagePolicy:
        """Returns the policy with the request's sampling settings."""
        same = ("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids")
        changes = {key: value for key, value in settings.items() if key in same}
        if changes.get("top_k") == -1:  # as vLLM spells that there is no limit
            changes["top_k"] = 0
        if "max_completion_tokens" in settings:
            changes["max_tokens"] = settings["max_completion_tokens"]
        if "stop" in settings:
            changes["stop"] = settings["stop"]
            if isinstance(changes["stop"], str):
                changes["stop"] = [changes["stop"]]
        validate(SamplingConfig, changes)
        return self.policy.with_sampling(changes) if changes else self.policy


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Context in which errors of the chat template are raised as ValueErrors."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the agent's chat template cannot show this conversation: {str(error)[:200]}") from None


class ContextLimit:
    """Checks that a conversation fits the base's context. One that is far too long is not tokenised as a whole, which
    would take hundreds of bytes per character."""

    def __init__(self, tokenizer: Any, engine: Engine) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_positions(engine) or 2**20
        self.max_chars = self.max_tokens * max_chars_per_token(tokenizer)

    def check(self, chat: Chat) -> int:
        """Returns the number of characters of a conversation. Raises ValueError if its tokens certainly exceed the
        context; a short conversation is not tokenised here."""
        texts = list(_texts([*map(to_template_message, chat.messages), *chat.tools]))
        size = sum(map(len, texts))
        if size > self.max_chars or len(chat.messages) > self.max_tokens:
            raise self._too_long(f"{size:,} characters in {len(chat.messages)} messages")
        if size > CHARS_PER_TOKEN * self.max_tokens:
            self._count("".join(texts))
        return size

    def _count(self, text: str) -> None:
        """Raises ValueError if `text` has more tokens than the context. Counts chunk by chunk; a chunk border can add a
        few tokens, so `CHARS_PER_TOKEN` are subtracted per chunk."""
        tokens = 0
        for start in range(0, len(text), COUNT_CHUNK_CHARS):
            tokens += (
                len(self.tokenizer.encode(text[start : start + COUNT_CHUNK_CHARS], add_special_tokens=False))
                - CHARS_PER_TOKEN
            )
            if tokens > self.max_tokens:
                raise self._too_long(f"more than {tokens:,} tokens")

    def _too_long(self, what: str) -> ValueError:
        return ValueError(f"a conversation of {what} does not fit the base's context of {self.max_tokens:,} tokens")


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value, including keys."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend([*value.keys(), *value.values()])
        elif isinstance(value, list):
            waiting.extend(value)


def read_api_key(variable: str | None, file: Path | None) -> str | None:
    """Returns the API key from an environment variable or the first line of a file; None (any key
    is accepted) without either. Raises ValueError for both, and for a missing or empty key."""
    if variable and file:
        raise ValueError("pass only one of --key-env and --key-file")
    key = ""
    where = str(file)
    if variable:
        key = os.environ.get(variable, "")
        where = f"the variable {variable}"
    if file:
        with contextlib.suppress(OSError, IndexError):
            key = file.read_text(encoding="utf-8").splitlines()[0].strip()
    if (variable or file) and not key.strip():
        raise ValueError(f"there is no key in {where}")
    return key.strip() or None
