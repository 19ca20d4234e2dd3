"""Envs of an OpenEnv server, which is a process made with OpenEnv, through palestra's adapter."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.envs import check_env
from palestra.envs.adapters.openenv import OpenEnv

pytestmark = pytest.mark.peers
SERVER = Path(__file__).with_name("openenv_server.py")


def serve(sessions: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), str(port), str(sessions)]) as process:
        try:
            _wait(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server has ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from serve(8)


@pytest.fixture(scope="module")
def narrow_url() -> Iterator[str]:
    """A server that holds one session at a time."""
    yield from serve(1)


def play_game(env: OpenEnv, *answers: str, seed: int = 3) -> list[Any]:
    """The steps of a game with these answers."""

    async def play() -> list[Any]:
        steps = [await env.reset(seed)]
        try:
            for answer in answers:
                steps.append(await env.step({"agent": answer}))
        finally:
            await env.close()
        return steps

    return asyncio.run(play())


def secret_number(url: str, seed: int) -> int:
    """The number that the server has drawn."""
    (right,) = [n for n in range(1, 10) if play_game(OpenEnv(url=url), str(n), seed=seed)[-1].done]
    return right


@pytest.mark.parametrize("reward", ["dense", "outcome"])
def test_env_passes_the_env_check(url: str, reward: Any) -> None:
    env = lambda: OpenEnv(url=url, max_steps=12, reward=reward)  # noqa: E731
    check_env(env, seeds=range(2), act=lambda seat, seen, rng: rng.choice([str(rng.randint(1, 9)), '{"x": 1}']))


def test_a_game_is_played(url: str) -> None:
    right = secret_number(url, 3)
    wrong = 1 if right > 1 else 2
    first, hint, last = play_game(OpenEnv(url=url, show=["text"]), f"I try.\n#### {wrong}", f'{{"message": "{right}"}}')
    assert first.observations == {"agent": "guess 1 to 9"}
    assert hint.observations == {"agent": "more" if wrong < right else "less"}
    terms = {"reward_terms": {"agent": {"server": 0.01, "form": 0.0}}}
    assert hint.rewards == {"agent": 0.01} and hint.info == {"success": False, "invalid": {"agent": False}} | terms
    assert last.done and not last.truncated and last.rewards == {"agent": 1.0} and last.info["success"]
    whole = play_game(OpenEnv(url=url), str(wrong))[1]
    assert whole.observations["agent"].splitlines()[1:] == ["guesses: 1"]


def test_rewards_may_be_paid_at_the_end(url: str) -> None:
    right = secret_number(url, 3)
    wrong = 1 if right > 1 else 2
    steps = play_game(OpenEnv(url=url, reward="outcome"), str(wrong), str(wrong), str(right))
    assert [step.rewards["agent"] for step in steps] == [0, 0, 0, pytest.approx(1.02)]
    cut = play_game(OpenEnv(url=url, reward="outcome", max_steps=2), str(wrong), str(wrong))[-1]
    assert cut.truncated and cut.rewards == {"agent": pytest.approx(0.02)} and not cut.info["success"]


def test_invalid_actions_are_refused(url: str) -> None:
    _, long, odd, fine = play_game(OpenEnv(url=url, show=["text"]), "9" * 30, '{"guess": 4}', "0")
    assert long.rewards == {"agent": -0.1} and long.info["invalid"] == {"agent": True}
    assert long.info["reward_terms"] == {"agent": {"server": 0.0, "form": -0.1}}
    assert long.observations["agent"].startswith("guess 1 to 9\nYour action was refused: message: String should have")
    assert "guess: Extra inputs are not permitted" in odd.observations["agent"]
    assert fine.info["invalid"] == {"agent": False} and fine.observations == {"agent": "more"}


def test_reset_options_reach_the_env(url: str) -> None:
    assert play_game(OpenEnv(url=url, reset={"most": 50}, show=["text"]))[0].observations == {"agent": "guess 1 to 50"}


def test_failed_or_silent_server_fails_the_episode(url: str) -> None:
    with pytest.raises(RuntimeError, match=r"failed at a step with EXECUTION_ERROR.*the server's own fault"):
        play_game(OpenEnv(url=url), "crash")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not answer a step for 0\.5 s"):
        play_game(OpenEnv(url=url, timeout=0.5), "sleep")
    assert time.monotonic() - start < 2.5


def test_nondeterministic_game_is_not_forked(url: str) -> None:
    async def fork() -> None:
        env = OpenEnv(url=url, reset={"wild": True})
        await env.reset(0)
        try:
            await env.fork()
        finally:
            await env.close()

    with pytest.raises(ValueError, match="cannot be forked"):
        asyncio.run(fork())


def test_sessions_are_released_on_close(narrow_url: str) -> None:
    """A closed game's place is free at once; this server allows only one game at a time."""
    env = OpenEnv(url=narrow_url)
    seen = [play_game(env, "1", seed=seed)[1].observations for seed in (1, 1, 1)]
    assert seen[0] == seen[1] == seen[2]

    async def two() -> None:
        first, second = OpenEnv(url=narrow_url), OpenEnv(url=narrow_url)
        await first.reset(0)
        try:
            await second.reset(0)
        finally:
            await second.close()
            await first.close()

    with pytest.raises(RuntimeError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
        asyncio.run(two())


def test_unreachable_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match="no OpenEnv server answers"):
        play_game(OpenEnv(url=f"http://127.0.0.1:{port}"))
    with pytest.raises(ValueError, match="not an address of a server"):
        OpenEnv(url="localhost:8000")
    with pytest.raises(ValueError, match="timeout=0"):
        OpenEnv(url="http://localhost:8000", timeout=0)
