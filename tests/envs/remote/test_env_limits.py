"""Limits of an env server: no client harms it or other clients, and it always stops."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from helpers import raw
from helpers.env_servers import EnvServer, count_sessions, serving, wait_for_value, wait_until_closed

from palestra.envs.remote import MAX_REQUEST_BYTES, MAX_REQUESTS_PER_MESSAGE, SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.remote_env import make_env
from palestra.envs.remote.serialization import MAX_KEYS, encode_mapping, encode_value, read_value

TOYS = "plan_path,helpers.remote_toys:Count,helpers.remote_toys:Waits,helpers.remote_toys:Hangs"
COUNT = "helpers.remote_toys:Count"


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with serving(TOYS) as server:
        yield server


def ask(address: str, *requests: pb.Request, client: str = "test", timeout: float = 10.0) -> list[pb.Reply]:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        batch = channel.unary_unary(f"/{SERVICE}/Batch", pb.Requests.SerializeToString, pb.Replies.FromString)
        reply = batch(pb.Requests(requests=requests), timeout=timeout, metadata=(("client", client),))
        return list(reply.replies)


def open_request(session: int, seed: pb.Value | None = None, type: str = COUNT, **options: object) -> pb.Request:
    kind = pb.Kind(type=type, options=encode_mapping(options))
    return pb.Request(id=session, session=session, open=pb.Open(kind=kind, seed=seed or encode_value(session)))


def close_request(session: int) -> pb.Request:
    return pb.Request(session=session, close=pb.Close())


def step_request(session: int, word: object) -> pb.Request:
    return pb.Request(id=session, session=session, step=encode_mapping({"a": word}))


def fault_of(address: str, *requests: pb.Request) -> pb.Fault:
    began = time.monotonic()
    reply = ask(address, *requests)[-1]
    assert time.monotonic() - began < 5
    return reply.fault


@pytest.mark.parametrize(
    "seed",
    [
        pb.Value(long=b"\x7f" * 10 * 2**20),
        pb.Value(long=b"\x7f" * 100 * 2**10),
        pb.Value(long=b"\x7f" * 9),
        pb.Value(long=b"\xff" * 7 + b"\x7f\x80"),
        pb.Value(text="7"),
        pb.Value(truth=True),
        pb.Value(real=1.0),
        pb.Value(),
    ],
    ids=lambda seed: f"{seed.WhichOneof('kind')}-{seed.ByteSize()}",
)
def test_seeds_beyond_64_bits_are_refused(server: EnvServer, seed: pb.Value) -> None:
    """A generator needs time quadratic in the length of its seed: 20 MB took 20 minutes."""
    fault = fault_of(server.address, open_request(1, seed, "plan_path"))
    assert fault.why == pb.Fault.REFUSED and "64 bits" in fault.message
    assert count_sessions(server.address) == 0


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_every_64_bit_seed_is_accepted(server: EnvServer, seed: int) -> None:
    (reply,) = ask(server.address, open_request(1, encode_value(seed)))
    assert reply.HasField("opened")
    ask(server.address, close_request(1))


def test_values_are_limited_in_size(server: EnvServer) -> None:
    twins = pb.Value(set=pb.Items(items=[pb.Value(integer=n) for n in range(MAX_KEYS + 1)]))
    for value, message in [
        (pb.Value(long=b"\x7f" * 2000), "an integer of 2,000 bytes"),
        (twins, "16,384 are the most"),
    ]:
        step = pb.Request(id=1, session=1, step=pb.Pairs(pairs=[pb.Pair(name="a", value=value)]))
        assert message in fault_of(server.address, open_request(1), step).message
        ask(server.address, close_request(1))
    with pytest.raises(ValueError, match="are not an array"):
        read_value(pb.Value(array=pb.Array(dtype="S0", shape=[10**9])))
    assert "are the most" in fault_of(server.address, open_request(1, to="x" * 300_000)).message


def test_messages_are_limited_in_size(server: EnvServer) -> None:
    for requests in (
        [step_request(1, "x" * (MAX_REQUEST_BYTES + 2**20))],
        [step_request(1, "x")] * (MAX_REQUESTS_PER_MESSAGE + 1),
    ):
        with pytest.raises(grpc.RpcError) as error:
            ask(server.address, *requests)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_client_messages_stay_within_the_limit(server: EnvServer) -> None:
    """However many requests are made while one message is being written."""

    async def games() -> None:
        envs = [make_env(type=COUNT, at=[server.address]) for _ in range(20)]
        await asyncio.gather(*(env.reset(i) for i, env in enumerate(envs)))
        word = "x" * 2**20
        steps = await asyncio.gather(*(env.step({"a": word}) for env in envs))
        assert all(step.info["heard"] == {"a": word} for step in steps)
        with pytest.raises(ValueError, match="exceeds the limit of 16,777,216"):
            await envs[0].step({"b": "x" * (MAX_REQUEST_BYTES + 1)})

    asyncio.run(games())
    wait_until_closed(server.address)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /palestra.remote.Envs/Ask HTTP/1.1\r\nHost: evil.example\r\nOrigin: https://evil.example\r\n"
        b"Content-Type: text/plain\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n\r\n",
        b"OPTIONS /palestra.remote.Envs/Ask HTTP/1.1\r\nHost: x\r\nOrigin: https://evil.example\r\n\r\n",
    ],
    ids=["simple post", "upgrade", "preflight"],
)
def test_browser_requests_are_not_answered(server: EnvServer, sent: bytes) -> None:
    heard = b""
    with raw.connected(f"http://{server.address}") as wire, contextlib.suppress(ConnectionError):
        wire.sendall(sent)
        while piece := wire.recv(2**16):
            heard += piece
    assert b"HTTP/1.1 2" not in heard and b"HTTP/1.1 101" not in heard


# ---- sessions


@pytest.mark.slow
def test_sessions_are_limited_and_expire() -> None:
    with serving(TOYS, "--sessions", 4, "--idle", 1, "--lease", 2) as server:
        replies = ask(server.address, *(open_request(n) for n in (1, 2, 3)))
        assert [reply.HasField("opened") for reply in replies] == [True, True, False]
        assert "this client has 2 sessions open" in replies[2].fault.message
        ask(server.address, open_request(1), open_request(2), client="another")
        (reply,) = ask(server.address, open_request(1), client="a third")
        assert reply.fault.why == pb.Fault.REFUSED and "4 sessions open, the maximum" in reply.fault.message
        wait_for_value(lambda: count_sessions(server.address), 0)

        async def game():
            """A game that continues after its session has expired: the session is replayed."""
            env = make_env(type=COUNT, at=[server.address])
            await env.reset(1)
            await asyncio.to_thread(wait_for_value, lambda: count_sessions(server.address), 0)
            return await env.step({"a": "x"})

        assert asyncio.run(game()).info == {"heard": {"a": "x"}}


@pytest.mark.slow
def test_env_call_over_its_time_limit_is_given_up() -> None:
    with serving(TOYS, "--limit", 2) as server:

        async def game() -> None:
            slow = make_env(type="helpers.remote_toys:Waits", at=[server.address])
            await slow.reset(0)
            with pytest.raises(TimeoutError, match="took over 2 s"):
                await slow.step({"a": "8"})

        asyncio.run(game())
        ask(server.address, open_request(1, type="helpers.remote_toys:Hangs"))
        with pytest.raises(grpc.RpcError):
            ask(server.address, step_request(1, "hang"), timeout=30)
        wait_for_value(lambda: plays(server), True, seconds=60)  # by another worker
        assert "an env worker hung" in server.stop()


def plays(server: EnvServer) -> bool:
    try:
        return ask(server.address, open_request(1), client="new", timeout=1)[0].HasField("opened")
    except grpc.RpcError:
        return False


# ---- shutdown


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_all_processes_lets_sessions_finish(number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to the workers too, and a service manager SIGTERM."""
    server = EnvServer(TOYS, "--grace", 30)
    ask(server.address, open_request(1))
    for pid in [*children(server.process.pid), server.process.pid]:
        os.kill(pid, number)
    time.sleep(1)
    assert ask(server.address, step_request(1, "x"))[0].HasField("step")
    ask(server.address, close_request(1))
    out, _ = server.process.communicate(timeout=20)
    assert server.process.returncode == 0, out


def hung() -> EnvServer:
    """A server whose worker does not react any more."""
    server = EnvServer(TOYS, "--grace", 1)
    ask(server.address, open_request(1, type="helpers.remote_toys:Hangs"))
    with pytest.raises(grpc.RpcError):
        ask(server.address, step_request(1, "hang"), timeout=1)
    return server


@pytest.mark.slow
def test_hung_server_ends_after_its_grace_period() -> None:
    server = hung()
    server.process.terminate()
    out, _ = server.process.communicate(timeout=30)
    assert server.process.returncode == 1 and "1 env workers had not ended" in out


@pytest.mark.slow
def test_second_signal_exits_at_once() -> None:
    server = hung()
    server.process.terminate()
    time.sleep(0.3)
    server.process.terminate()
    server.process.communicate(timeout=3)
    assert server.process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_server_that_was_suspended_keeps_its_workers() -> None:
    """For longer than a worker may be silent; its processes go on one after the other."""
    with serving(TOYS, "--limit", 5, "--workers", 2) as server:
        first = psutil.Process(server.process.pid)
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            process.suspend()
        time.sleep(8)
        for process in processes:
            process.resume()
            time.sleep(0.1)
        assert plays(server)
        assert "hung" not in server.stop()


@pytest.mark.slow
def test_hung_worker_dies_with_its_server() -> None:
    server = hung()
    server.kill()
    wait_for_value(lambda: listens(server), False)


def listens(server: EnvServer) -> bool:
    try:
        raw.connected(f"http://{server.address}").close()
    except ConnectionError:
        return False
    return True
