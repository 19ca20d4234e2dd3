"""Helpers for tests of debates: playing one to its end, and a local endpoint with scripted verdicts."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from palestra.core.types import Step
from palestra.environments.debate.env import Debate

Talk = Callable[[str, Any, Debate], str]  # seat, observation, env -> answer


def expert(seat: str, observation: Any, env: Debate) -> str:
    return env.expert(seat, random.Random(0))


def play(env: Debate, seed: int = 0, **talks: Talk | str) -> tuple[list[Step], dict[str, float]]:
    """All steps of a debate and each seat's return; seats without a talk are played by experts."""
    return asyncio.run(playing(env, seed, **talks))


async def playing(env: Debate, seed: int = 0, **talks: Talk | str) -> tuple[list[Step], dict[str, float]]:
    steps, earned = [env.reset(seed)], dict.fromkeys((*env.seats, "team"), 0.0)
    while not steps[-1].done:
        answers = {
            seat: _said(talks.get(seat, expert), seat, view, env) for seat, view in steps[-1].observations.items()
        }
        steps.append(await env.step(answers))
        for seat, reward in (*steps[-1].rewards.items(), ("team", steps[-1].team_reward)):
            earned[seat] += reward
    return steps, earned


def _said(talk: Talk | str, seat: str, observation: Any, env: Debate) -> str:
    return talk if isinstance(talk, str) else talk(seat, observation, env)


@dataclass
class Reply:
    """The endpoint's reaction to a request: wait (None: until it is shut down), then answer."""

    text: str = '{"winner": "draw"}'
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: float | None = 0.0
    raw: str | None = None  # the whole body, in place of a completion of `text`


class Endpoint(ThreadingHTTPServer):
    """Chat completions by `judge`, which is called with a request's body and its number, counted from 0."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, judge: Callable[[dict[str, Any], int], Reply | str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.judge, self.shut = judge, threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is not the server's error."""


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.counting:
            number = len(self.server.bodies)
            self.server.bodies.append(body | {"path": self.path})
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        reply = self.server.judge(body, number)
        reply = Reply(reply) if isinstance(reply, str) else reply
        if reply.wait is None or reply.wait:
            self.server.shut.wait(reply.wait)
        completion = {"choices": [{"message": {"role": "assistant", "content": reply.text}}]}
        data = (json.dumps(completion) if reply.raw is None else reply.raw).encode()
        self.send_response(reply.status)
        for name, value in (reply.headers | {"content-length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def endpoint(judge: Callable[[dict[str, Any], int], Reply | str]) -> Iterator[Endpoint]:
    server = Endpoint(judge)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shut.set()
        server.shutdown()
        server.server_close()
        thread.join()


def debate_in(body: dict[str, Any]) -> dict[str, Any]:
    """The debate in a request."""
    found: dict[str, Any] = json.loads(body["messages"][1]["content"])
    return found
