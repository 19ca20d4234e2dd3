"""The server of `palestra play --browser`: the built page and the JSON API of its games.

    POST /api/games                 starts a game of the next instance: {"id": ...}
    GET  /api/games/ID              the state that the page shows
    GET  /api/games/ID/events       a server-sent event whenever the state changes
    POST /api/games/ID/answer       {"turn": 0, "text": "..."}; 409 if that turn is not open
    POST /api/games/ID/give-up

Errors are `{"error": TEXT}`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from palestra.config import Strict, validate
from palestra.dashboard.api import answer as as_json
from palestra.dashboard.app import QUIET, STATIC
from palestra.dashboard.game import Game, Games, OutOfTurn
from palestra.dashboard.guard import Guard
from palestra.dashboard.library import Absent
from palestra.web.bodies import read_json
from palestra.web.door import bracketed, listening
from palestra.web.gate import App, Gate, Limits
from palestra.web.origins import Origins, is_loopback
from palestra.web.server import stoppable

LIMITS = Limits(body=256 * 1024, requests=512)
Ask = Callable[[Games, Request], Awaitable[Response]]


class Said(Strict):
    """The body of POST /api/games/ID/answer."""

    turn: int
    """Number of the person's turn that this answers, from 0."""
    text: str
    """The answer."""


def page(games: Games, token: str = "", hosts: Collection[str] = ()) -> App:
    """Returns the ASGI app over `games`."""
    routes = [
        Route("/", lambda _: RedirectResponse("play"), methods=["GET"]),
        Route("/play", lambda _: FileResponse(STATIC / "index.html"), methods=["GET"]),
        Route("/api/games", _told(games, begin), methods=["POST"]),
        Route("/api/games/{game}", _told(games, state), methods=["GET"]),
        Route("/api/games/{game}/events", _told(games, events), methods=["GET"]),
        Route("/api/games/{game}/answer", _told(games, answer), methods=["POST"]),
        Route("/api/games/{game}/give-up", _told(games, give_up), methods=["POST"]),
        Mount("/", StaticFiles(directory=STATIC)),
    ]
    app = GZipMiddleware(Starlette(routes=routes), minimum_size=2048)
    gate = Gate(app, Origins(), LIMITS, shape=lambda status, reason: {"error": reason})
    return Guard(gate, token, hosts, posts=True, cookie="palestra_play")


def _told(games: Games, ask: Ask) -> Callable[[Request], Awaitable[Response]]:
    """Wraps a handler: exceptions become JSON errors (404, 409, 400)."""

    async def told(request: Request) -> Response:
        try:
            return await ask(games, request)
        except Absent as error:
            return JSONResponse({"error": str(error)}, 404)
        except OutOfTurn as error:
            return JSONResponse({"error": str(error)}, 409)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)

    return told


async def begin(games: Games, request: Request) -> Response:
    """POST /api/games."""
    return JSONResponse({"id": games.begin().id}, 201)


async def state(games: Games, request: Request) -> Response:
    """GET /api/games/ID."""
    return as_json(request, _game(games, request).state())


async def answer(games: Games, request: Request) -> Response:
    """POST /api/games/ID/answer."""
    game = _game(games, request)
    said = validate(Said, read_json(await request.body()))
    game.answer(said.turn, said.text)
    return JSONResponse({"turn": said.turn})


async def give_up(games: Games, request: Request) -> Response:
    """POST /api/games/ID/give-up."""
    _game(games, request).give_up()
    return JSONResponse({})


async def events(games: Games, request: Request) -> Response:
    """GET /api/games/ID/events."""
    return StreamingResponse(changes(games, _game(games, request)), media_type="text/event-stream")


async def changes(games: Games, game: Game) -> AsyncIterator[str]:
    """Yields the text of server-sent events while the game is open and the client is connected."""
    game.pages += 1
    try:
        known = -1
        while not game.left:
            if not await game.news(known, QUIET):
                yield ": still here\n\n"
            elif not game.left:
                known = game.changes
                yield f"event: change\ndata: {known}\n\n"
    finally:
        game.pages -= 1
        games.look_after(game)


def _game(games: Games, request: Request) -> Game:
    game = games.find(request.path_params["game"])
    if game is None:
        raise Absent("this game has ended: nobody had its page open, or the server was started anew")
    return game


def serve(games: Games, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until a stop signal. For a `host` other than loopback it generates a token, which is part of the printed
    address. Raises ValueError if the port is taken."""
    token = "" if is_loopback(host) else secrets.token_urlsafe(12)
    door = listening(host, port)
    say(f"play at: http://{bracketed(host)}:{door.getsockname()[1]}/play{f'?token={token}' if token else ''}")
    app = page(games, token, {host, socket.gethostname().lower()})
    stoppable(app, drain=5, keep_alive=5, closing=games.close).run(sockets=[door])
