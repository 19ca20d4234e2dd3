"""`palestra play --browser` over HTTP: whole games, and requests that its server refuses."""

import asyncio
import json
import signal

import httpx
import pytest
import uvicorn
from helpers.processes import playing
from starlette.testclient import TestClient

from palestra.core.http.calls import ANY_KEY
from palestra.core.http.chat_server import ChatSession
from palestra.core.http.listen import open_listener
from palestra.core.types import Step
from palestra.dashboard.play_server import LIMITS, build_play_app
from palestra.dashboard.play_session import GameSetup, OutOfTurn, PlaySessions
from palestra.envs import make_env
from palestra.envs.base import Env
from palestra.text.policies.scripted import HumanPolicy, RandomPolicy, ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

KUHN = """
env: {type: text_kuhn, rendering: full}
policies:
  player_0: {type: random}
  player_1: {type: scripted, answers: ["between us, my card is high #### bet"]}
"""
HERE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def kuhn(tmp_path_factory):
    """A server whose other seat talks about its private card; the process and its address."""
    config = tmp_path_factory.mktemp("play") / "kuhn.yaml"
    config.write_text(KUHN)
    with playing(config) as started:
        yield started


@pytest.fixture
def client(kuhn):
    with httpx.Client(base_url=kuhn[1].removesuffix("/play"), timeout=20) as found:
        yield found


def wait_for_turn(client, game):
    """The state of the game once the person is to act, or the game has ended."""
    with client.stream("GET", f"/api/games/{game}/events") as events:
        for line in events.iter_lines():
            if line == "event: change":
                state = client.get(f"/api/games/{game}").json()
                if state["now"] != "waiting":
                    return state
    raise AssertionError("the server hung up")


def begin(client):
    begun = client.post("/api/games")
    assert begun.status_code == 201
    return begun.json()["id"]


def say(client, game, turn, text, **options):
    return client.post(f"/api/games/{game}/answer", json={"turn": turn, "text": text}, **options)


# ---- a game


def test_other_seats_private_state_is_hidden_until_the_end(client):
    game = begin(client)
    state = wait_for_turn(client, game)
    assert state["seats"] == {"player_0": "human", "player_1": "player_1"} and state["seat"] == "player_0"
    for turn, word in enumerate(("pass", "bet")):
        text = json.dumps(state)
        assert state["now"] == "asked" and state["turn"] == turn and state["legal_actions"] == ["pass", "bet"]
        assert {one["seat"] for joint in state["line"] for one in joint["turns"]} == {"player_0"}
        assert "my card is high" not in text and "You are player 1" not in text and state["end"] is None
        assert "instance" not in text and "seed" not in text  # the seed would reveal the deal
        assert say(client, game, turn, word).status_code == 200
        state = wait_for_turn(client, game)
    said = [(one["seat"], one.get("answer")) for joint in state["line"] for one in joint["turns"] if "answer" in one]
    assert [seat for seat, _ in said] == ["player_0", "player_1", "player_0"]
    assert "my card is high" in said[1][1]
    assert state["line"][1]["turns"][0]["observation"].startswith("You are player 1.")
    returns = state["end"]["returns"]
    assert state["now"] == "over" and returns["player_0"] == -returns["player_1"] and abs(returns["player_0"]) == 2


def test_person_sees_the_seats_role_and_observation(client):
    game = begin(client)
    state = wait_for_turn(client, game)
    client.post(f"/api/games/{game}/give-up")
    end = wait_for_turn(client, game)["end"]
    env = make_env("text_kuhn", rendering="full")
    first = env.reset(end["instance"])
    assert end["gave_up"] and state["line"][0]["turns"][0]["observation"] == first.observations["player_0"]
    assert state["role"] == env.roles["player_0"] and state["rules"] == ""


def test_out_of_turn_answer_is_409(client):
    game = begin(client)
    wait_for_turn(client, game)
    early = say(client, game, 1, "bet")
    assert early.status_code == 409 and "not your turn" in early.json()["error"]
    assert say(client, game, 0, "pass").status_code == 200
    twice = say(client, game, 0, "bet")
    assert twice.status_code == 409 and "answered already" in twice.json()["error"]
    assert wait_for_turn(client, game)["line"][0]["turns"][0]["answer"] == "pass"
    assert say(client, game, 1, "pass").status_code == 200
    assert wait_for_turn(client, game)["now"] == "over"
    late = say(client, game, 2, "pass")
    assert late.status_code == 409 and "over" in late.json()["error"]


# ---- refused requests


def test_cross_origin_play_is_refused(client):
    host = client.base_url.netloc.decode()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://{host}.evil.example"):
        assert client.post("/api/games", headers={"Origin": origin}).status_code == 403, origin
    assert client.post("/api/games", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/play", headers={"Host": "evil.example"}).status_code == 403
    game = begin(client)
    wait_for_turn(client, game)
    assert say(client, game, 0, "bet", headers={"Origin": "http://evil.example"}).status_code == 403
    assert say(client, game, 0, "bet", headers={"Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"turn": 0}', 400),
        (b'{"turn": "x", "text": "bet"}', 400),
        (b'{"turn": 0, "text": "bet", "seat": "player_1"}', 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b'{"turn": 0, "text": "\\ud800"}', 400),
        (b'{"turn": 0, "text": "' + b"x" * LIMITS.max_body_bytes + b'"}', 413),
    ],
)
def test_invalid_answers_are_refused_with_the_reason(client, body, status):
    game = begin(client)
    wait_for_turn(client, game)
    reply = client.post(f"/api/games/{game}/answer", content=body)
    assert reply.status_code == status and reply.json()["error"]
    assert wait_for_turn(client, game)["turn"] == 0


def test_unknown_paths_are_refused(client):
    assert client.get("/", follow_redirects=True).url.path == "/play"
    assert 'id="app"' in client.get("/play").text
    assert "default-src 'none'" in client.get("/play").headers["content-security-policy"]
    for path in ("/api/games/none", "/api/games/none/events", "/api/runs", "/..%2fplay.py"):
        assert client.get(path).status_code in (404, 405), path
    assert client.put("/api/games").status_code == 405


# ---- abandoned games


class AtOnce(Env):
    """Two seats that answer once, at the same time."""

    seats = ("player_0", "player_1")

    def reset(self, seed):
        return Step(dict.fromkeys(self.seats, "say something"))

    def step(self, actions):
        return Step({})


def games(alone=60.0, other=None, say=print, env=lambda: make_env("text_tic_tac_toe")):
    """Play sessions in this process."""
    arena = EpisodeRunner(env, "test")

    async def play(seed, ask):
        team = {"player_0": HumanPolicy(ask), "player_1": other or RandomPolicy()}
        return await arena.play(EpisodeSpec(seed, team, seed), Branching())

    setting = GameSetup("text_tic_tac_toe", {"player_0": "human", "player_1": "other"}, "player_0", "three in a row")
    return PlaySessions(play, setting, first_instance=5, print_line=say, idle_timeout_s=alone)


def test_unwatched_game_ends():
    async def left():
        table = games(alone=0.05)
        game = table.start()
        while not game.state_version:
            await asyncio.sleep(0)
        assert game.state()["rules"] == "three in a row"
        await asyncio.sleep(0.2)
        assert table.find(game.id) is None and game.closed
        with pytest.raises(OutOfTurn):
            game.answer(0, "a1")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(left())


def test_closing_the_page_ends_its_game():
    async def closed():
        table, door = games(alone=1.5), open_listener("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(build_play_app(table), log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[door]))
        async with httpx.AsyncClient(base_url=f"{HERE}:{door.getsockname()[1]}", timeout=20) as client:
            name = (await client.post("/api/games")).json()["id"]
            async with client.stream("GET", f"/api/games/{name}/events") as events:
                lines = events.aiter_lines()
                assert await anext(lines) == "event: change"
                await asyncio.sleep(1.8)
                assert table.find(name).num_viewers == 1  # while the page is open
            for _ in range(1000):
                await asyncio.sleep(0.02)
                if table.find(name) is None:
                    break
            assert (await client.get(f"/api/games/{name}")).status_code == 404
        server.should_exit = True
        await serving

    asyncio.run(closed())


def test_open_games_are_limited():
    async def many():
        table = games()
        for _ in range(32):
            table.start()
        with pytest.raises(ValueError, match="32 games are open"):
            table.start()
        table.close()

    asyncio.run(many())


def test_failure_reason_is_printed_in_the_terminal_only():
    def broken(query, rng):
        raise ValueError("no answer from http://secret.example")

    printed = []

    async def failing():
        table = games(other=ScriptedPolicy(broken), say=printed.append)
        game = table.start()
        while game.state()["now"] != "over":
            if game.state()["now"] == "asked":
                game.answer(0, "b2")
            await asyncio.sleep(0)
        assert game.state()["end"]["failed"] and "secret.example" not in json.dumps(game.state())
        table.close()

    asyncio.run(failing())
    assert len(printed) == 1 and "instance 5 ended early" in printed[0] and "secret.example" in printed[0]


def test_game_failing_during_the_persons_turn_leaves_no_task():
    async def broken(query, rng):
        await asyncio.sleep(0.05)
        raise ValueError("lost")

    async def failing():
        table = games(other=ScriptedPolicy(broken), say=lambda _: None, env=AtOnce)
        game = table.start()
        while game.state()["now"] != "over":
            await asyncio.sleep(0.02)
        assert game.state()["end"]["failed"] and game.state()["legal_actions"] == []
        with pytest.raises(OutOfTurn, match="over"):
            game.answer(0, "hello")
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        table.close()

    asyncio.run(failing())


def test_non_local_address_needs_a_token():
    locked = TestClient(build_play_app(games(), "sesame"), base_url=HERE, follow_redirects=False)
    assert locked.post("/api/games").status_code == 401
    assert locked.get("/play?token=sesame").headers["location"] == "/play"
    assert locked.get("/play").status_code == 200  # the client keeps cookies


# ---- the process


@pytest.mark.slow
def test_endpoint_address_and_key_are_hidden_and_ctrl_c_is_clean(monkeypatch):
    """The endpoint's answers are used. Its address and key are not on the page, and open event streams are closed at
    the end."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    session = ChatSession(["big"], lambda one: one.answer.set_result("bet"), key=ANY_KEY)
    with playing("text_kuhn", "--seats", f"player_1={session.url}#big") as (process, address):
        with httpx.Client(base_url=address.removesuffix("/play"), timeout=20) as client:
            game, seen = begin(client), []
            for turn in range(2):
                seen.append(wait_for_turn(client, game))
                say(client, game, turn, "pass")
            seen.append(wait_for_turn(client, game))
            assert seen[-1]["now"] == "over" and seen[-1]["seats"]["player_1"] == "big"
            assert "sk-hidden" not in json.dumps(seen) and session.url not in json.dumps(seen)
            with client.stream("GET", f"/api/games/{game}/events") as events:
                lines = events.iter_lines()
                assert next(lines) == "event: change"
                process.send_signal(signal.SIGINT)
                assert [line for line in lines if line.startswith("event")] == []
        process.wait(timeout=20)
        assert process.stdout.read() == ""
    session.close()
