"""Envs on servers in other processes: they pass the env check, and survive lost servers."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.env_servers import count_sessions, describe_env, serving, wait_for_value, wait_until_closed
from helpers.warm_processes import run_palestra
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.core.types import Step
from palestra.envs import check_env
from palestra.envs.remote import SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.address import pop_metrics
from palestra.envs.remote.remote_env import env_factory, make_env
from palestra.envs.remote.serialization import encode_mapping, encode_value, read_step
from palestra.parallel.worker_stats import worker_stats
from palestra.text.policies.scripted import ExpertPolicy, ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

TOYS = ",".join(f"helpers.remote_toys:{name}" for name in ("Count", "Waits", "Fickle", "Deadly", "Sick"))
NAMED = "math,debate,plan_path,text_tic_tac_toe"


@pytest.fixture(scope="module")
def server():
    with serving(f"{NAMED},{TOYS}") as server:
        yield server


@pytest.fixture
def killable():
    """A server that a test may kill."""
    with serving(TOYS) as server:
        yield server


def at(server, kind="helpers.remote_toys:Count", **options):
    return {"type": kind, "at": [server.address], **options}


# ---- the env check


@pytest.mark.parametrize(
    "env",
    [
        {"type": "text_tic_tac_toe"},
        {"type": "plan_path", "size": 5},
        {"type": "debate", "judge": "seat"},
        {"type": "math", "difficulty": 1, "team": "single", "max_turns": 2},
        {"type": "helpers.remote_toys:Waits", "to": 4},
    ],
    ids=lambda env: env["type"],
)
@pytest.mark.few(2)
def test_remote_envs_pass_the_env_check(server, env):
    pop_metrics()
    check_env(env_factory({**env, "at": [server.address]}), seeds=range(2))
    assert pop_metrics()["env_lost"] == 0


def test_remote_env_equals_local_env(server):
    async def game(env):
        steps, rng = [await awaited(env.reset(5))], random.Random(0)
        while not steps[-1].done:
            seats = steps[-1].observations
            actions = {seat: await awaited(env.expert(seat, rng)) for seat in seats}
            steps.append(await awaited(env.step(actions)))
        return steps, rng.random()

    for env in ({"type": "text_tic_tac_toe"}, {"type": "debate"}, {"type": "plan_path", "size": 5}):
        here, there = make_env(**env), make_env(**env, at=server.address)
        assert (here.seats, dict(here.roles)) == (there.seats, there.roles)
        if hasattr(here, "expert"):
            assert asyncio.run(game(here)) == asyncio.run(game(there))
        else:
            assert not hasattr(there, "expert")


async def awaited(result):
    return await result if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize("kind", ["helpers.remote_toys:Count", "helpers.remote_toys:Waits"])
def test_remote_forks_and_experts_work(server, kind):
    expert = ScriptedPolicy(lambda query, rng: ExpertPolicy().act and query.expert(rng), "expert")
    played = []
    pop_metrics()
    for env in (at(server, kind, to=4), at(server, kind, to=4) | {"at": None}):
        arena = EpisodeRunner(env_factory(env), "count")
        seats = {"a": expert, "b": ExpertPolicy("expert")}
        branching = Branching("turn", group_size=3, continue_from="all")
        episode = asyncio.run(arena.play(EpisodeSpec(7, seats, 1), branching))
        assert episode.error is None and len(episode.nodes) == 3 + 9 + 27 + 81
        played.append([(node.id, node.parent, node.observations, node.rewards, node.info) for node in episode.nodes])
    assert played[0] == played[1] and pop_metrics()["env_lost"] == 0
    wait_until_closed(server.address)


def test_remote_env_errors_fail_their_episodes(server):
    async def failing_game(*words):
        env = make_env(**at(server, "helpers.remote_toys:Sick"))
        await env.reset(0)
        for word in words[:-1]:
            await env.step({"a": word})
        with pytest.raises(Exception) as raised:
            await (await env.fork()).step({"a": words[-1]})
        return raised.value

    assert "no such word" in str(asyncio.run(failing_game("fail")))
    odd = asyncio.run(failing_game("odd"))
    assert isinstance(odd, ValueError) and "builtins.object cannot be sent" in str(odd)
    whole = str(asyncio.run(failing_game("whole", "x")))
    assert "could not be forked: ValueError: Sick cannot be copied (cannot pickle 'generator' object): define" in whole


def test_blocking_env_does_not_block_others(server):
    async def run_both():
        slow, fast = make_env(**at(server, "helpers.remote_toys:Waits")), make_env(**at(server))
        await slow.reset(0), await fast.reset(0)
        waits = asyncio.create_task(slow.step({"a": "1.5"}))
        start = time.monotonic()
        for _ in range(3):
            await fast.step({"a": "go"})
        assert time.monotonic() - start < 1 and not waits.done()
        await slow.close()  # the server does not wait for it

    asyncio.run(run_both())
    wait_until_closed(server.address)


# ---- errors


def test_invalid_env_options_are_refused_at_construction(server):
    for env, message in [
        (at(server, "sokoban"), '"sokoban" is not served here: math, debate'),
        (at(server, tow=3), 'no option "tow": did you mean to'),
        (at(server) | {"at": "nowhere.txt"}, "at: nowhere.txt is neither the address"),
        (at(server) | {"at": ["localhost"]}, "'localhost', which is not an address"),
        (at(server) | {"at": {"servers": [server.address], "server_timeut": 3}}, "did you mean server_timeout"),
        (at(server) | {"at": {"servers": ["localhost:1"], "server_timeout": 0.1}}, "no env server described the env"),
    ]:
        with pytest.raises(ValueError, match=message):
            env_factory(env)


def test_invalid_server_options_are_refused():
    for envs, message in [("pong", "plays many games at once"), ("mth", "did you mean"), (",", "names no env")]:
        done = CliRunner().invoke(app, ["serve-envs", "--envs", envs])
        assert done.exit_code == 2 and message in done.stderr


def test_step_before_reset_or_after_close_is_refused(server):
    async def closed_game():
        env = make_env(**at(server))
        await env.reset(0)
        await env.close()
        await env.step({"a": "1"})

    for game in (make_env(**at(server)).step({"a": "1"}), closed_game()):
        with pytest.raises(ValueError, match=r"call reset\(seed\) first"):
            asyncio.run(game)


# ---- lost servers


def test_session_survives_a_server_restart(killable):
    """The server is killed during a game and started again: the game continues unchanged."""

    async def game(env, disturb):
        steps = [await awaited(env.reset(11))]
        while not steps[-1].done:
            steps.append(await awaited(env.step(dict.fromkeys(steps[-1].observations, "x"))))
            if len(steps) == 4:
                await asyncio.to_thread(disturb)
        return steps

    def disturb():
        killable.kill()
        killable.start()

    pop_metrics()
    whole = asyncio.run(game(make_env(type="helpers.remote_toys:Count", to=7), lambda: None))
    assert asyncio.run(game(make_env(**at(killable, to=7)), disturb)) == whole
    metrics = pop_metrics()
    assert (metrics["env_sessions"], metrics["env_lost"], metrics["env_replays"], metrics["env_replayed_steps"]) == (
        1,
        1,
        1,
        4,
    )
    (line,) = (line for line in worker_stats.take_report(0) if line["where"] == killable.address)
    assert (line["done"], line["lost"] >= 1, line["replays"]) == (1, True, 1) and killable.address in line["why"]


@pytest.mark.slow
def test_fork_and_expert_survive_a_server_restart(killable):
    async def game():
        env = make_env(**at(killable, to=5))
        await env.reset(3)
        await env.step({"a": "x"})
        before = await env.expert("b", random.Random(2))
        twin = await env.fork()
        await asyncio.to_thread(killable.kill)
        late = await env.fork()
        await asyncio.to_thread(killable.start)
        assert await env.expert("b", random.Random(2)) == before
        return [await one.step({"b": "y"}) for one in (late, twin, env)]

    steps = asyncio.run(game())
    assert steps[0] == steps[1] == steps[2] and steps[0].info == {"heard": {"b": "y"}}


def test_fork_survives_its_original(server):
    """The original is closed before the copy is made; closing a copy does not affect the original."""

    async def game(kind):
        env = make_env(**at(server, kind))
        await env.reset(0)
        twins = [await env.fork() for _ in range(3)]
        await twins[1].close()
        step = await env.step({"a": "x"})
        more = await twins[2].fork()
        await env.close(), await twins[2].close()
        assert [await twin.step({"a": "x"}) for twin in (twins[0], more)] == [step, step]

    pop_metrics()
    for kind in ("helpers.remote_toys:Count", "helpers.remote_toys:Waits"):
        asyncio.run(game(kind))
    assert pop_metrics()["env_lost"] == 0


@pytest.mark.slow
def test_nondeterministic_env_is_detected_on_replay(killable):
    async def game():
        env = make_env(**at(killable, "helpers.remote_toys:Fickle"))
        await env.reset(3)
        await env.step({"a": "x"})
        await asyncio.to_thread(killable.kill)
        await asyncio.to_thread(killable.start)
        await env.step({"b": "x"})

    with pytest.raises(RuntimeError, match=r"not a function of its seed and the actions: .* joint step 0 differs"):
        asyncio.run(game())


@pytest.mark.slow
def test_request_timeout_moves_the_session_to_another_server(killable):
    """Silence counts as a loss; if every server is silent, the episode fails."""
    env = at(killable, "helpers.remote_toys:Waits")
    env["at"] = {"servers": env["at"], "request_timeout": 0.2}

    async def game():
        env_there = make_env(**env)
        await env_there.reset(3)
        await env_there.step({"a": "30"})

    with pytest.raises(RuntimeError, match=r"lost its server 5 times in a row.*no answer within the deadline"):
        asyncio.run(game())


def test_timeout_names_the_expected_servers(killable):
    env = at(killable)
    env["at"] = {"servers": env["at"], "server_timeout": 0.3}
    remote = make_env(**env)
    killable.kill()
    with pytest.raises(TimeoutError, match=rf"no env server has answered for 0.3 s .*Servers: {killable.address}"):
        asyncio.run(remote.reset(0))


@pytest.mark.slow
def test_servers_can_join_and_leave(server, tmp_path):
    """By a file of addresses: new games go to the listed servers, and running games stay on their server."""
    names = tmp_path / "servers.txt"
    names.write_text(f"# ours\n{server.address}\n")

    async def games():
        env = {"type": "helpers.remote_toys:Count", "at": str(names)}
        old = make_env(**env)
        await old.reset(0)
        with serving(TOYS) as other:
            names.write_text(f"{other.address}\n")
            while count_sessions(other.address) == 0:  # until the file has been read again
                new = make_env(**env)
                await new.reset(0)
                await asyncio.sleep(0.05)
            assert count_sessions(server.address) >= 1
            await old.step({"a": "x"})
            names.write_text(f"{server.address}\n{other.address}\n")
            await asyncio.to_thread(other.kill)
            return await new.step({"a": "x"}), await old.step({"b": "y"})

    new, old = asyncio.run(games())
    assert new.info == {"heard": {"a": "x"}} and old.info == {"heard": {"b": "y"}}


# ---- sessions, clients and workers


def ask(address, *requests, client="test"):
    with grpc.insecure_channel(address) as channel:
        batch = channel.unary_unary(f"/{SERVICE}/Batch", pb.Requests.SerializeToString, pb.Replies.FromString)
        return batch(pb.Requests(requests=requests), timeout=10, metadata=(("client", client),)).replies


def open_request(session, **options):
    return pb.Open(
        kind=pb.Kind(type="helpers.remote_toys:Count", options=encode_mapping(options)), seed=encode_value(session)
    )


def test_sessions_are_batched_in_one_message(server):
    """With single calls, as a client in another language would send them."""
    numbers = range(1, 6)
    ask(server.address, *(pb.Request(id=n, session=n, open=open_request(n)) for n in numbers))
    replies = ask(server.address, *(pb.Request(id=n, session=n, step=encode_mapping({"a": str(n)})) for n in numbers))
    assert [read_step(reply.step).info["heard"] for reply in replies] == [{"a": str(n)} for n in numbers]
    other = ask(server.address, pb.Request(id=1, session=1, step=encode_mapping({})), client="somebody else")
    assert other[0].fault.why == pb.Fault.UNKNOWN
    again = ask(server.address, pb.Request(id=1, session=1, open=open_request(1)), pb.Request(id=2, session=1))
    assert [reply.fault.why for reply in again] == [pb.Fault.REFUSED] * 2
    ask(server.address, *(pb.Request(session=n, close=pb.Close()) for n in numbers))
    wait_until_closed(server.address)


def test_server_supports_grpc_reflection(server):
    description = describe_env(server.address, type="helpers.remote_toys:Count")
    assert list(description.seats) == ["a", "b"] and description.expert and "math" in description.types
    assert [option.shown for option in description.options] == ["to: int = 3", "split: str = 'train'"]
    with grpc.insecure_channel(server.address) as channel:
        assert health(channel) == "SERVING"
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

        assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()


def health(channel):
    check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(check.status)


CLIENT = """
import asyncio, sys
from palestra.envs.remote.remote_env import make_env
async def main():
    env = make_env(type="helpers.remote_toys:Count", at=sys.argv[1])
    await env.reset(0)
    print("open", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
def test_sessions_of_dead_clients_are_released():
    """Clients that say goodbye, that vanish, and that sent single calls."""
    with serving(TOYS, "--lease", 1) as server:
        ask(server.address, pb.Request(id=1, session=1, open=open_request(1)))
        clients = []
        for _ in range(2):
            command = [sys.executable, "-c", CLIENT, server.address]
            clients.append(subprocess.Popen(command, env=server.environment, stdout=subprocess.PIPE, text=True))
            assert clients[-1].stdout.readline() == "open\n"
        clients[0].kill()
        os.kill(clients[1].pid, signal.SIGSTOP)  # as if its machine had lost the network
        wait_until_closed(server.address)
        clients[1].kill()
        for client in clients:
            client.communicate()


@pytest.mark.slow
def test_stopping_server_lets_sessions_finish():
    async def games(server, other):
        env = make_env(**at(server) | {"at": [server.address]})
        await env.reset(0)
        server.process.terminate()
        with grpc.insecure_channel(server.address) as channel:
            wait_for_value(lambda: health(channel), "NOT_SERVING")
        (reply,) = ask(server.address, pb.Request(id=1, session=1, open=open_request(1)))
        assert reply.fault.why == pb.Fault.DRAINING
        late = make_env(**at(server) | {"at": [server.address, other.address]})
        await late.reset(1)
        assert count_sessions(other.address) == 1
        for seat in "aba":
            step = await env.step({seat: "x"})
        assert step.done
        await env.close()
        assert await asyncio.to_thread(server.process.wait, 10) == 0
        await late.close()

    with serving(TOYS) as server, serving(TOYS) as other:
        asyncio.run(games(server, other))


@pytest.mark.slow
def test_workers_share_a_port_and_lost_sessions_are_replayed(tmp_path):
    """A client finds all workers; a worker that dies loses only its own sessions, which are replayed."""
    with serving(TOYS, "--workers", 2, "--grace", 1) as server:

        async def games():
            envs = [make_env(**at(server, to=6)) for _ in range(8)]
            for env in envs:
                await env.reset(1)
            spread = {env._connection.worker_id for env in envs}
            await asyncio.gather(*(env.step({"a": "x"}) for env in envs))
            deadly = make_env(**at(server, "helpers.remote_toys:Deadly"))
            await deadly.reset(0)
            pop_metrics()
            with pytest.raises(RuntimeError, match="bring servers down"):
                await deadly.step({"a": "die"})
            steps = await asyncio.gather(*(env.step({"b": "y"}) for env in envs))
            return spread, steps

        spread, steps = asyncio.run(games())
        assert len(spread) == 2 and all(step == steps[0] for step in steps)
        assert pop_metrics()["env_replays"] >= 1
        said = server.stop()
        assert "an env worker died (exit code 3)" in said and "Traceback" not in said


@pytest.mark.slow
def test_second_server_on_a_port_is_refused(server):
    for workers in (1, 2):
        port = server.address.rpartition(":")[2]
        done = run_palestra("serve-envs", "--envs", "math", "--port", port, "--workers", workers)
        assert done.returncode == 2 and "Choose another --port" in done.stderr


# ---- access control


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*new, "-addext", "subjectAltName=DNS:localhost", *files], check=True, capture_output=True)
    return folder


def test_token_and_tls_are_supported(certificate, tmp_path, monkeypatch):
    monkeypatch.delenv("PALESTRA_ENV_TOKEN", raising=False)
    options = ("--cert", certificate / "cert.pem", "--key", certificate / "key.pem")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("open sesame\n")
    theirs.write_text("let me in\n")

    def play_games(**at):
        async def game():
            env = make_env(
                type="helpers.remote_toys:Count", at={"servers": [server.address], "server_timeout": 0.5, **at}
            )
            return await env.reset(0)

        return asyncio.run(game())

    with serving(TOYS, *options, environment={"PALESTRA_ENV_TOKEN": "open sesame"}) as server:
        assert "sesame" not in server.first_line
        ca = str(certificate / "cert.pem")
        assert isinstance(play_games(ca=ca, token_file=str(ours)), Step)
        monkeypatch.setenv("OURS", "open sesame")
        assert isinstance(play_games(ca=ca, token_env="OURS"), Step)
        for wrong in ({}, {"token_file": str(theirs)}):
            with pytest.raises(ValueError, match="refuses the token"):
                play_games(ca=ca, **wrong)
        with pytest.raises(ValueError, match="no env server described the env"):
            play_games(token_file=str(ours))  # without TLS
        with pytest.raises(ValueError, match="no env server described the env"):
            play_games(tls=True, token_file=str(ours))  # its certificate is not trusted
        credentials = grpc.ssl_channel_credentials((certificate / "cert.pem").read_bytes())
        with grpc.secure_channel(server.address, credentials) as channel:
            assert health(channel) == "SERVING"  # which needs no token


@pytest.mark.slow
def test_changed_token_locks_clients_out_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_ENV_TOKEN", "one")
    with serving(TOYS) as server:
        env = make_env(**at(server))
        server.kill()
        server.environment["PALESTRA_ENV_TOKEN"] = "two"
        server.start()
        with pytest.raises(ValueError, match="refuses the token"):
            asyncio.run(env.reset(0))
