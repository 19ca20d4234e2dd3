"""A server that replies something else than was asked for: the episode fails by the server's address, and is never one
that is over with no reward."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from palestra.core.types import Episode
from palestra.envs.remote import PROTOCOL_VERSION, SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.remote_env import env_factory
from palestra.envs.remote.serialization import encode_mapping
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

Reply = Callable[[pb.Reply], None]


def first_step() -> pb.Step:
    return pb.Step(observations=encode_mapping({"a": "your move"}), rewards=encode_mapping({"a": 0.0}))


def last_step() -> pb.Step:
    return pb.Step(observations=pb.Pairs(), rewards=encode_mapping({"a": 1.0}))


def opens(reply: pb.Reply) -> None:
    reply.opened.steps.append(first_step())


def ends(reply: pb.Reply) -> None:
    reply.step.CopyFrom(last_step())


def loses(reply: pb.Reply) -> None:
    reply.fault.why = pb.Fault.UNKNOWN


def pays_twice(reply: pb.Reply) -> None:
    ends(reply)
    reply.step.rewards.pairs.append(encode_mapping({"a": 9.0}).pairs[0])


def says(reply: pb.Reply) -> None:
    reply.said.answer.text = "x"


class Server:
    """A server whose replies are made by `open` and `step`."""

    def __init__(self) -> None:
        self.open: Reply = opens
        self.step: Reply = ends
        self.loop = asyncio.new_event_loop()
        self.is_open = threading.Event()
        threading.Thread(target=self.loop.run_until_complete, args=[self._serve()], daemon=True).start()
        assert self.is_open.wait(20)

    async def _serve(self) -> None:
        self.stopped = asyncio.Event()
        server = grpc.aio.server()
        describe = grpc.unary_unary_rpc_method_handler(
            self._describe, pb.Kind.FromString, pb.Description.SerializeToString
        )
        play = grpc.stream_stream_rpc_method_handler(self._play, pb.Requests.FromString, pb.Replies.SerializeToString)
        handlers = {"Describe": describe, "Play": play}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self.is_open.set()
        await self.stopped.wait()
        await server.stop(0)

    async def _describe(self, kind: pb.Kind, context: Any) -> pb.Description:
        return pb.Description(seats=["a"])

    async def _play(self, messages: AsyncIterator[pb.Requests], context: Any) -> AsyncIterator[pb.Replies]:
        yield pb.Replies(hello=pb.Hello(protocol=PROTOCOL_VERSION, worker="w", workers=1))
        async for message in messages:
            replies = []
            for request in message.requests:
                if request.id:
                    reply = pb.Reply(id=request.id)
                    {"open": self.open, "step": self.step}[request.WhichOneof("what")](reply)
                    reply.instance.integer = 7
                    replies.append(reply)
            yield pb.Replies(replies=replies)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def play(server: Server) -> Episode:
    runner = EpisodeRunner(env_factory({"type": "math", "at": [server.address]}), "there")
    spec = EpisodeSpec(0, {"a": ScriptedPolicy(lambda query, rng: "x", "script")}, 0)
    return asyncio.run(runner.play(spec, Branching()))


def test_the_server_is_one_that_plays(server: Server) -> None:
    server.open, server.step = opens, ends
    episode = play(server)
    assert episode.error is None and episode.nodes[-1].rewards == {"a": 1.0}


@pytest.mark.parametrize(
    ("open_reply", "step_reply", "fault"),
    [
        (opens, lambda reply: reply.done.SetInParent(), 'replied "done" where "step" was asked for'),
        (opens, says, 'replied "said" where "step"'),
        (opens, opens, 'replied "opened" where "step"'),
        (opens, lambda reply: None, 'replied "nothing" where "step"'),
        (ends, ends, 'replied "step" where "opened"'),
        (lambda reply: reply.opened.SetInParent(), ends, "replied 0 steps for 1"),
        (opens, loses, "replied 1 steps for 2"),  # the replay after the loss
        (opens, pays_twice, "a mapping has one key twice"),
    ],
)
def test_a_reply_of_another_kind_fails_its_episode(
    server: Server, open_reply: Reply, step_reply: Reply, fault: str
) -> None:
    server.open, server.step = open_reply, step_reply
    error = play(server).error or ""
    assert fault in error and (server.address in error or "twice" in error)
