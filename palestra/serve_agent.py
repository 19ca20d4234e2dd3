"""Trained agents behind an endpoint that speaks OpenAI's chat completions, one resident base for all that share it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from palestra.agents import Agent, load_policy
from palestra.chat import Chat, with_system
from palestra.config import validate
from palestra.engine.sampler import Sampling
from palestra.engines import Engines
from palestra.policies.base import Query
from palestra.policies.lm import ChatEncoder, LanguagePolicy
from palestra.web.endpoint import ANYBODY, Asked, Said, Server, Session

REMEMBERED = 256  # prompts whose tokens are kept: those who ask here need not be few


def serve_agents(
    agents: Sequence[Agent], host: str, port: int, key: str | None, device: str, say: Callable[[str], None]
) -> None:
    """Answers calls until SIGTERM or Ctrl-C, then those under way. `key` (None: any) is asked of every caller.

    Raises ValueError where two agents have one name, an agent is a network, or the address is taken.
    """
    names = [agent.name for agent in agents]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two agents are called {twice}: serve them at two ports")
    engines = Engines(device, max_rows=64)
    desks = {agent.name: Desk(agent, engines) for agent in agents}
    asyncio.run(_serve(desks, host, port, key, say))


async def _serve(desks: dict[str, Desk], host: str, port: int, key: str | None, say: Callable[[str], None]) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    server = Server(host, port)

    def deliver(asked: Asked) -> None:  # on the server's thread; the policies live on this one
        _passed_on(asyncio.run_coroutine_threadsafe(desks[asked.model].answer(asked), loop), asked.answer)

    Session(list(desks), deliver, server=server, key=key or ANYBODY)
    say(f"{', '.join(desk.agent.versioned for desk in desks.values())} at {server.url}")
    await over.wait()
    await asyncio.to_thread(server.close)


def _passed_on(source: Future[Said], to: Future[str | Said]) -> None:
    """What comes of `source` becomes of `to`, unless nobody waits for that any more."""

    def done(source: Future[Said]) -> None:
        if to.cancelled() or source.cancelled():
            return
        error = source.exception()
        to.set_exception(error) if error else to.set_result(source.result())

    source.add_done_callback(done)
    to.add_done_callback(lambda to: source.cancel() if to.cancelled() else None)


class Desk:
    """Where one agent is asked. It speaks as it was trained to, unless the caller says otherwise."""

    def __init__(self, agent: Agent, engines: Engines) -> None:
        self.agent = agent
        self.policy = load_policy(agent, engines)
        encoder = self.policy.encoder
        self.policy.encoder = ChatEncoder(encoder.tokenizer, encoder.options, remember=REMEMBERED)

    async def answer(self, asked: Asked) -> Said:
        """Raises ValueError for settings that no policy can follow, and a conversation that is too long."""
        policy = self._as_asked(asked.settings)
        seed = asked.settings.get("seed", secrets.randbits(63))
        if not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, not {seed!r}")
        (answer,) = await policy.act(Query("", self._framed(asked.chat), seed=seed))
        tokens = (len(answer.prompt_ids), len(answer.token_ids))
        return Said(answer.text, answer.stop == "length", tokens)

    def _framed(self, chat: Chat) -> Chat:
        """The conversation, with the role that the agent was trained in where it says nothing of one."""
        if chat.messages[0].get("role") == "system" or not self.agent.role:
            return chat
        return Chat(tuple(with_system(chat.messages, self.agent.role)), chat.tools)

    def _as_asked(self, settings: dict[str, Any]) -> LanguagePolicy:
        changes = {key: value for key, value in settings.items() if key in ("temperature", "top_p", "max_tokens")}
        if "max_completion_tokens" in settings:
            changes["max_tokens"] = settings["max_completion_tokens"]
        if "stop" in settings:
            stop = settings["stop"]
            changes["stop"] = [stop] if isinstance(stop, str) else stop
        validate(Sampling, changes)
        return self.policy.sampling_with(changes) if changes else self.policy


def read_key(variable: str | None, file: Path | None) -> str | None:
    """The key that callers must know: of an environment variable, or the first line of a file; None: any will do.

    Raises ValueError where it is to be read and there is none.
    """
    if variable and file:
        raise ValueError("the key is read from one place: say --key-env or --key-file")
    key = os.environ.get(variable, "") if variable else ""
    if file:
        with contextlib.suppress(OSError, IndexError):
            key = file.read_text(encoding="utf-8").splitlines()[0].strip()
    if (variable or file) and not key.strip():
        raise ValueError(f"there is no key in {f'the variable {variable}' if variable else file}")
    return key.strip() or None
