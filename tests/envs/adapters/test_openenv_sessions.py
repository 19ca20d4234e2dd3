"""Sessions of OpenEnv's protocol that palestra opens and closes, with a server of a few lines; peers/test_openenv.py
has OpenEnv's own."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from palestra.envs.adapters.openenv import OpenEnv

Reply = Callable[[int, str], dict[str, Any]]  # from the number of the session and the type of the message


def observation(text: str) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": 0.0, "done": False}}


def failed_replay(session: int, kind: str) -> dict[str, Any]:
    error = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "out of memory"}}
    return error if session == 1 and kind == "step" else observation("again")


def failed_reset(session: int, kind: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": "EXECUTION_ERROR"}} if session == 1 else observation("again")


def other_replay(session: int, kind: str) -> dict[str, Any]:
    return observation(f"session {session}")


def test_fork_replays_long_actions_as_they_were_sent() -> None:
    """An answer is cut to its last 4,000 characters, a replayed action is not."""
    sent: list[list[Any]] = []

    async def answer(socket: ServerConnection) -> None:
        sent.append(own := [])
        async for message in socket:
            request = json.loads(message)
            if request["type"] == "close":
                break
            own.append(request["data"])
            await socket.send(json.dumps(observation("again")))

    async def fork() -> None:
        async with serve(answer, "127.0.0.1", 0) as server:
            env = OpenEnv(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5)
            await env.reset(0)
            await env.step({"agent": "é" * 700})
            await (await env.fork()).close()
            await env.close()

    asyncio.run(fork())
    assert sent[0][1] == {"message": "é" * 700} and sent[1] == sent[0]


@pytest.mark.parametrize("reply", [failed_replay, failed_reset, other_replay])
def test_session_of_a_failed_fork_is_closed(reply: Reply) -> None:
    opened, ended = [], []

    async def answer(socket: ServerConnection) -> None:
        opened.append(number := len(opened))
        async for message in socket:
            kind = json.loads(message)["type"]
            if kind == "close":
                break
            await socket.send(json.dumps(reply(number, kind)))
        ended.append(number)

    async def fork() -> None:
        async with serve(answer, "127.0.0.1", 0) as server:
            env = OpenEnv(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5)
            await env.reset(0)
            await env.step({"agent": "go"})
            with pytest.raises((ValueError, RuntimeError)):
                await env.fork()
            assert (opened, ended) == ([0, 1], [1])
            await env.close()

    asyncio.run(fork())
